"""Profiles of engines on real hardware, by name or read from a file.

The constants of each profile are least-squares fits of its tables in `data`; a test fits them
again. A file of `sterna profile` is a profile, too; its section `measurement` is not read here.
Profiles of users are YAML or JSON files of this form::

    name: a10-llama-7b
    description: LLaMA-7B on an NVIDIA A10
    source: where the numbers come from
    engine:           # the fields of EmulatedEngineConfig; num_blocks is required
      num_blocks: 792
      step_mode: prefill_first
    step_time:        # all fields of StepTime, in seconds
      prefill_s: 0.0056
      prefill_token_s: 2.03e-4
      prefill_pair_s: 5.1e-9
      prefill_min_s: 0.033
      decode_s: 0.032
      decode_request_s: 2.8e-4
      decode_token_s: 1.26e-6
    copy_time:        # all fields of CopyTime, in seconds
      block_s: 0.0034
      stage_s: 0.015
"""

import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, get_type_hints

import msgspec
import yaml

from sterna.engine.emulated.config import EmulatedEngineConfig, Preemption, StepMode
from sterna.engine.emulated.durations import CopyTime, StepTime
from sterna.errors import ConfigurationError

Section = TypeVar("Section")

MEASUREMENT = "measurement"
"""The section of a file that describes the measurement (`engine/profiling/profile_file.py`)."""


@dataclass(frozen=True, slots=True)
class Profile:
    """One engine on one kind of hardware.

    Attributes:
        name: its name in options.
        description: model and hardware, in one line.
        source: source of its numbers.
        engine: memory, limits and rules.
    """

    name: str
    description: str
    source: str
    engine: EmulatedEngineConfig
    step_time: StepTime
    copy_time: CopyTime


A10_LLAMA_7B = Profile(
    name="a10-llama-7b",
    description="LLaMA-7B in 16 bits on one NVIDIA A10 (24 GB), vLLM 0.1",
    source="data/a10_llama_measured.csv; 792 blocks of data/kv_capacity_a10_llama7b.csv",
    engine=EmulatedEngineConfig(num_blocks=792),
    step_time=StepTime(
        prefill_s=5.5823e-3,
        prefill_token_s=2.0281e-4,
        prefill_pair_s=5.0882e-9,
        prefill_min_s=3.2616e-2,
        decode_s=3.2333e-2,
        decode_request_s=2.8308e-4,
        decode_token_s=1.2578e-6,
    ),
    copy_time=CopyTime(block_s=3.3770e-3, stage_s=1.5215e-2),
)
"""The engine of the paper's cluster, with the duration of each step alone (mean error of a fit:
prefill 0.9 %, decode 0.7 %, copy 2.7 %).

All measured decodes have 8,192 tokens in their caches, so that the table alone does not determine
the cost of a token: the fit assumes that the KV cache (512 KiB a token) is read as fast as the
weights (13.5 GB). The copy is that of a whole sequence from one instance to another, handshake
included.
"""

A10X4_LLAMA_30B = Profile(
    name="a10x4-llama-30b",
    description="LLaMA-30B in 16 bits on four NVIDIA A10 (24 GB each), vLLM 0.1",
    source="data/a10_llama_measured.csv; the number of blocks is an estimate",
    engine=EmulatedEngineConfig(num_blocks=688),
    step_time=StepTime(
        prefill_s=1.2147e-2,
        prefill_token_s=4.1155e-4,
        prefill_pair_s=1.8173e-9,
        prefill_min_s=5.0496e-2,
        decode_s=5.0373e-2,
        decode_request_s=1.2298e-4,
        decode_token_s=1.2369e-6,
    ),
    copy_time=CopyTime(block_s=5.3826e-3, stage_s=4.0981e-2),
)
"""Fitted as the 7B one (mean error: prefill 2.5 %, decode 3.1 %, copy 3.4 %).

Its number of blocks was not published. 688 is the rest of nine tenths of four times 24 GB after
65 GB of weights and 4.3 GB of activations: those for which the 7B leaves room, scaled by the
widths of the layers and divided by four.
"""

