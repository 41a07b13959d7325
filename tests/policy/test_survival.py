"""Survival curve of outputs, and the loads that are expected by it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sterna.policy.survival import NUM_EXPECTED, Survival, coming_tokens
from sterna.types import OUTPUT_LENGTHS, InstanceView
from tests.policy.builders import instance, queuing, running


def ended(**num_by_length: int) -> tuple[int, ...]:
    """Counts of outputs: so many of the lengths from this one on, as in `n64=3`."""
    counts = [0] * len(OUTPUT_LENGTHS)
    for name, num in num_by_length.items():
        counts[OUTPUT_LENGTHS.index(int(name.removeprefix("n")))] = num
    return tuple(counts)


def test_those_that_were_longer_say_how_likely_a_request_goes_on() -> None:
    """By hand: of 92 outputs beyond 64 tokens, and eight that are expected, 72 and eight are beyond
    96; of 72 between 96 and 128, half are beyond 112."""
    survival = Survival(ended(n64=20, n96=72))
    assert survival.share(64, 32) == 0.8
    assert survival.share(64, 48) == 0.44
    assert survival.share(96, 16) == 0.55


def test_until_outputs_have_ended_and_beyond_the_longest_a_request_goes_on() -> None:
    assert Survival(()).share(0, 1_000) == 1.0
    assert Survival(ended()).share(70, 1_000_000) == 1.0
    assert Survival(ended(n64=100)).share(128, 1_000) == 1.0


def test_few_outputs_decide_little() -> None:
    assert Survival(ended(n16=1)).share(0, 1_000) == NUM_EXPECTED / (NUM_EXPECTED + 1)


counts = st.lists(
    st.integers(0, 50), min_size=len(OUTPUT_LENGTHS), max_size=len(OUTPUT_LENGTHS)
).map(tuple)


@given(counts, st.integers(0, 200_000), st.integers(0, 5_000), st.integers(0, 5_000))
def test_a_longer_wait_leaves_fewer(
    num_ended: tuple[int, ...], num_tokens: int, num_steps: int, num_more: int
) -> None:
    survival = Survival(num_ended)
    assert survival.share(num_tokens, 0) == 1.0
    both = survival.share(num_tokens, num_steps + num_more)
    assert 0.0 < both <= survival.share(num_tokens, num_steps) <= 1.0
    # To go on for both times is to go on for the first and then for the second one.
    in_turn = survival.share(num_tokens, num_steps)
    in_turn *= survival.share(num_tokens + num_steps, num_more)
    assert both == pytest.approx(in_turn)


def view(*, num_ended: tuple[int, ...]) -> InstanceView:
    requests = [
        running("young", 96, num_tokens=90, num_output_tokens=64),
        running("old", 112, num_tokens=100, num_output_tokens=96),
    ]
    waiting = [queuing("waits", 32)]
    return replace(instance(running=requests, queuing=waiting), num_ended=num_ended)


def test_what_a_request_will_have_counts_by_the_chance_that_it_still_runs() -> None:
    """By hand, as above: 0.8 of 90 + 32 tokens, 8 of 80 of 100 + 32; none has ended below 64
    tokens, so that the one that waits will have 32 + 32."""
    seen = view(num_ended=ended(n64=20, n96=72))
    expected = coming_tokens((*seen.running, *seen.queuing), seen, 32)
    assert expected == pytest.approx([0.8 * 122, 0.1 * 132, 64])


def test_without_ended_outputs_all_requests_grow() -> None:
    seen = view(num_ended=())
    assert coming_tokens(seen.running, seen, 32) == [122, 132]
