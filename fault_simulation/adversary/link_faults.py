"""Faults of links: nothing passes between a node and all others for a time."""

from collections.abc import Callable, Sequence

from fault_simulation.processes.instances import InstanceProcess
from fault_simulation.processes.ray import Platform
from fault_simulation.virtual.settings import LEASE_S

CUTS: dict[str, tuple[float, float]] = {
    "much shorter than a lease": (0.1, 0.6),
    "about as long as a lease": (0.7, 1.5),
    "much longer than a lease": (2.0, 3.0),
}
"""Bounds of the time for which a link is cut, in leases; each time one of these."""

DEATH_IN_CUT_SHARE = 0.3
"""Of the cuts: those in which the supervisor dies, so that its successor cannot reach all."""

LOST_NODE_SHARE = 0.3
"""Of the cuts: those in which Ray gives the node up for ever."""


class Links:
    """Cuts the links of one cluster.

    Args:
        how_long: some of `CUTS`.
    """

    def __init__(self, platform: Platform, how_long: Sequence[str]) -> None:
        self._how_long = how_long
        self._platform = platform
        self._world = platform.world
        self._nodes = platform.world.nodes

    def cut_one(self) -> float | None:
        """Cut a node with instances off from all others; returns the duration, or None if there is
        no such node, or no instance elsewhere that could continue."""
        nodes, rng = self._nodes, self._nodes.rng
        within_reach = [
            each.name
            for each in self._platform.instances()
            if nodes.is_away(each.name) and nodes.is_within_reach(each.name)
        ]
        if not within_reach:
            return None
        node = nodes.node_of(rng.choice(within_reach))
        if not any(self._can_continue(each) for each in self._instances_elsewhere(node)):
            return None
        how_long = rng.choice(self._how_long)
        duration_s = rng.uniform(*CUTS[how_long]) * LEASE_S
        nodes.cut(node, duration_s)
        self._world.network.on_node_cut(node, duration_s)
        self._world.counts[f"link cut: {how_long}"] += 1
        self._world.timeline.note("", f"node {node} is cut off for {duration_s:.2f} s")
        if rng.random() < DEATH_IN_CUT_SHARE:
            self._in_cut(duration_s, self._kill_supervisor)
        if rng.random() < LOST_NODE_SHARE:
            self._in_cut(duration_s, lambda: self._platform.lose_node(node))
        return duration_s

    def _instances_elsewhere(self, node: int) -> list[InstanceProcess]:
        instances = self._platform.instances()
        return [each for each in instances if self._nodes.node_of(each.name) != node]

    def _can_continue(self, instance: InstanceProcess) -> bool:
        is_served = instance.membership.version > 0 and not instance.engine.is_terminating
        is_well = not instance.is_hung and not instance.engine.is_stalled
        return is_served and is_well and self._nodes.is_within_reach(instance.name)

    def _in_cut(self, duration_s: float, action: Callable[[], None]) -> None:
        self._world.timeline.push(self._nodes.rng.uniform(0.0, duration_s), None, "", action)

    def _kill_supervisor(self) -> None:
        supervisor = self._platform.supervisor
        if supervisor is not None and supervisor.is_alive:
            self._world.counts["supervisor killed while a link is cut"] += 1
            self._platform.kill(supervisor)
