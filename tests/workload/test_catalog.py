"""Workloads by name: what each gives, and what is answered to those that cannot be."""

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sterna.errors import ConfigurationError
from sterna.types import HIGH, NORMAL, Priority
from sterna.workload.catalog import PATTERNS, TRACES, Workload, build_trace, is_drawn
from sterna.workload.trace import Trace

THREE = """arrival_s,input_tokens,output_tokens,priority,prefix_blocks
10,5,10,0,0-1
11,6,20,1,
14,7,30,0,0 2
"""


def content(trace: Trace) -> list[object]:
    return [
        trace.name,
        trace.arrival_s.tolist(),
        trace.input_tokens.tolist(),
        trace.output_tokens.tolist(),
        trace.priority.tolist(),
    ]


def refusal(workload: Workload) -> str:
    with pytest.raises(ConfigurationError) as error:
        build_trace(workload)
    return str(error.value)


@pytest.fixture
def three(tmp_path: Path) -> str:
    path = tmp_path / "three.csv"
    path.write_text(THREE)
    return str(path)


# ---------------------------------------------------------------- names


@pytest.mark.parametrize("name", TRACES)
def test_every_name_of_the_catalogue_gives_a_trace(name: str) -> None:
    for text in (name, name.swapcase()):
        trace = build_trace(Workload(text, num_requests=20, rate=2.0))
        assert trace.name == name
        assert len(trace) == 20
        assert trace.arrival_s[0] == 0.0


def test_the_catalogue_has_all_pairs_of_short_medium_and_long_first() -> None:
    pairs = ["S-S", "S-M", "S-L", "M-S", "M-M", "M-L", "L-S", "L-M", "L-L"]
    assert list(TRACES)[:9] == pairs
    assert "(the paper's)" in TRACES["S-L"]
    assert "(the paper's)" not in TRACES["S-M"]


def test_a_pair_is_lengths_with_these_means() -> None:
    short = build_trace(Workload("M-S", rate=1.0))
    assert content(short)[1:] == content(build_trace(Workload("zipf:256-128", rate=1.0)))[1:]
    assert short.input_tokens.mean() == pytest.approx(256, rel=0.02)
    assert short.output_tokens.mean() == pytest.approx(128, rel=0.02)
    assert len(short) == 10_000


def test_fixed_lengths_are_these() -> None:
    trace = build_trace(Workload("FIXED:64-8", num_requests=3, rate=2.0, arrivals="uniform"))
    assert content(trace) == ["fixed:64-8", [0.0, 0.5, 1.0], [64] * 3, [8] * 3, [0] * 3]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("MM", "did you mean M-M?"),
        ("m_m", "did you mean M-M?"),
        ("sharegtp", "did you mean sharegpt?"),
        ("azure", "did you mean azure-conv?"),
        ("mooncake", "did you mean mooncake-arxiv?"),
        ("zipf:12", "did you mean zipf:IN-OUT?"),
        ("zipf:12.5-3", "did you mean zipf:IN-OUT?"),
        ("fixed:64", "did you mean fixed:IN-OUT?"),
        ("qqqqq", "there are S-S, S-M, "),
        ("", "there are S-S, S-M, "),
        ("x" * 5000, "there are S-S, S-M, "),
    ],
)
def test_an_unknown_name_gets_a_suggestion(name: str, hint: str) -> None:
    text = refusal(Workload(name, rate=1.0))
    assert text.startswith(f"no trace is called {name!r}, and it is no .csv or .jsonl file; {hint}")


def test_the_patterns_say_what_else_there_is() -> None:
    assert list(PATTERNS) == [
        "zipf:IN-OUT",
        "fixed:IN-OUT",
        "prompts:N-SHARED-IN-OUT",
        "FILE",
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("zipf:0-5", "trace zipf:0-5: a mean length must be from 1 to 10000 tokens, not 0"),
        ("zipf:5-10001", "a mean length must be from 1 to 10000 tokens, not 10001"),
        ("fixed:0-5", "trace fixed:0-5: lengths must be at least 1 token"),
    ],
)
def test_lengths_that_cannot_be_are_refused(name: str, message: str) -> None:
    assert message in refusal(Workload(name, rate=1.0))


