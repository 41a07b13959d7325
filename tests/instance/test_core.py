"""An instance around its llumlet: the owners of its requests, and the addressees of its answers."""

from dataclasses import replace

import pytest
from msgspec import structs

from sterna.config import LlumletConfig, PolicyConfig
from sterna.instance.core import (
    REPEAT_NEWS_S,
    AddToEngine,
    CallEngine,
    FrontendGone,
    InstanceCore,
    InstanceEffect,
    SetTerminating,
)
from sterna.messages.actors import (
    AbortRequests,
    AddRequest,
    CallUtility,
    Emptied,
    FinalAck,
    FrontendMember,
    HandedBack,
    InstanceMember,
    ListRequests,
    LoadReport,
    Membership,
    MigrateRequest,
    MigrationMessage,
    OwnerQuery,
    OwnerReply,
    RequestsMoved,
    SetDestination,
    TokenBatch,
    TokenSpan,
    UtilityResult,
)
from sterna.messaging.send_effects import KeepOnly, ToMailbox, Unexpected
from sterna.migration.messages import (
    AbortRequest,
    BlocksReserved,
    Drained,
    Inspect,
    Inspected,
    Mode,
    RequestPosition,
    ReservationFreed,
    ReservationId,
    Reserve,
    ReserveBlocks,
    Reserved,
)
from sterna.policy.presets import INFAAS_PP, LLUMNIX
from sterna.types import (
    FrontendId,
    Immovable,
    InstanceId,
    InstanceView,
    MigrationId,
    Priority,
    RequestId,
)
from tests.instance.llumlets import inspects, queuing, running, view

I0 = InstanceId("i0")
F0, F1 = FrontendId(0), FrontendId(1)
R = RequestId("r")


def core() -> InstanceCore:
    return InstanceCore(I0, LlumletConfig(policy=LLUMNIX))


def membership(version: int, *frontends: FrontendId) -> Membership:
    there = tuple(FrontendMember(each, f"mailbox of {each}") for each in frontends)
    return Membership(version, (InstanceMember(I0, "i0"),), there, None)


def with_scheduler(version: int, scheduler: str | None) -> Membership:
    """Two instances."""
    there = (InstanceMember(I0, "i0"), InstanceMember(InstanceId("i1"), "i1"))
    return Membership(version, there, (), scheduler)


def reported(effects: list[InstanceEffect]) -> list[int]:
    """The last dispatch of each load report."""
    sent = [each.message for each in effects if isinstance(each, ToMailbox)]
    return [each.load.last_dispatch for each in sent if isinstance(each, LoadReport)]


def test_a_front_end_that_is_not_known_yet_is_answered_when_it_is() -> None:
    """It heard of the instance before the instance heard of anybody."""
    under_test = core()
    assert under_test.on_message(OwnerQuery(F0, 7, (R,)), [], 0.0) == []
    effects = under_test.on_message(membership(1, F0), [], 0.0)
    assert ToMailbox("mailbox of 0", OwnerReply(I0, 7, ())) in effects


def test_a_scheduler_is_told_the_load_as_soon_as_it_is_heard_of() -> None:
    """An idle instance out of the warm pool, and one whose scheduler has a successor: until they
    have reported, nobody is sent to them, and the next heartbeat may be a second away."""
    under_test = core()
    under_test.on_view(view(), 0.0)

    def told(version: int, scheduler: str | None, now_s: float) -> list[str]:
        news = structs.replace(membership(version), scheduler=scheduler)
        effects = under_test.on_message(news, [], now_s)
        sent = [each for each in effects if isinstance(each, ToMailbox)]
        return [each.address for each in sent if isinstance(each.message, LoadReport)]

    assert told(1, "scheduler 0", 0.3) == ["scheduler 0"]
    assert told(2, "scheduler 0", 0.4) == []
    assert told(3, None, 0.5) == []
    assert told(4, "scheduler 1", 0.6) == ["scheduler 1"]


def test_load_reports_have_the_counts_of_caches() -> None:
    under_test = core()
    under_test.on_message(structs.replace(membership(1, F0), scheduler="scheduler"), [], 0.0)
    counts = {"num_prefix_tokens": 96, "num_prefix_hits": 64, "external_counts": (32, 16)}

    effects = under_test.on_view(replace(view(running(R, 64)), **counts), 0.1)

    sent = [each.message for each in effects if isinstance(each, ToMailbox)]
    [reported] = [each for each in sent if isinstance(each, LoadReport)]
    assert {name: getattr(reported, name) for name in counts} == counts


