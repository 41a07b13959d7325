"""`sterna serve --engine emulated` and `--engine paced`: engines that take the time of measured
hardware, from options and model.

The profile has the engine's speed and memory. The model's folder has the tokenizer and the
vocabulary, which vLLM's own front end needs. No weights are read.
"""

import json
import logging
import re
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sterna.engine.emulated.config import EmulatedEngineConfig
from sterna.engine.emulated.durations import StepTime
from sterna.engine.emulated.emulated_engine import EmulatedOptions
from sterna.engine.emulated.profiles import profile
from sterna.engine.emulated.tokens import Vocabulary
from sterna.engine.vllm.guard import is_cpu_build
from sterna.errors import ConfigurationError

logger = logging.getLogger("sterna.serve")

_CHANGES: Mapping[str, str] = MappingProxyType(
    {
        "block_size": "block_size",
        "num_gpu_blocks_override": "num_blocks",
        "max_num_seqs": "max_num_seqs",
        "max_num_active_seqs": "max_num_seqs",
        "max_num_batched_tokens": "max_num_batched_tokens",
        "max_num_scheduled_tokens": "max_num_batched_tokens",
        "enable_prefix_caching": "prefix_caching",
        "watermark": "watermark",
    }
)
"""vLLM's options that change the profile's engine, and what they change. Of two that change the
same, the latter holds: it is the scheduler's own limit, which the former only sets by default."""

CPU_BLOCK_SIZE = 32
"""Block sizes of vLLM's attention on CPU are multiples of this."""

_PLAIN_TEXT = re.compile(r"[Ġ▁]?[!-~]+")
"""Tokens that are a piece of text by themselves, in the spelling of tokenizers' files: printable
ASCII, perhaps after a blank. The text of an answer is the concatenation of its tokens' texts."""


def emulated_options(args: Namespace) -> EmulatedOptions:
    """Return the engine to emulate, and leave the front end's options in `args`.

    Raises:
        ConfigurationError: an option needs an engine with a model, or the model's folder has no
            usable tokenizer.
    """
    _refuse_unsupported(args)
    chosen = profile(args.profile)
    engine = changed_engine(chosen.engine, args)
    for option in _CHANGES:
        # vLLM would check these against the kernels of this machine.
        setattr(args, option, None)
    folder = Path(args.model)
    args.max_model_len = _max_model_len(args.max_model_len, engine, folder)
    return EmulatedOptions(
        engine=engine,
        step_time=chosen.step_time,
        copy_time=replace(
            chosen.copy_time,
            block_s=chosen.copy_time.block_s * engine.block_size / chosen.engine.block_size,
        ),
        vocabulary=plain_vocabulary(folder),
        max_model_len=args.max_model_len,
        classes=args.classes,
    )


