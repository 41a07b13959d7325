"""The line of requests at the global scheduler."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from sterna.config import PolicyConfig
from sterna.messages.actors import DispatchRequest
from sterna.policy.presets import LLUMNIX, STERNA
from sterna.scheduler.held_requests import HeldRequests
from sterna.types import HIGH, NORMAL, InstanceId, Priority, RequestId
from tests.scheduler.test_global_scheduler import ask

POLICIES = (LLUMNIX, replace(STERNA, ageing_tokens_per_s=64.0))


@dataclass(frozen=True)
class Put:
    """A request in line, since when, and what instances have of it."""

    request: DispatchRequest
    since_s: float
    cached: Mapping[InstanceId, int]
    shared: Mapping[InstanceId, int]


def place(policy: PolicyConfig, now_s: float, each: Put) -> tuple[float, float, float]:
    size_tokens = 0.0
    if policy.binds_late:
        waited_s = now_s - each.since_s
        size_tokens = each.request.demand_tokens - policy.ageing_tokens_per_s * waited_s
    if policy.holds_by_uncached:
        size_tokens -= max(each.cached.values(), default=0)
    return -each.request.scheduling_priority, size_tokens, each.request.arrival_s


INSTANCES = (InstanceId("i0"), InstanceId("i1"))
parts_tokens = st.dictionaries(st.sampled_from(INSTANCES), st.sampled_from([16, 32, 48]))
events = st.tuples(
    st.booleans(),
    st.integers(0, 5),
    st.integers(3, 20).map(lambda blocks: 16 * blocks),
    st.sampled_from([NORMAL, HIGH]),
    st.integers(0, 8).map(lambda quarters: quarters / 4),
    parts_tokens,
    parts_tokens,
)
Event = tuple[bool, int, int, Priority, float, Mapping[InstanceId, int], Mapping[InstanceId, int]]


@given(st.sampled_from(POLICIES), st.lists(events, max_size=30))
def test_the_line_is_sorted_by_class_aged_uncached_demand_and_arrival(
    policy: PolicyConfig, happened: list[Event]
) -> None:
    """As a sort of all of them at this moment would: none is lost, and one that is put again keeps
    its time."""
    held, now_s = HeldRequests(policy), 0.0
    known: dict[str, Put] = {}
    for is_put, number, demand_tokens, priority, after_s, cached, shared in happened:
        now_s += after_s
        name = f"r{number}"
        if is_put:
            request = ask(name, demand_tokens, scheduling_priority=priority, arrival_s=now_s)
            since_s = known[name].since_s if name in known else now_s
            known[name] = Put(request, since_s, cached, shared)
            held.put(request, now_s, cached, shared=shared)
        else:
            left = known.pop(name, None)
            assert held.take(ask(name).request_id) == (None if left is None else left.since_s)

        in_order = [
            each.request for each in sorted(known.values(), key=partial(place, policy, now_s))
        ]
        assert list(held.in_line()) == in_order
        by_time = sorted(known.values(), key=lambda each: each.since_s)
        assert list(held) == [each.request for each in by_time]
        assert held.first_tokens == (in_order[0].demand_tokens if in_order else 0)
        demands_tokens = [request.demand_tokens for request in in_order]
        assert held.smallest_tokens == min(demands_tokens, default=None)
        assert held.largest_tokens == max(demands_tokens, default=None)
        assert held.first_since_s == (by_time[0].since_s if by_time else None)
        assert len(held) == len(known)
        for instance_id in INSTANCES:
            own_tokens = [
                each.request.demand_tokens - each.shared[instance_id]
                for each in known.values()
                if instance_id in each.shared
            ]
            assert held.smallest_own_tokens(instance_id) == min(own_tokens, default=None)
            assert (instance_id in held.sharing_instances) == bool(own_tokens)


def in_line(held: HeldRequests) -> list[str]:
    return [each.request_id for each in held.in_line()]


def test_those_that_wait_for_their_prefix_are_out_of_the_line_until_their_time_has_come() -> None:
    held = HeldRequests(STERNA)
    for number in range(3):
        held.put(ask(f"r{number}", 160 + 16 * number), float(number))
    assert (held.smallest_tokens, held.total_tokens, held.first_since_s) == (160, 528, 0.0)
    held.await_prefix(RequestId("r0"), [InstanceId("i0")], 5.0)
    held.await_prefix(RequestId("r2"), [InstanceId("i0"), InstanceId("i1")], 4.0)
    assert in_line(held) == ["r1"]
    assert (held.smallest_tokens, held.largest_tokens, held.total_tokens) == (176, 176, 176)
    assert (held.smallest_of_all_tokens, held.first_since_s, len(held)) == (160, 1.0, 3)
    assert held.first_prefix_limit_s == 4.0
    held.end_overdue_waits(4.0)
    assert in_line(held) == ["r1", "r2"]
    assert list(held.awaited_instances) == ["i0"]
    assert held.take(RequestId("r0")) == 0.0
    assert (held.first_prefix_limit_s, list(held.awaited_instances)) == (math.inf, [])


def test_as_many_are_back_in_line_as_their_instance_has_memory_for() -> None:
    held = HeldRequests(STERNA)
    for name, demand_tokens in (("a", 320), ("b", 480), ("c", 160), ("d", 160)):
        held.put(ask(name, demand_tokens), 0.0)
        held.await_prefix(RequestId(name), [InstanceId("i0")], 9.0)
    held.end_waits_for(InstanceId("other"), 10_000.0)
    assert in_line(held) == []
    held.end_waits_for(InstanceId("i0"), 490.0)
    assert in_line(held) == ["c", "a"]


def test_one_that_is_put_again_waits_in_line() -> None:
    held = HeldRequests(STERNA)
    held.put(ask("r"), 0.0)
    held.await_prefix(RequestId("r"), [InstanceId("i0")], 9.0)
    held.put(ask("r", 320), 1.0)
    assert (in_line(held), held.total_tokens, held.first_prefix_limit_s) == (["r"], 320, math.inf)
    assert held.since_s(RequestId("r")) == 0.0
