"""The scheduler of one instance (Section 4.3): what it reports, which requests it moves and when,
and where it sends the aborts of clients."""

import math
from collections.abc import Iterable

import pytest

from sterna import llumlet as llumlet_module
from sterna.config import LlumletConfig, MigrationConfig, PolicyConfig
from sterna.llumlet import ForwardAbort, Llumlet, LlumletEffect, Report
from sterna.migration.messages import (
    Abort,
    Aborted,
    AbortRequest,
    Adopted,
    BlocksReserved,
    Commit,
    Committed,
    Drain,
    Drained,
    Ended,
    ForwardedAbort,
    Inspect,
    Inspected,
    Mode,
    Progress,
    Reason,
    Released,
    ReservationId,
    Reserve,
    ReserveBlocks,
    Reserved,
    Resume,
    Send,
)
from sterna.types import (
    HIGH,
    NORMAL,
    Immovable,
    InstanceId,
    InstanceView,
    MigrationId,
    Priority,
    RequestId,
    RequestStatus,
    RequestView,
)

A, B, C = InstanceId("A"), InstanceId("B"), InstanceId("C")
N = ReservationId(1)


def config(
    num_concurrent_migrations: int = 1,
    *,
    report_interval_s: float = 0.05,
    heartbeat_interval_s: float = 1.0,
    retry_backoff_s: float = 1.0,
) -> LlumletConfig:
    return LlumletConfig(
        policy=PolicyConfig(name="test", num_concurrent_migrations=num_concurrent_migrations),
        migration=MigrationConfig(),
        report_interval_s=report_interval_s,
        heartbeat_interval_s=heartbeat_interval_s,
        retry_backoff_s=retry_backoff_s,
    )


def running(
    name: str,
    num_tokens: int = 64,
    priority: Priority = NORMAL,
    immovable: Immovable | None = None,
) -> RequestView:
    return RequestView(
        request_id=RequestId(name),
        status=RequestStatus.RUNNING,
        num_tokens=num_tokens,
        physical_usage_tokens=num_tokens,
        execution_priority=priority,
        immovable=immovable,
    )


def queuing(name: str, num_tokens: int = 64) -> RequestView:
    return RequestView(
        request_id=RequestId(name),
        status=RequestStatus.QUEUING,
        num_tokens=num_tokens,
        demand_tokens=num_tokens,
    )


def view(*requests: RequestView) -> InstanceView:
    return InstanceView(
        instance_id=A,
        total_tokens=4096,
        block_size=16,
        running=tuple(r for r in requests if r.status is RequestStatus.RUNNING),
        queuing=tuple(r for r in requests if r.status is RequestStatus.QUEUING),
    )


def paired(*requests: RequestView, num_concurrent_migrations: int = 1) -> Llumlet:
    """Instance A with these requests, told at 0 s to migrate to B."""
    llumlet = Llumlet(A, config(num_concurrent_migrations))
    llumlet.on_view(view(*requests), 0.0)
    llumlet.on_destination(B, 0.0)
    return llumlet


def inspects(effects: Iterable[LlumletEffect]) -> list[str]:
    """The requests with which migrations began."""
    return [effect.request_id for effect in effects if isinstance(effect, Inspect)]


def reports(effects: Iterable[LlumletEffect]) -> list[Report]:
    return [effect for effect in effects if isinstance(effect, Report)]


def without_reports(effects: Iterable[LlumletEffect]) -> list[LlumletEffect]:
    return [effect for effect in effects if not isinstance(effect, Report)]


PROGRESS = Inspected(Progress(False, 1, 2, 0), b"request")


def until_reserve(llumlet: Llumlet, migration_id: str, now_s: float = 0.0) -> None:
    llumlet.on_outcome(MigrationId(migration_id), PROGRESS, now_s)


def until_commit(llumlet: Llumlet, migration_id: str, now_s: float = 0.0) -> None:
    """A short request: its first stage is the last."""
    until_reserve(llumlet, migration_id, now_s)
    reserved = Reserved(MigrationId(migration_id), N, 0, ())
    llumlet.on_message(B, reserved, now_s)
    llumlet.on_outcome(MigrationId(migration_id), Drained(2, b"state"), now_s)


def committed(llumlet: Llumlet, migration_id: str, now_s: float = 0.0) -> list[LlumletEffect]:
    until_commit(llumlet, migration_id, now_s)
    return llumlet.on_message(B, Committed(MigrationId(migration_id), N), now_s)


