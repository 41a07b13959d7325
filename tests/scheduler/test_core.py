"""Core of the scheduler: the members that it knows, and the addressees of its decisions."""

from dataclasses import replace

import pytest
from msgspec import structs

from sterna.config import ScalingConfig
from sterna.messages.actors import (
    HELD_INTERVAL_S,
    Absent,
    AddInstances,
    CacheReport,
    CancelDispatch,
    ClusterStats,
    Dispatched,
    DispatchRequest,
    Emptied,
    FrontendMember,
    Held,
    InstanceMember,
    InstanceStats,
    LoadReport,
    Membership,
    MigrationEnd,
    SetDestination,
    TerminateInstance,
)
from sterna.messages.reasons import HeldCause
from sterna.messaging.send_effects import KeepOnly, ToMailbox, Unexpected
from sterna.policy.presets import INFAAS_PP, LLUMNIX, STERNA
from sterna.policy.scaling import ScaleUp, Terminate
from sterna.scheduler.core import SchedulerCore, SchedulerEffect
from sterna.types import (
    NORMAL,
    CacheGroup,
    CacheLayout,
    FrontendId,
    InstanceId,
    InstanceLoad,
    Priority,
    RequestId,
    packed,
)
from tests.policy import builders

I0, I1, I2 = (InstanceId(f"i{k}") for k in range(3))
F0, F1 = FrontendId(0), FrontendId(1)
R = RequestId("r")
SUPERVISOR = "supervisor"


FOR_MEMORY = (HeldCause.MEMORY,)


def membership(
    version: int,
    *serving: InstanceId,
    absent: tuple[Absent, ...] = (),
    frontends: tuple[FrontendId, ...] = (F0,),
    supervisor: str | None = SUPERVISOR,
) -> Membership:
    members = tuple(InstanceMember(each, f"mailbox of {each}") for each in serving)
    there = tuple(FrontendMember(each, f"front end {each}") for each in frontends)
    return Membership(version, members, there, "scheduler", absent, supervisor)


def report(instance_id: InstanceId, used_tokens: int = 0, *, sequence: int = 1) -> LoadReport:
    """A report of one running request, of which there is memory for 1,000 tokens, that can move."""
    free = float(1000 - used_tokens)
    load = InstanceLoad(
        instance_id,
        sequence,
        1000,
        used_tokens,
        free,
        free,
        num_running=1,
        num_queuing=0,
        move_tokens=used_tokens // 2,
    )
    return LoadReport(load)


def ask(frontend_id: FrontendId = F0) -> DispatchRequest:
    return DispatchRequest(frontend_id, R, 64, 0.0, NORMAL, NORMAL)


def chosen(core: SchedulerCore) -> InstanceId:
    """Where a request is sent now."""
    (answer,) = core.on_message(ask(), 0.0)
    assert isinstance(answer, ToMailbox)
    assert isinstance(answer.message, Dispatched)
    return answer.message.instance_id


def serving(*instance_ids: InstanceId, scaling: ScalingConfig | None = None) -> SchedulerCore:
    """A scheduler at 0 s with these instances, of which all have reported that they are idle."""
    core = SchedulerCore(LLUMNIX, now_s=0.0, explains=False, scaling=scaling)
    core.on_membership(membership(1, *instance_ids), 0.0)
    for each in instance_ids:
        core.on_message(report(each), 0.0)
    return core


def sent(effects: list[SchedulerEffect]) -> list[ToMailbox]:
    return [each for each in effects if isinstance(each, ToMailbox)]


def destination(instance_id: InstanceId, named: InstanceId | None) -> ToMailbox:
    return ToMailbox(f"mailbox of {instance_id}", SetDestination(named))


# ---------------------------------------------------------------------------------- requests


def test_the_front_end_that_asks_is_told_the_instance() -> None:
    core = SchedulerCore(LLUMNIX, now_s=0.0, explains=False, first_dispatch_number=500)
    core.on_message(membership(1, I0, frontends=(F0, F1)), 0.0)
    core.on_message(report(I0), 0.0)
    assert core.on_message(ask(F1), 0.0) == [ToMailbox("front end 1", Dispatched(R, I0, 500))]


