"""Arrival processes keep rate, burstiness and order; their names are read strictly."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sterna.errors import ConfigurationError
from sterna.workload.arrivals import (
    DAILY_MODELS,
    GRAMMAR,
    Arrivals,
    Daily,
    Gamma,
    Poisson,
    Recorded,
    Step,
    Uniform,
    curve_arrivals_s,
    gamma_arrivals_s,
    parse_arrivals,
    poisson_arrivals_s,
    recorded_arrivals_s,
    uniform_arrivals_s,
)
from sterna.workload.curves import RateCurve
from sterna.workload.randomness import Draws

SEEDS = st.integers(0, 2**32 - 1)
RATES = st.floats(0.01, 1000.0)
STREAMS = st.one_of(SEEDS.map(np.random.default_rng), SEEDS.map(np.random.RandomState))


def steps(*pieces: tuple[float, float]) -> RateCurve:
    """A curve of (rate, duration_s)."""
    rates, durations_s = zip(*pieces, strict=True)
    return RateCurve(np.array(durations_s, float), np.array(rates, float))


# ---------------------------------------------------------------- the processes


def test_poisson_arrivals_are_the_papers() -> None:
    """The artifact draws one exponential gap a request from numpy's legacy generator."""
    gaps_s = np.random.RandomState(0xCADE).exponential(1 / 7.5, size=5)
    times_s = poisson_arrivals_s(7.5, 5, np.random.RandomState(0xCADE))
    assert times_s.tolist() == [0.0, *np.cumsum(gaps_s[:-1]).tolist()]


def test_gamma_arrivals_are_the_papers() -> None:
    """The artifact's gaps have shape 1/cv^2 and scale cv^2/rate."""
    gaps_s = np.random.RandomState(3).gamma(1 / 16, 16 / 2.0, size=5)
    times_s = gamma_arrivals_s(2.0, 4.0, 5, np.random.RandomState(3))
    assert times_s.tolist() == [0.0, *np.cumsum(gaps_s[:-1]).tolist()]


@given(rate=RATES, seed=SEEDS)
def test_poisson_gaps_have_the_rates_mean_and_a_variation_of_1(rate: float, seed: int) -> None:
    gaps_s = np.diff(poisson_arrivals_s(rate, 4000, np.random.default_rng(seed)))
    # Six standard deviations of the sample's mean, and as much for its variation.
    assert gaps_s.mean() * rate == pytest.approx(1.0, abs=6 / math.sqrt(4000))
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(1.0, abs=0.15)


@given(rate=RATES, cv=st.floats(0.05, 6.0), seed=SEEDS)
def test_gamma_gaps_have_the_rates_mean_and_the_variation(
    rate: float, cv: float, seed: int
) -> None:
    num_requests = 20_000
    gaps_s = np.diff(gamma_arrivals_s(rate, cv, num_requests, np.random.default_rng(seed)))
    assert gaps_s.mean() * rate == pytest.approx(1.0, abs=6 * cv / math.sqrt(num_requests))
    # The variation of a sample of gamma numbers spreads by about sqrt((1 + 3 cv^2) / 2n).
    spread = math.sqrt((1 + 3 * cv**2) / (2 * num_requests))
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(cv, rel=10 * spread)


@given(rate=RATES, num_requests=st.integers(2, 50))
def test_uniform_gaps_are_all_the_same(rate: float, num_requests: int) -> None:
    times_s = uniform_arrivals_s(rate, num_requests)
    assert times_s[0] == 0.0
    assert np.diff(times_s) == pytest.approx(1.0 / rate)


@given(rate=RATES, num_requests=st.integers(1, 60), stream=STREAMS)
def test_all_processes_begin_at_0_and_never_go_back(
    rate: float, num_requests: int, stream: Draws
) -> None:
    for times_s in (
        poisson_arrivals_s(rate, num_requests, stream),
        gamma_arrivals_s(rate, 8.0, num_requests, stream),
        uniform_arrivals_s(rate, num_requests),
        curve_arrivals_s(steps((rate, 1.0), (0.0, 0.5), (3 * rate, 0.1)), num_requests, stream),
    ):
        assert len(times_s) == num_requests
        assert times_s[0] == 0.0
        assert (np.diff(times_s) >= 0.0).all()


