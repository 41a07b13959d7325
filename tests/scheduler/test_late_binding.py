"""Late binding: requests wait at the global scheduler until an instance has memory for them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from sterna.config import PolicyConfig, ScalingConfig
from sterna.errors import ConfigurationError
from sterna.messages.reasons import HeldCause
from sterna.policy.own import Policy
from sterna.policy.presets import LLUMNIX, ROUND_ROBIN
from sterna.policy.scaling import ScaleUp
from sterna.policy.virtual_usage import Candidate, NewRequest
from sterna.policy_file import in_server
from sterna.scheduler.global_scheduler import GlobalScheduler
from sterna.types import HIGH, FrontendId, InstanceId, InstanceView, RequestId
from tests.policy.builders import M, evenly_loaded, instance, queuing, report, running
from tests.scheduler.test_global_scheduler import FRONTEND, ask, places

LATE = replace(ROUND_ROBIN, binds_late=True)


def scheduler(*views: InstanceView, policy: PolicyConfig = LATE) -> GlobalScheduler:
    built = GlobalScheduler(policy, now_s=0.0)
    for view in views:
        built.on_load(report(view, policy), 0.0)
    return built


def full(instance_id: str, free_tokens: int = 0, *, is_terminating: bool = False) -> InstanceView:
    return evenly_loaded(instance_id, M - free_tokens, 1, is_terminating=is_terminating)


def freed(core: GlobalScheduler, view: InstanceView, now_s: float = 1.0) -> list[tuple[str, str]]:
    """Where requests go when the instance reports this."""
    return places(core.on_load(report(view, sequence=2), now_s))


def test_a_request_waits_until_an_instance_has_memory_for_it() -> None:
    core = scheduler(full("i0", 144), full("i1"))
    assert core.on_request(ask("r", 160), 0.0) == []
    assert (core.num_held, core.smallest_held_tokens) == (1, 160)
    assert freed(core, full("i1", 144)) == []
    assert freed(core, full("i0", 160)) == [("r", "i0")]
    assert (core.num_held, core.smallest_held_tokens) == (0, None)


def test_what_queues_is_on_its_way_or_is_prefilled_needs_its_memory_first() -> None:
    waiting = instance("i0", running=[running("a", M - 320)], queuing=[queuing("b", 176)])
    assert scheduler(waiting).on_request(ask("r", 160), 0.0) == []
    core = scheduler(full("i0", 320))
    assert places(core.on_request(ask("a", 160), 0.0)) == [("a", "i0")]
    assert places(core.on_request(ask("b", 160), 0.0)) == [("b", "i0")]
    assert core.on_request(ask("c", 160), 0.0) == []


def test_those_that_are_there_keep_memory_to_grow() -> None:
    """By hand: three requests that may each need ten tokens more leave 30 fewer, whether they run,
    queue or are on their way. An instance without any takes whatever fits."""
    policy = replace(LATE, growth_steps=10.0)
    three = instance("i0", running=[running("a", 320)], queuing=[queuing("b", 160)])
    free_tokens = M - 480 - 160
    core = scheduler(three, policy=policy)
    assert places(core.on_request(ask("c", 160), 0.0)) == [("c", "i0")]
    assert core.on_request(ask("d", free_tokens - 29), 0.0) == []
    assert places(core.on_request(ask("e", free_tokens - 30), 0.0)) == [("e", "i0")]
    empty = scheduler(instance("i0"), policy=policy)
    assert places(empty.on_request(ask("whole", M), 0.0)) == [("whole", "i0")]


def test_memory_to_grow_counts_only_while_much_waits() -> None:
    """By hand: as long as no more than a hundredth of the memory of both instances waits, what fits
    is let in, whatever those that run there may need; with more, memory to grow is left to them."""
    policy = replace(LATE, growth_steps=10.0, crowded_share=0.01)
    most_tokens = 2 * M // 100
    core = scheduler(full("i0"), full("i1"), policy=policy)
    assert core.on_request(ask("a", most_tokens), 0.0) == []
    assert core.growth_steps == 0
    assert freed(core, full("i0", most_tokens)) == [("a", "i0")]
    core = scheduler(full("i0"), full("i1"), policy=policy)
    assert core.on_request(ask("a", most_tokens), 0.0) == []
    assert core.on_request(ask("b", most_tokens - 1), 0.0) == []
    assert core.growth_steps == 10
    # One request runs there.
    assert freed(core, full("i0", most_tokens + 8)) == []
    assert places(core.on_load(report(full("i0", most_tokens + 9), sequence=3), 1.0)) == [
        ("b", "i0")
    ]
    assert core.growth_steps == 0
    core.on_request(ask("c", most_tokens - 1), 0.0)
    core.on_cancel(RequestId("a"), 1.0)
    assert core.growth_steps == 0


def test_a_full_batch_takes_no_request_however_much_memory_there_is() -> None:
    """What queues or is on its way gets a place before it."""
    two = [running("a", 16), running("b", 16)]
    core = scheduler(replace(instance("i0", running=two), num_slots=3))
    assert places(core.on_request(ask("c", 160), 0.0)) == [("c", "i0")]
    assert core.on_request(ask("d", 160), 0.0) == []
    queued = replace(instance("i0", running=two, queuing=[queuing("c", 160)]), num_slots=3)
    assert freed(core, queued) == []
    one = replace(instance("i0", running=two[:1]), num_slots=3)
    assert places(core.on_load(report(one, sequence=3, last_dispatch=1), 2.0)) == [("d", "i0")]


def test_the_smallest_demand_goes_first() -> None:
    core = scheduler(full("i0"))
    for name, demand_tokens in (("large", 480), ("small", 160), ("medium", 320)):
        assert core.on_request(ask(name, demand_tokens), 0.0) == []
    assert freed(core, full("i0", 500)) == [("small", "i0"), ("medium", "i0")]
    assert core.num_held == 1


def test_a_higher_class_goes_before_a_smaller_demand() -> None:
    core = scheduler(full("i0"), policy=replace(LLUMNIX, binds_late=True))
    core.on_request(ask("small", 160), 0.0)
    core.on_request(ask("urgent", 480, scheduling_priority=HIGH), 0.0)
    assert freed(core, full("i0", 500)) == [("urgent", "i0")]


def test_who_has_waited_counts_as_smaller() -> None:
    """By hand: with 100 tokens a second, 480 tokens count as 180 after three seconds."""
    for later_s, expected in ((2.9, "new"), (3.1, "old")):
        core = scheduler(full("i0"), policy=replace(LATE, ageing_tokens_per_s=100.0))
        core.on_request(ask("old", 480), 0.0)
        core.on_request(ask("new", 180), later_s)
        assert freed(core, full("i0", 500), later_s) == [(expected, "i0")]


RESERVING = replace(LATE, reserves_after_s=10.0)


def test_a_large_request_that_has_waited_keeps_an_instance_free_until_it_fits() -> None:
    """Otherwise small ones would fill each instance before it can have one."""
    core = scheduler(full("i0"), full("i1"), policy=RESERVING)

    def reported(sequence: int, free_tokens: int, now_s: float) -> list[tuple[str, str]]:
        view = report(full("i0", free_tokens), sequence=sequence, last_dispatch=1)
        return places(core.on_load(view, now_s))

    core.on_request(ask("large", 4_000), 0.0)
    core.on_request(ask("early", 160), 1.0)
    assert reported(2, 320, 9.0) == [("early", "i0")]
    assert reported(3, 0, 9.5) == []
    core.on_request(ask("late", 160), 10.0)
    assert reported(4, 320, 10.0) == []
    # Another instance is free for those behind it.
    assert freed(core, full("i1", 160), 11.0) == [("late", "i1")]
    assert reported(5, 4_160, 12.0) == [("large", "i0")]


def test_it_keeps_one_free_beside_others_that_could_never_hold_it() -> None:
    tiny = instance("i1", total_tokens=1_600, running=[running("r", 1_600)])
    core = scheduler(full("i0"), tiny, policy=RESERVING)
    core.on_request(ask("large", 4_000), 0.0)
    core.on_request(ask("late", 160), 10.0)
    assert freed(core, full("i0", 320), 11.0) == []


def test_an_urgent_request_keeps_an_instance_free_at_once() -> None:
    policy = replace(LLUMNIX, binds_late=True, reserves_after_s=10.0)
    core = scheduler(full("i0"), policy=policy)
    core.on_request(ask("small", 160), 0.0)
    core.on_request(ask("urgent", 480, scheduling_priority=HIGH), 0.0)
    assert freed(core, full("i0", 320)) == []
    core.on_cancel(RequestId("urgent"), 1.0)
    assert places(core.on_load(report(full("i0", 320), sequence=3), 2.0)) == [("small", "i0")]


def test_a_stream_that_was_lost_with_its_instance_goes_before_new_requests() -> None:
    """Its client waits in the middle of an answer."""
    core = scheduler(full("i0"), policy=RESERVING)
    core.on_request(ask("small", 160), 0.0)
    lost = structs.replace(ask("lost", 480), has_begun=True)
    core.on_request(lost, 1.0)
    assert freed(core, full("i0", 320), 1.5) == []
    later = report(full("i0", 480), sequence=3)
    assert places(core.on_load(later, 2.0)) == [("lost", "i0")]


def test_what_has_waited_at_a_scheduler_that_died_has_waited() -> None:
    core = scheduler(full("i0"), policy=RESERVING)
    core.on_request(ask("early", 160), 100.0)
    core.on_request(structs.replace(ask("large", 4_000), waited_s=9.0), 100.0)
    assert freed(core, full("i0", 160), 100.5) == [("early", "i0")]
    core.on_request(ask("late", 160), 101.0)
    # It has waited for ten seconds.
    assert places(core.on_load(report(full("i0", 320), sequence=3), 101.0)) == []
    later = report(full("i0", 4_320), sequence=4)
    assert places(core.on_load(later, 102.0)) == [("large", "i0"), ("late", "i0")]


def test_no_request_moves_to_where_memory_is_kept_free() -> None:
    """Except from an instance that is emptied."""
    policy = replace(LLUMNIX, binds_late=True, reserves_after_s=10.0)
    source, destination = evenly_loaded("i0", M - 64, 8), full("i1", 2_000)

    def destinations(source: InstanceView, *, is_held: bool) -> dict[InstanceId, InstanceId]:
        core = scheduler(source, destination, policy=policy)
        if is_held:
            core.on_request(ask("large", 4_000), 0.0)
            # It fits nowhere, and a smaller one would.
            assert core.on_request(ask("small", 160), 10.0) == []
        core.on_tick(10.1)
        return dict(core.destinations)

    to_the_other = {InstanceId("i0"): InstanceId("i1")}
    assert destinations(source, is_held=False) == to_the_other
    assert destinations(source, is_held=True) == {}
    assert destinations(replace(source, is_terminating=True), is_held=True) == to_the_other


def test_memory_is_kept_free_also_while_nothing_else_could_be_dispatched() -> None:
    policy = replace(LLUMNIX, binds_late=True, reserves_after_s=10.0)
    core = scheduler(evenly_loaded("i0", M - 64, 8), full("i1", 2_000), policy=policy)
    core.on_request(ask("large", 4_000), 0.0)
    core.on_tick(10.1)
    assert dict(core.destinations) == {}


def test_no_memory_is_kept_free_for_a_request_that_was_cancelled() -> None:
    policy = replace(LLUMNIX, binds_late=True, reserves_after_s=10.0)
    core = scheduler(evenly_loaded("i0", M - 64, 8), full("i1", 2_000), policy=policy)
    core.on_request(ask("large", 4_000), 0.0)
    core.on_request(ask("other", 3_000), 5.0)
    core.on_tick(10.1)
    assert dict(core.destinations) == {}
    core.on_cancel(RequestId("large"), 10.2)
    core.on_tick(10.4)
    assert dict(core.destinations) == {InstanceId("i0"): InstanceId("i1")}


def test_memory_is_kept_free_where_the_request_can_ever_be() -> None:
    """The emptier instance is too small for it."""
    core = scheduler(
        instance("i0", total_tokens=2_000),
        full("i1", 1_000),
        policy=replace(LATE, reserves_after_s=10.0),
    )
    core.on_request(ask("large", 4_000), 0.0)
    assert places(core.on_request(ask("small", 160), 10.0)) == [("small", "i0")]
    assert core.on_load(report(full("i1", 3_000), sequence=2), 11.0) == []
    assert places(core.on_load(report(full("i1", 4_000), sequence=3), 12.0)) == [("large", "i1")]


class Empty(Policy):
    """Whose pairs are all its base's."""

    base = "llumnix"