def test_a_front_end_that_is_not_there_is_told_nothing() -> None:
    assert serving(I0).on_message(ask(F1), 0.0) == []


def test_a_request_that_was_cancelled_gets_no_instance() -> None:
    for is_cancelled in (False, True):
        core = serving()
        assert core.on_message(ask(), 0.0) == []
        if is_cancelled:
            assert core.on_message(CancelDispatch(R), 0.5) == []
        answers = sent(core.on_message(report(I0), 1.0))
        assert answers == ([] if is_cancelled else [ToMailbox("front end 0", Dispatched(R, I0, 1))])


def test_a_request_of_a_front_end_that_died_gets_no_instance() -> None:
    """Its successor has another id, and asks for what it has itself."""
    core = serving()
    core.on_message(ask(), 0.0)
    core.on_membership(membership(2, frontends=(F1,)), 0.5)
    # This one was under way when its front end died.
    late = structs.replace(ask(), request_id=RequestId("late"))
    assert core.on_message(late, 0.5) == []
    assert core.undispatched == []
    assert core.on_message(report(I0), 1.0) == []
    assert core.on_membership(membership(3, I0, frontends=(F0, F1)), 1.5)
    assert sent(core.on_message(ask(), 2.0)) == [ToMailbox("front end 0", Dispatched(R, I0, 1))]


def test_an_instance_gets_requests_although_its_report_comes_before_the_news_of_it() -> None:
    core = serving()
    core.on_message(report(I0), 0.0)
    assert sent(core.on_message(ask(), 0.0)) == [ToMailbox("front end 0", Dispatched(R, I0, 1))]
    assert core.reports == {}


def cache_report(instance_id: InstanceId, listed_in: int) -> CacheReport:
    groups = (CacheGroup(0, 4, None),)
    return CacheReport(instance_id, b"", b"", CacheLayout(4, 4, groups), listed_in)


@pytest.mark.parametrize("dies", [False, True], ids=["its client leaves", "its front end dies"])
def test_a_prompt_that_will_not_be_computed_is_not_waited_for(dies: bool) -> None:
    def load(instance_id: InstanceId, used_tokens: int, sequence: int) -> LoadReport:
        running = [builders.running("other", used_tokens)] if used_tokens else []
        view = builders.instance(instance_id, total_tokens=100_000, running=running)
        return LoadReport(
            builders.report(view, STERNA, sequence=sequence, last_dispatch=sequence - 1)
        )

    def prompt(frontend_id: FrontendId, name: str) -> DispatchRequest:
        return DispatchRequest(
            *(frontend_id, RequestId(name), 30_004, 0.0, NORMAL, NORMAL),
            prompt_tokens=30_001,
            block_hashes=packed(range(1, 7_501)),
        )

    core = SchedulerCore(STERNA, now_s=0.0, explains=False)
    core.on_membership(membership(1, I0, I1, frontends=(F0, F1)), 0.0)
    for each in (I0, I1):
        core.on_message(cache_report(each, 1), 0.0)
        core.on_message(load(each, 0, 1), 0.0)
    first = ToMailbox("front end 0", Dispatched(RequestId("a"), I0, 1))
    assert core.on_message(prompt(F0, "a"), 0.0) == [first]
    if dies:
        core.on_membership(membership(2, I0, I1, frontends=(F1,)), 1.0)
    else:
        core.on_message(CancelDispatch(RequestId("a")), 1.0)
    core.on_message(load(I0, 85_000, 2), 1.0)
    again = ToMailbox("front end 1", Dispatched(RequestId("b"), I1, 2))
    assert core.on_message(prompt(F1, "b"), 1.0) == [again]