RTX4090_LLAMA_31_8B = Profile(
    name="rtx4090-llama-3.1-8b",
    description="Llama-3.1-8B in 16 bits on one NVIDIA RTX 4090 (24 GB), vLLM 1",
    source="data/rtx4090_llama31_8b_*.csv; the blocks are an estimate, the copy is the A10's link",
    engine=EmulatedEngineConfig(
        num_blocks=2_900,
        watermark=0.0,
        max_num_batched_tokens=2_048,
        step_mode=StepMode.CHUNKED,
        preemption=Preemption.LAST_ADMITTED,
        keeps_block_free=False,
    ),
    step_time=StepTime(
        prefill_s=2.9662e-3,
        prefill_token_s=8.7406e-5,
        prefill_pair_s=2.6596e-9,
        prefill_min_s=1.8654e-2,
        decode_s=1.6923e-2,
        decode_request_s=4.2074e-5,
        decode_token_s=1.3957e-7,
    ),
    copy_time=CopyTime(block_s=8.4426e-4, stage_s=1.5215e-2),
)
"""Mean error of the fit: prefill 3.0 %, decode 1.3 %; prompts of 128 tokens and fewer are assumed
to take the same time (up to 12 % off).

Blocks and copies were not measured. 2,900 blocks of 2 MiB are the rest of nine tenths of 24 GB
after 16 GB of weights and 1 GB of activations; they are copied at the rate of LLaMA-7B's from one
A10 to another.
"""

H100_LLAMA_31_8B = Profile(
    name="h100-llama-3.1-8b",
    description="Llama-3.1-8B in 16 bits on one NVIDIA H100 (80 GB), vLLM 1",
    source="data/h100_llama31_8b_*.csv; blocks, copies and decoding attention are estimates",
    engine=EmulatedEngineConfig(
        num_blocks=28_000,
        watermark=0.0,
        max_num_seqs=1_024,
        max_num_batched_tokens=8_192,
        step_mode=StepMode.CHUNKED,
        preemption=Preemption.LAST_ADMITTED,
        keeps_block_free=False,
    ),
    step_time=StepTime(
        prefill_s=7.0753e-3,
        prefill_token_s=2.1715e-5,
        prefill_pair_s=1.3439e-9,
        prefill_min_s=9.3370e-3,
        decode_s=8.4206e-3,
        decode_request_s=1.3341e-5,
        decode_token_s=6.8722e-8,
    ),
    copy_time=CopyTime(block_s=2.0972e-4, stage_s=1.5215e-2),
)
"""Mean error of the fit: prefill 4.4 % (at most 9.5 %, prompts of 16 to 2,046 tokens), decode 3.3 %
(batches of 1 to 128; larger ones, which vLLM allows by default, are extrapolated).

Pairs of tokens cost what the attention kernel grows by, so that long prompts can be extrapolated: a
whole one of 100,000 tokens takes 15.6 s. The kernels are those of a model that is not compiled:
a compiled one fuses its norms, and is up to a quarter faster. Attention of a decode was not
measured: the fit assumes that the KV cache (128 KiB a token) is read as fast as the weights
(16 GB). 28,000 blocks of 2 MiB are the rest of nine tenths of 85 GB after weights and 2 GB of
activations; they are copied at 10 GB/s, four fifths of a link of 100 Gb/s, with the A10's time a
stage.
"""

A10_LLAMA_7B_BLOCK_BYTES = 16 * 512 * 1024
"""Keys and values of 16 tokens in 32 layers of 4,096 numbers each, in 16 bits."""


def estimated_copy_time(block_bytes: int) -> CopyTime:
    """The copy time where no copy was measured: the rate, and the time of a stage, of LLaMA-7B's
    copies from one A10 to another."""
    a10 = A10_LLAMA_7B.copy_time
    return CopyTime(a10.block_s * block_bytes / A10_LLAMA_7B_BLOCK_BYTES, a10.stage_s)


PROFILES: Mapping[str, Profile] = MappingProxyType(
    {
        each.name: each
        for each in (A10_LLAMA_7B, A10X4_LLAMA_30B, RTX4090_LLAMA_31_8B, H100_LLAMA_31_8B)
    }
)


