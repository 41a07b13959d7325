"""Which requests the llumlet of an instance moves, when, and how many at once (Section 4.3)."""

from dataclasses import replace

import pytest

from sterna.config import LlumletConfig
from sterna.instance.llumlet import Llumlet, LlumletEffect
from sterna.migration.messages import (
    Aborted,
    Drain,
    Ended,
    Inspect,
    Inspected,
    Mode,
    Reason,
    Released,
    RequestPosition,
    Reserve,
    ReserveBlocks,
    Reserved,
    Send,
)
from sterna.types import HIGH, Immovable, MigrationId, RequestId
from tests.instance.llumlets import (
    PROGRESS,
    A,
    B,
    C,
    N,
    come,
    committed,
    config,
    inspects,
    paired,
    queuing,
    reports,
    running,
    until_reserve,
    view,
    without_reports,
)


def refused(
    llumlet: Llumlet, migration_id: str, reason: Reason, now_s: float = 0.0
) -> list[LlumletEffect]:
    until_reserve(llumlet, migration_id, now_s)
    return llumlet.on_message(B, Aborted(MigrationId(migration_id), None, reason), now_s)


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


def test_the_last_view_is_kept_with_what_the_engine_does_not_know() -> None:
    llumlet = Llumlet(A, config())
    assert llumlet.view is None
    llumlet.set_terminating(True, 0.0)
    llumlet.on_view(view(running("a", 16)), 0.0)
    assert llumlet.view == replace(view(running("a", 16)), is_terminating=True)


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


def test_migrations_follow_each_other_until_the_destination_is_unset() -> None:
    """Section 4.4.3: "The llumlet of each source instance then starts to migrate requests to the
    destination continuously, until it is no longer set in the source state"."""
    requests = [running(f"r{i}", 16 * (i + 1)) for i in range(4)]
    llumlet = paired(*requests)
    assert inspects(committed(llumlet, "A-1")) == ["r1"]
    assert inspects(committed(llumlet, "A-2")) == ["r2"]
    llumlet.on_destination(None, 0.0)
    assert inspects(committed(llumlet, "A-3")) == []


def test_where_the_policy_says_so_one_request_moves_for_each_round_that_names_a_destination() -> (
    None
):
    """As in the paper's runs, also where there are slots for more."""
    settings = config(num_concurrent_migrations=3)
    policy = replace(settings.policy, migrates_continuously=False)
    llumlet = Llumlet(A, replace(settings, policy=policy))
    llumlet.on_view(view(*(running(f"r{k}", 16 * (k + 1)) for k in range(3))), 0.0)
    assert inspects(llumlet.on_destination(B, 0.0)) == ["r0"]
    assert llumlet.destination is None
    assert inspects(committed(llumlet, "A-1")) == []
    assert inspects(llumlet.on_destination(B, 0.2)) == ["r1"]


def test_a_round_that_finds_nothing_to_move_leaves_the_destination_named() -> None:
    settings = config()
    policy = replace(settings.policy, migrates_continuously=False)
    llumlet = Llumlet(A, replace(settings, policy=policy))
    llumlet.on_view(view(), 0.0)
    llumlet.on_destination(B, 0.0)
    assert inspects(llumlet.on_view(view(running("r")), 0.1)) == ["r"]


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


def test_a_request_that_moved_and_came_back_may_move_again_at_once() -> None:
    llumlet = paired(running("r"))
    committed(llumlet, "A-1")
    come(llumlet, "r")
    assert inspects(llumlet.on_message(C, Released(MigrationId("C-1")), 0.1)) == ["r"]


def test_an_aborted_migration_gives_its_slot_back() -> None:
    """Mistake 2: locks set and never read, so that an abort blocks what follows."""
    llumlet = paired(running("a", 16), running("b", 32))
    llumlet.on_outcome(MigrationId("A-1"), Inspected(None), 0.0)
    assert inspects(llumlet.on_tick(0.0)) == []
    until_reserve(llumlet, "A-2")
    (report,) = reports(llumlet.on_view(view(running("b", 32)), 0.0))
    assert report.load.num_migrating_out == 1