def test_an_instance_that_lived_between_two_memberships_is_known_no_more() -> None:
    """Its own one, the second, was overtaken by the third, in which it is dead."""
    core = serving(I0)
    reports = [structs.replace(report(I1), listed_in=2), cache_report(I1, 2)]
    for each in reports:
        core.on_message(each, 0.0)
    core.on_message(report(I0, 500, sequence=2), 0.0)
    assert chosen(core) == I1
    core.on_membership(membership(3, I0), 1.0)
    for _ in range(2):
        assert core.prefixes.contents().keys() == set()
        assert chosen(core) == I0
        # What was under way for longest.
        for each in reports:
            core.on_message(each, 2.0)


def test_an_instance_that_reports_early_is_kept_until_its_membership_comes() -> None:
    """Older ones may come after the report."""
    core = serving(I0)
    core.on_message(cache_report(I1, 3), 0.0)
    core.on_membership(membership(2, I0), 1.0)
    assert core.prefixes.contents().keys() == {I1}
    core.on_membership(membership(3, I0, I1), 2.0)
    core.on_membership(membership(4, I0, I1), 3.0)
    assert core.prefixes.contents().keys() == {I1}
    core.on_membership(membership(5, I0), 4.0)
    assert core.prefixes.contents().keys() == set()


def test_an_instance_that_is_emptied_gets_no_request_although_it_has_not_reported_so() -> None:
    def chosen(core: SchedulerCore) -> InstanceId:
        (answer,) = sent(core.on_message(ask(), 0.2))
        assert isinstance(answer.message, Dispatched)
        return answer.message.instance_id

    core = serving(I0, I1)
    assert [chosen(core), chosen(core), chosen(core)] == [I0, I1, I0]
    news = membership(2, I0, I1)
    emptied = structs.replace(news.instances[1], is_terminating=True)
    core.on_membership(structs.replace(news, instances=(news.instances[0], emptied)), 0.2)
    assert [chosen(core), chosen(core)] == [I0, I0]
    core.on_membership(membership(3, I0, I1), 0.2)
    assert chosen(core) == I1


def test_a_message_that_is_for_others_is_unexpected() -> None:
    stray = Emptied(I0, 3)
    assert serving(I0).on_message(stray, 0.0) == [Unexpected(stray)]


# ------------------------------------------------------------------------------- who is there


def test_connections_are_kept_to_those_who_are_there() -> None:
    core = SchedulerCore(LLUMNIX, now_s=0.0, explains=False)
    assert core.on_message(membership(1, I0, absent=(Absent(I1, "starting"),)), 0.0) == [
        KeepOnly(frozenset({"mailbox of i0", "front end 0", SUPERVISOR}))
    ]
    assert core.on_membership(membership(2, I1, supervisor=None), 0.0) == [
        KeepOnly(frozenset({"mailbox of i1", "front end 0"}))
    ]


@pytest.mark.parametrize("version", [1, 2])
def test_an_older_membership_is_ignored(version: int) -> None:
    core = SchedulerCore(LLUMNIX, now_s=0.0, explains=False)
    newest = membership(2, I0)
    core.on_membership(newest, 0.0)
    assert core.on_membership(membership(version, I1), 0.0) == []
    assert core.membership == newest


def test_the_newest_report_of_each_instance_that_is_there_is_known() -> None:
    core = serving(I0, I1)
    newer = report(I0, 640, sequence=2)
    core.on_message(newer, 0.1)
    core.on_message(report(I2), 0.1)
    assert core.reports == {I0: newer, I1: report(I1)}


def test_a_dead_instance_is_in_no_metrics() -> None:
    core = serving(I0, I1)
    core.on_membership(membership(2, I1), 0.1)
    core.on_message(report(I0, sequence=2), 0.2)
    assert core.reports == {I1: report(I1)}
    (stats,) = core.stats()
    assert [each.instance_id for each in stats.message.instances] == [I1]


HIGH_RUNS = ((Priority(1), 4),)


