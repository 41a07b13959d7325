"""The engines that the options of `sterna serve --engine emulated` and `paced` describe."""

import json
from pathlib import Path
from typing import Any

import pytest

from sterna.cli.serve.emulated_options import plain_vocabulary
from sterna.cli.serve.read_options import parse
from sterna.engine.emulated.profiles import A10_LLAMA_7B, PROFILES, RTX4090_LLAMA_31_8B
from sterna.engine.emulated.tokens import Vocabulary
from sterna.errors import ConfigurationError
from tests.models import small_model

pytestmark = pytest.mark.vllm


def options(*more: str) -> Any:
    return parse(["serve", "--engine", "emulated", *more])


def test_the_papers_engine_with_the_small_models_tokens_is_the_default() -> None:
    args = options()
    profile = PROFILES["a10-llama-7b"]
    assert args.emulated.engine == profile.engine
    assert args.emulated.step_time == profile.step_time
    assert args.emulated.copy_time == profile.copy_time
    assert args.emulated.vocabulary == Vocabulary(1928, 439)
    assert args.emulated.max_model_len == args.max_model_len == 8192
    assert args.model == str(small_model())
    assert args.kv_cache_memory_bytes is None


def test_a_model_length_that_vllm_is_to_choose_is_the_default() -> None:
    assert options("--max-model-len", "auto").max_model_len == options().max_model_len


def test_vllms_options_change_the_profiles_engine_and_are_kept_from_the_front_end() -> None:
    args = options("--num-gpu-blocks-override", "40", "--block-size", "32", "--max-num-seqs", "5")
    engine = args.emulated.engine
    assert (engine.num_blocks, engine.block_size, engine.max_num_seqs) == (40, 32, 5)
    assert (args.num_gpu_blocks_override, args.block_size, args.max_num_seqs) == (None,) * 3
    # What is longer would never be admitted.
    assert args.emulated.max_model_len == (40 - 1) * 32


def test_options_of_vllms_scheduler_change_the_profiles_engine() -> None:
    args = options(
        *("--watermark", "0.25", "--max-num-active-seqs", "5", "--max-num-scheduled-tokens", "300")
    )
    engine = args.emulated.engine
    assert (engine.watermark, engine.max_num_seqs, engine.max_num_batched_tokens) == (0.25, 5, 300)
    left = (args.watermark, args.max_num_active_seqs, args.max_num_scheduled_tokens)
    assert left == (0.0, None, None)


def test_engines_with_the_rules_of_vllm_1_may_have_a_prefix_cache() -> None:
    new = ("--profile", "rtx4090-llama-3.1-8b")
    assert options(*new, "--enable-prefix-caching").emulated.engine.prefix_caching
    assert not options(*new, "--no-enable-prefix-caching").emulated.engine.prefix_caching


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--enable-prefix-caching"], "prefix_caching needs the rules of vLLM 1"),
        (["--enable-lora"], "--enable-lora: an emulated engine has no such thing"),
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size: an emulated engine has no"),
        (["--long-prefill-token-threshold", "64"], "--long-prefill-token-threshold: an emulated"),
        (["--no-enable-chunked-prefill"], "--no-enable-chunked-prefill: an emulated engine"),
        (["--no-scheduler-reserve-full-isl"], "--no-scheduler-reserve-full-isl: an emulated"),
        (["--max-num-active-seqs", "257"], "--max-num-active-seqs 257: an engine has 256"),
        (["--watermark", "1"], "watermark must be in [0, 1), not 1.0"),
        (["--profile", "h900-gpt"], "h900-gpt"),
        (["--num-gpu-blocks-override", "1"], "num_blocks must leave a block usable"),
        (
            ["--num-gpu-blocks-override", "40", "--max-model-len", "700"],
            "--max-model-len 700: an engine holds 624 tokens",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_cannot_be_emulated_is_refused(more: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        options(*more)
    assert message in str(refused.value)


def paced(*more: str) -> Any:
    return parse(["serve", "--engine", "paced", "--profile", "rtx4090-llama-3.1-8b", *more])


def test_a_paced_engine_has_the_steps_the_memory_and_the_limits_of_the_profile() -> None:
    """2,900 blocks of 16 tokens are 1,450 of 32, the smallest that vLLM computes on CPU; vLLM keeps
    one more to itself."""
    args = paced()
    assert args.emulated is None
    assert args.step_time == RTX4090_LLAMA_31_8B.step_time
    assert (args.num_gpu_blocks_override, args.block_size) == (1_451, 32)
    assert args.max_num_batched_tokens == RTX4090_LLAMA_31_8B.engine.max_num_batched_tokens
    assert args.max_num_seqs == RTX4090_LLAMA_31_8B.engine.max_num_seqs
    assert args.watermark == RTX4090_LLAMA_31_8B.engine.watermark
    assert paced("--profile", "a10-llama-7b").watermark == A10_LLAMA_7B.engine.watermark == 0.01


def test_options_overrule_the_profile_of_a_paced_engine() -> None:
    args = paced("--num-gpu-blocks-override", "101", "--block-size", "64", "--max-num-seqs", "7")
    assert (args.num_gpu_blocks_override, args.block_size, args.max_num_seqs) == (101, 64, 7)
    # What is longer would never be admitted.
    assert args.max_model_len <= 100 * 64
    assert paced("--profile", "a10-llama-7b", "--watermark", "0").watermark == 0.0
    with pytest.raises(ConfigurationError, match="--max-model-len 8000: an engine holds"):
        paced("--num-gpu-blocks-override", "101", "--block-size", "64", "--max-model-len", "8000")


def test_engines_are_paced_on_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sterna.cli.serve.emulated_options.is_cpu_build", lambda: False)
    with pytest.raises(ConfigurationError, match="--engine paced needs vLLM's build for CPUs"):
        paced()


def test_an_engine_without_a_profile_has_vllms_watermark() -> None:
    from vllm.config import SchedulerConfig

    assert parse(["serve"]).watermark == SchedulerConfig.watermark
    assert parse(["serve", "--watermark", "0.25"]).watermark == 0.25


def test_a_profile_without_an_emulated_engine_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--profile is for --engine emulated"):
        parse(["serve", "--profile", "a10-llama-7b"])


def _tokenizer(folder: Path, content: object) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def test_the_vocabulary_is_the_longest_run_of_plain_tokens(tmp_path: Path) -> None:
    texts = ["<s>", "a", "b", "é", "c", "Ġd", "▁e", "Ċ", "f", "g"]
    vocabulary = {text: token_id for token_id, text in enumerate(texts)}
    added = [{"id": 0, "content": "<s>"}]
    content = {"model": {"vocab": vocabulary}, "added_tokens": added}
    assert plain_vocabulary(_tokenizer(tmp_path, content)) == Vocabulary(4, 3)


def test_a_vocabulary_with_scores_is_read_as_well(tmp_path: Path) -> None:
    content = {"model": {"vocab": [["<unk>", 0.0], ["a", -1.0], ["b", -2.0]]}}
    content["added_tokens"] = [{"id": 0}]
    assert plain_vocabulary(_tokenizer(tmp_path, content)) == Vocabulary(1, 2)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"has no tokenizer\.json"):
        plain_vocabulary(tmp_path)


def test_a_vocabulary_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no token that is plain text"):
        plain_vocabulary(_tokenizer(tmp_path, {"model": {"vocab": {"é": 0}}}))
