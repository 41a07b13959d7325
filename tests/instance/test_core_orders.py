"""Requests that leave an instance: what operators are answered, and what reports count."""

from dataclasses import replace

import msgspec
import pytest
from msgspec import structs

from sterna.config import LlumletConfig
from sterna.instance.core import InstanceCore, InstanceEffect, OutgoingMigrationEnded
from sterna.messages.actors import (
    BY_OPERATOR,
    COMMITTED,
    AbortRequests,
    AddRequest,
    AdminReply,
    CopyPrefix,
    FrontendMember,
    InstanceMember,
    ListRequests,
    LoadReport,
    Membership,
    MigrateRequest,
    MigrationEnd,
    MigrationMessage,
    MoveEnded,
    PrefixDone,
    SetDestination,
    TokenSpan,
)
from sterna.messages.reasons import MoveCause, MoveReason
from sterna.messaging.send_effects import ToMailbox
from sterna.migration.messages import (
    Abort,
    Aborted,
    AbortRequest,
    Adopted,
    BlocksReserved,
    Commit,
    Committed,
    Drained,
    Ended,
    Inspected,
    Mode,
    Reason,
    RequestPosition,
    ReservationId,
    Reserve,
    Reserved,
    Send,
)
from sterna.policy.presets import LLUMNIX
from sterna.types import HIGH, FrontendId, Immovable, InstanceId, MigrationId, RequestId
from tests.instance.llumlets import inspects, queuing, running, view

I0, I1, I2 = (InstanceId(f"i{k}") for k in range(3))
F0 = FrontendId(0)
R = RequestId("r")


def addressed(effects: list[InstanceEffect]) -> list[ToMailbox]:
    return [each for each in effects if isinstance(each, ToMailbox)]


TOLD_TO_MOVE = MigrateRequest("operator", 5, R, I1, Mode.RECOMPUTE)


def ordered(*others: InstanceMember, order: MigrateRequest | None = TOLD_TO_MOVE) -> InstanceCore:
    """A core with a request of front end 0, beside i1 and others, which an operator has move."""
    under_test = InstanceCore(I0, LlumletConfig(policy=LLUMNIX))
    there = (InstanceMember(I0, "i0"), InstanceMember(I1, "i1"), *others)
    frontends = (FrontendMember(F0, "mailbox of 0"),)
    under_test.on_membership(Membership(1, there, frontends, "scheduler"), 0.0)
    under_test.on_message(AddRequest(F0, R, 1), [b"request"], 0.0)
    under_test.on_view(replace(view(running(R)), instance_id=I0), 0.0)
    if order is not None:
        under_test.on_message(order, [], 0.0)
    return under_test


ORDERED = MigrationId("i0-1")


def moved_out(under_test: InstanceCore, drained_s: float, ended_s: float) -> list[InstanceEffect]:
    """Let the migration go through; returns what its end brings."""
    progress = RequestPosition(is_queuing=False, num_full_blocks=1, num_blocks=2, num_preemptions=0)
    under_test.on_outcome(ORDERED, Inspected(progress, b"request"), 0.0)
    reserved = Reserved(ORDERED, ReservationId(1), 0, ("i1",))
    under_test.on_message(MigrationMessage(I1, reserved), [], 0.0)
    under_test.on_outcome(ORDERED, Drained(2, b"state"), drained_s)
    committed = MigrationMessage(I1, Committed(ORDERED, ReservationId(1)))
    return under_test.on_message(committed, [], ended_s)


def answers(effects: list[InstanceEffect]) -> list[tuple[int, object, str | None]]:
    """What operators are answered."""
    replies = [each.message for each in addressed(effects) if each.address == "operator"]
    assert all(isinstance(each, AdminReply) for each in replies)
    return [(each.query_id, msgspec.json.decode(each.body), each.error) for each in replies]


def test_an_operator_is_answered_when_the_request_has_moved() -> None:
    under_test = ordered()
    effects = moved_out(under_test, drained_s=2.0, ended_s=2.25)
    assert answers(effects) == [
        (5, {"request": "r", "from": "i0", "to": "i1", "stages": 1, "suspended_ms": 250.0}, None)
    ]
    ended = Ended(ORDERED, R, I1, True, None, 1)
    assert effects.index(ended) < effects.index(OutgoingMigrationEnded(ended, 0.25))
    assert under_test.requests() == frozenset()


def test_an_operator_is_answered_when_the_migration_has_failed() -> None:
    under_test = ordered()
    effects = under_test.on_outcome(ORDERED, Inspected(None), 1.0)
    (ended,) = [each.ended for each in effects if isinstance(each, OutgoingMigrationEnded)]
    assert ended.aborted is not None
    reason = ended.aborted.value
    assert answers(effects) == [(5, {"request": "r", "reason": reason}, reason)]
    assert OutgoingMigrationEnded(ended, 0.0) in effects
    assert under_test.requests() == {R}