class Asks(Empty):
    """Changes nothing of the pairs that its base makes."""

    def pair(self, instances: Sequence[Candidate]) -> Mapping[InstanceId, InstanceId]:
        return super().pair(instances)


class Fails(Empty):
    """Has its base decide in a server."""

    def pair(self, instances: Sequence[Candidate]) -> Mapping[InstanceId, InstanceId]:
        raise RuntimeError


WITH_ITS_PAIRS = pytest.mark.parametrize(
    "preset",
    [
        LLUMNIX,
        Empty().as_config(),
        in_server(Empty().as_config()),
        Asks().as_config(),
        in_server(Asks().as_config()),
        in_server(Fails().as_config()),
    ],
    ids=["preset", "class", "class in a server", "asks", "asks in a server", "fails in a server"],
)


@WITH_ITS_PAIRS
def test_while_memory_is_kept_free_requests_move_to_where_there_is_other_memory(
    preset: PolicyConfig,
) -> None:
    policy = replace(preset, binds_late=True, reserves_after_s=10.0)
    cluster = evenly_loaded("i0", M - 64, 8), full("i1", 3_000), full("i2", 2_500)
    core = scheduler(*cluster, policy=policy)
    core.on_request(ask("large", 4_000), 0.0)
    core.on_request(ask("small", 160), 10.0)
    core.on_tick(10.1)
    assert dict(core.destinations) == {InstanceId("i0"): InstanceId("i2")}


