"""Builders of the values that the policy tests arrange: views, and the loads reported of them."""

from collections.abc import Sequence

import pytest
from hypothesis import strategies as st

from sterna.config import PolicyConfig
from sterna.policy.load_report import load
from sterna.policy.presets import LLUMNIX
from sterna.policy.selection import candidates_to_move
from sterna.policy.virtual_usage import Candidate, NewRequest, freeness_of
from sterna.types import (
    HIGH,
    NORMAL,
    Immovable,
    InstanceId,
    InstanceLoad,
    InstanceView,
    Priority,
    RequestId,
    RequestStatus,
    RequestView,
)
from tests.policy import algorithm1

M = 12_672
"""KV capacity of LLaMA-7B on an A10, in tokens: 792 blocks of 16."""


def running(
    request_id: str,
    usage_tokens: int,
    *,
    num_tokens: int | None = None,
    demand_tokens: int = 0,
    priority: Priority = NORMAL,
    immovable: Immovable | None = None,
    num_output_tokens: int = 0,
    num_earlier_tokens: int = 0,
    num_shared_tokens: int = 0,
) -> RequestView:
    return RequestView(
        request_id=RequestId(request_id),
        status=RequestStatus.RUNNING,
        num_tokens=usage_tokens if num_tokens is None else num_tokens,
        physical_usage_tokens=usage_tokens,
        demand_tokens=demand_tokens,
        scheduling_priority=priority,
        execution_priority=priority,
        num_output_tokens=num_output_tokens,
        num_earlier_tokens=num_earlier_tokens,
        num_shared_tokens=num_shared_tokens,
        immovable=immovable,
    )


def queuing(
    request_id: str,
    demand_tokens: int,
    *,
    priority: Priority = NORMAL,
    immovable: Immovable | None = None,
) -> RequestView:
    return RequestView(
        request_id=RequestId(request_id),
        status=RequestStatus.QUEUING,
        num_tokens=demand_tokens,
        demand_tokens=demand_tokens,
        scheduling_priority=priority,
        execution_priority=priority,
        immovable=immovable,
    )


def instance(
    instance_id: str = "i0",
    *,
    total_tokens: int = M,
    running: Sequence[RequestView] = (),
    queuing: Sequence[RequestView] = (),
    reserved_tokens: int = 0,
    shared_tokens: int = 0,
    is_terminating: bool = False,
) -> InstanceView:
    return InstanceView(
        instance_id=InstanceId(instance_id),
        total_tokens=total_tokens,
        block_size=16,
        running=tuple(running),
        queuing=tuple(queuing),
        reserved_tokens=reserved_tokens,
        shared_tokens=shared_tokens,
        is_terminating=is_terminating,
    )


def report(
    view: InstanceView,
    policy: PolicyConfig = LLUMNIX,
    *,
    sequence: int = 1,
    last_dispatch: int = 0,
) -> InstanceLoad:
    """What the instance's llumlet reports in this very state."""
    return load(
        view,
        policy,
        sequence=sequence,
        last_dispatch=last_dispatch,
        num_migrating_out=0,
        num_migrating_in=0,
    )


def candidate(
    view: InstanceView,
    policy: PolicyConfig = LLUMNIX,
    *,
    in_flight: Sequence[NewRequest] = (),
    num_dispatched: int = 0,
) -> Candidate:
    """The instance as the global scheduler knows it from a report of this very state."""
    return Candidate(report(view, policy), tuple(in_flight), num_dispatched)


def evenly_loaded(
    instance_id: str, used_tokens: int, num_running: int, *, is_terminating: bool = False
) -> InstanceView:
    """An instance of capacity M whose normal requests use the same memory each."""
    share_tokens = used_tokens // num_running
    return instance(
        instance_id,
        running=[running(f"{instance_id}-{k}", share_tokens) for k in range(num_running)],
        is_terminating=is_terminating,
    )


def new_request(demand_tokens: int = 160, priority: Priority = NORMAL) -> NewRequest:
    return NewRequest(demand_tokens, priority)


def first_to_move(view: InstanceView, policy: PolicyConfig) -> RequestView | None:
    """The request that would move first, or None when none can."""
    candidates = candidates_to_move(view, policy)
    return candidates[0] if candidates else None