def test_a_request_that_was_not_drained_was_not_suspended() -> None:
    under_test = ordered()
    progress = RequestPosition(is_queuing=False, num_full_blocks=1, num_blocks=2, num_preemptions=0)
    under_test.on_outcome(ORDERED, Inspected(progress, b"request"), 0.5)
    refusal = MigrationMessage(I1, Aborted(ORDERED, None, Reason.NO_MEMORY))
    effects = under_test.on_message(refusal, [], 2.0)
    assert OutgoingMigrationEnded(Ended(ORDERED, R, I1, True, Reason.NO_MEMORY, 0), 0.0) in effects


def reported_ends(effects: list[InstanceEffect]) -> list[MigrationEnd]:
    """The ends of migrations in the load reports."""
    sent = [each.message for each in addressed(effects)]
    return [end for each in sent if isinstance(each, LoadReport) for end in each.migrations]


def test_the_end_of_a_migration_is_reported_once() -> None:
    under_test = ordered()
    moved = moved_out(under_test, drained_s=2.0, ended_s=2.25)
    left = under_test.on_view(replace(view(), instance_id=I0), 3.0)
    later = under_test.on_tick(30.0)
    expected = [MigrationEnd(COMMITTED, 1, 0.25, BY_OPERATOR)]
    assert reported_ends([*moved, *left, *later]) == expected


def test_a_migration_that_failed_is_reported_with_its_reason() -> None:
    under_test = ordered()
    effects = under_test.on_outcome(ORDERED, Inspected(None), 1.0)
    effects += under_test.on_tick(30.0)
    [end] = reported_ends(effects)
    assert (end.outcome, end.is_committed) == ("request_unknown", False)


def test_the_destination_of_a_request_that_ends_is_told_at_once() -> None:
    under_test = ordered()
    progress = RequestPosition(is_queuing=False, num_full_blocks=1, num_blocks=2, num_preemptions=0)
    under_test.on_outcome(ORDERED, Inspected(progress, b"request"), 0.5)
    effects = under_test.on_outputs(F0, (TokenSpan(R, 0, 1, True),), [b"token"], 1.0)
    reason = Reason.REQUEST_FINISHED
    assert Send(I1, Abort(ORDERED, reason)) in effects
    assert answers(effects) == [(5, {"request": "r", "reason": reason.value}, reason.value)]


@pytest.mark.parametrize(
    ("destination", "reason"),
    [("i9", "no instance is called i9"), ("i0", Reason.SAME_INSTANCE.value)],
)
def test_an_order_that_cannot_be_carried_out_is_refused_at_once(
    destination: str, reason: str
) -> None:
    under_test = ordered(order=None)
    order = structs.replace(TOLD_TO_MOVE, destination=InstanceId(destination))
    effects = under_test.on_message(order, [], 1.0)
    assert answers(effects) == [(5, {"request": "r", "reason": reason}, reason)]
    assert not under_test.has_open_migrations


def test_a_migration_that_nobody_ordered_is_answered_to_nobody() -> None:
    under_test = ordered(order=None)
    under_test.on_message(SetDestination(I1), [], 1.0)
    assert answers(moved_out(under_test, 1.0, 2.0)) == []
    under_test = ordered(order=None)
    under_test.on_message(SetDestination(I1), [], 1.0)
    assert answers(under_test.on_outcome(ORDERED, Inspected(None), 2.0)) == []


def test_reports_count_the_migrations_that_have_ended() -> None:
    under_test = ordered()

    def counts(effects: list[InstanceEffect]) -> list[tuple[int, int]]:
        sent = [each.message for each in addressed(effects)]
        reports = [each for each in sent if isinstance(each, LoadReport)]
        return [(each.num_committed, each.num_aborted) for each in reports]

    assert counts(under_test.on_outcome(ORDERED, Inspected(None), 0.5)) == [(0, 1)]
    under_test.on_message(TOLD_TO_MOVE, [], 1.0)
    again = MigrationId("i0-2")
    progress = RequestPosition(is_queuing=True, num_full_blocks=0, num_blocks=0, num_preemptions=0)
    under_test.on_outcome(again, Inspected(progress, b"request"), 1.0)
    reserved = Reserved(again, ReservationId(1), 0, ("i1",))
    under_test.on_message(MigrationMessage(I1, reserved), [], 1.0)
    under_test.on_outcome(again, Drained(0, b"state"), 1.0)
    committed = MigrationMessage(I1, Committed(again, ReservationId(1)))
    assert counts(under_test.on_message(committed, [], 1.5)) == [(1, 1)]