# ---------------------------------------------------------------- files


def test_a_file_is_a_trace_with_all_that_it_says(three: str) -> None:
    trace = build_trace(Workload(three))
    assert content(trace) == ["three.csv", [0.0, 1.0, 4.0], [5, 6, 7], [10, 20, 30], [0, 1, 0]]
    assert trace.prefix_blocks is not None
    assert [trace.prefix_blocks.of(row).tolist() for row in range(3)] == [[0, 1], [], [0, 2]]


def test_a_file_without_its_ending_is_refused_for_that(tmp_path: Path) -> None:
    path = tmp_path / "three"
    path.write_text(THREE)
    assert "name must end with .csv, .jsonl" in refusal(Workload(str(path)))


@pytest.mark.parametrize(
    "name", ["none.csv", "none.jsonl.gz", "folder/none", "~nobody-of-that-name/x.csv"]
)
def test_a_missing_file_is_refused_as_a_file(name: str) -> None:
    assert refusal(Workload(name)).startswith(name)


def test_a_name_of_the_catalogue_comes_before_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "M-M").mkdir()
    assert build_trace(Workload("M-M", num_requests=2, rate=1.0)).name == "M-M"


def test_requests_that_are_too_long_are_left_out_first(three: str) -> None:
    trace = build_trace(Workload(three, num_requests=3, max_total_tokens=26))
    assert trace.input_tokens.tolist() == [5, 6, 5]
    assert "max_total_tokens 3 leaves no request" in refusal(Workload(three, max_total_tokens=3))


@pytest.mark.parametrize("num_requests", [1, 100, 20_000])
def test_requests_that_are_too_long_are_drawn_again_where_lengths_are_drawn(
    num_requests: int,
) -> None:
    """None is there twice because another one is missing, and the others stay as they are."""
    workload = Workload("zipf:4096-4096", num_requests, 1.0, class_fractions={HIGH: 0.5})
    whole = build_trace(workload)
    limited = replace(workload, max_total_tokens=8_000)
    trace = build_trace(limited)
    is_too_long = whole.input_tokens + whole.output_tokens > 8_000
    assert is_too_long.any()
    assert (trace.input_tokens + trace.output_tokens).max() <= 8_000
    for field in ("input_tokens", "output_tokens"):
        kept = getattr(whole, field)[~is_too_long]
        assert np.array_equal(getattr(trace, field)[~is_too_long], kept)
    assert np.array_equal(trace.arrival_s, whole.arrival_s)
    assert np.array_equal(trace.priority, whole.priority)
    assert content(trace) == content(build_trace(limited))
    if num_requests == 100:
        pairs = set(zip(trace.input_tokens.tolist(), trace.output_tokens.tolist(), strict=True))
        assert len(pairs) >= 90, "76 if the others were taken twice"
        other = build_trace(replace(limited, seed=7))
        assert not np.array_equal(other.input_tokens, trace.input_tokens)


@pytest.mark.parametrize(
    ("trace", "divisor", "limit"),
    [("reasoning", 1, 12_560), ("reasoning", 10, 900), ("prompts:8-2048-256-128", 1, 2_400)],
)
def test_mixes_with_prefixes_have_lengths_that_are_drawn_again(
    trace: str, divisor: int, limit: int
) -> None:
    workload = Workload(trace, 1_000, 1.0, divisor=divisor)
    whole = build_trace(workload)
    limited = build_trace(replace(workload, max_total_tokens=limit))
    is_too_long = whole.input_tokens + whole.output_tokens > limit
    assert 100 < is_too_long.sum() < 500
    assert (limited.input_tokens + limited.output_tokens).max() <= limit
    assert np.array_equal(limited.output_tokens[~is_too_long], whole.output_tokens[~is_too_long])
    assert np.array_equal(limited.arrival_s, whole.arrival_s)
    assert limited.prefix_blocks is not None
    assert whole.prefix_blocks is not None
    assert np.array_equal(limited.prefix_blocks.ids, whole.prefix_blocks.ids)
    last, first = limited.output_tokens[-100:], limited.output_tokens[:100]
    assert not np.array_equal(last, first), "the first ones are not taken twice"


