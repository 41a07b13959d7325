"""Histories of a front end's requests."""

import math

import pytest

from sterna.engine.payload_parts import Annotations, EventType
from sterna.frontend.requests.histories import (
    MAX_DECISIONS,
    MAX_ENDED,
    MAX_EVENTS,
    Histories,
    Timing,
)
from sterna.messages.actors import COMMITTED, Dispatched, DispatchRequest, Held, MoveEnded
from sterna.messages.reasons import (
    DispatchReason,
    HeldCause,
    InstanceSeen,
    MoveCause,
    MoveReason,
)
from sterna.types import FrontendId, InstanceId, Priority, RequestId

QUEUED, SCHEDULED, PREEMPTED = EventType

TERN = RequestId("cmpl-tern-0-9f86d081")
AGAIN = RequestId("cmpl-tern-0-9f86d081+1")
ARRIVED_S = 1_700_000_000.5
I1, I3 = InstanceId("i1"), InstanceId("i3")
CHOSEN = InstanceSeen(I1, 312.0, 4, 0, 12_000.0, 300.0, 0, 512)
OTHER = InstanceSeen(I3, 840.0, 9, 2, 700.0, -math.inf, 60, 0)
REASON = DispatchReason("soonest", 2, 4, CHOSEN, OTHER, 0.4)
SHORT = MoveReason(MoveCause.MEMORY, 12.0, math.inf, 48.0, "shortest")


def asked(request_id: RequestId = TERN) -> DispatchRequest:
    return DispatchRequest(
        FrontendId(0), request_id, 720, 1_700_000_000.5, Priority(0), Priority(0), prompt_tokens=700
    )


@pytest.fixture
def histories() -> Histories:
    """A request that arrived at 10 s, and was sent to i1 at 10.4 s."""
    made = Histories()
    made.begin(asked(), "normal", 10.0, arrived_s=ARRIVED_S)
    made.on_held(Held((TERN,), 640.0, (HeldCause.MEMORY,)), 10.001)
    made.on_dispatched(Dispatched(TERN, I1, 17, REASON))
    made.on_sent(TERN, I1, 17, 10.4)
    return made


def events_of(histories: Histories, name: str = TERN) -> list[dict[str, object]]:
    (found,) = histories.described(name)
    events: list[dict[str, object]] = found["events"]
    return events


def test_the_whole_life_of_a_request(histories: Histories) -> None:
    waited = Annotations(((QUEUED, 0.35), (SCHEDULED, 0.05)), 512)
    histories.on_engine_events(TERN, waited, 10.8)
    histories.on_output(TERN, 10.8)
    histories.on_output(TERN, 10.9)
    histories.on_move_ended(MoveEnded(I1, TERN, I3, "no_memory", 1, 0.0, SHORT), 11.0)
    histories.on_move_ended(MoveEnded(I1, TERN, I3, COMMITTED, 2, 0.006, SHORT), 12.0)
    histories.on_last_token(TERN, 120)
    histories.on_ended(TERN, "finished", 13.0)
    (found,) = histories.described("tern")
    events = found.pop("events")
    assert found == {
        "id": TERN,
        "state": "finished",
        "instance": I3,
        "class": "normal",
        "arrived_s": ARRIVED_S,
        "prompt_tokens": 700,
        "demand_tokens": 720,
        "output_tokens": 120,
        "events_dropped": 0,
    }
    assert [(each["at_s"], each["event"]) for each in events] == [
        (0.0, "arrived"),
        (0.001, "held"),
        (0.4, "dispatched"),
        (0.75, "scheduled"),
        (0.8, "first token"),
        (1.0, "did not move"),
        (2.0, "moved"),
        (3.0, "finished"),
    ]
    why = events[2]["why"]
    assert (why["rule"], why["held_s"]) == ("soonest", 0.4)
    assert (why["chosen"]["instance"], why["chosen"]["cost"]) == (I1, 312.0)
    assert why["next_best"]["freeness_steps"] is None, "JSON has no infinity"
    assert events[3]["waited_s"] == pytest.approx(0.3)
    assert events[4]["cached_tokens"] == 512
    assert events[5]["outcome"] == "no_memory"
    assert events[6]["why"]["cause"] == "memory"
    assert events[6]["why"]["destination"] is None