def test_load_reports_have_the_memory_of_each_execution_priority() -> None:
    under_test = core()
    under_test.on_message(structs.replace(membership(1, F0), scheduler="scheduler"), [], 0.0)
    normal = running(R, 64)
    urgent = structs.replace(running(RequestId("urgent"), 32), execution_priority=Priority(1))

    effects = under_test.on_view(view(normal, urgent, urgent), 0.1)

    sent = [each.message for each in effects if isinstance(each, ToMailbox)]
    [reported] = [each for each in sent if isinstance(each, LoadReport)]
    assert dict(reported.usage_by_priority) == {
        Priority(0): normal.physical_usage_tokens,
        Priority(1): 2 * urgent.physical_usage_tokens,
    }


def test_a_dispatch_is_in_flight_until_the_engine_shows_it() -> None:
    """An engine takes requests in between two steps, which may be seconds apart. What came
    meanwhile is in none of the numbers of a report; if the scheduler took it for reported, it would
    send the whole of a burst to this instance."""
    under_test = core()
    under_test.on_message(structs.replace(membership(1, F0), scheduler="scheduler"), [], 0.0)

    assert reported(under_test.on_view(view(running("old", 64)), 0.0)) == [0]
    under_test.on_message(AddRequest(F0, R, 7), [b"request"], 0.1)
    assert reported(under_test.on_tick(10.0)) == [0], "a heartbeat while the engine steps"
    # The step that was under way has ended.
    assert reported(under_test.on_view(view(running("old", 96)), 20.0)) == [0]
    both = view(running("old", 96), running(R, 64))
    assert reported(under_test.on_view(both, 30.0)) == [7]
    under_test.on_message(AddRequest(F0, RequestId("next"), 8), [b"request"], 30.1)
    assert reported(under_test.on_view(view(running(R, 64), queuing("next")), 40.0)) == [8]


@pytest.mark.parametrize("is_aborted", [False, True], ids=["refused", "aborted"])
def test_a_dispatch_that_no_view_ever_shows_does_not_stay_in_flight(is_aborted: bool) -> None:
    under_test = core()
    under_test.on_message(structs.replace(membership(1, F0), scheduler="scheduler"), [], 0.0)
    under_test.on_view(view(), 0.0)
    under_test.on_message(AddRequest(F0, R, 7), [b"request"], 0.1)
    if is_aborted:
        under_test.on_message(AbortRequests((R,)), [], 0.1)
    else:
        under_test.on_outputs(F0, (TokenSpan(R, 0, 0, True),), [b"error"], 0.1)
    assert reported(under_test.on_tick(0.2)) == [7]


@pytest.mark.parametrize("is_shown", [True, False], ids=["older shown", "older aborted"])
def test_an_end_does_not_take_older_dispatches_out_of_flight(is_shown: bool) -> None:
    """Whoever reports a number says that all below it are in its numbers, too."""
    under_test = core()
    under_test.on_message(structs.replace(membership(1, F0), scheduler="scheduler"), [], 0.0)
    under_test.on_view(view(), 0.0)
    for name, number in (("first", 5), ("second", 6), ("third", 7)):
        under_test.on_message(AddRequest(F0, RequestId(name), number), [b"request"], 0.1)

    under_test.on_message(AbortRequests((RequestId("third"),)), [], 0.2)
    assert reported(under_test.on_tick(10.0)) == [0]
    under_test.on_message(AbortRequests((RequestId("first"),)), [], 10.1)
    assert reported(under_test.on_tick(20.0)) == [5]
    if is_shown:
        assert reported(under_test.on_view(view(running("second", 64)), 30.0)) == [7]
    else:
        under_test.on_message(AbortRequests((RequestId("second"),)), [], 20.1)
        assert reported(under_test.on_tick(30.0)) == [7]


