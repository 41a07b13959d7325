"""Where an instance runs: a placement group of Ray, with all that its engine needs (Section 5).

What no node has at this moment stays asked for, so that Ray's cluster autoscaler sees the demand
and can add a node; the instance is *pending* until then.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

logger = logging.getLogger(__name__)

PENDING_AFTER_S = 1.0
"""Ray places what fits within milliseconds; what takes longer waits for resources."""

SMALLEST_SHARE = 0.001
"""Of a CPU: a placement group must ask for something."""


class Place:
    """What one instance may use, for as long as it lives."""

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

    def give_back(self) -> None:
        """Let others have it; whatever still runs here is killed."""
        remove_placement_group(self._group)


async def find_place(
    name: str, num_cpus: float, num_gpus: int, on_pending: Callable[[str | None], None]
) -> Place:
    """Return a place with these resources, as soon as there is one.

    Args:
        name: by which `find_again` finds it; it outlives this process.
        on_pending: called with the reason when it has to be waited for, and with None when the
            wait is over.
    """
    bundle: dict[str, float] = {"CPU": max(num_cpus, SMALLEST_SHARE)}
    if num_gpus:
        bundle["GPU"] = num_gpus
    # One bundle is never spread over nodes: ranks of one engine share memory.
    group = placement_group([bundle], name=name, lifetime="detached")
    try:
        # `ready()` would start a process of its own for this.
        if not await asyncio.to_thread(group.wait, PENDING_AFTER_S):
            reason = _reason(bundle)
            logger.warning("instance waits for a place instance=%s because %s", name, reason)
            on_pending(reason)
            while not await asyncio.to_thread(group.wait, PENDING_AFTER_S):
                pass
    except BaseException:
        remove_placement_group(group)
        raise
    on_pending(None)
    return Place(group)


def find_again(name: str) -> Place | None:
    """Return the place of this name, had or only asked for; None where there is none."""
    try:
        return Place(get_placement_group(name))
    except ValueError:
        return None


def _reason(bundle: Mapping[str, float]) -> str:
    names = {"CPU": "CPUs", "GPU": "GPUs"}
    asked = " and ".join(
        f"{count:g} {names[name]}" for name, count in bundle.items() if count > SMALLEST_SHARE
    )
    free = ray.available_resources()
    left = " and ".join(f"{free.get(name, 0):g} {names[name]}" for name in bundle)
    return f"no node has {asked or 'room'} free (in all {left} are): waiting for one"