def test_a_preemption_ends_when_the_request_is_scheduled_again(histories: Histories) -> None:
    histories.on_engine_events(TERN, Annotations(((QUEUED, 0.1), (SCHEDULED, 0.05)), 0), 11.0)
    histories.on_output(TERN, 11.0)
    histories.on_engine_events(TERN, Annotations(((PREEMPTED, 1.5), (SCHEDULED, 0.5)), 0), 13.0)
    histories.on_output(TERN, 13.0)
    assert [(each["event"], each["at_s"]) for each in events_of(histories)[-2:]] == [
        ("preempted", 1.5),
        ("resumed", 2.5),
    ]
    assert events_of(histories)[-1]["waited_s"] == pytest.approx(1.0)


def test_a_preemption_before_a_move_was_on_the_instance_that_it_left(histories: Histories) -> None:
    histories.on_output(TERN, 11.0)
    histories.on_move_ended(MoveEnded(I1, TERN, I3, COMMITTED, 0, 0.0, SHORT), 12.0)
    histories.on_engine_events(TERN, Annotations(((PREEMPTED, 1.5), (SCHEDULED, 0.5)), 0), 13.0)
    histories.on_engine_events(TERN, Annotations(((PREEMPTED, 0.5),), 0), 14.0)
    assert [(each["event"], each.get("instance")) for each in events_of(histories)[-4:]] == [
        ("preempted", I1),
        ("moved", None),
        ("resumed", I3),
        ("preempted", I3),
    ]


def test_of_a_request_that_the_front_end_has_sent_itself_the_scheduler_has_no_reason() -> None:
    histories = Histories()
    histories.begin(asked(), "normal", 10.0, arrived_s=ARRIVED_S)
    histories.on_dispatched(Dispatched(TERN, I3, 17, REASON))
    histories.on_sent(TERN, I1, 0, 10.1)
    assert events_of(histories)[-1]["why"] is None


def test_another_attempt_belongs_to_the_same_history(histories: Histories) -> None:
    histories.on_sent_again(TERN, 40, 11.0)
    assert histories.described(TERN)[0]["instance"] is None
    histories.on_dispatched(Dispatched(AGAIN, I3, 18, REASON))
    histories.on_sent(AGAIN, I3, 18, 11.2)
    histories.on_last_token(AGAIN, 50)
    histories.on_ended(TERN, "finished", 12.0)
    (found,) = histories.described(TERN)
    assert (found["instance"], found["output_tokens"]) == (I3, 50)
    assert [each["event"] for each in found["events"][-3:]] == ["lost", "dispatched", "finished"]


def test_the_id_of_a_later_attempt_stands_for_its_request(histories: Histories) -> None:
    histories.on_sent_again(TERN, 40, 11.0)
    histories.on_sent(AGAIN, I3, 18, 11.2)
    assert [each["id"] for each in histories.described(AGAIN)] == [TERN]


def test_a_clients_name_may_look_like_a_later_attempt() -> None:
    name = "gull-9f86d082+1"
    request_id = RequestId(f"chatcmpl-{name}-9f86d081")
    histories = Histories()
    histories.begin(asked(request_id), "normal", 10.0, arrived_s=ARRIVED_S)
    assert [each["id"] for each in histories.described(name)] == [request_id]


def test_the_first_output_behind_the_lost_ones_is_an_event(histories: Histories) -> None:
    histories.on_output(TERN, 10.5)
    histories.on_sent_again(TERN, 40, 11.0)
    histories.on_sent(AGAIN, I3, 18, 11.2)
    for now_s in (11.5, 11.6):
        histories.on_output(TERN, now_s)
    kinds = [each["event"] for each in events_of(histories)]
    assert kinds[-4:] == ["first token", "lost", "dispatched", "goes on"]