def quiet(num_concurrent_migrations: int = 1) -> LlumletConfig:
    """One that reports nothing by itself, so that its other deadlines are to be seen."""
    return replace(config(num_concurrent_migrations), report_interval_s=None)


def test_a_llumlet_that_nothing_happens_to_has_no_deadline() -> None:
    llumlet = Llumlet(A, quiet())
    llumlet.on_view(view(running("r")), 0.0)
    assert llumlet.next_deadline_s is None
    llumlet.on_destination(B, 0.0)
    assert llumlet.next_deadline_s is None


def test_a_back_off_is_waited_for_only_while_another_migration_may_begin() -> None:
    llumlet = Llumlet(A, quiet())
    llumlet.on_view(view(running("a", 16), running("b", 32)), 0.0)
    llumlet.on_destination(B, 0.0)
    llumlet.on_outcome(MigrationId("A-1"), Inspected(None), 0.5)
    assert llumlet.num_outgoing == 1, "the other one"
    assert llumlet.next_deadline_s is None
    llumlet.on_outcome(MigrationId("A-2"), Inspected(None), 0.75)
    assert llumlet.next_deadline_s == 1.5
    llumlet.on_destination(None, 0.8)
    assert llumlet.next_deadline_s is None


def test_of_several_deadlines_the_first_counts() -> None:
    """A migration that asks again in a second, a report that is due, a back-off."""
    llumlet = paired(running("a", 16), running("b", 32), num_concurrent_migrations=2)
    until_reserve(llumlet, "A-1", 0.25)
    llumlet.on_outcome(MigrationId("A-2"), Inspected(None), 0.5)
    assert llumlet.next_deadline_s == 1.25
    llumlet.on_tick(1.25)
    assert llumlet.next_deadline_s == 1.5


def test_deadlines_of_migrations_are_the_llumlets() -> None:
    llumlet = Llumlet(A, config())
    llumlet.on_order(RequestId("r"), B, Mode.LIVE, 0.0)
    until_reserve(llumlet, "A-1", 2.0)
    assert llumlet.next_deadline_s == 3.0
    (again,) = llumlet.on_tick(3.0)
    assert isinstance(again, Send)
    assert isinstance(again.message, Reserve)


def test_the_next_deadline_is_the_earliest_of_migrations_and_reports() -> None:
    llumlet = Llumlet(A, config(heartbeat_interval_s=2.5))
    llumlet.on_view(view(), 0.0)
    llumlet.on_order(RequestId("r"), B, Mode.LIVE, 0.0)
    until_reserve(llumlet, "A-1", 1.0)
    assert llumlet.next_deadline_s == 2.0
    llumlet.on_tick(2.0)
    assert llumlet.next_deadline_s == 2.5


# ------------------------------------------------------------------------------------ back-off


def test_a_request_whose_migration_aborted_is_not_retried_at_once() -> None:
    llumlet = paired(running("a", 16), running("b", 32))
    effects = llumlet.on_outcome(
        MigrationId("A-1"), Inspected(RequestPosition(False, 1, 2, 0, True)), 0.0
    )
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


def test_the_end_of_a_back_off_is_no_deadline_while_nothing_can_begin() -> None:
    llumlet = Llumlet(A, config(heartbeat_interval_s=60.0))
    requests = view(running("a", 16), running("b", 32))
    llumlet.on_view(requests, 0.0)
    llumlet.on_destination(B, 0.0)
    llumlet.on_outcome(MigrationId("A-1"), Inspected(None), 0.0)
    llumlet.on_tick(0.1)
    assert llumlet.next_deadline_s == 60.0, "b has the slot"
    llumlet.on_outcome(MigrationId("A-2"), Inspected(None), 0.5)
    llumlet.on_tick(0.6)
    assert llumlet.next_deadline_s == 1.0
    llumlet.on_destination(None, 0.6)
    assert llumlet.next_deadline_s == 60.5