def committing(config: LlumletConfig | None = None) -> InstanceCore:
    """A core with a request of front end 0, which is drained, and waits for the verdict of i1."""
    under_test = InstanceCore(I0, config or LlumletConfig(policy=LLUMNIX))
    peer, there = InstanceId("i1"), InstanceMember(InstanceId("i1"), "i1")
    under_test.on_membership(
        structs.replace(membership(1, F0), instances=(InstanceMember(I0, "i0"), there)), 0.0
    )
    under_test.on_message(AddRequest(F0, R, 1), [b"request"], 0.0)
    order = MigrateRequest("mailbox of 0", 1, R, peer, Mode.RECOMPUTE)
    (inspect,) = [
        each for each in under_test.on_message(order, [], 0.0) if isinstance(each, Inspect)
    ]
    migration_id = inspect.migration_id
    progress = RequestPosition(is_queuing=True, num_full_blocks=0, num_blocks=0, num_preemptions=0)
    under_test.on_outcome(migration_id, Inspected(progress, b"request"), 0.0)
    reserved = Reserved(migration_id, ReservationId(1), 0, ("i1",))
    under_test.on_message(MigrationMessage(peer, reserved), [], 0.0)
    assert owned(under_test) == OwnerReply(I0, 7, (R,), version=1)
    under_test.on_outcome(migration_id, Drained(0, b"state"), 0.0)
    return under_test


def owned(under_test: InstanceCore) -> OwnerReply:
    """What it says when it is asked for the request."""
    (effect,) = under_test.on_message(OwnerQuery(F0, 7, (R,)), [], 0.0)
    assert isinstance(effect, ToMailbox)
    assert isinstance(effect.message, OwnerReply)
    return effect.message


def test_a_request_whose_commit_is_under_way_is_not_said_to_be_here() -> None:
    """The peer may have adopted it and died: its late Committed would free what was claimed, and
    nobody would have the request."""
    assert owned(committing()) == OwnerReply(I0, 7, (), arriving=(R,), version=1)


def test_tokens_for_a_front_end_that_is_not_known_yet_are_kept_in_order() -> None:
    under_test = core()
    batches = [TokenBatch(I0, (TokenSpan(R, i, 1, False),)) for i in range(3)]
    under_test.on_membership(membership(1), 0.0)
    for batch in batches:
        assert under_test.on_outputs(F1, batch.spans, [b"token"], 0.0) == []
    under_test.on_membership(membership(2, F0), 0.0)
    effects = under_test.on_membership(membership(3, F0, F1), 0.0)
    assert [each for each in effects if isinstance(each, ToMailbox)] == [
        ToMailbox("mailbox of 1", batch, [b"token"]) for batch in batches
    ]


def test_a_request_is_here_until_its_last_token() -> None:
    under_test = core()
    under_test.on_membership(membership(1, F0), 0.0)
    under_test.on_message(AddRequest(F0, R, 1), [b"payload"], 0.0)
    here = []
    for span in (TokenSpan(R, 0, 1, False), TokenSpan(R, 1, 1, True)):
        effects = under_test.on_outputs(F0, (span,), [b"token"], 0.0)
        assert effects == [ToMailbox("mailbox of 0", TokenBatch(I0, (span,)), [b"token"])]
        here.append(set(under_test.requests()))
    assert here == [{R}, set()]


def test_nothing_is_kept_for_a_front_end_that_is_gone() -> None:
    under_test = core()
    for each in (membership(1, F0), membership(2)):
        under_test.on_membership(each, 0.0)
    assert under_test.on_outputs(F0, (TokenSpan(R, 0, 1, False),), [b"token"], 0.0) == []
    effects = under_test.on_membership(membership(3, F1), 0.0)
    assert not [each for each in effects if isinstance(each, ToMailbox)]


def test_a_request_that_comes_after_its_front_ends_death_is_not_begun() -> None:
    under_test = core()
    for each in (membership(1, F0), membership(2)):
        under_test.on_membership(each, 0.0)
    effects = under_test.on_message(AddRequest(F0, R, 0), [b"payload"], 0.0)
    assert not [each for each in effects if isinstance(each, AddToEngine)]
    assert not under_test.requests()


def test_a_front_ends_death_ends_its_requests_and_no_others() -> None:
    under_test = core()
    under_test.on_membership(membership(1, F0, F1), 0.0)
    other = RequestId("other")
    under_test.on_message(AddRequest(F0, R, 0), [b"payload"], 0.0)
    under_test.on_message(AddRequest(F1, other, 0), [b"payload"], 0.0)
    effects = under_test.on_membership(membership(2, F1), 0.0)
    assert [each for each in effects if isinstance(each, AbortRequest)] == [AbortRequest(R)]


def test_a_request_that_moves_here_after_its_front_ends_death_is_ended() -> None:
    """Its source has died, say, before it could tell that nobody wants it any more."""
    under_test = core()
    for each in (membership(1, F0), membership(2)):
        under_test.on_membership(each, 0.0)
    assert AbortRequest(R) in under_test.on_adopted(F0, R, first_index=3, now_s=0.0)