def freeness(view: InstanceView, policy: PolicyConfig) -> float:
    """What decides, from the load that is reported; checked against the paper's pseudo-code."""
    known = freeness_of(report(view, policy), (), policy)
    # The report sums whole usages and headrooms apart; floats may then differ in their ends.
    assert known == pytest.approx(algorithm1.freeness(view, policy), rel=1e-9, abs=1e-6)
    return known


priorities = st.sampled_from([NORMAL, HIGH])
usages_tokens = st.integers(1, 400).map(lambda num_blocks: 16 * num_blocks)


def _requests(
    instance_id: str, kind: str, max_size: int, *, all_movable: bool
) -> st.SearchStrategy[list[RequestView]]:
    reasons = [None] if all_movable else [None, None, None, Immovable.PREFILLING]
    immovable = st.sampled_from(reasons)
    drawn = st.lists(
        st.tuples(usages_tokens, priorities, immovable, usages_tokens), max_size=max_size
    )

    def build(
        k: int, tokens: int, priority: Priority, reason: Immovable | None, rest_tokens: int
    ) -> RequestView:
        name = f"{instance_id}-{kind}{k}"
        if kind == "q":
            return queuing(name, tokens, priority=priority, immovable=reason)
        # A prompt in chunks, part of which is in memory.
        demand_tokens = tokens + rest_tokens if reason is Immovable.PREFILLING else 0
        return running(
            name, tokens, demand_tokens=demand_tokens, priority=priority, immovable=reason
        )

    return drawn.map(lambda each: [build(k, *values) for k, values in enumerate(each)])


def views(
    instance_id: str = "i0", *, may_terminate: bool = True, all_movable: bool = False
) -> st.SearchStrategy[InstanceView]:
    """Any instance, far overloaded ones included; request ids are unique in it."""
    return st.builds(
        instance,
        st.just(instance_id),
        total_tokens=st.integers(200, 1600).map(lambda num_blocks: 16 * num_blocks),
        running=_requests(instance_id, "r", 6, all_movable=all_movable),
        queuing=_requests(instance_id, "q", 2, all_movable=all_movable),
        reserved_tokens=st.integers(0, 50).map(lambda num_blocks: 16 * num_blocks),
        is_terminating=st.booleans() if may_terminate else st.just(False),
    )


def clusters() -> st.SearchStrategy[list[InstanceView]]:
    """One to five instances of any state."""
    return st.integers(1, 5).flatmap(
        lambda num: st.tuples(*(views(f"i{k}") for k in range(num))).map(list)
    )


def crowded(instance_id: str) -> st.SearchStrategy[InstanceView]:
    """An instance with several requests, of which one can move, and next to nothing free."""
    return _filled(instance_id, 3, 8, st.integers(1, 60), st.integers(0, 40))


def lone(instance_id: str) -> st.SearchStrategy[InstanceView]:
    """An instance that is filled by one request: where that moves to, it is the same again."""
    return _filled(instance_id, 1, 1, st.integers(500, 790), st.integers(0, 40))


def roomy(instance_id: str) -> st.SearchStrategy[InstanceView]:
    """An instance with few requests, and most of its memory free."""
    return _filled(instance_id, 0, 3, st.integers(1, 60), st.integers(1_000, 9_000))


def _filled(
    instance_id: str,
    min_requests: int,
    max_requests: int,
    num_blocks: st.SearchStrategy[int],
    free_tokens: st.SearchStrategy[int],
) -> st.SearchStrategy[InstanceView]:
    def build(blocks: list[int], free: int) -> InstanceView:
        requests = [running(f"{instance_id}-r{k}", 16 * each) for k, each in enumerate(blocks)]
        return instance(instance_id, total_tokens=16 * sum(blocks) + free, running=requests)

    blocks = st.lists(num_blocks, min_size=min_requests, max_size=max_requests)
    return st.builds(build, blocks, free_tokens)


def clusters_with_moves() -> st.SearchStrategy[list[InstanceView]]:
    """Some instances that have too much, some that have room, and some of any state."""
    sources = st.sampled_from([[crowded, lone], [crowded, lone, lone], [crowded, crowded, lone]])
    others = st.sampled_from([[roomy, roomy, roomy], [roomy, roomy, views]])
    kinds = st.builds(lambda some, more: [*some, *more], sources, others)
    return kinds.flatmap(st.permutations).flatmap(
        lambda order: st.tuples(*(build(f"i{k}") for k, build in enumerate(order))).map(list)
    )