@pytest.mark.parametrize(
    "reason",
    [
        Reason.NO_MEMORY,
        Reason.NO_SLOT,
        Reason.OTHER_WEIGHTS,
        Reason.BUSY,
        Reason.TERMINATING,
        Reason.TRANSFER_FAILED,
        Reason.LEASE_EXPIRED,
    ],
)
def test_a_destination_that_refused_is_not_asked_again_until_it_is_named_again(
    reason: Reason,
) -> None:
    llumlet = paired(running("a", 16), running("b", 32))
    assert inspects(refused(llumlet, "A-1", reason)) == []
    assert inspects(llumlet.on_view(view(running("a", 16), running("b", 32)), 0.1)) == []
    assert inspects(llumlet.on_destination(B, 0.2)) == ["b"]


def test_a_destination_that_says_nothing_is_not_asked_for_the_next_request() -> None:
    llumlet = paired(running("a", 16), running("b", 32))
    until_reserve(llumlet, "A-1")
    effects: list[LlumletEffect] = []
    now_s = 0.0
    while not any(isinstance(each, Ended) for each in effects):
        now_s += 1.0
        effects = llumlet.on_tick(now_s)
    assert Ended(MigrationId("A-1"), RequestId("a"), B, True, Reason.PEER_SILENT, 0) in effects
    assert inspects(effects) == []
    assert inspects(llumlet.on_destination(B, now_s)) == ["b"]


def test_a_destination_that_refused_is_asked_again_after_the_back_off() -> None:
    llumlet = paired(running("a", 16), running("b", 32))
    refused(llumlet, "A-1", Reason.NO_MEMORY)
    assert inspects(llumlet.on_tick(1.0)) == ["a"]


def test_a_pause_ends_in_its_time_although_its_request_has_to_wait_for_longer() -> None:
    """An operator has ordered the request elsewhere, where it was refused later."""
    llumlet = Llumlet(A, replace(config(), report_interval_s=None))
    llumlet.on_view(view(running("a", 16), running("b", 32)), 0.0)
    llumlet.on_destination(B, 0.0)
    refused(llumlet, "A-1", Reason.NO_MEMORY)
    llumlet.on_order(RequestId("a"), C, Mode.LIVE, 0.2)
    until_reserve(llumlet, "A-2", 0.2)
    llumlet.on_message(C, Aborted(MigrationId("A-2"), None, Reason.NO_MEMORY), 0.5)
    assert llumlet.next_deadline_s == 1.0
    assert inspects(llumlet.on_tick(1.0)) == ["b"]


@pytest.mark.parametrize("reason", [Reason.UNSUPPORTED, Reason.TOO_LONG, Reason.NO_ADAPTER_SLOT])
def test_a_refusal_of_one_request_does_not_hold_up_the_others(reason: Reason) -> None:
    llumlet = paired(running("a", 16), running("b", 32))
    assert inspects(refused(llumlet, "A-1", reason)) == ["b"]


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


def test_an_order_for_a_request_that_has_moved_is_refused() -> None:
    """The engine may still show it for a moment."""
    llumlet = paired(running("r"))
    committed(llumlet, "A-1")
    assert llumlet.on_order(RequestId("r"), C, Mode.LIVE, 0.0) is Reason.REQUEST_UNKNOWN
    llumlet.on_request_arrived(RequestId("r"))
    assert not isinstance(llumlet.on_order(RequestId("r"), C, Mode.LIVE, 0.0), Reason)


def test_an_order_does_not_wait_for_a_slot_or_a_back_off() -> None:
    llumlet = paired(running("a", 16), running("b", 32))
    until_reserve(llumlet, "A-1")
    assert not isinstance(llumlet.on_order(RequestId("b"), B, Mode.LIVE, 0.0), Reason)


def test_orders_take_slots_from_automatic_migrations() -> None:
    llumlet = Llumlet(A, config())
    llumlet.on_view(view(running("a", 16), running("b", 32)), 0.0)
    llumlet.on_order(RequestId("b"), C, Mode.LIVE, 0.0)
    assert inspects(llumlet.on_destination(B, 0.0)) == []