def test_nothing_begins_to_move_while_there_is_no_scheduler() -> None:
    """Section 5: while the global scheduler is bypassed, "migration is disabled"."""
    under_test = core()
    under_test.on_membership(with_scheduler(1, "mailbox of a scheduler"), 0.0)
    under_test.on_message(SetDestination(InstanceId("i1")), [], 0.0)
    under_test.on_membership(with_scheduler(2, None), 0.0)
    assert not inspects(under_test.on_view(view(running("first")), 0.0))
    under_test.on_membership(with_scheduler(3, "mailbox of another one"), 0.0)
    assert not inspects(under_test.on_view(view(running("first")), 0.0))
    assert inspects(under_test.on_message(SetDestination(InstanceId("i1")), [], 0.0))


def addressed(effects: list[InstanceEffect]) -> list[ToMailbox]:
    return [each for each in effects if isinstance(each, ToMailbox)]


def test_an_older_membership_is_ignored() -> None:
    under_test = core()
    newest = membership(2, F0)
    under_test.on_message(newest, [], 0.0)
    for version in (1, 2):
        assert under_test.on_message(membership(version, F1), [], 0.0) == []
    assert under_test.membership == newest


def test_connections_are_kept_to_those_who_are_there() -> None:
    under_test = core()
    news = structs.replace(with_scheduler(1, "scheduler"), supervisor="supervisor")
    there = {"i0", "i1", "scheduler", "supervisor"}
    assert KeepOnly(frozenset(there)) in under_test.on_message(news, [], 0.0)
    effects = under_test.on_message(membership(2, F0), [], 0.0)
    assert KeepOnly(frozenset({"i0", "mailbox of 0"})) in effects
    assert under_test.address_of(InstanceId("i1")) is None
    assert under_test.address_of(I0) == "i0"


def test_the_death_of_front_ends_is_told_to_the_log_in_order() -> None:
    under_test = core()
    frontends = [FrontendId(k) for k in (1, 3, 8, 16)]
    under_test.on_membership(membership(1, *frontends), 0.0)
    for each in frontends:
        under_test.on_message(AddRequest(each, RequestId(f"r{each}"), 0), [b"payload"], 0.0)
    effects = under_test.on_membership(membership(2), 0.0)
    told = [each for each in effects if isinstance(each, FrontendGone | AbortRequest)]
    assert told == [
        effect
        for each in frontends
        for effect in (FrontendGone(each), AbortRequest(RequestId(f"r{each}")))
    ]


def test_what_instances_that_died_had_sent_is_void() -> None:
    """It was under way when they died: what they offer will never come."""
    under_test = core()
    under_test.on_membership(with_scheduler(1, None), 0.0)
    reserve = Reserve(MigrationId("i1-1"), R, 0, 0, 1, True, None, b"request")
    offer = MigrationMessage(I1, reserve)
    under_test.on_membership(membership(2), 0.0)
    assert under_test.on_message(offer, [], 0.1) == []
    assert not under_test.has_open_migrations
    # One that is only not heard of yet may offer what it has.
    stranger = MigrationMessage(InstanceId("i2"), reserve)
    assert any(isinstance(each, ReserveBlocks) for each in under_test.on_message(stranger, [], 0.2))


def test_a_request_that_comes_by_a_migration_is_said_to_arrive() -> None:
    under_test = core()
    news = structs.replace(with_scheduler(1, None), frontends=membership(1, F0).frontends)
    under_test.on_membership(news, 0.0)
    reserve = Reserve(MigrationId("i1-1"), R, 0, 0, 1, True, None, b"request")
    under_test.on_message(MigrationMessage(I1, reserve), [], 0.0)
    assert owned(under_test) == OwnerReply(I0, 7, (), arriving=(R,), version=1)


def test_only_the_requests_that_are_asked_for_are_said_to_be_here() -> None:
    under_test = core()
    under_test.on_membership(membership(1, F0), 0.0)
    for name in ("r", "s", "t"):
        under_test.on_message(AddRequest(F0, RequestId(name), 0), [b"payload"], 0.0)
    asked = tuple(map(RequestId, ("t", "u", "r")))
    assert under_test.on_message(OwnerQuery(F0, 7, asked), [], 0.0) == [
        ToMailbox("mailbox of 0", OwnerReply(I0, 7, (RequestId("t"), R), version=1))
    ]