def changed_engine(engine: EmulatedEngineConfig, args: Namespace) -> EmulatedEngineConfig:
    """Return the profile's engine with what vLLM's options change; with another block size it has
    the same memory.

    Raises:
        ConfigurationError: there are fewer batch slots than --max-num-active-seqs, or such an
            engine cannot be.
    """
    given = [(field, getattr(args, option)) for option, field in _CHANGES.items()]
    changes: dict[str, Any] = {field: value for field, value in given if value is not None}
    num_slots, num_active = args.max_num_seqs or engine.max_num_seqs, args.max_num_active_seqs
    if num_active is not None and num_active > num_slots:
        raise ConfigurationError(
            f"--max-num-active-seqs {num_active}: an engine has {num_slots} batch slots; raise "
            "--max-num-seqs"
        )
    if "block_size" in changes:
        num_tokens = engine.num_blocks * engine.block_size
        changes.setdefault("num_blocks", num_tokens // changes["block_size"])
    changed = replace(engine, **changes)
    return changed.with_priorities() if args.scheduling_policy == "priority" else changed


def paced_options(args: Namespace) -> StepTime:
    """Return how long the steps of a real engine last. Memory and limits are the profile's as well,
    where no option gives them.

    Raises:
        ConfigurationError: there is no such profile, or vLLM is not the one for CPUs.
    """
    if not is_cpu_build():
        raise ConfigurationError(
            "--engine paced needs vLLM's build for CPUs: on a GPU steps overlap, and have its speed"
        )
    chosen = profile(args.profile)
    num_tokens = chosen.engine.num_blocks * chosen.engine.block_size
    if args.block_size is None:
        args.block_size = -(-chosen.engine.block_size // CPU_BLOCK_SIZE) * CPU_BLOCK_SIZE
    if args.num_gpu_blocks_override is None:
        # vLLM keeps one block to itself.
        args.num_gpu_blocks_override = num_tokens // args.block_size + 1
    for option in ("max_num_seqs", "max_num_batched_tokens", "watermark"):
        if getattr(args, option) is None:
            setattr(args, option, getattr(chosen.engine, option))
    engine = replace(
        chosen.engine,
        num_blocks=args.num_gpu_blocks_override - 1,
        block_size=args.block_size,
        watermark=args.watermark,
    )
    args.max_model_len = _max_model_len(args.max_model_len, engine, Path(args.model))
    logger.warning(
        "this is an experiment: steps last as long as those of %s, by sleeping for the rest of "
        "their time; each instance logs how many were late",
        chosen.name,
    )
    return chosen.step_time


def _refuse_unsupported(args: Namespace) -> None:
    asked = {
        "--enable-lora": args.enable_lora,
        "--enable-prompt-embeds": args.enable_prompt_embeds,
        "--kv-cache-memory-bytes": args.kv_cache_memory_bytes is not None,
        "--kv-transfer-config": args.kv_transfer_config is not None,
        "--long-prefill-token-threshold": args.long_prefill_token_threshold != 0,
        "--no-enable-chunked-prefill": args.enable_chunked_prefill is False,
        "--no-scheduler-reserve-full-isl": not args.scheduler_reserve_full_isl,
        "--pipeline-parallel-size": args.pipeline_parallel_size != 1,
        "--quantization": args.quantization is not None,
        "--speculative-config": args.speculative_config is not None,
        "--tensor-parallel-size": args.tensor_parallel_size != 1,
    }
    for option, is_asked in asked.items():
        if is_asked:
            raise ConfigurationError(
                f"{option}: an emulated engine has no such thing; leave it out, or choose another "
                "--profile"
            )


def _max_model_len(given: int | None, engine: EmulatedEngineConfig, folder: Path) -> int:
    """Return the largest length of prompt and answer together: the memory of an empty instance."""
    num_tokens = engine.total_tokens
    # vLLM reads `auto` as -1.
    if given not in (None, -1):
        if given > num_tokens:
            raise ConfigurationError(
                f"--max-model-len {given}: an engine holds {num_tokens} tokens"
            )
        return given
    longest = _json(folder / "config.json").get("max_position_embeddings")
    return num_tokens if longest is None else min(int(longest), num_tokens)


def plain_vocabulary(folder: Path) -> Vocabulary:
    """Return the longest run of ids whose tokens are plain text.

    Special tokens are not text, and many other tokens are parts of characters, which a
    tokenizer cannot decode one by one.

    Raises:
        ConfigurationError: the folder has no tokenizer.json, or there is no such token in it.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigurationError(
            f"{folder} has no tokenizer.json, from which the emulated engine takes its tokens; "
            "name the folder of a model that has one"
        )
    tokenizer = _json(file)
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    if not isinstance(vocabulary, dict):
        vocabulary = {text: token_id for token_id, (text, _) in enumerate(vocabulary)}
    added = {each["id"] for each in tokenizer.get("added_tokens", [])}
    plain = {
        token_id
        for text, token_id in vocabulary.items()
        if token_id not in added and _PLAIN_TEXT.fullmatch(text)
    }
    if not plain:
        raise ConfigurationError(f"{file} has no token that is plain text")
    return _longest_run(plain)


def _longest_run(ids: Iterable[int]) -> Vocabulary:
    """Return the first one of the longest runs of consecutive ids."""
    longest = Vocabulary(0, 1)
    first = previous = -2
    num_longest = 0
    for token_id in sorted(ids):
        if token_id != previous + 1:
            first = token_id
        previous = token_id
        if token_id - first + 1 > num_longest:
            num_longest = token_id - first + 1
            longest = Vocabulary(first, num_longest)
    return longest


def _json(file: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{file} cannot be read: {error}") from error
    return content
