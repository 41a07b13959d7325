"""Fleet checks, without faults: drains end in time, and the cluster reaches its size."""

from collections.abc import Set

from fault_simulation.virtual.timeline import Violation
from sterna.supervisor.fleet import Fleet, Phase
from sterna.types import InstanceId

DRAIN_LIMIT_S = 15.0
"""Time within which an instance that is being emptied has ended."""


class Drains:
    """The instances that are being emptied, and since when."""

    def __init__(self) -> None:
        self._since_s: dict[InstanceId, float] = {}

    def check(self, fleet: Fleet, now_s: float, calm_s: float) -> None:
        """Check the fleet after an event of its supervisor.

        Args:
            calm_s: when the faults are, or were, over; the time before does not count.

        Raises:
            Violation: it takes, or took, an instance too long to be emptied and to end.
        """
        for instance_id, since_s in self._since_s.items():
            time_s = now_s - max(since_s, calm_s)
            if time_s > DRAIN_LIMIT_S:
                raise Violation(f"{instance_id} has been emptied for {time_s:.1f} s")
        emptied = fleet.in_phase(Phase.TERMINATING, Phase.CLOSING)
        self._since_s = {each: self._since_s.get(each, now_s) for each in emptied}


def unsettled(fleet: Fleet, acting: Set[InstanceId], *, has_place: bool) -> str | None:
    """Return the difference between the instances that should exist and those that do, or None.

    Starts that wait for a place count as instances, and a rolling restart may wait for them.

    Args:
        acting: the instances that act on others.
        has_place: whether a place is free.
    """
    if emptied := fleet.in_phase(Phase.TERMINATING, Phase.CLOSING):
        return f"the fleet is still emptying {', '.join(emptied)}"
    starting = fleet.in_phase(Phase.STARTING)
    is_waiting = all(fleet.members[each].pending is not None for each in starting)
    if starting and (has_place or not is_waiting):
        return f"the fleet is still starting {', '.join(starting)}"
    serving = fleet.in_phase(Phase.SERVING)
    if len(serving) + len(starting) < fleet.wanted:
        return f"{len(serving)} instances serve, and {fleet.wanted} are wanted"
    if fleet.is_restarting and not starting:
        return "a rolling restart has not ended"
    if acting != set(serving):
        return f"{sorted(acting)} act, and the fleet has {sorted(serving)}"
    return None