def test_a_request_that_moved_here_is_told_of_with_the_membership_that_is_known() -> None:
    under_test = core()
    under_test.on_membership(membership(4, F0), 0.0)
    assert under_test.on_adopted(F0, R, first_index=3, now_s=0.0) == [
        ToMailbox("mailbox of 0", RequestsMoved(I0, (R,), (3,), 4))
    ]
    assert under_test.requests() == {R}


def test_a_denial_names_the_membership_that_is_known() -> None:
    """The request may have been passed on to an instance that the front end does not know yet."""
    under_test = core()
    under_test.on_membership(membership(4, F0), 0.0)
    assert owned(under_test) == OwnerReply(I0, 7, (), version=4)


def test_a_request_goes_to_the_engine() -> None:
    under_test = core()
    request = AddRequest(F0, R, 7, (1, 2))
    assert under_test.on_message(request, [b"payload"], 0.0) == [
        AddToEngine(F0, request, [b"payload"])
    ]
    assert under_test.requests() == {R}


def test_a_call_goes_to_the_engine_and_its_result_to_the_front_end() -> None:
    under_test = core()
    under_test.on_membership(membership(1, F0), 0.0)
    call = CallUtility(F0, 9, "reset")
    assert under_test.on_message(call, [b"arguments"], 0.0) == [CallEngine(call, b"arguments")]
    assert under_test.on_utility_result(F0, 9, b"result") == [
        ToMailbox("mailbox of 0", UtilityResult(I0, 9), [b"result"])
    ]


def test_a_message_that_is_for_others_is_unexpected() -> None:
    stray = Emptied(I0, 3)
    assert core().on_message(stray, [], 0.0) == [Unexpected(stray)]


def test_of_what_is_kept_for_front_ends_that_are_not_known_the_oldest_is_dropped() -> None:
    under_test = core()
    num_kept = 10_000
    for call_id in range(num_kept + 2):
        under_test.on_utility_result(F0, call_id, b"result")
    sent = addressed(under_test.on_membership(membership(1, F0), 0.0))
    assert len(sent) == num_kept
    assert sent[0].message == UtilityResult(I0, 2)


# ------------------------------------------------------------------------------- its end

SUPERVISOR = "mailbox of the supervisor"
EMPTIED = ToMailbox(SUPERVISOR, Emptied(I0, 3))
LAST = TokenSpan(R, 0, 1, True)


def terminating(version: int, *frontends: FrontendId) -> Membership:
    itself = InstanceMember(I0, "i0", is_terminating=True, emptied_since=3)
    return structs.replace(
        membership(version, *frontends), instances=(itself,), supervisor=SUPERVISOR
    )


def test_it_may_end_when_its_front_end_has_heard_all_that_it_was_told() -> None:
    under_test = core()
    under_test.on_message(terminating(3, F0), [], 0.0)
    under_test.on_adopted(F0, R, 0, 0.0)
    under_test.on_outputs(F0, (LAST,), [b"token"], 0.0)
    for num_heard in (0, 1):
        assert under_test.on_message(FinalAck(F0, 3, num_heard), [], 1.0) == []
    assert under_test.on_message(FinalAck(F0, 3, 2), [], 1.0) == [EMPTIED]


def test_the_engine_hears_when_the_emptying_begins_and_ends() -> None:
    under_test = core()
    assert SetTerminating(True) in under_test.on_membership(terminating(3), 0.0)
    assert SetTerminating(False) in under_test.on_membership(membership(4), 0.0)


def test_the_scheduler_hears_at_once_that_the_emptying_begins() -> None:
    under_test = core()
    told = structs.replace(terminating(3), scheduler="scheduler")
    under_test.on_membership(
        structs.replace(told, version=2, instances=(InstanceMember(I0, "i0"),)), 0.0
    )
    under_test.on_view(view(), 0.0)
    effects = under_test.on_membership(told, 0.001)
    reports = [each.message for each in addressed(effects)]
    assert [each.load.is_terminating for each in reports if isinstance(each, LoadReport)] == [True]


def test_an_instance_does_not_end_while_it_has_a_request() -> None:
    """A front end sends its FinalAck too soon."""
    under_test = core()
    under_test.on_message(AddRequest(F0, R, 1), [b"payload"], 0.0)
    under_test.on_message(terminating(3, F0), [], 0.0)
    assert under_test.on_message(FinalAck(F0, 3), [], 1.0) == []
    assert EMPTIED in under_test.on_message(AbortRequests((R,)), [], 2.0)