@WITH_ITS_PAIRS
def test_requests_move_for_balance_only_between_instances_of_one_format(
    preset: PolicyConfig,
) -> None:
    policy = replace(preset, balance_ratio=1.2, balance_after_tokens=0)
    cluster = (
        evenly_loaded("i0", 1_280, 16),
        evenly_loaded("i1", 160, 2),
        evenly_loaded("i2", 320, 4),
    )
    core = scheduler(*cluster, policy=policy)
    core.on_tick(0.2)
    assert dict(core.destinations) == {InstanceId("i0"): InstanceId("i1")}
    core.set_kv_formats({InstanceId(f"i{k}"): each for k, each in enumerate(("a", "b", "a"))})
    core.on_tick(0.4)
    assert dict(core.destinations) == {InstanceId("i0"): InstanceId("i2")}


class Sticky(Policy):
    """All requests to the first instance, full or not; adds instances while requests wait."""

    given: ClassVar[list[list[InstanceId]]] = []

    def dispatch(self, request: NewRequest, instances: Sequence[Candidate]) -> InstanceId:
        self.given.append([each.instance_id for each in instances])
        return InstanceId("i0")

    def num_instances(
        self, instances: Sequence[Candidate], num_starting: int, scaling: ScalingConfig
    ) -> int | None:
        known = self.this_round
        if known.held_s < 3.0:
            return len(instances)
        return len(instances) + known.num_held + known.held_tokens // M


