"""The line of requests at the global scheduler."""

import math
from dataclasses import replace
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


def place(
    policy: PolicyConfig, now_s: float, each: tuple[DispatchRequest, float]
) -> tuple[float, float, float]:
    request, since_s = each
    size_tokens = 0.0
    if policy.binds_late:
        size_tokens = request.demand_tokens - policy.ageing_tokens_per_s * (now_s - since_s)
    return -request.scheduling_priority, size_tokens, request.arrival_s


events = st.tuples(
    st.booleans(),
    st.integers(0, 5),
    st.integers(1, 20).map(lambda blocks: 16 * blocks),
    st.sampled_from([NORMAL, HIGH]),
    st.integers(0, 8).map(lambda quarters: quarters / 4),
)


@given(st.sampled_from(POLICIES), st.lists(events, max_size=30))
def test_the_line_is_sorted_by_class_aged_demand_and_arrival(
    policy: PolicyConfig, happened: list[tuple[bool, int, int, Priority, float]]
) -> None:
    """As a sort of all of them at this moment would: none is lost, and one that is put again keeps
    its time."""
    held, now_s = HeldRequests(policy), 0.0
    known: dict[str, tuple[DispatchRequest, float]] = {}
    for is_put, number, demand_tokens, priority, after_s in happened:
        now_s += after_s
        name = f"r{number}"
        if is_put:
            request = ask(name, demand_tokens, scheduling_priority=priority, arrival_s=now_s)
            since_s = known[name][1] if name in known else now_s
            known[name] = (request, since_s)
            held.put(request, now_s)
        else:
            _, since = known.pop(name, (None, None))
            assert held.take(ask(name).request_id) == since

        key = partial(place, policy, now_s)
        in_order = [request for request, _ in sorted(known.values(), key=key)]
        assert list(held.in_line()) == in_order
        assert list(held) == [
            request for request, _ in sorted(known.values(), key=lambda it: it[1])
        ]
        demands_tokens = [request.demand_tokens for request in in_order]
        assert held.smallest_tokens == min(demands_tokens, default=None)
        assert held.largest_tokens == max(demands_tokens, default=None)
        assert held.first_since_s == min([since_s for _, since_s in known.values()], default=None)
        assert len(held) == len(known)


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