def refused(
    llumlet: Llumlet, migration_id: str, reason: Reason, now_s: float = 0.0
) -> list[LlumletEffect]:
    until_reserve(llumlet, migration_id, now_s)
    return llumlet.on_message(B, Aborted(MigrationId(migration_id), None, reason), now_s)


def coming(llumlet: Llumlet, request_id: str, source: InstanceId = C) -> ReservationId:
    """Let a request come until its only stage is reserved; returns the reservation's number."""
    migration_id = MigrationId(f"{source}-1")
    reserve = Reserve(migration_id, RequestId(request_id), 0, 0, 0, True, None, b"request")
    llumlet.on_message(source, reserve, 0.0)
    effects = llumlet.on_outcome(migration_id, BlocksReserved(0, ()), 0.0)
    (answer,) = (effect.message for effect in effects if isinstance(effect, Send))
    return answer.reservation


def come(llumlet: Llumlet, request_id: str, source: InstanceId = C) -> list[LlumletEffect]:
    number = coming(llumlet, request_id, source)
    migration_id = MigrationId(f"{source}-1")
    commit = Commit(migration_id, number, RequestId(request_id), 0, 0, b"state")
    llumlet.on_message(source, commit, 0.0)
    return llumlet.on_outcome(migration_id, Adopted(), 0.0)


# ------------------------------------------------------------------------ which request moves


def test_lower_priorities_and_shorter_sequences_move_first() -> None:
    """Section 4.4.3: "The llumlet prefers the requests with lower priorities and shorter sequence
    lengths when choosing the requests to migrate"."""
    llumlet = Llumlet(A, config(num_concurrent_migrations=4))
    requests = [
        running("high", 16, HIGH),
        running("long", 3_328),
        running("short", 32),
        running("middle", 640),
    ]
    llumlet.on_view(view(*requests), 0.0)
    chosen = inspects(llumlet.on_destination(B, 0.0))
    assert chosen == ["short", "middle", "long", "high"]


def test_the_request_that_was_chosen_is_the_one_that_moves() -> None:
    """Mistake 4: a victim chosen by checking one request and moving another."""
    llumlet = Llumlet(A, config())
    stuck = running("stuck", 16, immovable=Immovable.PREFILLING)
    llumlet.on_view(view(running("long", 512), stuck, running("short", 32)), 0.0)
    effects = llumlet.on_destination(B, 0.0)
    migration_id = MigrationId("A-1")
    assert Inspect(migration_id, RequestId("short")) in effects
    (reserve,) = without_reports(llumlet.on_outcome(migration_id, PROGRESS, 0.0))
    assert isinstance(reserve, Send)
    assert reserve.message.request_id == "short"
    (drain,) = without_reports(llumlet.on_message(B, Reserved(migration_id, N, 0, ()), 0.0))
    assert isinstance(drain, Drain)
    assert drain.request_id == "short"


def test_nothing_moves_without_a_destination_or_before_the_first_view() -> None:
    llumlet = Llumlet(A, config())
    assert inspects(llumlet.on_destination(B, 0.0)) == []
    llumlet.on_destination(None, 0.0)
    assert inspects(llumlet.on_view(view(running("r")), 0.0)) == []


def test_queuing_requests_stay_until_the_instance_terminates() -> None:
    llumlet = paired(queuing("q"))
    assert inspects(llumlet.on_view(view(queuing("q")), 0.1)) == []
    llumlet.set_terminating(True, 0.0)
    assert inspects(llumlet.on_view(view(queuing("q")), 0.2)) == ["q"]


def test_a_driver_may_show_the_engine_only_where_it_is_wanted() -> None:
    """The simulator looks at an engine where a migration may begin, not after every step."""
    llumlet = Llumlet(A, config())
    seen = view(running("a", 16), running("b", 32))
    assert not llumlet.wants_view
    assert llumlet.on_destination(B, 0.0) == []
    assert llumlet.wants_view
    assert inspects(llumlet.on_look(seen, 0.0)) == ["a"]
    assert not llumlet.wants_view
    assert llumlet.on_outcome(MigrationId("A-1"), Inspected(None), 0.5) != []
    assert llumlet.wants_view
    assert inspects(llumlet.on_look(seen, 0.5)) == ["b"]
    llumlet.on_outcome(MigrationId("A-2"), Inspected(None), 0.6)
    assert inspects(llumlet.on_look(seen, 0.6)) == []
    assert llumlet.next_deadline_s == 1.5
    assert llumlet.on_tick(1.5) == []
    assert inspects(llumlet.on_look(seen, 1.5)) == ["a"]


