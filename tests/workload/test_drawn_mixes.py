"""Drawn requests with shared prefixes have the lengths and prefixes that they should."""

import math

import numpy as np
import pytest

from sterna.errors import ConfigurationError
from sterna.workload.block_hashes import BlockHashes
from sterna.workload.catalog import Workload, build_trace
from sterna.workload.drawn import AGENT_MAX_TOKENS
from sterna.workload.trace import Trace


def drawn(name: str, num_requests: int = 10_000, **options: object) -> Trace:
    return build_trace(Workload(name, num_requests, rate=1.0, **options))  # type: ignore[arg-type]


def reusable_share(trace: Trace, block_size: int = 16) -> float:
    reusable = BlockHashes.of(trace, block_size).reusable_tokens
    return float(reusable.sum() / trace.input_tokens.sum())


# ---------------------------------------------------------------------------------- agents


def test_agents_have_the_lengths_of_the_packaged_sessions() -> None:
    """Means within a tenth of those. They reuse a little less, since their blocks are rounded, so
    that some answers are not known to the turns behind them."""
    packaged, ours = (
        build_trace(Workload("agentic-code", rate=1.0)),
        drawn("agents", 10_000, seed=4),
    )
    assert packaged.turns is not None
    assert ours.turns is not None
    for of in (
        lambda trace: trace.input_tokens.mean(),
        lambda trace: trace.output_tokens.mean(),
        lambda trace: trace.input_tokens[trace.turns.is_first].mean(),
        lambda trace: np.median(trace.turns.think_s[~trace.turns.is_first]),
        lambda trace: 1.0 / trace.turns.is_first.mean(),
    ):
        assert of(ours) == pytest.approx(of(packaged), rel=0.1)
    as_many = drawn("agents", len(packaged), seed=4)
    assert reusable_share(as_many, 512) == pytest.approx(reusable_share(packaged, 512), abs=0.02)
    assert (ours.input_tokens + ours.output_tokens).max() <= AGENT_MAX_TOKENS


def test_an_agents_prompt_has_the_turns_before_it() -> None:
    trace = drawn("agents", 500)
    assert trace.turns is not None
    assert trace.prefix_blocks is not None
    later = np.flatnonzero(~trace.turns.is_first)
    assert len(later) > 400
    for row in later.tolist():
        before = int(trace.turns.previous[row])
        known = int(trace.input_tokens[before] + trace.output_tokens[before])
        assert trace.input_tokens[row] > known
        num_blocks = known // 512
        assert (
            trace.prefix_blocks.of(row)[:num_blocks] == trace.prefix_blocks.of(before)[:num_blocks]
        ).all()


def test_first_prompts_of_agents_share_what_all_and_what_their_groups_share() -> None:
    trace = drawn("agents", 3_000)
    assert trace.turns is not None
    assert trace.prefix_blocks is not None
    firsts = [trace.prefix_blocks.of(row) for row in np.flatnonzero(trace.turns.is_first).tolist()]
    assert {tuple(each[:64]) for each in firsts} == {tuple(range(64))}
    groups = [int(each[64]) for each in firsts]
    _, numbers = np.unique(groups, return_counts=True)
    assert 10 < len(numbers) <= 50
    # With Zipf 1.2 the first group has 28 % of the sessions.
    assert 0.15 < numbers.max() / len(firsts) < 0.42


def test_agents_can_be_divided_for_engines_with_little_memory() -> None:
    whole, divided = drawn("agents", 300), drawn("agents", 300, divisor=16)
    assert divided.input_tokens.mean() == pytest.approx(whole.input_tokens.mean() / 16, rel=0.02)
    assert reusable_share(divided, 32) == pytest.approx(reusable_share(whole, 512), abs=0.001)


# --------------------------------------------------------------------------- system prompts


def test_system_prompts_are_shared_by_popularity() -> None:
    """By hand: of 1, 1/2, 1/3 and 1/4 the first has 48 %."""
    trace = drawn("prompts:4-2048-256-128", 4_000)
    assert trace.prefix_blocks is not None
    _, numbers = np.unique(trace.prefix_blocks.ids, return_counts=True)
    assert numbers / 4_000 == pytest.approx([0.48, 0.24, 0.16, 0.12], abs=0.03)
    assert trace.input_tokens.mean() == pytest.approx(2_048 + 256, rel=0.02)
    assert trace.output_tokens.mean() == pytest.approx(128, rel=0.02)
    assert reusable_share(trace) == pytest.approx(2_048 / 2_304, abs=0.02)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("prompts:0-2048-256-128", "at least 1"),
        ("prompts:2-100-20000-128", "from 1 to 10000"),
    ],
)
def test_system_prompts_that_cannot_be_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        drawn(name)


# -------------------------------------------------------------------------------- reasoning


def test_reasoning_is_8000_tokens_long_in_the_mean() -> None:
    trace = drawn("reasoning")
    assert set(trace.input_tokens.tolist()) == {1_250}
    assert trace.output_tokens.mean() == pytest.approx(8_000, rel=0.02)
    assert 25_000 < trace.output_tokens.max() <= 32_768
    logs = np.log(trace.output_tokens)
    assert logs.std() == pytest.approx(0.78, abs=0.03)
    assert math.exp(float(np.median(logs))) == pytest.approx(6_300, rel=0.05)
    assert reusable_share(trace) == pytest.approx(240 / 1_250, abs=0.001)


@pytest.mark.parametrize("name", ["agents", "reasoning", "prompts:3-64-32-32"])
def test_another_seed_draws_other_requests(name: str) -> None:
    first, again, other = (drawn(name, 200, seed=seed) for seed in (1, 1, 2))
    assert (first.input_tokens == again.input_tokens).all()
    assert (first.output_tokens == again.output_tokens).all()
    assert (first.output_tokens != other.output_tokens).any()