def test_an_instance_ends_with_its_last_request_where_no_front_end_is_left() -> None:
    under_test = core()
    under_test.on_message(AddRequest(F0, R, 1), [b"payload"], 0.0)
    assert EMPTIED not in under_test.on_message(terminating(3), [], 0.0)
    assert under_test.on_outputs(F0, (LAST,), [b"error"], 1.0) == [EMPTIED]


def test_an_instance_that_is_not_being_emptied_does_not_end() -> None:
    under_test = core()
    news = structs.replace(terminating(3), instances=(InstanceMember(I0, "i0", emptied_since=3),))
    assert EMPTIED not in under_test.on_message(news, [], 0.0)


def test_an_instance_does_not_end_while_one_of_its_peers_waits_for_an_answer() -> None:
    under_test = core()
    others = (*terminating(3).instances, InstanceMember(I1, "i1"))
    under_test.on_message(structs.replace(with_scheduler(2, None), instances=others[1:]), [], 0.0)
    reserve = Reserve(MigrationId("i1-1"), R, 0, 0, 1, True, None, b"request")
    under_test.on_message(MigrationMessage(I1, reserve), [], 0.0)
    assert under_test.has_open_migrations
    news = structs.replace(terminating(3), instances=others)
    assert EMPTIED not in under_test.on_message(news, [], 1.0)
    effects = under_test.on_message(terminating(4), [], 2.0)
    effects += under_test.on_outcome(MigrationId("i1-1"), BlocksReserved(0, ()), 2.0)
    assert EMPTIED not in effects
    # The engine shows the freed memory before it says that the memory is free.
    assert EMPTIED not in under_test.on_view(view(), 2.0)
    effects = under_test.on_outcome(MigrationId("i1-1"), ReservationFreed(), 2.0)
    assert not under_test.has_open_migrations
    assert EMPTIED in effects


def test_while_there_is_no_supervisor_the_end_is_told_to_the_next_one() -> None:
    under_test = core()
    nobody = structs.replace(terminating(3), supervisor=None)
    assert addressed(under_test.on_message(nobody, [], 0.0)) == []
    assert addressed(under_test.on_message(terminating(4), [], 0.0)) == [EMPTIED]


def test_what_it_hands_back_is_to_be_heard_too() -> None:
    under_test, effects = emptied(LASTING, SUCCESSOR)
    assert len(parted(effects)) == 2
    told = structs.replace(under_test.membership, version=2, supervisor=SUPERVISOR)
    under_test.on_message(told, [], LIMIT_S)
    assert under_test.on_message(FinalAck(F0, 1, 0), [], LIMIT_S) == []
    may_end = ToMailbox(SUPERVISOR, Emptied(I0, 1))
    assert under_test.on_message(FinalAck(F0, 1, 1), [], LIMIT_S) == [may_end]


def test_what_is_kept_counts_when_it_is_sent_and_answers_do_not() -> None:
    under_test = core()
    under_test.on_message(membership(1), [], 0.0)
    under_test.on_outputs(F0, (LAST,), [b"token"], 0.0)
    under_test.on_message(terminating(3, F0), [], 0.0)
    under_test.on_message(OwnerQuery(F0, 7, (R,)), [], 0.0)
    assert under_test.on_message(FinalAck(F0, 3, 0), [], 1.0) == []
    assert under_test.on_message(FinalAck(F0, 3, 1), [], 1.0) == [EMPTIED]


def test_nobody_waits_for_what_its_mailbox_has_dropped() -> None:
    under_test = core()
    under_test.on_message(terminating(3, F0, F1), [], 0.0)
    under_test.on_message(FinalAck(F1, 3), [], 0.5)
    (effect,) = under_test.on_outputs(F0, (LAST,), [b"token"], 0.0)
    assert isinstance(effect, ToMailbox)
    under_test.on_unsent(effect.address, effect.message)
    under_test.on_unsent(effect.address, OwnerReply(I0, 7, ()))
    assert under_test.on_message(FinalAck(F0, 3), [], 1.0) == [EMPTIED]


# --------------------------------------------- what cannot move, on an instance that is to end

I1 = InstanceId("i1")
LIMIT_S = 60.0