def test_a_paused_llumlet_wants_no_view() -> None:
    llumlet = Llumlet(A, config())
    llumlet.on_destination(B, 0.0)
    llumlet.on_look(view(running("a"), running("b")), 0.0)
    until_reserve(llumlet, "A-1")
    refusal = Aborted(MigrationId("A-1"), None, Reason.BUSY)
    llumlet.on_message(B, refusal, 0.1)
    assert not llumlet.wants_view
    assert inspects(llumlet.on_look(view(running("b")), 0.1)) == []
    llumlet.on_destination(B, 0.2)
    assert llumlet.wants_view


# ------------------------------------------------------------------------- how many, how long


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_as_many_migrations_go_on_at_once_as_the_policy_allows(limit: int) -> None:
    """Mistake 5: a loop "while there is a migration slot" that never ends with more than one."""
    llumlet = Llumlet(A, config(num_concurrent_migrations=limit))
    llumlet.on_view(view(*(running(f"r{i}", 16 * (i + 1)) for i in range(5))), 0.0)
    chosen = inspects(llumlet.on_destination(B, 0.0))
    assert chosen == [f"r{i}" for i in range(limit)]
    assert inspects(llumlet.on_tick(0.01)) == []


def test_fewer_requests_than_slots_leave_slots_free() -> None:
    """Mistake 5 again: the loop must end when nobody is left to choose."""
    llumlet = Llumlet(A, config(num_concurrent_migrations=8))
    llumlet.on_view(view(running("a"), running("b")), 0.0)
    assert inspects(llumlet.on_destination(B, 0.0)) == ["a", "b"]


def test_migrations_follow_each_other_until_the_destination_is_unset() -> None:
    """Section 4.4.3: "The llumlet of each source instance then starts to migrate requests to the
    destination continuously, until it is no longer set in the source state"."""
    requests = [running(f"r{i}", 16 * (i + 1)) for i in range(4)]
    llumlet = paired(*requests)
    assert inspects(committed(llumlet, "A-1")) == ["r1"]
    assert inspects(committed(llumlet, "A-2")) == ["r2"]
    llumlet.on_destination(None, 0.0)
    assert inspects(committed(llumlet, "A-3")) == []


def test_a_migration_in_flight_goes_on_when_the_destination_is_unset() -> None:
    llumlet = paired(running("r"))
    llumlet.on_destination(None, 0.0)
    effects = committed(llumlet, "A-1")
    assert Ended(MigrationId("A-1"), RequestId("r"), B, True, None, 1) in effects


def test_an_old_view_does_not_move_a_request_twice() -> None:
    llumlet = paired(running("r"))
    assert inspects(committed(llumlet, "A-1")) == []
    assert inspects(llumlet.on_view(view(running("r")), 0.1)) == []


def test_a_request_that_came_is_not_moved_on_before_its_source_has_heard_of_it() -> None:
    llumlet = Llumlet(A, config())
    come(llumlet, "r")
    llumlet.on_view(view(running("r")), 0.0)
    assert inspects(llumlet.on_destination(B, 0.0)) == []
    assert inspects(llumlet.on_message(C, Released(MigrationId("C-1")), 0.1)) == ["r"]


def test_an_aborted_migration_gives_its_slot_back() -> None:
    """Mistake 2: locks set and never read, so that an abort blocks what follows."""
    llumlet = paired(running("a", 16), running("b", 32))
    llumlet.on_outcome(MigrationId("A-1"), Inspected(None), 0.0)
    assert inspects(llumlet.on_tick(0.0)) == []
    until_reserve(llumlet, "A-2")
    effects = llumlet.on_view(view(running("b", 32)), 0.0)
    assert reports(effects) == []
    (report,) = reports(llumlet.on_view(view(running("b", 32)), 0.06))
    assert report.load.num_migrating_out == 1


# ------------------------------------------------------------------------------------ back-off