def test_a_request_that_was_lost_before_its_first_token_has_it_later(histories: Histories) -> None:
    histories.on_sent_again(TERN, 0, 11.0)
    histories.on_output(TERN, 11.5)
    assert [each["event"] for each in events_of(histories)[-2:]] == ["lost", "first token"]


def test_what_an_earlier_attempt_says_late_does_not_count(histories: Histories) -> None:
    histories.on_sent_again(TERN, 40, 11.0)
    histories.on_sent(AGAIN, I1, 18, 11.2)
    histories.on_move_ended(MoveEnded(I1, TERN, I3, COMMITTED, 2, 0.006), 11.3)
    histories.on_last_token(TERN, 7)
    histories.on_engine_events(TERN, Annotations(((PREEMPTED, 0.1),), 0), 11.4)
    (found,) = histories.described(TERN)
    assert (found["instance"], found["output_tokens"]) == (I1, None)
    assert found["events"][-1]["event"] == "moved"


def test_a_move_of_which_is_heard_after_the_end_is_kept(histories: Histories) -> None:
    histories.on_ended(TERN, "finished", 12.0)
    histories.on_move_ended(MoveEnded(I1, TERN, I3, COMMITTED, 2, 0.006), 12.001)
    (found,) = histories.described(TERN)
    assert (found["state"], found["instance"]) == ("finished", I3)
    assert found["events"][-1]["event"] == "moved"


def test_a_reason_that_comes_too_late_belongs_to_no_later_attempt(histories: Histories) -> None:
    histories.on_dispatched(Dispatched(TERN, I3, 18, REASON))
    histories.on_sent_again(TERN, 40, 11.0)
    histories.on_sent(AGAIN, I1, 19, 11.2)
    assert events_of(histories)[-1]["why"] is None


def test_an_id_that_is_used_again_has_one_history(histories: Histories) -> None:
    histories.on_ended(TERN, "finished", 12.0)
    histories.begin(asked(), "normal", 20.0, arrived_s=ARRIVED_S)
    histories.begin(asked(), "normal", 30.0, arrived_s=ARRIVED_S)
    assert [each["event"] for each in events_of(histories)] == ["arrived"]
    assert histories.timing(["cmpl-tern-0"], 0.0) == Timing(None, None, None, None)


def test_an_operators_order_has_no_reason_of_the_scheduler(histories: Histories) -> None:
    histories.on_move_ended(MoveEnded(I1, TERN, I3, COMMITTED, 2, 0.006), 12.0)
    assert events_of(histories)[-1]["why"] is None


def test_a_failure_has_a_reason(histories: Histories) -> None:
    histories.on_ended(TERN, "failed", 12.0, reason="no instance was there to serve it")
    assert events_of(histories)[-1]["reason"] == "no instance was there to serve it"


def test_what_is_unknown_is_no_event(histories: Histories) -> None:
    gull = RequestId("cmpl-gull-0-9f86d081")
    histories.on_held(Held((gull,), 0.0, (HeldCause.MEMORY,)), 10.0)
    histories.on_sent(gull, I1, 1, 10.0)
    histories.on_output(gull, 10.0)
    histories.on_move_ended(MoveEnded(I1, gull, I3, COMMITTED, 1, 0.0), 10.0)
    histories.on_sent_again(gull, 1, 10.0)
    histories.on_last_token(gull, 1)
    histories.on_ended(gull, "aborted", 10.0)
    assert histories.described(gull) == []


def test_a_name_may_stand_for_several_and_an_id_for_one_alone(histories: Histories) -> None:
    other = RequestId("cmpl-tern-1-9f86d082")
    histories.begin(asked(other), "normal", 10.0, arrived_s=ARRIVED_S)
    assert [each["id"] for each in histories.described("tern")] == [TERN, other]
    assert [each["id"] for each in histories.described(other)] == [other]


def test_the_oldest_of_many_ended_requests_are_forgotten(histories: Histories) -> None:
    histories.on_ended(TERN, "finished", 11.0)
    for number in range(MAX_ENDED):
        request_id = RequestId(f"cmpl-gull-{number}-9f86d081")
        histories.begin(asked(request_id), "normal", 12.0, arrived_s=ARRIVED_S)
        histories.on_ended(request_id, "finished", 13.0)
    assert histories.described("tern") == []
    assert len(histories.described("gull")) == MAX_ENDED