@given(rate=RATES, seed=SEEDS)
def test_the_same_seed_gives_the_same_arrivals(rate: float, seed: int) -> None:
    curve = steps((rate, 1.0), (2 * rate, 1.0))
    first, second = np.random.RandomState(seed), np.random.RandomState(seed)
    for stream in (first, second):
        poisson_arrivals_s(rate, 10, stream)
    assert np.array_equal(
        gamma_arrivals_s(rate, 3.0, 50, first), gamma_arrivals_s(rate, 3.0, 50, second)
    )
    assert np.array_equal(curve_arrivals_s(curve, 50, first), curve_arrivals_s(curve, 50, second))


def test_recorded_arrivals_start_at_0_with_their_gaps() -> None:
    assert recorded_arrivals_s(np.array([5.0, 5.5, 9.0])).tolist() == [0.0, 0.5, 4.0]


@given(
    recorded_s=st.lists(st.floats(0.0, 1e6), min_size=2, max_size=30).map(sorted),
    rate=st.floats(0.01, 100.0),
)
def test_recorded_arrivals_are_stretched_to_a_rate(recorded_s: list[float], rate: float) -> None:
    recorded = np.array(recorded_s)
    if recorded[-1] - recorded[0] < 1e-6:
        return
    times_s = recorded_arrivals_s(recorded, rate)
    assert (len(times_s) - 1) / times_s[-1] == pytest.approx(rate)
    ratio = times_s[-1] / (recorded[-1] - recorded[0])
    assert times_s == pytest.approx((recorded - recorded[0]) * ratio)


def test_one_recorded_request_comes_at_0_at_any_rate() -> None:
    assert recorded_arrivals_s(np.array([7.0]), 3.0).tolist() == [0.0]


def test_recorded_arrivals_at_one_moment_cannot_be_stretched() -> None:
    with pytest.raises(ConfigurationError, match="all requests came at the same time"):
        recorded_arrivals_s(np.array([7.0, 7.0]), 3.0)


# ---------------------------------------------------------------- rates that change


def test_a_curve_brings_its_rate_in_each_piece() -> None:
    curve = steps((20.0, 100.0), (0.0, 50.0), (80.0, 50.0))
    times_s = curve_arrivals_s(curve, 60_000, np.random.RandomState(1))
    in_round_s = times_s % 200.0
    num_rounds = times_s[-1] / 200.0
    assert ((in_round_s < 100.0).sum() / num_rounds / 100.0) == pytest.approx(20.0, rel=0.05)
    assert not ((in_round_s > 100.0) & (in_round_s < 150.0)).any()
    assert ((in_round_s >= 150.0).sum() / num_rounds / 50.0) == pytest.approx(80.0, rel=0.05)


def test_a_curve_of_one_rate_is_a_poisson_process() -> None:
    curve, rate = steps((4.0, 10.0)), 4.0
    from_curve = curve_arrivals_s(curve, 500, np.random.RandomState(2))
    assert from_curve == pytest.approx(poisson_arrivals_s(rate, 500, np.random.RandomState(2)))


def test_the_time_of_an_expected_number_is_exact() -> None:
    """At 2 a second for 3 s, then none for 4 s, then 1 a second for 2 s: 8 in a round of 9 s."""
    curve = steps((2.0, 3.0), (0.0, 4.0), (1.0, 2.0))
    expected = np.array([0.0, 1.0, 5.0, 6.0, 7.0, 8.0, 9.0, 16.0, 17.0])
    assert curve.time_s(expected).tolist() == [0.0, 0.5, 2.5, 7.0, 8.0, 9.0, 9.5, 18.0, 18.5]


def test_rounding_where_pieces_meet_does_not_change_the_order() -> None:
    """Numbers next to each other around the end of a round: the third came before the second."""
    curve, end = steps((6.1, 27.89), (37.47, 51.82)), 6335.4732
    times_s = curve.time_s(end + np.spacing(end) * np.arange(-3, 4))
    assert (np.diff(times_s) >= 0.0).all()
    assert times_s == pytest.approx(3 * (27.89 + 51.82))


