"""What is measured of an engine, and the target load that the measurement says."""

import csv
from importlib import resources

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sterna.engine.profiling.fitting import DecodePoint
from sterna.engine.profiling.measurement_plan import (
    NOISY_FACTOR,
    REQUEST_TOKENS,
    ROOM_TOKENS,
    Basis,
    Batch,
    Decode,
    batches,
    prompt_lengths,
    propose,
    rising,
    target_load,
)
from sterna.errors import ConfigurationError

DATA = resources.files("sterna.engine.emulated") / "data"

KV_PER_WEIGHTS = 2 * 32 * 4096 / 6_738_415_616
"""LLaMA-7B's keys and values of one token over its weights, both in 16 bits."""


def step_s(num_requests: int, num_tokens: int) -> float:
    """An engine on which a batch's time is exactly linear."""
    return 30e-3 + 256e-6 * num_requests + 1e-6 * num_tokens


def points(*batches: tuple[int, int]) -> list[DecodePoint]:
    """Decodes of so many requests of so many tokens each."""
    return [DecodePoint(n, n * each, step_s(n, n * each)) for n, each in batches]


def timed(num_requests: int, tokens_each: int, *rounds_s: float) -> Decode:
    num_tokens = num_requests * tokens_each
    return Decode(Batch(num_requests, tokens_each), num_tokens, rounds_s)


# ------------------------------------------------------------------------------------ target load


def test_the_papers_engine_gets_about_the_papers_target_load() -> None:
    """Section 6.4: "We empirically choose a target memory load of 1,600 tokens for high-priority
    requests, as we observe that such load preserves near-ideal decode speed"."""
    decodes = [
        DecodePoint(int(row["batch_size"]), int(row["total_tokens"]), float(row["ms"]) / 1e3)
        for row in csv.DictReader((DATA / "a10_llama_measured.csv").read_text("utf-8").splitlines())
        if (row["model"], row["quantity"]) == ("llama-7b", "decode_step")
    ]

    target = target_load(decodes, kv_per_weights=KV_PER_WEIGHTS)

    assert target.tokens == 1649
    assert target.tokens == pytest.approx(1600, rel=0.05)
    assert target.basis is Basis.FITTED
    assert target.ideal_s == pytest.approx(32.9e-3, rel=1e-2)


def test_the_target_load_is_where_a_step_is_a_tenth_over_that_of_one_request() -> None:
    """One request of 256 tokens takes 30.512 ms, so that 3.0512 ms are left for more of them, and
    each takes 0.512 ms: 256 + 256 * 3.0512 / 0.512 tokens."""
    batch = points((1, 256), (2, 256), (4, 256), (8, 256), (16, 256))

    target = target_load(batch)

    assert target.tokens == 1781
    assert target.ideal_s == pytest.approx(30.512e-3)
    assert target.limit_s == pytest.approx(33.5632e-3)
    assert (target.basis, target.is_reached) == (Basis.MEASURED, True)


def test_without_batches_of_the_length_the_fitted_model_says_the_same() -> None:
    others = points((1, 64), (8, 64), (32, 64), (1, 1024), (8, 1024))

    target = target_load(others)

    assert target.tokens == pytest.approx(1781, abs=1)
    assert target.basis is Basis.FITTED


def test_a_wider_tolerance_allows_more() -> None:
    batch = points(*((1 << power, 256) for power in range(6)))
    targets = [target_load(batch, tolerance=each).tokens for each in (0.05, 0.1, 0.2)]
    assert targets == sorted(set(targets))


def test_where_every_step_is_near_the_ideal_the_largest_batch_is_the_target() -> None:
    flat = [DecodePoint(n, 256 * n, 30e-3 + 1e-5 * n) for n in (1, 2, 4, 8)]

    target = target_load(flat)

    assert (target.tokens, target.is_reached) == (2048, False)


def test_where_two_requests_are_too_slow_the_target_is_less_than_both() -> None:
    steep = [DecodePoint(n, 256 * n, 30e-3 * n) for n in (1, 2, 4)]

    target = target_load(steep)

    assert target.tokens == int(256 * 1.1)
    assert target.is_reached


def test_a_batch_that_is_faster_than_one_request_lowers_the_ideal() -> None:
    """The three smallest batches take 30 ms on average; their order says nothing."""
    dented = [
        DecodePoint(n, 256 * n, duration_s)
        for n, duration_s in ((1, 31e-3), (2, 32e-3), (4, 27e-3), (8, 39e-3))
    ]

    target = target_load(dented)

    assert target.ideal_s == pytest.approx(30e-3)
    assert target.tokens == 1024 + 1024 // 2


def test_a_small_batch_that_is_slow_does_not_hide_a_larger_one_that_is_near() -> None:
    """Two rows may take a slower kernel than four."""
    humped = [
        DecodePoint(n, 256 * n, duration_s)
        for n, duration_s in ((1, 30e-3), (2, 36e-3), (4, 31e-3), (8, 35e-3))
    ]

    target = target_load(humped)

    assert target.ideal_s == pytest.approx(30e-3)
    assert target.tokens == 1024 + 1024 // 2


def test_the_growth_of_requests_while_they_are_prefilled_keeps_their_batch_in_the_curve() -> None:
    grown = [DecodePoint(n, round(1.05 * 256 * n), step_s(n, 256 * n)) for n in (1, 2, 4, 8, 16)]
    assert target_load(grown).basis is Basis.MEASURED


def test_too_few_batches_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="decode points do not determine 3 constants"):
        target_load(points((1, 64), (8, 64)))