def test_of_many_events_the_first_and_the_last_are_kept(histories: Histories) -> None:
    for number in range(2 * MAX_EVENTS):
        refused = MoveEnded(I1, TERN, I3, "no_memory", number, 0.0, SHORT)
        histories.on_move_ended(refused, 20.0 + number)
    (found,) = histories.described(TERN)
    assert len(found["events"]) == MAX_EVENTS
    assert found["events_dropped"] == 2 * MAX_EVENTS + 3 - MAX_EVENTS
    assert found["events"][0]["event"] == "arrived"
    assert found["events"][-1]["stages"] == 2 * MAX_EVENTS - 1


def test_where_the_time_until_the_first_token_went(histories: Histories) -> None:
    name = "cmpl-tern-0"
    assert histories.timing([name], 0.0) == Timing(0.4, None, None, I1)
    waited = Annotations(((QUEUED, 0.35), (SCHEDULED, 0.05)), 512)
    histories.on_engine_events(TERN, waited, 10.8)
    histories.on_output(TERN, 10.8)
    timing = histories.timing([name], 0.0)
    assert timing is not None
    assert (timing.scheduler_s, timing.instance_id) == (0.4, I1)
    assert timing.queue_s == pytest.approx(0.3)
    assert timing.prefill_s == pytest.approx(0.05)


def test_of_several_requests_the_one_that_waited_longest_is_timed(histories: Histories) -> None:
    other = RequestId("cmpl-tern-1-9f86d082")
    histories.begin(asked(other), "normal", 10.0, arrived_s=ARRIVED_S)
    histories.on_sent(other, I3, 0, 11.0)
    timing = histories.timing(["cmpl-tern-0", "cmpl-tern-1", "cmpl-gull-0"], 0.0)
    assert timing == Timing(1.0, None, None, I3)
    assert histories.timing(["cmpl-gull-0"], 0.0) is None


def test_an_earlier_request_of_the_same_name_is_not_timed(histories: Histories) -> None:
    """A client that tries again sends the same X-Request-Id."""
    histories.on_ended(TERN, "aborted", 41.0)
    again = RequestId("cmpl-tern-0-9f86d082")
    histories.begin(asked(again), "normal", 50.0, arrived_s=ARRIVED_S)
    histories.on_sent(again, I3, 0, 50.125)
    assert histories.timing(["cmpl-tern-0"], 49.0) == Timing(0.125, None, None, I3)


def test_without_the_engines_events_the_prefill_begins_at_the_dispatch(
    histories: Histories,
) -> None:
    histories.on_output(TERN, 10.9)
    timing = histories.timing(["cmpl-tern-0"], 0.0)
    assert timing is not None
    assert timing.queue_s is None
    assert timing.prefill_s == pytest.approx(0.5)


def test_a_request_that_is_forgotten_is_timed_no_longer(histories: Histories) -> None:
    again = RequestId("cmpl-tern-0-9f86d083")
    histories.on_ended(TERN, "finished", 11.0)
    histories.begin(asked(again), "normal", 11.0, arrived_s=ARRIVED_S)
    histories.on_sent(again, I3, 0, 11.25)
    for number in range(MAX_ENDED):
        request_id = RequestId(f"cmpl-gull-{number}-9f86d081")
        histories.begin(asked(request_id), "normal", 12.0, arrived_s=ARRIVED_S)
        histories.on_ended(request_id, "finished", 13.0)
    assert histories.timing(["cmpl-tern-0"], 0.0) == Timing(0.25, None, None, I3)
    histories.on_ended(again, "finished", 14.0)
    histories.begin(asked(TERN), "normal", 15.0, arrived_s=ARRIVED_S)
    histories.on_ended(TERN, "finished", 15.0)
    assert histories.timing(["cmpl-gull-0"], 0.0) is None


