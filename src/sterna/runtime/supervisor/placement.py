"""Places of instances: each is a placement group of Ray, with an engine's resources (Section 5).

A request for resources that no node has free stays open, so that Ray's cluster autoscaler sees the
demand and can add a node; the instance is *pending* until then.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from sterna.own_log import LogThrottle
from sterna.runtime.actors.addresses import is_gcs_up
from sterna.runtime.supervisor.ray_errors import reason_of
from sterna.runtime.supervisor.tasks import Tasks

logger = logging.getLogger(__name__)

PENDING_AFTER_S = 1.0
"""Ray places a group that fits within milliseconds; after this time it waits for resources."""

RETRY_DELAY_S = 1.0
"""Time between two attempts to give a place back."""

SMALLEST_SHARE = 0.001
"""The smallest part of a CPU to request: a placement group must request something."""


class Place:
    """The resources of one instance, for as long as it lives."""

    def __init__(self, group: PlacementGroup) -> None:
        self._group = group

    def options(self) -> dict[str, Any]:
        """Return the options with which an actor runs here."""
        bundle: Mapping[str, float] = self._group.bundle_specs[0]
        return {
            "num_cpus": bundle["CPU"],
            "num_gpus": bundle.get("GPU", 0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=0
            ),
        }

    async def give_back(self) -> None:
        """Free the resources, and kill what still runs here. Returns when Ray's GCS has confirmed
        it, however long the GCS is away: otherwise the resources would stay taken for good."""
        throttle = LogThrottle()
        while True:
            # Without a GCS the call takes a minute to fail.
            if is_gcs_up():
                try:
                    await asyncio.to_thread(remove_placement_group, self._group)
                except ray.exceptions.RayError as error:
                    if throttle.is_due():
                        logger.warning("place not given back yet reason=%s", reason_of(error))
                else:
                    return
            await asyncio.sleep(RETRY_DELAY_S)


async def find_place(
    name: str,
    num_cpus: float,
    num_gpus: int,
    on_pending: Callable[[str | None], None],
    tasks: Tasks,
) -> Place:
    """Return a place with these resources, as soon as there is one.

    Args:
        name: its key in `find_places`; the place outlives this process.
        on_pending: called with the reason when it has to be waited for, and with None when the
            wait is over.
        tasks: runs the return of the place if this call is cancelled.
    """
    bundle: dict[str, float] = {"CPU": max(num_cpus, SMALLEST_SHARE)}
    if num_gpus:
        bundle["GPU"] = num_gpus
    # One bundle is never spread over nodes: ranks of one engine share memory.
    # In a thread, here and below, since a call blocks while Ray's GCS is away.
    group = await asyncio.to_thread(placement_group, [bundle], name=name, lifetime="detached")
    place = Place(group)
    try:
        # `ready()` would start a process of its own for this.
        if not await asyncio.to_thread(group.wait, PENDING_AFTER_S):
            reason = await asyncio.to_thread(_reason, bundle)
            logger.warning("instance waits for a place instance=%s because %s", name, reason)
            on_pending(reason)
            while not await asyncio.to_thread(group.wait, PENDING_AFTER_S):
                pass
    except BaseException:
        tasks.begin(place.give_back())
        raise
    on_pending(None)
    return place


def find_places() -> dict[str, Place]:
    """Return all places, granted or requested, by their names."""
    places = {}
    for each in placement_group_table().values():
        # It may be gone already, belong to another namespace, or have no name.
        with contextlib.suppress(ValueError):
            if each["state"] != "REMOVED":
                places[each["name"]] = Place(get_placement_group(each["name"]))
    return places


def _reason(bundle: Mapping[str, float]) -> str:
    names = {"CPU": "CPUs", "GPU": "GPUs"}
    asked = " and ".join(
        f"{count:g} {names[name]}" for name, count in bundle.items() if count > SMALLEST_SHARE
    )
    free = ray.available_resources()
    left = " and ".join(f"{free.get(name, 0):g} {names[name]}" for name in bundle)
    return f"no node has {asked or 'room'} free (in all {left} are): waiting for one"