def profile(name_or_path: str) -> Profile:
    """The profile of that name, or the one in that file (`.yaml`, `.yml`, `.json`).

    Raises:
        ConfigurationError: there is no such profile, or something in the file cannot be used;
            the message names the file, the field and its value.
    """
    if name_or_path in PROFILES:
        return PROFILES[name_or_path]
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml", ".json"):
        names = ", ".join(PROFILES)
        raise ConfigurationError(
            f"profile must be one of {names}, or a .yaml or .json file, not {name_or_path!r}"
        )
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise ConfigurationError(f"profile {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"profile {path} cannot be read: it is not UTF-8 text") from None
    try:
        # Every JSON document is a YAML document.
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        at = " ".join(str(error).split())
        raise ConfigurationError(f"profile {path} is not valid YAML: {at}") from None
    if isinstance(document, dict):
        document.pop(MEASUREMENT, None)
    return _read(Profile, document, str(path), "")


def with_serving(
    step_time: StepTime,
    *,
    step_s: float = 0.0,
    prefill_s: float = 0.0,
    request_s: float = 0.0,
    token_s: float = 0.0,
) -> StepTime:
    """The step time with the time of the engine's CPU added to the accelerator's.

    Args:
        step_s: added to every step: scheduling, starting kernels.
        prefill_s: added to a step of prompts only: adding requests, preparing their inputs.
        request_s: added to a decode for each request of its batch: sampling, detokenizing and
            sending on its token.
        token_s: added to a decode for each token in its caches: listing their blocks.
    """
    added = replace(
        step_time,
        prefill_s=step_time.prefill_s + step_s + prefill_s,
        decode_s=step_time.decode_s + step_s,
        decode_request_s=step_time.decode_request_s + request_s,
        decode_token_s=step_time.decode_token_s + token_s,
    )
    return replace(added, prefill_min_s=step_time.prefill_min_s + step_s + prefill_s + request_s)


def _read(kind: type[Section], document: object, path: str, place: str) -> Section:
    """The dataclass that the document describes; `place` is its section in the file."""
    if not isinstance(document, dict):
        what = f"{place} of profile {path}" if place else f"profile {path}"
        raise ConfigurationError(f"{what} must be a mapping of fields, not {document!r}")
    known = fields(kind)  # type: ignore[arg-type]
    names = [each.name for each in known]
    for name, value in document.items():
        if name not in names:
            where = _place(place, name)
            raise ConfigurationError(
                f"profile {path}: {where} ({value!r}) is not a field: use {', '.join(names)}"
            )
    types = get_type_hints(kind)
    values = {
        each.name: _value(types[each.name], document[each.name], path, _place(place, each.name))
        for each in known
        if _is_given(each, document, path, place)
    }
    try:
        return kind(**values)
    except ConfigurationError as error:
        raise ConfigurationError(f"profile {path}: {place}: {error}") from None


def _is_given(field: "Field[Any]", document: Mapping[Any, Any], path: str, place: str) -> bool:
    if field.name in document:
        return True
    if field.default is MISSING:
        raise ConfigurationError(f"profile {path}: {_place(place, field.name)} is missing")
    return False


def _value(kind: Any, value: object, path: str, place: str) -> Any:
    if kind in (EmulatedEngineConfig, StepTime, CopyTime):
        return _read(kind, value, path, place)
    if kind in (StepMode, Preemption) and value not in [each.value for each in kind]:
        choices = " or ".join(each.value for each in kind)
        raise ConfigurationError(f"profile {path}: {place} must be {choices}, not {value!r}")
    # YAML reads 5e-9, without a point, as text.
    is_numeral = kind is float and isinstance(value, str)
    try:
        converted = msgspec.convert(value, kind, strict=not is_numeral)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"profile {path}: {place} is {value!r}: {error}") from None
    if isinstance(converted, float) and not math.isfinite(converted):
        raise ConfigurationError(f"profile {path}: {place} must be finite, not {value!r}")
    return converted


def _place(section: str, name: object) -> str:
    return f"{section}.{name}" if section else str(name)