def test_a_request_whose_migration_aborted_is_not_retried_at_once() -> None:
    llumlet = paired(running("a", 16), running("b", 32))
    effects = llumlet.on_outcome(MigrationId("A-1"), Inspected(Progress(False, 1, 2, 0, True)), 0.0)
    assert inspects(effects) == ["b"]
    llumlet.on_outcome(MigrationId("A-2"), Inspected(None), 0.5)
    assert inspects(llumlet.on_tick(0.9)) == []
    assert inspects(llumlet.on_tick(1.0)) == ["a"]


@pytest.mark.parametrize("backoff_s", [0.2, 3.0])
def test_the_back_off_is_as_long_as_configured(backoff_s: float) -> None:
    quiet = config(retry_backoff_s=backoff_s, heartbeat_interval_s=60.0)
    llumlet = Llumlet(A, quiet)
    llumlet.on_view(view(running("r")), 0.0)
    llumlet.on_destination(B, 0.0)
    llumlet.on_outcome(MigrationId("A-1"), Inspected(None), 0.0)
    llumlet.on_tick(0.1)
    assert llumlet.next_deadline_s == backoff_s
    assert inspects(llumlet.on_tick(backoff_s)) == ["r"]


@pytest.mark.parametrize("reason", [Reason.NO_MEMORY, Reason.BUSY, Reason.TERMINATING])
def test_a_destination_that_refused_is_not_asked_again_until_it_is_named_again(
    reason: Reason,
) -> None:
    llumlet = paired(running("a", 16), running("b", 32))
    assert inspects(refused(llumlet, "A-1", reason)) == []
    assert inspects(llumlet.on_view(view(running("a", 16), running("b", 32)), 0.1)) == []
    assert inspects(llumlet.on_destination(B, 0.2)) == ["b"]


def test_a_destination_that_refused_is_asked_again_after_the_back_off() -> None:
    llumlet = paired(running("a", 16), running("b", 32))
    refused(llumlet, "A-1", Reason.NO_MEMORY)
    assert inspects(llumlet.on_tick(1.0)) == ["a"]


def test_a_refusal_of_one_request_does_not_hold_up_the_others() -> None:
    llumlet = paired(running("a", 16), running("b", 32))
    assert inspects(refused(llumlet, "A-1", Reason.UNSUPPORTED)) == ["b"]


def test_a_refusal_of_another_destination_does_not_hold_up_the_present_one() -> None:
    llumlet = paired(running("a", 16), running("b", 32))
    llumlet.on_destination(C, 0.0)
    assert inspects(refused(llumlet, "A-1", Reason.NO_MEMORY)) == ["b"]


# -------------------------------------------------------------------------------------- orders


def test_an_operator_can_order_any_mode_to_any_instance() -> None:
    llumlet = Llumlet(A, config())
    outcome = llumlet.on_order(RequestId("r"), C, Mode.RECOMPUTE, 0.0)
    assert outcome == (MigrationId("A-1"), [Inspect(MigrationId("A-1"), RequestId("r"))])
    effects = llumlet.on_outcome(MigrationId("A-1"), PROGRESS, 0.0)
    (send,) = without_reports(effects)
    assert isinstance(send, Send)
    assert send.peer == C
    assert send.message.num_blocks == 0


def test_an_order_for_a_migrating_request_is_refused() -> None:
    llumlet = paired(running("r"))
    assert llumlet.on_order(RequestId("r"), C, Mode.LIVE, 0.0) is Reason.ALREADY_MIGRATING


def test_an_order_to_the_instance_itself_is_refused() -> None:
    llumlet = Llumlet(A, config())
    assert llumlet.on_order(RequestId("r"), A, Mode.LIVE, 0.0) is Reason.SAME_INSTANCE


def test_an_order_does_not_wait_for_a_slot_or_a_back_off() -> None:
    llumlet = paired(running("a", 16), running("b", 32))
    until_reserve(llumlet, "A-1")
    assert not isinstance(llumlet.on_order(RequestId("b"), B, Mode.LIVE, 0.0), Reason)


def test_orders_take_slots_from_automatic_migrations() -> None:
    llumlet = Llumlet(A, config())
    llumlet.on_view(view(running("a", 16), running("b", 32)), 0.0)
    llumlet.on_order(RequestId("b"), C, Mode.LIVE, 0.0)
    assert inspects(llumlet.on_destination(B, 0.0)) == []


# ------------------------------------------------------------------------------------- reports