def emptied(
    immovable: Immovable | None,
    *others: InstanceMember,
    hands_back: bool = True,
    policy: PolicyConfig = LLUMNIX,
) -> tuple[InstanceCore, list[InstanceEffect]]:
    """An instance with one request of front end 0, which is being emptied since 0 s, beside these
    others; and what it does when the limit has come."""
    config = LlumletConfig(policy=policy, drain_limit_s=LIMIT_S, hands_back=hands_back)
    under_test = InstanceCore(I0, config)
    frontend = FrontendMember(F0, "mailbox of 0")
    itself = InstanceMember(I0, "i0", is_terminating=True, emptied_since=1)
    under_test.on_membership(Membership(1, (itself, *others), (frontend,), None), 0.0)
    under_test.on_message(AddRequest(F0, R, 0), [b"payload"], 0.0)
    assert parted(under_test.on_view(seen(immovable), 1.0)) == []
    return under_test, under_test.on_tick(LIMIT_S)


def seen(immovable: Immovable | None) -> InstanceView:
    return replace(view(structs.replace(running(R), immovable=immovable)), instance_id=I0)


def parted(effects: list[InstanceEffect]) -> list[InstanceEffect]:
    return [
        each
        for each in effects
        if isinstance(each, AbortRequest)
        or (isinstance(each, ToMailbox) and isinstance(each.message, HandedBack))
    ]


SUCCESSOR = InstanceMember(I1, "i1")
LASTING = Immovable.UNSUPPORTED_REQUEST_FEATURE


def test_what_cannot_move_is_handed_back_when_the_limit_has_come() -> None:
    under_test, effects = emptied(LASTING, SUCCESSOR)
    assert parted(effects) == [
        AbortRequest(R),
        ToMailbox("mailbox of 0", HandedBack(I0, (R,))),
    ]
    assert not under_test.requests()
    # Until the engine has let go of it, views still show it.
    assert parted(under_test.on_view(seen(LASTING), LIMIT_S + 1.0)) == []


def test_what_cannot_move_and_comes_after_the_limit_is_handed_back_as_it_is_seen() -> None:
    under_test, _ = emptied(LASTING, SUCCESSOR)
    under_test.on_message(AddRequest(F0, R, 1), [b"payload"], LIMIT_S + 1.0)
    assert parted(under_test.on_view(seen(LASTING), LIMIT_S + 1.5)) == [
        AbortRequest(R),
        ToMailbox("mailbox of 0", HandedBack(I0, (R,))),
    ]


@pytest.mark.parametrize("immovable", [None, Immovable.PREFILLING, Immovable.MIGRATING])
def test_what_can_move_or_will_be_able_to_is_not_handed_back(immovable: Immovable | None) -> None:
    under_test, effects = emptied(immovable, SUCCESSOR)
    assert parted(effects) == []
    assert under_test.requests() == {R}


def test_what_was_handed_back_unheard_is_told_until_it_is_heard() -> None:
    """The front end's mailbox is full; it would wait for the request for ever."""
    under_test, effects = emptied(LASTING, SUCCESSOR)
    handed_back = ToMailbox("mailbox of 0", HandedBack(I0, (R,)))
    assert handed_back in effects
    begun_s = LIMIT_S + 5.0
    under_test.on_unsent(handed_back.address, handed_back.message)
    assert repeated(under_test, begun_s) == [handed_back]
    under_test.on_unsent(handed_back.address, handed_back.message)
    assert under_test.next_deadline_s == begun_s + REPEAT_NEWS_S
    assert repeated(under_test, begun_s + REPEAT_NEWS_S / 2) == []
    assert repeated(under_test, begun_s + REPEAT_NEWS_S) == [handed_back]
    assert repeated(under_test, begun_s + 9.0) == []


def repeated(under_test: InstanceCore, now_s: float) -> list[ToMailbox]:
    return [each for each in under_test.on_tick(now_s) if isinstance(each, ToMailbox)]


def test_the_end_of_a_request_that_was_not_heard_hands_it_back() -> None:
    """It goes on elsewhere from the tokens that its client has."""
    under_test = core()
    under_test.on_message(membership(1, F0), [], 0.0)
    under_test.on_message(AddRequest(F0, R, 1), [b"payload"], 0.0)
    (sent,) = under_test.on_outputs(F0, (LAST,), [b"token"], 1.0)
    assert isinstance(sent, ToMailbox)
    under_test.on_unsent(sent.address, sent.message)
    assert ToMailbox(sent.address, HandedBack(I0, (LAST.request_id,))) in under_test.on_tick(1.0)
    assert under_test.on_tick(3.0) == []


