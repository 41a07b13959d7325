"""A supervisor's successor goes by the newest membership that anybody knows."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import ray

from sterna.messages.actors import Membership
from sterna.runtime.actors.member_status import MemberStatus
from sterna.runtime.supervisor import recovery
from sterna.runtime.supervisor.recovery import (
    FRONTEND,
    SCHEDULER,
    FoundMembers,
    NothingFoundError,
    find_members,
    numbers_in,
)
from sterna.supervisor.core import HostedInstance, SupervisorState, state_of
from sterna.supervisor.failure_detector import ProcessIdentity
from sterna.supervisor.fleet import Fleet
from sterna.types import FrontendId, InstanceId

I0 = InstanceId("i0")
PROCESS = ProcessIdentity("node", 4711, 123456)
HOSTED = HostedInstance("tcp://127.0.0.1:4711", "kv", PROCESS)


def membership(version: int, wanted: int) -> Membership:
    options: dict[int, tuple[str, ...]] = {0: (), 1: ("--max-num-seqs", "8")}
    state = SupervisorState(Fleet(wanted), options, {I0: 3}, 2, 1, b"ready", {I0: HOSTED})
    return Membership(version, (), (), None, state=state.encode())


def test_the_newest_membership_holds() -> None:
    found = FoundMembers()
    found.instances[InstanceId("i0")] = (None, MemberStatus("a", membership(4, 2), PROCESS))
    found.frontends[FrontendId(0)] = (None, MemberStatus("b", membership(6, 3), PROCESS))
    found.scheduler = (None, MemberStatus("c", membership(5, 4), PROCESS))
    state = state_of(found.membership())
    assert state.fleet == Fleet(3)
    assert state.options == {0: (), 1: ("--max-num-seqs", "8")}
    assert (state.emptied_since, state.ready) == ({"i0": 3}, b"ready")
    # One that does not answer is ended by this.
    assert state.hosted == {I0: HOSTED}
    assert (state.num_frontends_begun, state.num_schedulers_begun) == (2, 1)


def test_where_nobody_knows_anything_there_is_nothing_to_take_over() -> None:
    with pytest.raises(NothingFoundError):
        FoundMembers().membership()
    found = FoundMembers()
    found.scheduler = (None, MemberStatus("c", Membership(0, (), (), None), PROCESS))
    with pytest.raises(NothingFoundError):
        found.membership()


def test_the_numbers_of_all_that_are_there_are_known() -> None:
    names = ["front end 0", "scheduler 7", "front end 12", "instance i3"]
    assert numbers_in(names) == {FRONTEND: [0, 12], SCHEDULER: [7]}


class Handle:
    """The handle of an actor, which gives this answer when it is asked for its status."""

    def __init__(self, answer: Callable[[], Awaitable[MemberStatus | None]]) -> None:
        self.status = self
        self.remote = answer


def answers(status: MemberStatus | None) -> Handle:
    return Handle(lambda: asyncio.sleep(0, status))


async def dies() -> MemberStatus | None:
    raise ray.exceptions.ActorDiedError


async def hangs() -> MemberStatus | None:
    await asyncio.Event().wait()
    return None


def test_members_that_are_up_are_found_and_all_others_are_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A member that a supervisor does not know must not act beside its replacement."""
    up = MemberStatus("address", membership(4, 2), PROCESS)
    handles: dict[str, Any] = {
        "instance i0": answers(up),
        "instance i1": Handle(hangs),
        "front end 3": answers(up),
        "front end 4": answers(None),
        "scheduler 1": answers(up),
        "scheduler 0": Handle(dies),
        "supervisor 5": Handle(hangs),
    }

    def get_actor(name: str) -> Handle:
        if name not in handles:
            raise ValueError("it has died meanwhile")
        return handles[name]  # type: ignore[no-any-return]

    killed: list[Handle] = []
    names = [*handles, "instance i2"]
    monkeypatch.setattr(recovery.ray.util, "list_named_actors", lambda: names)
    monkeypatch.setattr(recovery.ray, "get_actor", get_actor)
    monkeypatch.setattr(recovery.ray, "kill", killed.append)
    monkeypatch.setattr(recovery, "STATUS_TIMEOUT_S", 0.02)
    assert asyncio.run(find_members()) == FoundMembers(
        {I0: (handles["instance i0"], up)},
        {FrontendId(3): (handles["front end 3"], up)},
        (handles["scheduler 1"], up),
        {FRONTEND: [3, 4], SCHEDULER: [1, 0]},
    )
    lost = ("instance i1", "front end 4", "scheduler 0")
    assert set(killed) == {handles[name] for name in lost}
