"""The line of requests at the global scheduler."""

from dataclasses import replace
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from sterna.config import PolicyConfig
from sterna.messages.actors import DispatchRequest
from sterna.policy.presets import LLUMNIX, STERNA
from sterna.scheduler.held_requests import AwaitedPrefix, HeldRequests
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


def test_a_wait_for_a_prefix_ends_when_its_time_has_come_or_the_request_goes() -> None:
    held = HeldRequests(STERNA)
    for number in range(3):
        held.put(ask(f"r{number}"), 0.0)
        awaited = AwaitedPrefix(InstanceId("i0"), 3.0 - number)
        held.await_prefix(RequestId(f"r{number}"), awaited)
    held.await_prefix(RequestId("r0"), AwaitedPrefix(InstanceId("i1"), 5.0))
    assert held.first_prefix_limit_s == 1.0
    held.end_waits_for_prefixes(0.9)
    held.take(RequestId("r2"))
    assert held.first_prefix_limit_s == 2.0
    held.end_waits_for_prefixes(2.0)
    assert [held.awaited_prefix(RequestId(f"r{number}")) for number in range(3)] == [
        "i1",
        None,
        None,
    ]
    assert held.first_prefix_limit_s == 5.0
    assert len(held) == 2