def test_where_nothing_migrates_everything_is_handed_back() -> None:
    under_test, effects = emptied(None, SUCCESSOR, policy=INFAAS_PP)
    assert len(parted(effects)) == 2
    assert not under_test.requests()


def test_what_an_operator_has_move_is_not_handed_back_meanwhile() -> None:
    """It would be begun at another instance while its destination has it already."""
    config = LlumletConfig(policy=INFAAS_PP, drain_limit_s=LIMIT_S)
    under_test = committing(config)
    itself = InstanceMember(I0, "i0", is_terminating=True, emptied_since=2)
    news = structs.replace(membership(2, F0), instances=(itself, SUCCESSOR))
    under_test.on_membership(news, 0.0)
    under_test.on_view(seen(None), 1.0)
    assert parted(under_test.on_tick(LIMIT_S)) == []
    assert under_test.requests() == {R}


def test_what_waits_in_the_queue_is_handed_back_as_well() -> None:
    under_test, _ = emptied(None, SUCCESSOR, policy=INFAAS_PP)
    under_test.on_message(AddRequest(F0, R, 1), [b"payload"], LIMIT_S + 1.0)
    waiting = replace(view(queuing(R)), instance_id=I0)
    assert len(parted(under_test.on_view(waiting, LIMIT_S + 1.5))) == 2


def test_an_engine_that_has_shown_nothing_yet_has_nothing_to_hand_back() -> None:
    under_test = InstanceCore(I0, LlumletConfig(policy=LLUMNIX, drain_limit_s=LIMIT_S))
    itself = InstanceMember(I0, "i0", is_terminating=True, emptied_since=1)
    under_test.on_membership(Membership(1, (itself, SUCCESSOR), (), None), 0.0)
    assert under_test.on_tick(LIMIT_S) == []


@pytest.mark.parametrize(
    "others",
    [(), (InstanceMember(I1, "i1", is_terminating=True),)],
    ids=["alone", "both are to end"],
)
def test_nothing_is_handed_back_where_no_other_instance_could_have_it(
    others: tuple[InstanceMember, ...],
) -> None:
    under_test, effects = emptied(LASTING, *others)
    assert parted(effects) == []
    assert under_test.requests() == {R}


def test_nothing_is_handed_back_to_front_ends_that_continue_nothing() -> None:
    under_test, effects = emptied(LASTING, SUCCESSOR, hands_back=False)
    assert parted(effects) == []
    assert under_test.requests() == {R}


def test_what_came_back_from_an_instance_that_died_is_handed_back() -> None:
    """It moves no more, so that it would keep the instance from its end for as long as it runs."""
    under_test = committing(LlumletConfig(policy=LLUMNIX, drain_limit_s=LIMIT_S))
    itself = InstanceMember(I0, "i0", is_terminating=True, emptied_since=2)
    others = (itself, InstanceMember(InstanceId("i2"), "i2"))
    under_test.on_membership(structs.replace(membership(2, F0), instances=others), 0.0)
    assert owned(under_test) == OwnerReply(I0, 7, (R,), version=2)
    under_test.on_view(seen(None), 1.0)
    asked = ListRequests("mailbox of 0", 1)
    (answer,) = under_test.on_message(asked, [], 1.0)
    assert isinstance(answer, ToMailbox)
    assert Immovable.TAKEN_BACK.value.encode() in answer.message.body
    assert parted(under_test.on_tick(LIMIT_S)) == [
        AbortRequest(R),
        ToMailbox("mailbox of 0", HandedBack(I0, (R,))),
    ]


def test_what_was_taken_back_and_has_ended_moves_when_it_is_sent_here_again() -> None:
    under_test = committing()
    others = (InstanceMember(I0, "i0"), InstanceMember(InstanceId("i2"), "i2"))
    under_test.on_membership(structs.replace(membership(2, F0), instances=others), 0.0)
    order = MigrateRequest("mailbox of 0", 1, R, InstanceId("i2"))
    assert not inspects(under_test.on_message(order, [], 1.0)), "it was taken back"
    under_test.on_outputs(F0, (LAST,), [b"token"], 2.0)
    under_test.on_message(AddRequest(F0, R, 2), [b"request"], 3.0)
    assert inspects(under_test.on_message(order, [], 4.0)) == [R]