def test_every_front_end_is_told_all_loads() -> None:
    core = serving(I0, I1)
    load = structs.replace(
        report(I1, 640, sequence=2).load,
        num_running=4,
        num_queuing=3,
        num_migrating_out=2,
        num_migrating_in=5,
        num_preemptions=6,
        num_by_priority=HIGH_RUNS,
    )
    ended = (MigrationEnd("committed", 2, 0.01), MigrationEnd("no_memory", 1, 0.0))
    report_of_i1 = LoadReport(
        *(load, 7, 8, 0),
        num_prefix_tokens=90,
        num_prefix_hits=64,
        migrations=ended,
        num_sent_bytes=5_000,
        usage_by_priority=((Priority(1), 640),),
        external_counts=(20, 10),
        draft_counts=(9, 18, 7),
    )
    core.on_message(report_of_i1, 0.1)
    core.on_membership(membership(2, I0, I1, frontends=(F0, F1)), 0.2)
    stats = ClusterStats(
        (
            InstanceStats(I0, 1, 0, 0, 1000, 1000.0, 0, 0, 0, 0, 0),
            # 360 tokens are free for four requests and the head of the line.
            InstanceStats(
                *(I1, 4, 3, 640, 1000, 72.0, 2, 5, 7, 8, 6, 90, 64, 0, 5_000, HIGH_RUNS),
                usage_by_priority=((Priority(1), 640),),
                external_counts=(20, 10),
                draft_counts=(9, 18, 7),
            ),
        ),
        migrations=ended,
    )
    assert core.stats() == [ToMailbox("front end 0", stats), ToMailbox("front end 1", stats)]
    # An end of a migration counts once.
    later = structs.replace(stats, migrations=())
    assert core.stats() == [ToMailbox("front end 0", later), ToMailbox("front end 1", later)]


# ------------------------------------------------------------------------------------ rounds


def paired() -> SchedulerCore:
    """A scheduler that has named i1, which is idle, to i0, which is full."""
    core = serving(I0, I1)
    core.on_message(report(I0, 976, sequence=2), 0.1)
    deadline_s = core.next_deadline_s
    assert deadline_s == 0.2
    assert core.on_tick(deadline_s) == [destination(I0, I1), destination(I1, None)]
    return core


def test_a_source_is_told_its_destination() -> None:
    assert paired().destinations == {I0: I1}


def test_a_source_is_told_at_once_that_its_destination_is_dead() -> None:
    core = paired()
    effects = core.on_membership(membership(2, I0), 0.3)
    assert sent(effects) == [destination(I0, None)]
    assert core.destinations == {}


def test_sources_hear_of_deaths_in_the_order_of_the_dead() -> None:
    """The same messages in the same order each time that the same thing happens."""
    full, idle = [InstanceId(f"s{k}") for k in range(8)], [InstanceId(f"d{k}") for k in range(8)]
    core = serving(*full, *idle)
    for each in full:
        core.on_message(report(each, 976, sequence=2), 0.1)
    core.on_tick(0.2)
    assert core.destinations == dict(zip(full, idle, strict=True))
    effects = core.on_membership(membership(2, *full), 0.3)
    assert sent(effects) == [destination(each, None) for each in full]


def test_an_instance_that_is_not_known_yet_is_told_no_destination() -> None:
    core = serving(I0)
    core.on_message(report(I1), 0.0)
    assert core.on_tick(0.2) == [destination(I0, None)]


def test_without_migration_and_scaling_there_are_no_rounds() -> None:
    core = SchedulerCore(INFAAS_PP, now_s=0.0)
    assert core.next_deadline_s is None


# ------------------------------------------------------------------------------ auto-scaling

SCALING = ScalingConfig(
    max_instances=8, low_freeness_steps=500, high_freeness_steps=990, period_s=10.0
)


def over_time(core: SchedulerCore, until_s: int = 25) -> list[tuple[int, SchedulerEffect]]:
    """What a round each second decides about the number of instances."""
    return [
        (now_s, each)
        for now_s in range(1, until_s)
        for each in core.on_tick(float(now_s))
        if each not in (destination(I0, None), destination(I1, None))
    ]