def test_the_first_view_is_reported_at_once() -> None:
    (report,) = reports(Llumlet(A, config()).on_view(view(running("r", 64)), 5.0))
    assert report.load.instance_id == A
    assert report.load.used_tokens == 64
    assert report.load.num_running == 1


def test_loads_are_reported_at_most_once_an_interval_while_they_change() -> None:
    """Section 4.3: "The loads are reported by the llumlets periodically"."""
    llumlet = Llumlet(A, config(report_interval_s=0.25))
    times = [step / 16 for step in range(17)]
    reported = [
        now_s
        for step, now_s in enumerate(times)
        if reports(llumlet.on_view(view(running("r", 64 + step)), now_s))
    ]
    assert reported == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_a_change_just_after_a_report_is_told_when_the_interval_is_over() -> None:
    llumlet = Llumlet(A, config(report_interval_s=0.05))
    llumlet.on_view(view(running("r", 64)), 0.0)
    assert reports(llumlet.on_view(view(running("r", 80)), 0.01)) == []
    assert llumlet.next_deadline_s == 0.05
    (report,) = reports(llumlet.on_tick(0.05))
    assert report.load.used_tokens == 80


def test_an_unchanged_load_is_reported_once_a_heartbeat() -> None:
    llumlet = Llumlet(A, config(report_interval_s=0.05, heartbeat_interval_s=1.0))
    llumlet.on_view(view(running("r", 64)), 0.0)
    for step in range(1, 20):
        assert reports(llumlet.on_view(view(running("r", 64)), 0.05 * step)) == []
    assert len(reports(llumlet.on_view(view(running("r", 64)), 1.0))) == 1
    assert llumlet.next_deadline_s == 2.0


def test_a_change_of_the_queue_is_reported_at_once() -> None:
    llumlet = Llumlet(A, config())
    llumlet.on_view(view(running("r")), 0.0)
    (report,) = reports(llumlet.on_view(view(running("r"), queuing("q", 96)), 0.001))
    assert report.load.num_queuing == 1
    assert report.load.head_demand_tokens == 96
    assert len(reports(llumlet.on_view(view(running("r")), 0.002))) == 1


def test_migrations_that_begin_and_end_are_reported_at_once() -> None:
    llumlet = Llumlet(A, config())
    llumlet.on_view(view(running("r")), 0.0)
    (report,) = reports(llumlet.on_destination(B, 0.001))
    assert report.load.num_migrating_out == 1
    (report,) = reports(committed(llumlet, "A-1", 0.002))
    assert report.load.num_migrating_out == 0


def test_a_migration_that_comes_is_reported_at_once() -> None:
    llumlet = Llumlet(A, config())
    llumlet.on_view(view(), 0.0)
    reserve = Reserve(MigrationId("C-1"), RequestId("r"), 0, 0, 1, True, None, b"request")
    (report,) = reports(llumlet.on_message(C, reserve, 0.001))
    assert report.load.num_migrating_in == 1


def test_reports_are_numbered() -> None:
    llumlet = Llumlet(A, config())
    numbers = [
        report.load.sequence
        for step in range(4)
        for report in reports(llumlet.on_view(view(running("r", 64 + step)), 0.1 * step))
    ]
    assert numbers == [1, 2, 3, 4]


def test_the_last_dispatch_that_was_admitted_is_reported() -> None:
    llumlet = Llumlet(A, config())
    llumlet.on_request_admitted(2)
    llumlet.on_request_admitted(1)
    (report,) = reports(llumlet.on_view(view(running("first"), running("second")), 0.0))
    assert report.load.last_dispatch == 2


def test_a_dispatch_that_ended_at_once_is_reported_without_a_step_of_the_engine() -> None:
    """It was refused, say. The scheduler counts it as in flight until then."""
    llumlet = Llumlet(A, config())
    llumlet.on_view(view(running("r")), 0.0)
    llumlet.on_request_admitted(5)
    assert llumlet.next_deadline_s == 0.05
    (report,) = reports(llumlet.on_tick(0.05))
    assert report.load.last_dispatch == 5