def test_a_curve_that_begins_without_requests_brings_the_first_when_they_begin() -> None:
    assert steps((0.0, 5.0), (1.0, 5.0)).time_s(np.array([0.0, 1.0])).tolist() == [5.0, 6.0]


def test_a_last_step_without_end_goes_on() -> None:
    curve = steps((1.0, 2.0), (10.0, math.inf))
    assert not curve.repeats
    assert curve.mean_rate == 10.0
    assert curve.time_s(np.array([2.0, 3.0, 1002.0])) == pytest.approx([2.0, 2.1, 102.0])


@given(rate=RATES, factor=st.floats(0.1, 100.0))
def test_scaling_sets_the_mean_and_compressing_keeps_it(rate: float, factor: float) -> None:
    curve = steps((1.0, 30.0), (4.0, 10.0)).scaled_to(rate).compressed(factor)
    assert curve.mean_rate == pytest.approx(rate)
    assert curve.duration_s.sum() == pytest.approx(40.0 / factor)
    assert curve.rate[1] / curve.rate[0] == pytest.approx(4.0)


@given(
    pieces=st.lists(
        st.tuples(st.one_of(st.just(0.0), st.floats(0.01, 50.0)), st.floats(0.01, 100.0)),
        min_size=1,
        max_size=6,
    ).filter(lambda pieces: any(rate for rate, _ in pieces)),
    seed=SEEDS,
)
def test_no_request_comes_while_the_rate_is_0(pieces: list[tuple[float, float]], seed: int) -> None:
    curve = steps(*pieces)
    times_s = curve_arrivals_s(curve, 200, np.random.RandomState(seed))
    assert (np.diff(times_s) >= 0.0).all()
    end_s = np.cumsum(curve.duration_s)
    in_round_s = times_s % end_s[-1]
    piece = np.minimum(np.searchsorted(end_s, in_round_s, side="right"), len(pieces) - 1)
    margin_s = 1e-9 * (1.0 + times_s)
    is_near_a_border = np.abs(end_s[:, None] - in_round_s).min(axis=0) <= margin_s
    is_near_a_border |= in_round_s <= margin_s
    assert ((curve.rate[piece] > 0.0) | is_near_a_border).all()


