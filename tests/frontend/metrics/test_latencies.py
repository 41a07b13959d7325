"""Latencies of each priority class."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sterna.frontend.metrics.latencies import Latencies, Latency
from sterna.types import RequestId

TERN, GULL = RequestId("tern"), RequestId("gull")


def test_a_request_has_a_first_token_gaps_and_an_end() -> None:
    latencies = Latencies()
    latencies.begin(TERN, "high", 10.0)
    latencies.on_output(TERN, 10.5, is_finished=False)
    latencies.on_output(TERN, 10.75, is_finished=False)
    latencies.on_output(TERN, 11.0, is_finished=True)
    assert latencies.take() == {
        (Latency.FIRST_TOKEN, "high"): [0.5],
        (Latency.INTER_TOKEN, "high"): [0.25, 0.25],
        (Latency.REQUEST, "high"): [1.0],
    }
    assert latencies.take() == {}


def test_a_request_is_dispatched_once_however_often_it_is_sent() -> None:
    latencies = Latencies()
    latencies.begin(TERN, "high", 10.0)
    latencies.on_dispatched(TERN, 10.25)
    latencies.on_dispatched(TERN, 11.0)
    latencies.on_dispatched(GULL, 11.0)
    assert latencies.take() == {(Latency.DISPATCH, "high"): [0.25]}


def test_classes_are_kept_apart() -> None:
    latencies = Latencies()
    latencies.begin(TERN, "high", 0.0)
    latencies.begin(GULL, "normal", 0.0)
    latencies.on_output(GULL, 2.0, is_finished=False)
    latencies.on_output(TERN, 1.0, is_finished=False)
    assert latencies.take() == {
        (Latency.FIRST_TOKEN, "normal"): [2.0],
        (Latency.FIRST_TOKEN, "high"): [1.0],
    }


def test_a_request_that_is_forgotten_has_no_end() -> None:
    latencies = Latencies()
    latencies.begin(TERN, "high", 0.0)
    latencies.forget(TERN)
    latencies.forget(GULL)
    latencies.on_output(TERN, 1.0, is_finished=True)
    assert latencies.take() == {}


def test_a_request_that_ends_at_a_stop_string_ends_with_its_last_output() -> None:
    latencies = Latencies()
    latencies.begin(TERN, "high", 10.0)
    latencies.on_output(TERN, 10.5, is_finished=False)
    latencies.on_output(TERN, 10.75, is_finished=False)
    latencies.on_stopped(TERN)
    latencies.on_output(TERN, 11.0, is_finished=True)
    assert latencies.take()[Latency.REQUEST, "high"] == [0.75]


def test_a_request_that_stops_before_its_first_output_has_no_end() -> None:
    latencies = Latencies()
    latencies.begin(TERN, "high", 10.0)
    latencies.on_stopped(TERN)
    latencies.on_stopped(GULL)
    assert latencies.take() == {}


def test_a_gap_after_a_death_and_one_after_a_preemption_are_shown_apart() -> None:
    latencies = Latencies()
    latencies.begin(TERN, "high", 10.0)
    latencies.on_lost(TERN)
    latencies.on_output(TERN, 10.5, is_finished=False)
    latencies.on_lost(TERN)
    latencies.on_output(TERN, 12.5, is_finished=False)
    latencies.on_preempted(TERN, 0.75)
    latencies.on_output(TERN, 13.5, is_finished=False)
    latencies.on_lost(GULL)
    latencies.on_preempted(GULL, 0.5)
    found = latencies.take()
    assert found[Latency.RECOVERY, "high"] == [2.0], "before its first token there is no gap"
    assert found[Latency.PREEMPTION, "high"] == [0.75]
    assert found[Latency.INTER_TOKEN, "high"] == [2.0, 1.0]


@given(st.lists(st.floats(0.001, 10.0), min_size=1, max_size=20))
def test_first_token_and_gaps_add_up_to_the_request(waits_s: list[float]) -> None:
    latencies, now_s = Latencies(), 0.0
    latencies.begin(TERN, "normal", now_s)
    for left, wait_s in reversed(list(enumerate(reversed(waits_s)))):
        now_s += wait_s
        latencies.on_output(TERN, now_s, is_finished=left == 0)
    observed = latencies.take()
    (whole_s,) = observed[Latency.REQUEST, "normal"]
    (first_s,) = observed[Latency.FIRST_TOKEN, "normal"]
    gaps_s = observed.get((Latency.INTER_TOKEN, "normal"), [])
    assert len(gaps_s) == len(waits_s) - 1
    assert first_s + sum(gaps_s) == pytest.approx(whole_s)
