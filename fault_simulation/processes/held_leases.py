"""Leases of instances on other nodes, in virtual time: the part of the instance.

As `instance.lease_guard`; the decisions are those of `HeldLease`.
"""

from collections.abc import Callable

from fault_simulation.processes.actors import Actor
from fault_simulation.virtual.settings import HEARTBEAT_S, LEASE_S, NOTICE_LEASE_END_S
from fault_simulation.virtual.timeline import Crashed
from sterna.messages.actors import Heartbeat, HeartbeatAnswer


class Guard:
    """Ends an instance whose lease has ended, and asks for more of it before.

    Args:
        supervisor: returns the address of the supervisor, as far as the instance knows it.
    """

    def __init__(self, instance: Actor, supervisor: Callable[[], str | None]) -> None:
        self._instance = instance
        self._supervisor = supervisor
        self._world = instance.world
        self._nodes = self._world.nodes
        self._lease = self._world.cores.held_lease(LEASE_S, self._now_s())
        self._beat()
        self._watch()

    def on_answer(self, answer: HeartbeatAnswer) -> None:
        """The supervisor has answered a heartbeat."""
        if answer.asked_s is not None:
            self._lease.on_answer(answer.asked_s)

    def check(self) -> None:
        """Check the lease before the instance acts on others.

        Raises:
            Crashed: the lease has ended.
        """
        if self.has_ended:
            self._world.timeline.note(self._instance.name, "its lease has ended")
            self._world.counts["instance ended by its lease"] += 1
            raise Crashed(self._instance)

    @property
    def has_ended(self) -> bool:
        """Whether the instance no longer acts on others, however long it takes to notice."""
        return self._lease.has_ended(self._now_s())

    def _now_s(self) -> float:
        return self._nodes.clock_s(self._instance.name)

    def _beat(self) -> None:
        instance = self._instance
        heartbeat = Heartbeat(instance.name, 0, False, self._now_s())
        instance.send(self._supervisor(), heartbeat)
        instance.later(HEARTBEAT_S, "", self._beat)

    def _watch(self) -> None:
        """Check the lease when it would end, or a little later."""
        left_s = self._nodes.until_s(self._instance.name, self._lease.ends_s)
        late_s = self._nodes.rng.uniform(*NOTICE_LEASE_END_S)
        # An entry without an owner: an instance that hangs no longer acts when it continues.
        self._world.timeline.push(left_s + late_s, None, "", self._look)

    def _look(self) -> None:
        if self._instance.is_alive:
            self.check()
            self._watch()