def overloaded(*absent: Absent, scaling: ScalingConfig = SCALING) -> SchedulerCore:
    """A scheduler with one instance that has 500 tokens too few, and these to come."""
    core = serving(scaling=scaling)
    core.on_membership(membership(2, I0, absent=absent), 0.0)
    full = structs.replace(
        report(I0, 1000).load,
        num_queuing=1,
        head_demand_tokens=500,
        free_tokens=-500.0,
        normal_free_tokens=-500.0,
    )
    core.on_message(LoadReport(full), 0.0)
    return core


def asked(core: SchedulerCore) -> tuple[int, int]:
    """When the supervisor is first asked for more instances, and for how many."""
    return next(
        (now_s, each.message.num_instances)
        for now_s, each in over_time(core)
        if isinstance(each, ToMailbox) and isinstance(each.message, AddInstances)
    )


def test_the_supervisor_is_asked_for_instances() -> None:
    """The lack is 1,000 steps, of which each of them brings 500."""
    assert overloaded().on_tick(1.0) == [
        destination(I0, None),
        ScaleUp(2),
        ToMailbox(SUPERVISOR, AddInstances(2)),
    ]


def test_what_auto_scaling_decides_is_counted_once_for_the_front_ends() -> None:
    def counted(core: SchedulerCore) -> tuple[int, int]:
        (told,) = core.stats()
        assert isinstance(told.message, ClusterStats)
        return told.message.num_scaled_up, told.message.num_scaled_down

    core = overloaded()
    core.on_tick(1.0)
    assert [counted(core), counted(core)] == [(2, 0), (0, 0)]
    core = serving(I0, I1, scaling=replace(SCALING, cooldown_s=60.0))
    over_time(core)
    assert [counted(core), counted(core)] == [(0, 1), (0, 0)]
    core.on_membership(membership(2, I0, I1, supervisor=None), 20.0)
    for now_s in range(20, 120):
        core.on_tick(float(now_s))
    assert counted(core) == (0, 0), "there is no supervisor to ask"


def test_the_supervisor_is_told_which_instance_is_to_end() -> None:
    scaling = replace(SCALING, cooldown_s=60.0)
    assert over_time(serving(I0, I1, scaling=scaling)) == [
        (11, Terminate(I0)),
        (11, ToMailbox(SUPERVISOR, TerminateInstance(I0))),
    ]


def test_while_there_is_no_supervisor_the_decision_falls_again_after_another_period() -> None:
    core = serving(I0, I1, scaling=SCALING)
    core.on_membership(membership(2, I0, I1, supervisor=None), 0.0)
    assert over_time(core) == [(11, Terminate(I0)), (22, Terminate(I0))]


def test_an_instance_that_starts_is_not_asked_for_again() -> None:
    """And somebody comes already: the rest waits for the period."""
    assert asked(overloaded()) == (1, 2)
    assert asked(overloaded(Absent(I1, "starting"))) == (11, 1)
    assert asked(overloaded(Absent(I1, "pending", "no GPU"))) == (11, 1)
    core = overloaded(Absent(I1, "starting"))
    core.on_membership(membership(3, I0, absent=(Absent(I1, "starting"),)), 0.0)
    assert asked(core) == (11, 1), "it still starts"


def test_an_instance_that_has_not_reported_yet_is_not_asked_for_again() -> None:
    """It is up, and is as idle as one that starts."""
    core = overloaded()
    core.on_membership(membership(3, I0, I1), 0.0)
    assert asked(core) == (11, 1)


def test_an_instance_that_is_kept_warm_before_it_has_reported_starts_no_more() -> None:
    core = overloaded(Absent(I1, "starting"))
    core.on_membership(membership(3, I0, I1), 0.0)
    core.on_membership(membership(4, I0, absent=(Absent(I1, "warm"),)), 0.0)
    assert asked(core) == (1, 2)


def test_a_warm_instance_does_not_start() -> None:
    assert asked(overloaded(Absent(I1, "warm"))) == (1, 2)


def test_an_instance_that_starts_to_be_kept_warm_does_not_count() -> None:
    """It serves only when it is asked for."""
    assert asked(overloaded(Absent(I1, "starting", is_for_pool=True))) == (1, 2)