def test_sessions_that_are_cut_short_are_followed_by_further_ones() -> None:
    """Twice as many requests begin with the same sessions."""
    workload = Workload("agents", 400, 1.0, divisor=16, max_total_tokens=6_000)
    trace = build_trace(workload)
    assert len(trace) == 400
    assert (trace.input_tokens + trace.output_tokens).max() <= 6_000
    more = build_trace(replace(workload, num_requests=1_600, max_total_tokens=None))
    is_short = more.input_tokens + more.output_tokens <= 6_000
    assert trace.output_tokens.tolist() == more.output_tokens[is_short][:400].tolist()


def test_a_limit_that_leaves_nothing_out_changes_nothing() -> None:
    for trace in ("M-M", "L-L", "azure-conv"):
        workload = Workload(trace, 2_000, 1.0)
        limited = build_trace(replace(workload, max_total_tokens=12_560))
        assert content(limited) == content(build_trace(workload))


def test_a_limit_that_leaves_no_length_is_refused() -> None:
    assert "max_total_tokens 2 leaves no request: the shortest has " in refusal(
        Workload("zipf:4096-4096", 10, 1.0, max_total_tokens=2)
    )


# ---------------------------------------------------------------- arrivals and rates


def test_without_a_rate_recorded_arrivals_are_taken(three: str) -> None:
    recorded = content(build_trace(Workload(three, arrivals="recorded")))
    assert content(build_trace(Workload(three))) == recorded
    assert recorded[1] == [0.0, 1.0, 4.0]


def test_recorded_arrivals_are_not_taken_where_others_are_named(three: str) -> None:
    for arrivals in ("poisson", "Poisson"):
        assert f"trace three.csv with {arrivals} arrivals needs a rate" in refusal(
            Workload(three, arrivals=arrivals)
        )


def test_recorded_arrivals_are_stretched_to_a_rate(three: str) -> None:
    trace = build_trace(Workload(three, rate=1.0, arrivals="recorded"))
    assert trace.arrival_s.tolist() == [0.0, 0.5, 2.0]


def test_with_a_rate_arrivals_are_drawn(three: str) -> None:
    gaps_s = np.random.RandomState(0xCADE).exponential(0.5, size=3)
    for arrivals in (None, "poisson", "POISSON"):
        trace = build_trace(Workload(three, rate=2.0, arrivals=arrivals))
        assert trace.arrival_s.tolist() == [0.0, *np.cumsum(gaps_s[:-1]).tolist()]


def test_arrivals_of_generated_traces_are_drawn_after_the_lengths() -> None:
    """The paper's: 20,000 numbers for the lengths of 10,000 requests, then the gaps."""
    draws = np.random.RandomState(0xCADE)
    draws.random_sample(20_000)
    gaps_s = draws.exponential(1 / 7.5, size=10_000)
    trace = build_trace(Workload("M-M", rate=7.5))
    assert np.array_equal(trace.arrival_s, np.concatenate([[0.0], np.cumsum(gaps_s)[:-1]]))


def test_arrivals_of_other_traces_are_drawn_from_the_start() -> None:
    gaps_s = np.random.RandomState(7).gamma(1 / 4, 4 / 7.5, size=10_000)
    trace = build_trace(Workload("sharegpt", rate=7.5, arrivals="gamma:2", seed=7))
    assert np.array_equal(trace.arrival_s, np.concatenate([[0.0], np.cumsum(gaps_s)[:-1]]))