class AtOnce(Sticky):
    settings: Mapping[str, Any] = {"binds_late": False}


def test_a_class_is_given_the_instances_with_room() -> None:
    """Unless its requests do not wait at the scheduler."""
    Sticky.given.clear()
    late, at_once = (
        scheduler(full("i0"), full("i1", 320), policy=kind().as_config())
        for kind in (Sticky, AtOnce)
    )
    with pytest.raises(ConfigurationError, match="must return the instance_id of one"):
        late.on_request(ask("r", 160), 0.0)
    assert places(at_once.on_request(ask("r", 160), 0.0)) == [("r", "i0")]
    assert Sticky.given == [["i1"], ["i0", "i1"]]


def test_a_class_knows_what_waits_at_the_scheduler() -> None:
    """Its number takes the place of the built-in start for requests that wait."""
    core = GlobalScheduler(Sticky().as_config(), now_s=0.0, scaling=ScalingConfig())
    core.on_load(report(full("i0")), 0.0)
    core.on_request(ask("a", M), 0.0)
    core.on_request(ask("b", 160), 1.0)
    started = {
        now_s: [each for each in core.on_tick(now_s) if isinstance(each, ScaleUp)]
        for now_s in (2.9, 3.2)
    }
    assert started == {2.9: [], 3.2: [ScaleUp(3)]}


def test_without_an_instance_nothing_is_due_at_the_limit() -> None:
    core = scheduler(policy=replace(LATE, hold_limit_s=5.0))
    core.on_request(ask("a"), 1.0)
    assert core.next_deadline_s is None


def test_after_the_limit_a_request_is_dispatched_all_the_same() -> None:
    core = scheduler(full("i0"), policy=replace(LATE, hold_limit_s=5.0))
    assert core.next_deadline_s is None
    core.on_request(ask("a"), 1.0)
    core.on_request(ask("b"), 2.0)
    # Asking again does not begin the wait again.
    core.on_request(ask("a"), 4.0)
    assert core.next_deadline_s == 6.0
    assert core.on_tick(5.9) == []
    assert places(core.on_tick(6.0)) == [("a", "i0")]
    assert core.next_deadline_s == 7.0


def test_rounds_are_held_while_requests_wait() -> None:
    policy = replace(LLUMNIX, binds_late=True, hold_limit_s=0.3)
    core = scheduler(full("i0"), full("i1", 480), policy=policy)
    first = core.on_tick(0.2)
    core.on_request(ask("r", 496), 0.25)
    assert core.next_deadline_s == pytest.approx(0.4)
    assert len(first) == 2
    core.on_tick(0.4)
    assert core.next_deadline_s == pytest.approx(0.55)
    assert places(core.on_tick(0.55)) == [("r", "i1")]
    assert core.next_deadline_s == pytest.approx(0.6)


