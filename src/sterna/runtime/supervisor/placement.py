"""Places of instances: each is a placement group of Ray, with an engine's resources (Section 5).

A request for resources that no node has free stays open, so that Ray's cluster autoscaler sees the
demand and can add a node; the instance is *pending* until then.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

import ray
from ray.util.placement_group import (
    NODE_ID_LABEL_KEY,
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from sterna.own_log import LogThrottle
from sterna.runtime.actors.addresses import is_gcs_up, node_address, node_addresses
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
    drained_nodes: Callable[[], Collection[str]],
    on_pending: Callable[[str], None],
    tasks: Tasks,
) -> tuple[Place, str]:
    """Return a place with these resources, as soon as there is one, and the address of its node.

    Args:
        name: its key in `find_places`; the place outlives this process.
        drained_nodes: returns the addresses of the nodes on which it must not be; they may change
            meanwhile.
        on_pending: called with the reason when it has to be waited for.
        tasks: runs the return of the place if this call is cancelled.
    """
    bundle: dict[str, float] = {"CPU": max(num_cpus, SMALLEST_SHARE)}
    if num_gpus:
        bundle["GPU"] = num_gpus
    while True:
        drained = frozenset(drained_nodes())
        # In a thread, here and below, since a call blocks while Ray's GCS is away.
        group = await asyncio.to_thread(_request, name, bundle, drained)
        place = Place(group)
        try:
            # `ready()` would start a process of its own for this.
            is_granted = await asyncio.to_thread(group.wait, PENDING_AFTER_S)
            if not is_granted:
                reason = await asyncio.to_thread(_reason, bundle, drained)
                logger.warning("instance waits for a place instance=%s because %s", name, reason)
                on_pending(reason)
            # A request keeps the nodes that it leaves out.
            while not is_granted and drained == frozenset(drained_nodes()):
                is_granted = await asyncio.to_thread(group.wait, PENDING_AFTER_S)
            if is_granted:
                node = await asyncio.to_thread(_node_of, group)
                # A node may also have joined with the address of a drained one.
                if node not in drained_nodes():
                    return place, node
            await place.give_back()
        except BaseException:
            tasks.begin(place.give_back())
            raise


def find_places() -> dict[str, Place]:
    """Return all places, granted or requested, by their names."""
    places = {}
    for each in placement_group_table().values():
        # It may be gone already, belong to another namespace, or have no name.
        with contextlib.suppress(ValueError):
            if each["state"] != "REMOVED":
                places[each["name"]] = Place(get_placement_group(each["name"]))
    return places


def _request(name: str, bundle: dict[str, float], drained: Collection[str]) -> PlacementGroup:
    """Request a place on any node but these."""
    there = node_addresses() if drained else {}
    left_out = ", ".join(each for each, address in there.items() if address in drained)
    # One bundle is never spread over nodes: ranks of one engine share memory.
    return placement_group(
        [bundle],
        name=name,
        lifetime="detached",
        bundle_label_selector=[{NODE_ID_LABEL_KEY: f"!in({left_out})"}] if left_out else None,
    )


def _node_of(group: PlacementGroup) -> str:
    """The address of the node on which a place is."""
    return node_address(placement_group_table(group)["bundles_to_node_id"][0])


def _reason(bundle: Mapping[str, float], drained: Collection[str]) -> str:
    names = {"CPU": "CPUs", "GPU": "GPUs"}
    asked = " and ".join(
        f"{count:g} {names[name]}" for name, count in bundle.items() if count > SMALLEST_SHARE
    )
    free = ray.available_resources()
    left = " and ".join(f"{free.get(name, 0):g} {names[name]}" for name in bundle)
    nodes = f"no node but drained ones ({', '.join(sorted(drained))})" if drained else "no node"
    return f"{nodes} has {asked or 'room'} free (in all {left} are): waiting for one"