def test_an_instance_that_has_started_and_is_kept_warm_starts_no_more() -> None:
    core = overloaded(Absent(I1, "starting"))
    core.on_membership(membership(3, I0, absent=(Absent(I1, "warm"),)), 0.0)
    assert asked(core) == (1, 2)


def test_an_instance_that_has_died_before_it_was_up_starts_no_more() -> None:
    core = overloaded(Absent(I1, "starting"))
    core.on_membership(membership(3, I0), 0.0)
    assert asked(core) == (1, 2)


def test_an_instance_that_waits_for_a_place_keeps_no_idle_one() -> None:
    """Not even at the minimum: the supervisor gives up what waits first."""
    for state, ends in (("pending", True), ("starting", False)):
        core = serving(scaling=SCALING)
        core.on_membership(membership(2, I0, absent=(Absent(I1, state),)), 0.0)
        core.on_message(report(I0), 0.0)
        expected = [(11, Terminate(I0)), (11, ToMailbox(SUPERVISOR, TerminateInstance(I0)))]
        assert over_time(core, until_s=12) == (expected if ends else [])


def tells(effects: list[SchedulerEffect]) -> list[tuple[str, Held]]:
    return [
        (each.address, each.message) for each in sent(effects) if isinstance(each.message, Held)
    ]


def test_front_ends_hear_that_their_requests_are_held_and_hear_it_again() -> None:
    """Otherwise they would take the scheduler for dead, and dispatch the requests themselves."""
    core = SchedulerCore(replace(INFAAS_PP, binds_late=True), now_s=0.0)
    core.on_membership(membership(1, I0, frontends=(F0, F1)), 0.0)
    core.on_message(report(I0, 1000), 0.0)
    assert core.next_deadline_s is None
    assert tells(core.on_message(ask(), 1.0)) == [("front end 0", Held((R,), causes=FOR_MEMORY))]
    assert core.next_deadline_s == 1.0 + HELD_INTERVAL_S
    assert {
        each.message.num_held for each in core.stats() if isinstance(each.message, ClusterStats)
    } == {1}
    assert tells(core.on_tick(1.1)) == []
    assert tells(core.on_tick(1.2)) == [("front end 0", Held())]
    assert tells(core.on_tick(1.4)) == [("front end 0", Held())]
    core.on_message(report(I0, sequence=2), 1.5)
    assert tells(core.on_tick(1.6)) == []
    assert core.next_deadline_s is None


def test_what_has_waited_for_an_instance_is_told_when_it_waits_for_memory() -> None:
    core = SchedulerCore(replace(INFAAS_PP, binds_late=True), now_s=0.0)
    core.on_membership(membership(1, I0), 0.0)
    assert tells(core.on_message(ask(), 1.0)) == []
    core.on_message(report(I0, 960), 1.1)
    again = structs.replace(ask(), request_id=RequestId("s"))
    assert tells(core.on_message(again, 1.2)) == [
        ("front end 0", Held((RequestId("s"),), 40.0, FOR_MEMORY))
    ]
    assert tells(core.on_tick(1.4)) == [("front end 0", Held((R,), 40.0, FOR_MEMORY))]


def test_what_waited_before_the_first_report_is_told_without_another_request() -> None:
    core = SchedulerCore(replace(INFAAS_PP, binds_late=True), now_s=0.0)
    core.on_membership(membership(1, I0), 0.0)
    assert tells(core.on_message(ask(), 1.0)) == []
    core.on_message(report(I0, 960), 1.1)
    assert core.next_deadline_s == 1.1
    assert tells(core.on_tick(1.1)) == [("front end 0", Held((R,), 40.0, FOR_MEMORY))]


def test_policies_that_bind_at_once_hold_nothing_for_memory() -> None:
    core = serving(I0)
    core.on_message(report(I0, 1000, sequence=2), 0.0)
    assert tells(core.on_message(ask(), 1.0)) == []