def test_what_fits_nowhere_does_not_wait_for_ever() -> None:
    """An engine says by itself that it is too large, or cuts what it shares with others."""
    core = scheduler(full("i0"), instance("i1"))
    assert places(core.on_request(ask("r", M + 16), 0.0)) == [("r", "i0")]


def test_who_waits_is_known() -> None:
    core = scheduler(full("i0"))
    core.on_request(ask("r"), 0.0)
    assert core.waits(RequestId("r"))
    assert not core.waits(RequestId("other"))
    assert core.waiting() == {RequestId("r"): FRONTEND}
    assert [each.request_id for each in core.undispatched] == ["r"]
    # Without an instance its front end has to do without this scheduler.
    core.on_instance_left(InstanceId("i0"), 0.0)
    assert not core.waits(RequestId("r"))
    assert core.waiting() == {}
    assert core.num_held == len(core.undispatched) == 1


def test_an_instance_that_is_emptied_gets_none_while_another_exists() -> None:
    emptied = full("i0", 500, is_terminating=True)
    core = scheduler(emptied, full("i1"))
    assert core.on_request(ask("r"), 0.0) == []
    assert places(scheduler(emptied).on_request(ask("r"), 0.0)) == [("r", "i0")]


def test_the_end_of_its_front_end_or_a_cancellation_ends_the_wait() -> None:
    core = scheduler(full("i0"), policy=replace(LATE, hold_limit_s=5.0))
    core.on_request(ask("a"), 0.0)
    core.on_request(ask("b", frontend_id=FRONTEND + 1), 1.0)
    core.on_frontend_left(FRONTEND, 1.0)
    assert core.next_deadline_s == 6.0
    core.on_cancel(RequestId("b"), 1.0)
    assert (core.num_held, core.next_deadline_s) == (0, None)
    assert core.on_frontend_left(FrontendId(FRONTEND + 1), 1.0) == []


def test_loads_that_are_reported_together_are_seen_together() -> None:
    core = scheduler(full("i0"), full("i1"), policy=replace(LLUMNIX, binds_late=True))
    core.on_request(ask("r"), 0.0)
    loads = [report(full("i0", 200), sequence=2), report(full("i1", 2_000), sequence=2)]
    assert places(core.on_loads(loads, 1.0)) == [("r", "i1")]


demands_tokens = st.integers(1, 40).map(lambda blocks: 16 * blocks)


@settings(max_examples=60)
@given(
    st.lists(demands_tokens, min_size=1, max_size=12),
    st.lists(st.integers(0, 60).map(lambda blocks: 16 * blocks), min_size=1, max_size=4),
    st.sampled_from([0, 1, 48]),
    st.sampled_from([0.0, 0.002, 0.05]),
)
def test_no_request_waits_while_there_is_memory_for_it(
    demands: list[int], free_tokens: list[int], growth_steps: int, crowded_share: float
) -> None:
    """And none is dispatched where there is none."""
    views = [full(f"i{place}") for place in range(len(free_tokens))]
    policy = replace(LATE, growth_steps=growth_steps, crowded_share=crowded_share)
    core = scheduler(*views, policy=policy)
    for number, demand_tokens in enumerate(demands):
        assert core.on_request(ask(f"r{number}", demand_tokens), 0.0) == []
    loads = [
        structs.replace(report(full(f"i{place}", number)), sequence=2)
        for place, number in enumerate(free_tokens)
    ]
    sent = places(core.on_loads(loads, 1.0))
    for place, number in enumerate(free_tokens):
        instance_id = f"i{place}"
        got = [int(request_id[1:]) for request_id, to in sent if to == instance_id]
        left_tokens = number - sum(demands[each] for each in got)
        # One request ran there before.
        if got:
            assert left_tokens >= (0 if crowded_share else growth_steps * len(got))
        if core.smallest_held_tokens is not None:
            growth_tokens = core.growth_steps * (len(got) + 1)
            assert left_tokens - growth_tokens < core.smallest_held_tokens
    assert core.num_held + len(sent) == len(demands)


def test_it_is_said_what_each_request_waits_for() -> None:
    core = scheduler(full("i0", 320), policy=RESERVING)
    core.on_request(structs.replace(ask("lost", 4_000), has_begun=True), 0.0)
    core.on_request(ask("small", 160), 0.0)
    core.on_request(ask("large", 480), 0.0)
    found = [core.held_cause(RequestId(each)) for each in ("lost", "small", "large")]
    assert found == [HeldCause.MEMORY, HeldCause.KEPT_FREE, HeldCause.MEMORY]