def test_steps_have_rates_of_their_own_or_are_scaled() -> None:
    steps = "step:4@1m,0@1m,8@1m"
    own = build_trace(Workload("fixed:1-1", num_requests=4000, arrivals=steps))
    scaled = build_trace(Workload("fixed:1-1", num_requests=4000, rate=8.0, arrivals=steps))
    assert len(own) / own.arrival_s[-1] == pytest.approx(4.0, rel=0.1)
    assert len(scaled) / scaled.arrival_s[-1] == pytest.approx(8.0, rel=0.1)
    assert "only if its last piece has a duration" in refusal(
        Workload(rate=2.0, arrivals="step:2@1m,3")
    )


def test_days_have_the_mean_rate_and_the_length_that_are_asked_for() -> None:
    """Fourteen days of 60 s at 50 a second bring 42,000 requests."""
    trace = build_trace(
        Workload("fixed:1-1", num_requests=42_000, rate=50.0, arrivals="daily:m-large@60")
    )
    assert trace.arrival_s[-1] == pytest.approx(14 * 60.0, rel=0.02)
    per_hour = np.histogram(trace.arrival_s, bins=14 * 24)[0]
    assert per_hour.max() > 1.5 * per_hour.mean() > 3 * per_hour.min() / 1.5


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (
            Workload("M-M"),
            "trace M-M with poisson arrivals needs a rate, in requests a second",
        ),
        (
            Workload("azure-conv", arrivals="poisson"),
            "trace azure-conv with poisson arrivals needs a rate, in requests a second; as "
            "recorded it is 5.53",
        ),
        (
            Workload("azure-conv", arrivals="uniform"),
            "trace azure-conv with uniform arrivals needs a rate, in requests a second; as "
            "recorded it is 5.53",
        ),
        (
            Workload("M-M", arrivals="daily:deepseek-r1"),
            "trace M-M with daily:deepseek-r1 arrivals needs a rate, in requests a second; "
            "deepseek-r1's own is 16",
        ),
        (
            Workload("sharegpt", arrivals="recorded", rate=3.0),
            "trace sharegpt has no arrivals: choose others, such as poisson, and a rate",
        ),
    ],
)
def test_arrivals_that_lack_something_say_what(workload: Workload, message: str) -> None:
    assert refusal(workload) == message


# ---------------------------------------------------------------- numbers, seeds and classes


def test_more_requests_than_a_file_has_repeat_it(three: str) -> None:
    trace = build_trace(Workload(three, num_requests=5))
    assert trace.input_tokens.tolist() == [5, 6, 7, 5, 6]
    assert trace.arrival_s.tolist() == [0.0, 1.0, 4.0, 6.0, 7.0]


def test_all_requests_are_taken_unless_a_number_is_named() -> None:
    assert len(build_trace(Workload("azure-conv"))) == 19_366
    assert len(build_trace(Workload("azure-conv", num_requests=10))) == 10


@settings(max_examples=20, deadline=None)
@given(
    trace=st.sampled_from(["M-M", "zipf:64-900", "fixed:64-64", "mooncake-arxiv"]),
    arrivals=st.sampled_from(["poisson", "gamma:3", "uniform", "step:1@5,9@5"]),
    seed=st.integers(0, 2**32 - 1),
    high=st.floats(0.0, 1.0),
)
def test_equal_workloads_give_equal_traces(
    trace: str, arrivals: str, seed: int, high: float
) -> None:
    workload = Workload(trace, 50, 3.0, arrivals, seed, {HIGH: high})
    copy = pickle.loads(pickle.dumps(workload))
    assert workload == copy
    assert hash(workload) == hash(copy)
    assert content(build_trace(workload)) == content(build_trace(copy))


def test_another_seed_draws_everything_anew() -> None:
    one, other = (
        build_trace(Workload("M-M", 500, 1.0, seed=seed, class_fractions={HIGH: 0.5}))
        for seed in (1, 2)
    )
    for field in ("arrival_s", "input_tokens", "output_tokens", "priority"):
        assert not np.array_equal(getattr(one, field), getattr(other, field))


def test_classes_change_neither_lengths_nor_arrivals() -> None:
    plain = build_trace(Workload("S-S", 300, 26.0, "gamma:4"))
    mixed = build_trace(Workload("S-S", 300, 26.0, "gamma:4", class_fractions={HIGH: 0.1}))
    assert mixed.priority.sum() == 30
    assert content(plain)[:4] == content(mixed)[:4]