def test_recent_decisions_and_latencies_are_those_of_the_last_seconds(histories: Histories) -> None:
    histories.on_engine_events(TERN, Annotations(((PREEMPTED, 0.1),), 0), 10.8)
    histories.on_output(TERN, 10.8)
    histories.on_move_ended(MoveEnded(I1, TERN, I3, COMMITTED, 2, 0.006, SHORT), 12.0)
    histories.on_last_token(TERN, 121)
    histories.on_ended(TERN, "finished", 13.2)
    found = histories.recent(60.0, 14.0)
    assert [(each["time_s"], each["event"]) for each in found["decisions"]] == [
        (ARRIVED_S + 0.4, "dispatched"),
        (ARRIVED_S + 0.7, "preempted"),
        (ARRIVED_S + 2.0, "moved"),
    ]
    assert {each["request"] for each in found["decisions"]} == {TERN}
    assert found["decisions"][2]["why"]["cause"] == "memory"
    assert (found["ttft_s"], found["waiting"]) == ([0.8], 0)
    assert found["tpot_s"] == pytest.approx([2.4 / 120])
    later = histories.recent(1.5, 13.5)
    assert ([each["event"] for each in later["decisions"]], later["ttft_s"]) == ([], [])
    assert len(later["tpot_s"]) == 1


def test_a_request_that_was_lost_or_has_one_token_has_no_time_per_token(
    histories: Histories,
) -> None:
    histories.on_output(TERN, 10.8)
    histories.on_sent_again(TERN, 5, 11.0)
    assert histories.recent(60.0, 11.0)["waiting"] == 1
    histories.on_sent(AGAIN, I3, 18, 11.1)
    histories.on_last_token(AGAIN, 20)
    histories.on_ended(TERN, "finished", 12.0)
    found = histories.recent(60.0, 12.0)
    assert [each["event"] for each in found["decisions"]] == ["dispatched", "lost", "dispatched"]
    assert {each["request"] for each in found["decisions"]} == {TERN}
    assert (found["tpot_s"], found["waiting"]) == ([], 0)


def test_a_stream_that_was_taken_over_has_no_first_token_here() -> None:
    made = Histories()
    made.begin(asked(), "normal", 10.0, arrived_s=ARRIVED_S, goes_on=True)
    made.on_sent(TERN, I1, 0, 10.1)
    made.on_output(TERN, 10.5)
    made.on_last_token(TERN, 1_000)
    made.on_ended(TERN, "finished", 11.0)
    found = made.recent(60.0, 12.0)
    assert (found["ttft_s"], found["tpot_s"]) == ([], [])
    assert [each["event"] for each in events_of(made)][-2:] == ["goes on", "finished"]


def test_moves_are_described_although_dispatches_are_many() -> None:
    made = Histories()
    made.begin(asked(), "normal", 10.0, arrived_s=ARRIVED_S)
    made.on_move_ended(MoveEnded(I1, TERN, I3, COMMITTED, 2, 0.006, SHORT), 10.5)
    for number in range(MAX_DECISIONS):
        request_id = RequestId(f"cmpl-{number}-9f86d081")
        made.begin(asked(request_id), "normal", 11.0, arrived_s=ARRIVED_S)
        made.on_sent(request_id, I1, 0, 11.0)
    decisions = made.recent(60.0, 12.0)["decisions"]
    assert [each["event"] for each in decisions[:2]] == ["moved", "dispatched"]
    assert len(decisions) == MAX_DECISIONS


def test_a_front_end_describes_its_newest_decisions_only() -> None:
    made = Histories()
    for number in range(MAX_DECISIONS + 5):
        request_id = RequestId(f"cmpl-{number}-9f86d081")
        made.begin(asked(request_id), "normal", 10.0, arrived_s=ARRIVED_S)
        made.on_sent(request_id, I1, 0, 10.0 + number)
    decisions = made.recent(1000.0, 200.0)["decisions"]
    assert len(decisions) == MAX_DECISIONS
    assert decisions[-1]["request"] == f"cmpl-{MAX_DECISIONS + 4}-9f86d081"
