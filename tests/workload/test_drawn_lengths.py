"""The paper's lengths, by its rule, and by that rule for other means."""

import gzip
import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sterna.errors import ConfigurationError
from sterna.workload.catalog import Workload, build_trace
from sterna.workload.drawn import LONG, MEDIUM, SHORT, zipf_exponent, zipf_lengths
from sterna.workload.files import packaged_rows

SHARED = os.environ.get("STERNA_SHARED")
PERCENTILES = (50, 80, 95, 99)

DIGESTS = {
    "S-S": "058af3bd3e5a6e2e45de578276a94bd129840d7a311e1bdd7029413f74528411",
    "M-M": "1f26391df5d6fe6e45db4333001d6e98c402abfe713275a5c0d31859983f162e",
    "L-L": "eaa8b15a261b5de583f183d73bcd2d18247ec2b233e4b77ad62d33e4bb58df71",
    "S-L": "8b027c9493e47aef448156117efebe821dff4c645d8d670c0595462f9f676a1a",
    "L-S": "d6bf93f3d8344a3acfebeb6ab7dd7bdf54ea15cb5982397734bcbb95c2029b44",
}
"""SHA-256 of the paper's 10,000 requests of each trace, as CSV."""


def as_csv(trace: str) -> str:
    requests = build_trace(Workload(trace, rate=1.0))
    lines = zip(requests.input_tokens, requests.output_tokens, strict=True)
    return "input_tokens,output_tokens\n" + "".join(f"{i},{o}\n" for i, o in lines)


@pytest.mark.parametrize("trace", DIGESTS)
def test_the_default_seed_gives_the_papers_requests(trace: str) -> None:
    assert hashlib.sha256(as_csv(trace).encode()).hexdigest() == DIGESTS[trace]


@pytest.mark.skipif(SHARED is None, reason="the paper's requests lie beside the checkout")
@pytest.mark.parametrize("trace", DIGESTS)
def test_the_papers_requests_are_those_of_the_artifact(trace: str) -> None:
    path = Path(SHARED or "") / "data" / "generated" / f"{trace}.csv.gz"
    assert as_csv(trace) == gzip.decompress(path.read_bytes()).decode()


@pytest.mark.parametrize(
    ("mean_tokens", "table"),
    [
        (SHORT, (128, 38, 113, 413, 1464)),
        (MEDIUM, (256, 32, 173, 1288, 4208)),
        (LONG, (512, 55, 582, 3113, 5166)),
    ],
)
def test_generated_lengths_have_the_papers_percentiles(
    mean_tokens: int, table: tuple[int, ...]
) -> None:
    """Table 1, Gen: Short 128, 38, 113, 413, 1464; Medium 256, 32, 173, 1288, 4208; Long 512, 55,
    582, 3113, 5166 (mean, P50, P80, P95, P99). Section 6.1: "These distributions have a maximum
    length of 6k"."""
    lengths = zipf_lengths(mean_tokens, 10_000, np.random.RandomState(0xCADE))
    percentiles = np.percentile(lengths, PERCENTILES, method="nearest")
    assert percentiles.tolist() == list(table[1:])
    assert lengths.mean() == pytest.approx(table[0], rel=0.01)
    assert lengths.max() <= 6144


@pytest.mark.parametrize(
    ("file", "table_in", "table_out"),
    [
        (
            "sharegpt/sharegpt_gpt4_matched.csv.gz",
            (306, 74, 348, 1484, 3388),
            (500, 487, 781, 988, 1234),
        ),
        (
            "burstgpt/burstgpt_gpt4_conv_matched.csv.gz",
            (830, 582, 1427, 2345, 3549),
            (271, 243, 434, 669, 964),
        ),
    ],
)
def test_matched_lengths_have_the_papers_percentiles(
    file: str, table_in: tuple[int, ...], table_out: tuple[int, ...]
) -> None:
    """Table 1, Real: ShareGPT In 306, 74, 348, 1484, 3388, Out 500, 487, 781, 988, 1234; BurstGPT
    In 830, 582, 1427, 2345, 3549, Out 271, 243, 434, 669, 964 (mean, P50, P80, P95, P99)."""
    rows = packaged_rows(file)
    for lengths, table in ((rows.input_tokens, table_in), (rows.output_tokens, table_out)):
        found = [lengths.mean(), *np.percentile(lengths, PERCENTILES)]
        assert found == pytest.approx(table, rel=0.002)


def test_inputs_are_drawn_before_outputs_and_outputs_before_arrivals() -> None:
    draws = np.random.RandomState(9)
    input_tokens = zipf_lengths(SHORT, 50, draws)
    output_tokens = zipf_lengths(LONG, 50, draws)
    gaps_s = draws.exponential(1 / 3.0, size=50)
    trace = build_trace(Workload("S-L", num_requests=50, rate=3.0, seed=9))
    assert np.array_equal(trace.input_tokens, input_tokens)
    assert np.array_equal(trace.output_tokens, output_tokens)
    assert trace.arrival_s.tolist() == [0.0, *np.cumsum(gaps_s[:-1]).tolist()]


def test_the_legacy_generators_choice_gives_the_same_lengths() -> None:
    """The artifact draws with `choice`; one uniform number a request must give the same."""
    ranks = np.arange(1, 2 * MEDIUM)
    weights = ranks**-1.5
    sample = np.random.RandomState(4).choice(ranks, size=300, p=weights / weights.sum())
    lengths = np.minimum(np.ceil(sample * MEDIUM / sample.mean()), 6144)
    assert zipf_lengths(MEDIUM, 300, np.random.RandomState(4)).tolist() == lengths.tolist()


@given(
    mean_tokens=st.integers(1, 1024),
    num_requests=st.integers(1, 300),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_sample_keeps_its_mean_and_limits(
    mean_tokens: int, num_requests: int, seed: int
) -> None:
    lengths = zipf_lengths(mean_tokens, num_requests, np.random.RandomState(seed))
    limit = max(6144, 12 * mean_tokens)
    assert lengths.min() >= 1
    assert lengths.max() <= limit
    assert lengths.mean() <= mean_tokens + 1
    if lengths.max() < limit:
        assert lengths.mean() >= mean_tokens


@pytest.mark.parametrize(("mean_tokens", "shortfall"), [(1024, 0.01), (2048, 0.03), (8192, 0.1)])
def test_the_cut_takes_little_from_long_means(mean_tokens: int, shortfall: float) -> None:
    lengths = zipf_lengths(mean_tokens, 10_000, np.random.RandomState(0xCADE))
    assert lengths.mean() == pytest.approx(mean_tokens * (1 - shortfall), rel=0.02)


def test_the_exponent_is_the_papers_at_its_means_and_between_them_elsewhere() -> None:
    assert [zipf_exponent(mean) for mean in (128, 256, 512)] == [2.0, 1.5, 1.15]
    assert [zipf_exponent(mean) for mean in (1, 64, 2048)] == [2.0, 2.0, 1.15]
    assert zipf_exponent(181) == pytest.approx(1.75, abs=0.001)


@pytest.mark.parametrize("mean_tokens", [0, -1, 10_001])
def test_a_mean_that_cannot_be_is_refused(mean_tokens: int) -> None:
    with pytest.raises(ConfigurationError, match=f"from 1 to 10000 tokens, not {mean_tokens}"):
        zipf_lengths(mean_tokens, 10, np.random.RandomState(0))