def test_a_request_that_has_come_is_here_and_no_migration_from_here() -> None:
    under_test = ordered(order=None)
    came, comes = MigrationId("i1-1"), RequestId("comes")
    reserve = Reserve(came, comes, 0, 0, 0, True, None, b"request")
    under_test.on_message(MigrationMessage(I1, reserve), [], 0.0)
    effects = under_test.on_outcome(came, BlocksReserved(0, ()), 0.0)
    (answer,) = [each.message for each in effects if isinstance(each, Send)]
    assert isinstance(answer, Reserved)
    commit = Commit(came, answer.reservation, comes, 0, 0, b"state")
    under_test.on_message(MigrationMessage(I1, commit), [], 0.0)
    under_test.on_adopted(F0, comes, first_index=3, now_s=0.0)
    effects = under_test.on_outcome(came, Adopted(), 0.0)
    assert Ended(came, comes, I1, False, None, 1) in effects
    assert not any(isinstance(each, OutgoingMigrationEnded) for each in effects)
    assert under_test.requests() == {R, comes}


def test_an_operator_sees_the_requests_that_run_and_those_that_wait() -> None:
    under_test = InstanceCore(I0, LlumletConfig(policy=LLUMNIX))
    asked = ListRequests("operator", 6)
    assert answers(under_test.on_message(asked, [], 0.0)) == [(6, [], None)]
    some = view(
        structs.replace(
            running("r", 96),
            num_output_tokens=7,
            scheduling_priority=HIGH,
            num_preemptions=2,
            arrival_s=1.5,
            immovable=Immovable.UNSUPPORTED_REQUEST_FEATURE,
            unsupported="pooling",
        ),
        queuing("q", 48),
    )
    under_test.on_view(replace(some, instance_id=I0), 0.0)
    first = {
        "id": "r",
        "instance": "i0",
        "status": "running",
        "num_tokens": 96,
        "num_output_tokens": 7,
        "used_tokens": 96,
        "demand_tokens": 0,
        "priority": 1,
        "num_preemptions": 2,
        "arrival_s": 1.5,
        "immovable": "the request uses a feature whose state cannot move: pooling",
    }
    second = {
        **first,
        "id": "q",
        "status": "queuing",
        "num_tokens": 48,
        "num_output_tokens": 0,
        "used_tokens": 0,
        "demand_tokens": 48,
        "priority": 0,
        "num_preemptions": 0,
        "arrival_s": 0.0,
        "immovable": None,
    }
    assert answers(under_test.on_message(asked, [], 0.0)) == [(6, [first, second], None)]


def test_the_abort_of_a_request_that_has_moved_follows_it_to_an_instance_that_lives() -> None:
    under_test = ordered()
    moved_out(under_test, 0.0, 0.0)
    abort = AbortRequests((R,))
    assert addressed(under_test.on_message(abort, [], 1.0)) == [ToMailbox("i1", abort)]


def test_the_abort_of_a_request_that_has_come_back_goes_to_the_engine() -> None:
    under_test = ordered()
    moved_out(under_test, 0.0, 0.0)
    under_test.on_message(AddRequest(F0, R, 2), [b"request"], 1.0)
    assert AbortRequest(R) in under_test.on_message(AbortRequests((R,)), [], 2.0)


def test_migrations_to_instances_that_die_together_end_in_their_order() -> None:
    """The same messages in the same order each time that the same thing happens."""
    peers = [InstanceId(f"p{k}") for k in range(8)]
    under_test = ordered(*(InstanceMember(each, each) for each in peers), order=None)
    for each in reversed(peers):
        order = structs.replace(TOLD_TO_MOVE, request_id=RequestId(f"to {each}"), destination=each)
        under_test.on_message(order, [], 0.0)
    news = structs.replace(under_test.membership, version=2, instances=(InstanceMember(I0, "i0"),))
    effects = under_test.on_membership(news, 1.0)
    assert [
        each.ended.peer for each in effects if isinstance(each, OutgoingMigrationEnded)
    ] == peers


def num_reserved(under_test: InstanceCore) -> int:
    """The blocks for which the first stage asks."""
    progress = RequestPosition(is_queuing=False, num_full_blocks=1, num_blocks=2, num_preemptions=0)
    effects = under_test.on_outcome(ORDERED, Inspected(progress, b"request"), 0.0)
    (asked,) = [each.message for each in effects if isinstance(each, Send)]
    assert isinstance(asked, Reserve)
    return asked.num_blocks


@pytest.mark.parametrize(("kv_format", "is_moved"), [("", True), ("other", False)])
def test_requests_move_without_their_memory_to_instances_of_other_weights(
    kv_format: str, is_moved: bool
) -> None:
    under_test = ordered(
        InstanceMember(I2, "i2", kv_format=kv_format),
        order=structs.replace(TOLD_TO_MOVE, destination=I2, mode=Mode.LIVE),
    )
    assert (num_reserved(under_test) > 0) is is_moved