@pytest.mark.parametrize("trace", ["M-M", "sharegpt"])
def test_long_requests_and_long_gaps_are_no_more_often_of_high_priority(trace: str) -> None:
    """A tenth is high (Section 6.4), so of the longest tenth a tenth is; a share of 1,000 picks
    spreads by 0.009."""
    requests = build_trace(Workload(trace, rate=7.5, class_fractions={HIGH: 0.1}))
    gaps_s = np.diff(requests.arrival_s, prepend=0.0)
    for each in (requests.input_tokens, requests.output_tokens, gaps_s):
        for order in (np.argsort(each), np.argsort(-each)):
            assert requests.priority[order[:1000]].mean() == pytest.approx(0.1, abs=0.04)


def test_neither_lengths_nor_arrivals_change_the_classes() -> None:
    fractions = {HIGH: 0.1, Priority(2): 0.1}
    one = build_trace(Workload("S-S", 300, 26.0, class_fractions=fractions))
    other = build_trace(Workload("sharegpt", 300, 2.0, "uniform", class_fractions=fractions))
    assert np.array_equal(one.priority, other.priority)


def test_classes_replace_the_files_priorities(three: str) -> None:
    assert build_trace(Workload(three)).priority.tolist() == [0, 1, 0]
    assert build_trace(Workload(three, class_fractions={NORMAL: 1.0})).priority.sum() == 0
    top = Priority(3)
    assert build_trace(Workload(three, class_fractions={top: 1.0})).priority.tolist() == [3, 3, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_requests": 0}, "num_requests must be at least 1, not 0"),
        ({"rate": 0.0}, "rate must be positive requests a second, not 0.0"),
        ({"rate": -1.0}, "rate must be positive requests a second, not -1.0"),
        ({"rate": float("nan")}, "rate must be positive requests a second, not nan"),
        ({"rate": float("inf")}, "rate must be positive requests a second, not inf"),
        ({"seed": -1}, "seed must be from 0 to 4294967295, not -1"),
        ({"seed": 2**32}, "seed must be from 0 to 4294967295, not 4294967296"),
        ({"arrivals": "possion"}, "arrivals must be poisson, gamma:CV, "),
        ({"class_fractions": {HIGH: 2.0}}, "that of priority 1 must be from 0 to 1, not 2.0"),
        ({"max_total_tokens": 1}, "max_total_tokens must be at least 2, not 1"),
    ],
)
def test_a_workload_that_cannot_be_is_refused_at_once(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigurationError) as error:
        Workload(**options)
    assert str(error.value).startswith(message) or message in str(error.value)


@pytest.mark.parametrize(
    "workload",
    [
        Workload("azure-conv"),
        Workload("azure-conv", arrivals="recorded", rate=3.0),
        Workload("azure-conv", arrivals="Uniform", rate=3.0, max_total_tokens=2_000),
        Workload("azure-conv", rate=3.0),
        Workload("azure-conv", arrivals="gamma:4", rate=3.0),
        Workload("azure-conv", arrivals="step:3@10,5"),
        Workload("azure-conv", class_fractions={HIGH: 0.5}),
        Workload("agentic-code", arrivals="uniform", rate=3.0),
        Workload("fixed:64-64", 20, arrivals="uniform", rate=3.0),
        Workload("M-M", 20, arrivals="uniform", rate=3.0),
        Workload("agents", 20, arrivals="uniform", rate=3.0),
        Workload("prompts:2-16-64-64", 20, arrivals="uniform", rate=3.0),
    ],
)
def test_a_workload_is_drawn_if_seeds_make_a_difference(workload: Workload) -> None:
    one, other = (build_trace(replace(workload, seed=seed)) for seed in (1, 2))
    columns = ("arrival_s", "input_tokens", "output_tokens", "priority")
    same = [np.array_equal(getattr(one, each), getattr(other, each)) for each in columns]
    assert is_drawn(workload) == (not all(same))