@pytest.mark.parametrize(
    ("durations_s", "rates", "message"),
    [
        ([], [], "a duration and a rate for each piece"),
        ([1.0], [1.0, 2.0], "a duration and a rate for each piece"),
        ([0.0], [1.0], "must have a positive duration"),
        ([math.inf, 1.0], [1.0, 1.0], "must have a positive duration"),
        ([math.nan], [1.0], "must have a positive duration"),
        ([1.0], [-1.0], "at least 0"),
        ([1.0], [math.nan], "at least 0"),
        ([1.0], [math.inf], "at least 0"),
        ([1.0, 2.0], [0.0, 0.0], "must not stay at 0"),
        ([1.0, math.inf], [1.0, 0.0], "must not stay at 0"),
    ],
)
def test_an_impossible_curve_is_refused(
    durations_s: list[float], rates: list[float], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        RateCurve(np.array(durations_s), np.array(rates))


def test_a_curve_without_end_cannot_be_scaled() -> None:
    with pytest.raises(ConfigurationError, match="only if its last piece has a duration"):
        steps((1.0, math.inf)).scaled_to(3.0)


# ---------------------------------------------------------------- their names


@pytest.mark.parametrize(
    ("text", "arrivals"),
    [
        ("poisson", Poisson()),
        ("Poisson", Poisson()),
        ("uniform", Uniform()),
        ("recorded", Recorded()),
        ("gamma:4", Gamma(4.0)),
        ("GAMMA:0.5", Gamma(0.5)),
        ("gamma:1e1", Gamma(10.0)),
        ("step:2@10m,8@90,2@1h", Step((2.0, 8.0, 2.0), (600.0, 90.0, 3600.0))),
        ("step:0@10s,4.5@1d", Step((0.0, 4.5), (10.0, 86_400.0))),
        ("step:2@1.5m,6", Step((2.0, 6.0), (90.0, math.inf))),
        ("step:3", Step((3.0,), (math.inf,))),
        ("daily", Daily("language/m-large", 86_400.0)),
        ("daily@1h", Daily("language/m-large", 3600.0)),
        ("daily:m-mid", Daily("language/m-mid", 86_400.0)),
        ("daily:M-Mid@30m", Daily("language/m-mid", 1800.0)),
        ("daily:reason/deepseek-r1", Daily("reason/deepseek-r1", 86_400.0)),
    ],
)
def test_a_name_is_understood(text: str, arrivals: Arrivals) -> None:
    assert parse_arrivals(text) == arrivals


@pytest.mark.parametrize("text", ["", "possion", "poison", "gamma4", "gamma(4)", "dailyx", "steps"])
def test_an_unknown_name_is_answered_with_all_that_are_known(text: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        parse_arrivals(text)
    assert str(error.value) == f"arrivals must be {GRAMMAR}, not {text!r}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("poisson:3", "poisson takes no parameter; use poisson"),
        ("recorded:", "recorded takes no parameter; use recorded"),
        ("gamma", "gamma needs a coefficient of variation, as in gamma:4"),
        ("gamma:", "gamma needs a coefficient of variation, as in gamma:4"),
        ("gamma:0", "must be from 0.01 to 100, not 0"),
        ("gamma:101", "must be from 0.01 to 100, not 101"),
        ("gamma:-1", "'-1' is not a number of at least 0"),
        ("gamma:nan", "'nan' is not a number of at least 0"),
        ("gamma:inf", "'inf' is not a number of at least 0"),
        ("gamma: 4", "' 4' is not a number of at least 0"),
        ("gamma:1_0", "'1_0' is not a number of at least 0"),
        ("gamma:4,5", "'4,5' is not a number of at least 0"),
        ("step", "'' is not a number of at least 0"),
        ("step:", "'' is not a number of at least 0"),
        ("step:2@10m,", "'' is not a number of at least 0"),
        ("step:2,8@10m", "only the last step may leave out @TIME; step 1 is '2', not RATE@TIME"),
        ("step:2@", "'' is not a number of at least 0"),
        ("step:2@0", "a time must be positive, not '0'"),
        ("step:2@10x", "'10x' is not a number of at least 0"),
        ("step:-2@10", "'-2' is not a number of at least 0"),
        ("step:0@10", "must not stay at 0 for good"),
        ("step:2@10,0", "must not stay at 0 for good"),
        ("daily:", "must be one of m-large, m-mid, m-small, mm-image, deepseek-r1, not ''"),
        ("daily:large", "one of m-large, m-mid, m-small, mm-image, deepseek-r1, not 'large'"),
        ("daily:m-mid@", "'' is not a number of at least 0"),
        ("daily@0h", "a time must be positive, not '0h'"),
        ("daily@fast", "'fast' is not a number of at least 0"),
    ],
)
def test_a_wrong_parameter_is_refused_with_the_whole_text(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        parse_arrivals(text)
    assert message in str(error.value)
    assert repr(text) in str(error.value)


@given(st.text(max_size=20))
def test_any_other_text_is_refused_and_never_fails_otherwise(text: str) -> None:
    try:
        parsed = parse_arrivals(text)
    except ConfigurationError:
        return
    assert parsed in (Poisson(), Uniform(), Recorded())


@given(
    kind=st.sampled_from(["gamma:", "step:", "daily:", "daily@", "poisson:"]),
    rest=st.text("0123456789.e+-@,:smhd_ ", max_size=12),
)
def test_any_parameter_is_read_or_refused(kind: str, rest: str) -> None:
    try:
        parsed = parse_arrivals(kind + rest)
    except ConfigurationError:
        return
    match parsed:
        case Gamma(cv):
            assert 0.01 <= cv <= 100.0
        case Step(rates, durations_s):
            assert len(rates) == len(durations_s)
            assert any(rates)
        case Daily(model, day_s):
            assert model in DAILY_MODELS
            assert day_s > 0.0
        case _:
            raise AssertionError(f"{kind + rest!r} was read as {parsed}")
