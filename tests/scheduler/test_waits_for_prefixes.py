"""A request waits for the memory of the instance that has its prefix, as long as that pays."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from sterna.config import PolicyConfig, ScalingConfig, Soonest
from sterna.messages.actors import DispatchRequest
from sterna.messages.reasons import HeldCause
from sterna.policy.own import Policy
from sterna.policy.presets import STERNA
from sterna.policy.scaling import ScaleUp
from sterna.policy.virtual_usage import Candidate, NewRequest
from sterna.scheduler.global_scheduler import GlobalScheduler
from sterna.types import FrontendId, InstanceId, InstanceView, Priority, RequestId
from tests.policy.builders import M, evenly_loaded, instance, report
from tests.scheduler.test_global_scheduler import ask, places

WAITING = replace(
    STERNA,
    dispatch=Soonest(pair_cost=0.0),
    migrates=False,
    growth_steps=0.0,
    ageing_tokens_per_s=100.0,
    reserves_after_s=None,
)
"""No copies and no rounds: the deadlines are those of the waits."""

PROMPT = 1_600


class Known:
    """What instances have of each prompt, by the name of the request."""

    def __init__(self, **tokens: Mapping[str, int]) -> None:
        self.tokens = tokens

    def cached_tokens(self, request: DispatchRequest) -> Mapping[InstanceId, int]:
        of_request = self.tokens.get(request.request_id, {})
        return {InstanceId(name): tokens for name, tokens in of_request.items()}

    def can_copy(self, source: InstanceId, destination: InstanceId) -> bool:
        raise AssertionError("nothing is copied here")

    def on_dispatched(
        self, request: DispatchRequest, instance_id: InstanceId, now_s: float
    ) -> None: ...

    def on_cancel(self, request_id: RequestId) -> None: ...

    def on_frontend_left(self, frontend_id: FrontendId) -> None: ...


def full(instance_id: str, free_tokens: int = 0) -> InstanceView:
    return evenly_loaded(instance_id, M - free_tokens, 1)


def prompt(name: str, demand_tokens: int = PROMPT, *, priority: Priority = 0) -> DispatchRequest:
    asked = ask(name, demand_tokens, execution_priority=priority)
    return structs.replace(asked, prompt_tokens=demand_tokens)


def scheduler(
    *views: InstanceView, policy: PolicyConfig = WAITING, **tokens: Mapping[str, int]
) -> GlobalScheduler:
    """By default i0 is full, and i1 has memory for one of the prompts."""
    core = GlobalScheduler(policy, now_s=0.0, prefixes=Known(**tokens))
    for view in views or (full("i0"), full("i1", PROMPT)):
        core.on_load(report(view, policy), 0.0)
    return core


def test_a_request_waits_for_the_instance_that_has_its_prefix() -> None:
    core = scheduler(r={"i0": 1_000})
    assert core.on_request(prompt("r"), 0.0) == []
    assert places(core.on_load(report(full("i0", PROMPT), sequence=2), 1.0)) == [("r", "i0")]
    assert core.next_deadline_s is None


def test_it_goes_elsewhere_when_it_has_aged_by_what_the_prefix_saves() -> None:
    """By hand: 1,000 tokens, of which i1 has 200; 800 at 100 a second are 8 seconds."""
    core = scheduler(r={"i0": 1_000, "i1": 200})
    assert core.on_request(prompt("r"), 1.0) == []
    assert core.next_deadline_s == 9.0
    assert core.on_tick(8.99) == []
    assert places(core.on_tick(9.0)) == [("r", "i1")]
    assert core.next_deadline_s is None


def test_those_behind_it_do_not_wait() -> None:
    core = scheduler(full("i0"), full("i1", PROMPT + 160), r={"i0": 1_000})
    assert core.on_request(prompt("r"), 0.0) == []
    assert places(core.on_request(prompt("small", 160), 0.1)) == [("small", "i1")]
    assert places(core.on_request(prompt("other"), 0.2)) == [("other", "i1")]
    assert core.num_held == 1
    (waiting,) = core.waiting()
    assert core.held_cause(waiting) is HeldCause.PREFIX


@pytest.mark.parametrize(
    ("policy", "cached"),
    [
        (replace(WAITING, awaits_prefix=False), {"i0": 1_000}),
        (replace(WAITING, ageing_tokens_per_s=0.0), {"i0": 1_000}),
        (WAITING, {"i0": 1_000, "i1": 1_000}),
        (WAITING, {"unknown": 1_000}),
        (WAITING, {}),
    ],
    ids=["off", "without ageing", "as much here", "on one that left", "nowhere"],
)
def test_it_goes_where_there_is_memory_if_there_is_nothing_to_wait_for(
    policy: PolicyConfig, cached: Mapping[str, int]
) -> None:
    core = scheduler(policy=policy, r=cached)
    assert places(core.on_request(prompt("r"), 0.0)) == [("r", "i1")]


def test_it_does_not_wait_for_an_instance_that_is_not_full_but_busy_or_too_small() -> None:
    """The rule of dispatch has passed over the busy one; the small one could never hold it."""
    busy = evenly_loaded("i0", M - PROMPT, 60)
    core = scheduler(busy, instance("i1"), r={"i0": 16})
    assert places(core.on_request(prompt("r"), 0.0)) == [("r", "i1")]
    small = instance("i0", total_tokens=PROMPT - 16)
    core = scheduler(small, instance("i1"), r={"i0": 1_000})
    assert places(core.on_request(prompt("r"), 0.0)) == [("r", "i1")]


def test_a_request_with_a_headroom_does_not_wait() -> None:
    core = scheduler(r={"i0": 1_000})
    assert places(core.on_request(prompt("r", priority=1), 0.0)) == [("r", "i1")]


def test_it_waits_no_longer_for_an_instance_that_leaves() -> None:
    core = scheduler(r={"i0": 1_000})
    assert core.on_request(prompt("r"), 0.0) == []
    assert places(core.on_instance_left(InstanceId("i0"), 0.5)) == [("r", "i1")]
    assert (core.num_held, core.next_deadline_s) == (0, None)


def test_a_line_that_gets_short_makes_room_where_nothing_is_reported() -> None:
    """By hand: while the line is long each request needs 48 tokens more, and so i0 has no room for
    the prompt; what makes the line short says nothing of i0."""
    policy = replace(WAITING, growth_steps=48.0, crowded_share=0.1)
    cluster = full("i0", PROMPT + 16), full("i1", PROMPT + 64)
    core = scheduler(*cluster, policy=policy, r={"i0": 1_000})
    assert core.on_request(prompt("large", M), 0.0) == []
    assert core.on_request(prompt("r"), 0.1) == []
    core.on_cancel(RequestId("large"), 0.2)
    effects = core.on_load(report(full("i1", PROMPT + 48), policy, sequence=2), 0.3)
    assert places(effects) == [("r", "i0")]


def test_where_it_would_be_copied_it_waits_for_no_longer_than_that_takes() -> None:
    """By hand: 1,000 tokens would be copied in the time of 300 + 0.1 x 1,000; 4 seconds at 100."""
    copying = Soonest(pair_cost=0.0, copy_token_cost=0.1, copy_start_cost=300.0)
    core = scheduler(policy=replace(WAITING, dispatch=copying), r={"i0": 1_000})
    assert core.on_request(prompt("r"), 0.0) == []
    assert core.next_deadline_s == 4.0


def test_what_is_cached_does_not_count_in_line() -> None:
    """Of two that fit nowhere the larger one goes first if less of it is to be computed."""
    known = {"large": {"i0": 1_200}}
    for policy, first in ((WAITING, "large"), (replace(WAITING, holds_by_uncached=False), "small")):
        core = scheduler(full("i0"), full("i1"), policy=policy, **known)
        assert core.on_request(prompt("small", 800), 0.0) == []
        assert core.on_request(prompt("large"), 0.0) == []
        sent = places(core.on_load(report(full("i0", PROMPT), sequence=2), 0.0))
        assert sent[0] == (first, "i0")


def test_it_goes_to_whichever_of_those_with_most_of_it_has_memory_first() -> None:
    core = scheduler(full("i0"), full("i1"), full("i2", PROMPT), r={"i0": 1_000, "i1": 1_000})
    assert core.on_request(prompt("r"), 0.0) == []
    assert places(core.on_load(report(full("i0", PROMPT), sequence=2), 1.0)) == [("r", "i0")]


def test_one_that_does_not_fit_there_or_must_go_leaves_the_wait_to_others() -> None:
    core = scheduler(full("i0"), full("i1", 3_200), a={"i0": 800}, b={"i0": 800})
    assert core.on_request(prompt("a"), 0.0) == []
    assert core.on_request(prompt("b"), 0.0) == []
    core.on_cancel(RequestId("a"), 0.5)
    assert core.next_deadline_s == 8.0
    assert core.on_load(report(full("i0", PROMPT - 16), sequence=2), 1.0) == []
    assert places(core.on_load(report(full("i0", PROMPT), sequence=3), 1.5)) == [("b", "i0")]


def test_asking_again_does_not_begin_the_wait_anew() -> None:
    core = scheduler(r={"i0": 1_000})
    assert core.on_request(prompt("r"), 0.0) == []
    assert core.on_request(prompt("r"), 4.0) == []
    assert (core.num_held, core.next_deadline_s) == (1, 10.0)


def test_a_limit_of_holding_ends_the_wait_as_well() -> None:
    core = scheduler(policy=replace(WAITING, hold_limit_s=2.0), r={"i0": 1_000})
    assert core.on_request(prompt("r"), 0.0) == []
    assert core.next_deadline_s == 2.0
    assert places(core.on_tick(2.0)) == [("r", "i1")]


def test_an_instance_that_is_to_end_is_not_waited_for() -> None:
    core = scheduler(r={"i0": 1_000})
    assert core.on_request(prompt("r"), 0.0) == []
    core.set_terminating(InstanceId("i0"), True)
    assert places(core.on_load(report(full("i0"), sequence=2), 1.0)) == [("r", "i1")]
    core = scheduler(r={"i0": 1_000})
    core.set_terminating(InstanceId("i0"), True)
    assert places(core.on_request(prompt("r"), 0.0)) == [("r", "i1")]


def test_a_class_above_normal_does_not_wait() -> None:
    core = scheduler(r={"i0": 1_000})
    urgent = structs.replace(prompt("r"), scheduling_priority=1)
    assert places(core.on_request(urgent, 0.0)) == [("r", "i1")]


def test_a_decision_of_a_custom_class_is_not_put_off() -> None:
    class Last(Policy):
        base = "sterna"

        def dispatch(self, request: NewRequest, instances: Sequence[Candidate]) -> InstanceId:
            return instances[-1].instance_id

    core = scheduler(policy=Last().as_config(), r={"i0": 1_000})
    assert places(core.on_request(prompt("r"), 0.0)) == [("r", "i1")]


def test_no_instance_is_added_for_a_request_that_waits_for_its_prefix() -> None:
    scaling = ScalingConfig(max_instances=4, low_freeness_steps=0.0, high_freeness_steps=1e9)
    core = GlobalScheduler(WAITING, now_s=0.0, scaling=scaling, prefixes=Known(r={"i0": 1_000}))
    for view in (full("i0"), instance("i1")):
        core.on_load(report(view, WAITING), 0.0)
    assert core.on_request(prompt("r"), 0.0) == []
    assert not any(isinstance(each, ScaleUp) for each in core.on_tick(scaling.starved_after_s + 1))


@settings(max_examples=200)
@given(st.data())
def test_no_request_waits_for_a_prefix_without_a_deadline_and_none_for_ever(
    data: st.DataObject,
) -> None:
    """Whatever comes, deadlines lie ahead after a tick, and when all of them have passed, whatever
    has memory somewhere has been sent."""
    names = [f"r{number}" for number in range(4)]
    tokens = st.integers(0, 100).map(lambda blocks: 16 * blocks)
    where = st.dictionaries(st.sampled_from(["i0", "i1", "i2"]), tokens)
    policy = replace(WAITING, hold_limit_s=data.draw(st.sampled_from([None, 3.0])))
    views = full("i0"), full("i1"), full("i2")
    core = scheduler(*views, policy=policy, **{n: data.draw(where) for n in names})
    now_s, sequences = 0.0, dict.fromkeys(("i0", "i1", "i2"), 1)
    free = dict.fromkeys(sequences, 0)
    for _ in range(data.draw(st.integers(1, 12))):
        now_s += data.draw(st.integers(0, 12)) / 4
        if data.draw(st.booleans()):
            name = data.draw(st.sampled_from(names))
            core.on_request(prompt(name, data.draw(st.sampled_from([480, PROMPT]))), now_s)
        else:
            name = data.draw(st.sampled_from(list(sequences)))
            sequences[name] += 1
            free[name] = data.draw(st.sampled_from([0, 480, PROMPT, 3_200]))
            core.on_load(report(full(name, free[name]), sequence=sequences[name]), now_s)
        if data.draw(st.booleans()):
            core.on_cancel(RequestId(data.draw(st.sampled_from(names))), now_s)
        core.on_tick(now_s)
        deadline_s = core.next_deadline_s
        assert deadline_s is None or deadline_s > now_s
    while (deadline_s := core.next_deadline_s) is not None:
        core.on_tick(deadline_s)
    most_tokens = max(each.room_tokens for each in core.candidates)
    smallest_tokens = core.smallest_held_tokens
    assert smallest_tokens is None or smallest_tokens > most_tokens