@given(st.lists(st.floats(1e-3, 1.0), min_size=3, max_size=9), st.floats(0.01, 0.5))
def test_whatever_was_measured_the_target_lies_between_the_batches(
    durations_s: list[float], tolerance: float
) -> None:
    curve = [DecodePoint(1 << n, 256 << n, each) for n, each in enumerate(durations_s)]

    target = target_load(curve, tolerance=tolerance)

    assert curve[0].num_context_tokens <= target.tokens <= curve[-1].num_context_tokens
    assert target.is_reached == (durations_s[-1] > target.limit_s)
    assert target.is_reached or target.tokens == curve[-1].num_context_tokens


# ------------------------------------------------------------------------------------------- noise


def test_rounds_that_agree_make_a_proposal() -> None:
    decodes = [
        timed(n, 256, step_s(n, 256 * n), 1.004 * step_s(n, 256 * n), 0.996 * step_s(n, 256 * n))
        for n in (1, 2, 4, 8, 16)
    ]

    proposal = propose(decodes)

    assert proposal.target.tokens == 1781
    assert proposal.by_round[0] == 1781
    assert not proposal.is_noisy


def with_slow_rounds(*slow: dict[int, float]) -> list[Decode]:
    """Batches of the linear engine; in each round those of some sizes took so many times as
    long."""
    return [
        timed(n, 256, *(factors.get(n, 1.0) * step_s(n, 256 * n) for factors in slow))
        for n in (1, 2, 4, 8, 16)
    ]


def test_one_round_that_was_disturbed_changes_nothing() -> None:
    proposal = propose(with_slow_rounds({}, {4: 1.5, 8: 1.5, 16: 1.5}, {}))

    assert proposal.by_round[1] < 1781 / NOISY_FACTOR
    assert (proposal.target.tokens, proposal.is_noisy) == (1781, False)


def test_rounds_that_contradict_each_other_are_noise() -> None:
    """Something else slowed small batches down in the second round, and large ones in the third."""
    proposal = propose(with_slow_rounds({}, {1: 1.3, 2: 1.3}, {2: 1.5, 4: 1.5, 8: 1.5, 16: 1.5}))

    assert proposal.by_round[1] > 1781 * NOISY_FACTOR
    assert proposal.by_round[2] < 1781 / NOISY_FACTOR
    assert proposal.is_noisy


def test_other_lengths_have_a_target_of_their_own_where_they_were_measured() -> None:
    """As many tokens in longer requests are fewer requests, which are faster."""
    sizes = [(1, 64), (16, 64), (32, 64), *((1 << n, 256) for n in range(5)), (1, 1024), (8, 1024)]
    decodes = [timed(n, each, step_s(n, n * each)) for n, each in sizes]

    proposal = propose(decodes)

    assert [length for length, _ in proposal.by_length] == [64]
    assert proposal.by_length[0][1].tokens < proposal.target.tokens


@given(st.lists(st.floats(-10, 10), max_size=12))
def test_the_rising_sequence_never_falls_and_keeps_the_sum(values: list[float]) -> None:
    found = rising(values)

    assert found == pytest.approx(sorted(found))
    assert sum(found) == pytest.approx(sum(values), abs=1e-9)


@given(st.lists(st.floats(-10, 10), max_size=12))
def test_what_rises_stays_as_it_is(values: list[float]) -> None:
    assert rising(sorted(values)) == sorted(values)


def test_what_falls_is_replaced_by_its_mean() -> None:
    assert rising([3.0, 1.0, 2.0, 5.0, 4.0, 6.0]) == [2.0, 2.0, 2.0, 4.5, 4.5, 6.0]


# -------------------------------------------------------------------------------------------- plan


def test_every_batch_fits_the_engine_and_lengths_have_single_requests() -> None:
    plan = batches(11_616, 32, 8192)

    assert all(
        each.num_requests <= 32 and each.num_requests * (each.tokens_each + ROOM_TOKENS) <= 11_616
        for each in plan
    )
    lengths = {each.tokens_each for each in plan}
    assert lengths == {64, 256, 1024}
    assert {each.tokens_each for each in plan if each.num_requests == 1} == lengths
    reference = [each.num_requests for each in plan if each.tokens_each == REQUEST_TOKENS]
    assert reference == [32, 16, 8, 4, 2, 1]


def test_no_other_length_is_so_near_the_reference_that_their_batches_would_mix() -> None:
    assert {each.tokens_each for each in batches(11_616, 32, 8192, request_tokens=300)} == {
        64,
        300,
        1024,
    }


def test_a_quick_plan_is_a_part_with_the_whole_reference() -> None:
    plan, quick = batches(11_616, 32, 8192), batches(11_616, 32, 8192, is_quick=True)

    assert set(quick) < set(plan)
    reference = {each for each in plan if each.tokens_each == REQUEST_TOKENS}
    assert reference < set(quick)


@pytest.mark.parametrize("limits", [(600, 32, 8192), (11_616, 1, 8192), (11_616, 32, 300)])
def test_an_engine_without_room_for_two_requests_is_refused(limits: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigurationError, match="two requests of 256 tokens do not fit"):
        batches(*limits)


@pytest.mark.parametrize(
    ("limits", "lengths"),
    [
        ((512, 8192, 11_616), (16, 32, 64, 128, 256, 512, 2048)),
        ((2048, 1024, 11_616), (16, 32, 64, 128, 256, 512, 1023)),
        ((512, 8192, 700), (16, 32, 64, 128, 256, 512, 700)),
    ],
)
def test_prompts_are_powers_of_two_and_one_of_several_steps(
    limits: tuple[int, int, int], lengths: tuple[int, ...]
) -> None:
    assert prompt_lengths(*limits) == lengths
    quick = prompt_lengths(*limits, is_quick=True)
    assert set(quick) < set(lengths)
    assert quick[-1] == lengths[-1]