def test_a_terminating_instance_reports_that_it_is_one() -> None:
    """Algorithm 1, line 12: the fake request makes it a source of migrations."""
    llumlet = Llumlet(A, config())
    llumlet.on_view(view(running("r")), 0.0)
    llumlet.set_terminating(True, 0.0)
    (report,) = reports(llumlet.on_tick(0.0))
    assert report.load.is_terminating
    (report,) = reports(llumlet.on_view(view(running("r", 80)), 0.1))
    assert report.load.is_terminating
    llumlet.set_terminating(False, 0.0)
    (report,) = reports(llumlet.on_tick(0.1))
    assert not report.load.is_terminating


def test_the_engines_own_word_that_it_terminates_is_believed() -> None:
    llumlet = Llumlet(A, config())
    terminating = InstanceView(A, 4096, 16, is_terminating=True)
    (report,) = reports(llumlet.on_view(terminating, 0.0))
    assert report.load.is_terminating


def test_loads_are_finite_numbers() -> None:
    """Mistake 10: infinities in averages. The terminating flag says what infinity would."""
    llumlet = Llumlet(A, config())
    llumlet.set_terminating(True, 0.0)
    (report,) = reports(llumlet.on_view(view(running("r", 64, HIGH)), 0.0))
    assert math.isfinite(report.load.free_tokens)


def test_nothing_is_reported_before_the_first_view() -> None:
    llumlet = Llumlet(A, config())
    assert llumlet.on_tick(10.0) == []
    assert llumlet.next_deadline_s is None


# -------------------------------------------------------------------------- aborts of clients


def test_abort_of_a_request_that_is_here_goes_to_the_engine() -> None:
    assert Llumlet(A, config()).on_client_abort(RequestId("r"), 0.0) == [
        AbortRequest(RequestId("r"))
    ]


def test_abort_of_a_request_that_is_leaving_ends_request_and_migration() -> None:
    llumlet = paired(running("r"))
    until_reserve(llumlet, "A-1")
    effects = without_reports(llumlet.on_client_abort(RequestId("r"), 0.0))
    assert effects == [
        AbortRequest(RequestId("r")),
        Send(B, Abort(MigrationId("A-1"), Reason.REQUEST_ABORTED)),
        Ended(MigrationId("A-1"), RequestId("r"), B, True, Reason.REQUEST_ABORTED, 0),
    ]


def test_abort_of_a_committed_request_goes_to_its_destination() -> None:
    llumlet = paired(running("r"))
    until_commit(llumlet, "A-1")
    assert without_reports(llumlet.on_client_abort(RequestId("r"), 0.0)) == [
        Send(B, ForwardedAbort(MigrationId("A-1"), N, RequestId("r")))
    ]


def test_abort_of_a_request_that_left_follows_it() -> None:
    llumlet = paired(running("r"))
    committed(llumlet, "A-1")
    assert llumlet.on_client_abort(RequestId("r"), 0.0) == [ForwardAbort(B, RequestId("r"))]


def test_abort_of_a_request_that_is_coming_is_told_its_source() -> None:
    llumlet = Llumlet(A, config())
    coming(llumlet, "r")
    effects = llumlet.on_client_abort(RequestId("r"), 0.0)
    assert effects[0] == ForwardAbort(C, RequestId("r"))


def test_abort_of_a_request_that_came_back_goes_to_the_engine() -> None:
    llumlet = paired(running("r"))
    committed(llumlet, "A-1")
    come(llumlet, "r")
    assert llumlet.on_client_abort(RequestId("r"), 0.0) == [AbortRequest(RequestId("r"))]


def test_abort_of_a_request_that_was_dispatched_here_again_goes_to_the_engine() -> None:
    llumlet = paired(running("r"))
    committed(llumlet, "A-1")
    llumlet.on_request_arrived(RequestId("r"))
    assert llumlet.on_client_abort(RequestId("r"), 0.0) == [AbortRequest(RequestId("r"))]


def test_abort_of_a_request_whose_new_instance_died_is_not_sent_there() -> None:
    llumlet = paired(running("r"))
    committed(llumlet, "A-1")
    llumlet.on_peer_dead(B, 0.0)
    assert llumlet.on_client_abort(RequestId("r"), 0.0) == [AbortRequest(RequestId("r"))]


def test_only_the_latest_departures_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llumlet_module, "MOVED_OUT_CAPACITY", 2)
    llumlet = Llumlet(A, config())
    for number in (1, 2, 3):
        llumlet.on_order(RequestId(f"r{number}"), B, Mode.LIVE, 0.0)
        committed(llumlet, f"A-{number}")
    assert llumlet.on_client_abort(RequestId("r1"), 0.0) == [AbortRequest(RequestId("r1"))]
    assert llumlet.on_client_abort(RequestId("r2"), 0.0) == [ForwardAbort(B, RequestId("r2"))]