def with_i2(before: Membership, kv_format: str) -> Membership:
    """The next membership, in which i2 is listed as well."""
    instances = (*before.instances, InstanceMember(I2, "i2", kv_format=kv_format))
    return structs.replace(before, version=before.version + 1, instances=instances)


@pytest.mark.parametrize(("kv_format", "is_moved"), [("", True), ("other", False)])
def test_a_destination_is_used_when_the_membership_has_its_kv_format(
    kv_format: str, is_moved: bool
) -> None:
    """The scheduler's order may overtake the membership; it comes again in the next round."""
    under_test = ordered(order=None)
    assert not inspects(under_test.on_message(SetDestination(I2, REASON), [], 0.0))
    assert not inspects(under_test.on_message(with_i2(under_test.membership, kv_format), [], 0.0))
    assert inspects(under_test.on_message(SetDestination(I2, REASON), [], 0.0)) == [R]
    assert (num_reserved(under_test) > 0) is is_moved


def test_no_prefix_is_copied_to_an_instance_that_the_membership_does_not_have() -> None:
    under_test = ordered(order=None)
    copy = CopyPrefix(RequestId("another"), I2, b"hashes", 0)
    done = PrefixDone(copy.request_id, is_copied=False)
    assert under_test.on_message(copy, [], 0.0) == [ToMailbox("scheduler", done)]
    under_test.on_message(with_i2(under_test.membership, ""), [], 0.0)
    assert addressed(under_test.on_message(copy, [], 0.0)) == []
    assert under_test.has_open_migrations


def test_no_memory_leaves_an_instance_that_does_not_know_its_own_kv_format() -> None:
    """It was warm, and the scheduler heard first that it serves."""
    under_test = InstanceCore(I0, LlumletConfig(policy=LLUMNIX))
    there = (InstanceMember(I1, "i1"),)
    under_test.on_membership(Membership(1, there, (), "scheduler"), 0.0)
    under_test.on_view(replace(view(running(R)), instance_id=I0), 0.0)
    assert inspects(under_test.on_message(SetDestination(I1), [], 0.0)) == [R]
    assert num_reserved(under_test) == 0


REASON = MoveReason(MoveCause.MEMORY, 12.0, 300.0, 48.0, "shortest")


def told(effects: list[InstanceEffect]) -> list[MoveEnded]:
    """What the front end is told of migrations, for the histories of its requests."""
    to_frontend = [each.message for each in addressed(effects) if each.address == "mailbox of 0"]
    return [each for each in to_frontend if isinstance(each, MoveEnded)]


def test_the_front_end_is_told_how_a_request_moved_and_why() -> None:
    under_test = ordered(order=None)
    under_test.on_message(SetDestination(I1, REASON), [], 1.0)
    # The destination may be unset before the migration has ended.
    under_test.on_message(SetDestination(None), [], 1.5)
    effects = moved_out(under_test, drained_s=2.0, ended_s=2.25)
    assert told(effects) == [MoveEnded(I0, R, I1, "committed", 1, 0.25, REASON)]
    effects += under_test.on_view(replace(view(), instance_id=I0), 3.0)
    assert reported_ends(effects) == [MigrationEnd(COMMITTED, 1, 0.25, "memory")]


def test_a_move_that_ends_with_its_destination_keeps_its_reason() -> None:
    under_test = ordered(order=None)
    under_test.on_message(SetDestination(I1, REASON), [], 1.0)
    before = under_test.membership
    alone = tuple(each for each in before.instances if each.instance_id != I1)
    after = structs.replace(before, version=before.version + 1, instances=alone)
    effects = under_test.on_message(after, [], 2.0)
    assert [each.reason for each in told(effects)] == [REASON]


def test_the_bytes_that_were_sent_are_reported() -> None:
    under_test = ordered()
    under_test.on_sent(4_096)
    under_test.on_sent(1_024)
    effects = under_test.on_view(replace(view(), instance_id=I0), 3.0)
    reports = [each.message for each in addressed(effects) if isinstance(each.message, LoadReport)]
    assert [each.num_sent_bytes for each in reports] == [5_120]


def test_the_front_end_is_told_that_a_request_did_not_move() -> None:
    under_test = ordered(order=None)
    under_test.on_message(SetDestination(I1, REASON), [], 1.0)
    effects = under_test.on_outcome(ORDERED, Inspected(None), 1.0)
    assert told(effects) == [MoveEnded(I0, R, I1, "request_unknown", 0, 0.0, REASON)]


def test_an_operators_order_is_not_the_schedulers() -> None:
    under_test = ordered()
    under_test.on_message(SetDestination(I1, REASON), [], 1.0)
    (moved,) = told(moved_out(under_test, drained_s=2.0, ended_s=2.25))
    assert moved.reason is None
