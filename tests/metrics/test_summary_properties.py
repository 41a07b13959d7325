"""The summary against a second one, written without numpy from the definitions alone."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from sterna.metrics.summary import Distribution, summarize
from sterna.types import Priority
from tests.metrics.records import cluster, records

RELATIVE = 1e-9


@dataclass(frozen=True)
class Lived:
    """What one request went through; times in seconds, None for what it did not reach."""

    arrival_s: float
    ttft_s: float | None
    decode_s: float | None
    output_tokens: int
    priority: int
    losses_s: tuple[float, ...]
    queue_s: float
    execution_share: float


durations = st.floats(0.0, 1e4, allow_nan=False).map(lambda value: round(value, 6))
lives = st.builds(
    Lived,
    arrival_s=durations,
    ttft_s=st.none() | durations,
    decode_s=st.none() | durations,
    output_tokens=st.integers(1, 6144),
    priority=st.integers(0, 2),
    losses_s=st.lists(durations, max_size=3).map(tuple),
    queue_s=durations,
    execution_share=st.floats(0.0, 1.0),
)


def first_token_s(life: Lived) -> float:
    return math.nan if life.ttft_s is None else life.arrival_s + life.ttft_s


def end_s(life: Lived) -> float:
    """A request ends only after its first token."""
    return math.nan if life.decode_s is None else first_token_s(life) + life.decode_s


def naive(values: Sequence[float]) -> dict[str, float] | None:
    """Sorts, and walks to each rank with exact arithmetic."""
    if not values:
        return None
    ordered = sorted(values)
    found = {"mean": math.fsum(values) / len(values), "max": ordered[-1]}
    for name, share in (
        ("p50", Fraction(1, 2)),
        ("p90", Fraction(9, 10)),
        ("p99", Fraction(99, 100)),
        ("p999", Fraction(999, 1000)),
    ):
        rank = share * (len(ordered) - 1)
        below = math.floor(rank)
        above = min(below + 1, len(ordered) - 1)
        weight = float(rank - below)
        found[name] = ordered[below] * (1.0 - weight) + ordered[above] * weight
    return found


def assert_same(found: Distribution | None, expected: dict[str, float] | None) -> None:
    if expected is None:
        assert found is None
        return
    assert found is not None
    for name, value in expected.items():
        assert math.isclose(getattr(found, name), value, rel_tol=RELATIVE, abs_tol=1e-9), name


def of_those(
    those: Sequence[Lived],
    is_one: Callable[[Lived], bool],
    value: Callable[[Lived], float],
) -> dict[str, float] | None:
    return naive([value(life) for life in those if is_one(life)])


@given(st.lists(lives, max_size=40), st.none() | st.integers(0, 2))
def test_the_summary_is_what_the_definitions_say(
    everyone: list[Lived], priority: int | None
) -> None:
    run = records(
        arrival_s=[life.arrival_s for life in everyone],
        first_token_s=[first_token_s(life) for life in everyone],
        end_s=[end_s(life) for life in everyone],
        output_tokens=[life.output_tokens for life in everyone],
        priority=[life.priority for life in everyone],
        num_preemptions=[len(life.losses_s) for life in everyone],
        preemption_loss_s=[math.fsum(life.losses_s) for life in everyone],
        queue_s=[life.queue_s for life in everyone],
        decode_execution_s=[life.execution_share * (life.decode_s or 0.0) for life in everyone],
    )
    summary = summarize(run, cluster(), priority=None if priority is None else Priority(priority))
    those = [life for life in everyone if priority in (None, life.priority)]

    def started(life: Lived) -> bool:
        return life.ttft_s is not None

    def ended(life: Lived) -> bool:
        return started(life) and life.decode_s is not None

    def decoded(life: Lived) -> bool:
        return ended(life) and life.output_tokens > 1

    assert summary.num_requests == len(those)
    assert summary.num_completed == sum(map(ended, those))
    assert_same(
        summary.request_s, of_those(those, ended, lambda life: end_s(life) - life.arrival_s)
    )
    assert_same(
        summary.ttft_s, of_those(those, started, lambda life: first_token_s(life) - life.arrival_s)
    )
    assert_same(
        summary.tpot_s,
        of_those(
            those,
            decoded,
            lambda life: (end_s(life) - first_token_s(life)) / (life.output_tokens - 1),
        ),
    )
    assert_same(
        summary.tpot_execution_s,
        of_those(
            those,
            decoded,
            lambda life: life.execution_share * life.decode_s / (life.output_tokens - 1),
        ),
    )
    assert_same(summary.queue_s, naive([life.queue_s for life in those]))
    assert_same(summary.preemption_loss_s, naive([math.fsum(life.losses_s) for life in those]))
    num_preempted = sum(bool(life.losses_s) for life in those)
    assert summary.preempted_fraction == (num_preempted / len(those) if those else None)


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 16)), min_size=1, max_size=8),
    st.integers(1, 500),
)
def test_average_instances_are_those_counted_second_by_second(
    phases: list[tuple[int, int]], simulated_s: int
) -> None:
    """Each phase lasts whole seconds, the last one until the end."""
    begins, begin_s = [], 0
    for duration_s, number in phases:
        begins.append((float(begin_s), number))
        begin_s += duration_s
    by_second = [
        next(number for since_s, number in reversed(begins) if since_s <= second)
        for second in range(simulated_s)
    ]
    summary = summarize(records(), cluster(instances=begins, simulated_s=float(simulated_s)))
    assert math.isclose(summary.instances_avg, sum(by_second) / simulated_s, rel_tol=RELATIVE)
