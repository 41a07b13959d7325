"""What comes first at one and the same moment; computed by hand."""

from dataclasses import replace

import pytest

from sterna.policy.presets import INFAAS_PP
from sterna.simulator import simulate
from sterna.simulator.event_queue import EventQueue, Rank
from sterna.workload.trace import Trace
from tests.simulator.builders import configuration, requests, run


def happened(queue: EventQueue, log: list[str]) -> list[tuple[float, str]]:
    found = []
    while queue.next is not None:
        time_s, action = queue.pop()
        action(time_s)
        found.append((time_s, log[-1]))
    return found


def test_events_happen_by_time_then_rank_then_place_then_entry() -> None:
    queue, log = EventQueue(), []
    for time_s, rank, place, name in (
        (2.0, Rank.STEP_END, 0, "late"),
        (1.0, Rank.SAMPLE, 0, "sample"),
        (1.0, Rank.ROUND, 0, "round"),
        (1.0, Rank.ARRIVAL, 0, "arrival"),
        (1.0, Rank.MESSAGE, 0, "message"),
        (1.0, Rank.MESSAGE, 0, "next message"),
        (1.0, Rank.STEP_END, 1, "step of the second engine"),
        (1.0, Rank.STEP_END, 0, "step of the first engine"),
    ):
        queue.push(time_s, rank, lambda _, name=name: log.append(name), place)
    assert happened(queue, log) == [
        (1.0, "step of the first engine"),
        (1.0, "step of the second engine"),
        (1.0, "message"),
        (1.0, "next message"),
        (1.0, "arrival"),
        (1.0, "round"),
        (1.0, "sample"),
        (2.0, "late"),
    ]
    assert queue.next is None


def test_an_event_that_enters_late_still_comes_by_its_rank() -> None:
    """What a message leads to at its own moment happens before the arrivals of that moment."""
    queue, log = EventQueue(), []
    queue.push(1.0, Rank.ARRIVAL, lambda _: log.append("arrival"))

    def message(now_s: float) -> None:
        log.append("message")
        queue.push(now_s, Rank.STEP_END, lambda _: log.append("step"))

    queue.push(1.0, Rank.MESSAGE, message)
    assert [name for _, name in happened(queue, log)] == ["message", "step", "arrival"]


@pytest.mark.parametrize("is_fast", [False, True])
def test_a_step_that_ends_as_a_request_arrives_has_ended_and_the_next_has_begun(
    is_fast: bool,
) -> None:
    """The prefill takes 0.03 s. A request that comes at 0.03 finds the first decode under way,
    which computes token 17: 0.033 + 0.0008 + 17 x 1.5e-6 s. One that comes a little earlier is
    prefilled first."""
    config = configuration(INFAAS_PP, num_instances=1, is_fast=is_fast)
    records, _ = simulate(requests((0.0, 16, 2), (0.03, 16, 1)), config)
    decode_s = 0.033 + 0.0008 + 17 * 1.5e-6
    assert records.first_token_s == pytest.approx([0.03, 0.03 + decode_s + 0.03])
    records, _ = simulate(requests((0.0, 16, 2), (0.029, 16, 1)), config)
    assert records.first_token_s == pytest.approx([0.03, 0.06])
    assert records.end_s == pytest.approx([0.06 + decode_s, 0.06])


@pytest.mark.parametrize("is_fast", [False, True])
def test_a_dispatch_takes_its_time(is_fast: bool) -> None:
    config = configuration(INFAAS_PP, dispatch_delay_s=0.25, is_fast=is_fast)
    records, _ = simulate(requests((0.5, 16, 1)), config)
    assert records.first_token_s == pytest.approx([0.78])
    assert records.queue_s == pytest.approx([0.25])


def test_a_trace_without_requests_is_over_at_once() -> None:
    records, cluster = run(no_requests(), configuration())
    assert len(records) == 0
    assert (cluster.simulated_s, cluster.num_steps) == (0.0, 0)


def no_requests() -> Trace:
    one = requests((0.0, 1, 1))
    return replace(
        one,
        arrival_s=one.arrival_s[:0],
        input_tokens=one.input_tokens[:0],
        output_tokens=one.output_tokens[:0],
        priority=one.priority[:0],
    )
