"""The engine of `--engine emulated`: the profile's, with what vLLM's options change."""

from argparse import Namespace
from typing import Any

import pytest

from sterna.cli.serve.emulated_options import changed_engine
from sterna.engine.emulated.config import Preemption
from sterna.engine.emulated.profiles import A10_LLAMA_7B, H100_LLAMA_31_8B
from sterna.errors import ConfigurationError

OPTIONS: dict[str, Any] = {
    **dict.fromkeys(("block_size", "num_gpu_blocks_override", "enable_prefix_caching")),
    **dict.fromkeys(("max_num_seqs", "max_num_active_seqs", "watermark")),
    **dict.fromkeys(("max_num_batched_tokens", "max_num_scheduled_tokens")),
    "scheduling_policy": "fcfs",
}
"""As they are without any on the command line."""


@pytest.mark.parametrize(
    ("policy", "preemption"),
    [("fcfs", Preemption.LAST_ADMITTED), ("priority", Preemption.LEAST_URGENT)],
)
def test_with_priorities_the_least_urgent_request_is_preempted_as_by_vllm(
    policy: str, preemption: Preemption
) -> None:
    changed = changed_engine(
        H100_LLAMA_31_8B.engine, Namespace(**{**OPTIONS, "scheduling_policy": policy})
    )
    assert changed.preemption is preemption


def test_blocks_of_another_size_are_the_same_memory() -> None:
    """By hand: 792 blocks of 16 tokens are 396 of 32."""
    changed = changed_engine(A10_LLAMA_7B.engine, Namespace(**{**OPTIONS, "block_size": 32}))
    assert (changed.block_size, changed.num_blocks) == (32, 396)
    given = Namespace(**{**OPTIONS, "block_size": 32, "num_gpu_blocks_override": 100})
    assert changed_engine(A10_LLAMA_7B.engine, given).num_blocks == 100


def test_an_option_is_stronger_than_the_profile() -> None:
    changed = changed_engine(A10_LLAMA_7B.engine, Namespace(**{**OPTIONS, "max_num_seqs": 7}))
    assert changed.max_num_seqs == 7
    assert changed.num_blocks == A10_LLAMA_7B.engine.num_blocks


def test_the_limits_of_the_scheduler_hold_before_those_of_the_model_runner() -> None:
    given = {"max_num_seqs": 64, "max_num_active_seqs": 32, "watermark": 0.0}
    tokens = {"max_num_batched_tokens": 4_096, "max_num_scheduled_tokens": 1_024}
    changed = changed_engine(A10_LLAMA_7B.engine, Namespace(**{**OPTIONS, **given, **tokens}))
    assert (changed.max_num_seqs, changed.max_num_batched_tokens) == (32, 1_024)
    assert changed.watermark == 0.0


@pytest.mark.parametrize(("num_seqs", "num_slots"), [(None, 256), (8, 8)])
def test_more_active_requests_than_slots_are_refused_as_by_vllm(
    num_seqs: int | None, num_slots: int
) -> None:
    given = {"max_num_seqs": num_seqs, "max_num_active_seqs": num_slots + 1}
    with pytest.raises(ConfigurationError, match=f"an engine has {num_slots} batch slots"):
        changed_engine(A10_LLAMA_7B.engine, Namespace(**{**OPTIONS, **given}))
