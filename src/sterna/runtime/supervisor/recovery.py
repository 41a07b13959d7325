"""Recovery of a new supervisor: finds the live actors, and the newest membership that they know.

Every `Membership` carries the supervisor's whole state, so that the members keep it.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from sterna.errors import SternaError
from sterna.messages.actors import Membership
from sterna.runtime.actors.member_status import MemberStatus
from sterna.types import FrontendId, InstanceId

STATUS_TIMEOUT_S = 10.0
"""A member that has not answered by then is given up and replaced."""

INSTANCE = "instance "
FRONTEND = "front end "
SCHEDULER = "scheduler "
"""Prefixes of the names of actors."""


class NothingFoundError(SternaError):
    """No member knows a membership: there is nothing to take over."""


@dataclass(slots=True)
class FoundMembers:
    """The actors that are up, with their status.

    Attributes:
        numbers: the numbers of all front ends and schedulers, also of those that are not up, by
            the prefix of their names.
    """

    instances: dict[InstanceId, tuple[Any, MemberStatus]] = field(default_factory=dict)
    frontends: dict[FrontendId, tuple[Any, MemberStatus]] = field(default_factory=dict)
    scheduler: tuple[Any, MemberStatus] | None = None
    numbers: dict[str, list[int]] = field(default_factory=dict)

    def membership(self) -> Membership:
        """The newest membership that a member knows.

        Raises:
            NothingFoundError: no member knows one.
        """
        members = [*self.instances.values(), *self.frontends.values()]
        if self.scheduler is not None:
            members.append(self.scheduler)
        newest = max(
            (status.membership for _, status in members),
            key=lambda membership: membership.version,
            default=None,
        )
        if newest is None or not newest.state:
            raise NothingFoundError("no member of the cluster knows a membership")
        return newest


async def find_members() -> FoundMembers:
    """Ask all actors for their status, and kill those that are not up or do not answer."""
    names = [name for name in ray.util.list_named_actors() if name.startswith(_KINDS)]
    statuses = await asyncio.gather(*map(_ask, names))
    found = FoundMembers(numbers=numbers_in(names))
    for name, status in zip(names, statuses, strict=True):
        if status is None:
            continue
        if name.startswith(INSTANCE):
            found.instances[InstanceId(name.removeprefix(INSTANCE))] = status
        elif name.startswith(FRONTEND):
            found.frontends[FrontendId(int(name.removeprefix(FRONTEND)))] = status
        else:
            found.scheduler = status
    return found


def numbers_in(names: Sequence[str]) -> dict[str, list[int]]:
    """Return the numbers of the front ends and schedulers with these names."""
    return {
        kind: [int(name.removeprefix(kind)) for name in names if name.startswith(kind)]
        for kind in (FRONTEND, SCHEDULER)
    }


_KINDS = (INSTANCE, FRONTEND, SCHEDULER)


async def _ask(name: str) -> tuple[Any, MemberStatus] | None:
    actor = None
    with contextlib.suppress(ray.exceptions.RayError, ValueError, TimeoutError):
        actor = ray.get_actor(name)
        async with asyncio.timeout(STATUS_TIMEOUT_S):
            status = await actor.status.remote()
        if status is not None:
            return actor, status
    if actor is not None:
        ray.kill(actor)
    return None