# ---------------------------------------------------------------------------- deaths and ends


def test_a_dead_destination_gets_no_more_requests() -> None:
    llumlet = paired(running("a", 16), running("b", 32))
    effects = llumlet.on_peer_dead(B, 0.0)
    assert Ended(MigrationId("A-1"), RequestId("a"), B, True, Reason.PEER_DEAD, 0) in effects
    assert inspects(effects) == []
    assert inspects(llumlet.on_tick(5.0)) == []


def test_a_dead_destination_returns_what_it_had_not_confirmed() -> None:
    llumlet = paired(running("r"))
    until_commit(llumlet, "A-1")
    effects = llumlet.on_peer_dead(B, 0.0)
    assert Resume(MigrationId("A-1"), RequestId("r")) in effects


def test_death_of_a_stranger_changes_nothing() -> None:
    llumlet = paired(running("r"))
    assert llumlet.on_peer_dead(C, 0.0) == []
    assert inspects(committed(llumlet, "A-1")) == []


def test_a_request_that_ended_ends_its_migration() -> None:
    llumlet = paired(running("r"))
    until_reserve(llumlet, "A-1")
    effects = llumlet.on_request_ended(RequestId("r"), Reason.REQUEST_FINISHED, 0.0)
    assert Send(B, Abort(MigrationId("A-1"), Reason.REQUEST_FINISHED)) in effects


def test_a_request_that_ended_without_a_migration_is_nobodys_concern() -> None:
    llumlet = Llumlet(A, config())
    assert llumlet.on_request_ended(RequestId("r"), Reason.REQUEST_FINISHED, 0.0) == []


def test_a_terminating_instance_refuses_what_comes() -> None:
    llumlet = Llumlet(A, config())
    llumlet.set_terminating(True, 0.0)
    reserve = Reserve(MigrationId("C-1"), RequestId("r"), 0, 0, 1, False, None, b"request")
    assert llumlet.on_message(C, reserve, 0.0) == [
        Send(C, Aborted(MigrationId("C-1"), None, Reason.TERMINATING))
    ]


def test_the_limit_holds_for_what_comes_and_for_what_leaves_apart() -> None:
    """Two crossing migrations would wait for each other if they shared one slot."""
    llumlet = paired(running("r"))
    reserve = Reserve(MigrationId("B-1"), RequestId("other"), 0, 0, 1, False, None, b"request")
    (effect,) = without_reports(llumlet.on_message(B, reserve, 0.0))
    assert isinstance(effect, ReserveBlocks)
    second = Reserve(MigrationId("C-1"), RequestId("third"), 0, 0, 1, False, None, b"request")
    assert without_reports(llumlet.on_message(C, second, 0.0)) == [
        Send(C, Aborted(MigrationId("C-1"), None, Reason.BUSY))
    ]


def test_an_instance_has_open_migrations_until_both_sides_know_how_they_ended() -> None:
    llumlet = Llumlet(A, config())
    assert not llumlet.has_open_migrations
    come(llumlet, "r")
    assert llumlet.has_open_migrations
    llumlet.on_message(C, Released(MigrationId("C-1")), 0.0)
    assert not llumlet.has_open_migrations


def test_a_request_is_arriving_from_its_reservation_until_the_engine_has_it() -> None:
    llumlet = Llumlet(A, config())
    assert llumlet.arriving_requests() == frozenset()
    number = coming(llumlet, "r")
    assert llumlet.arriving_requests() == {"r"}
    commit = Commit(MigrationId("C-1"), number, RequestId("r"), 0, 0, b"state")
    llumlet.on_message(C, commit, 0.0)
    assert llumlet.arriving_requests() == {"r"}


def test_deadlines_of_migrations_are_the_llumlets() -> None:
    llumlet = Llumlet(A, config())
    llumlet.on_order(RequestId("r"), B, Mode.LIVE, 0.0)
    until_reserve(llumlet, "A-1", 2.0)
    assert llumlet.next_deadline_s == 3.0
    (again,) = llumlet.on_tick(3.0)
    assert isinstance(again, Send)
    assert isinstance(again.message, Reserve)
