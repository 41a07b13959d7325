"""Leases in virtual time: what `runtime.lease_guard`, `runtime.heartbeat` and `runtime.watch` do
for instances on other nodes. What is decided is `lease`'s."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from fault_simulation.virtual.settings import HEARTBEAT_S, JUDGE_S, LEASE_S, NOTICE_LEASE_END_S
from fault_simulation.virtual.timeline import Crashed
from sterna.messages.actors import Heartbeat, HeartbeatAnswer

if TYPE_CHECKING:
    from fault_simulation.processes.actors import Actor
    from fault_simulation.processes.instances import InstanceProcess
    from fault_simulation.processes.ray import Platform


class Guard:
    """Ends an instance whose lease has ended, and asks for more of it before."""

    def __init__(self, instance: "InstanceProcess") -> None:
        self._instance = instance
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
        """To be called before the instance acts on others.

        Raises:
            Crashed: it must not.
        """
        if self.has_ended:
            self._world.timeline.note(self._instance.name, "its lease has ended")
            self._world.counts["instance ended by its lease"] += 1
            raise Crashed(self._instance)

    @property
    def has_ended(self) -> bool:
        """Whether the instance will act on nobody any more, however long it takes to notice."""
        return self._lease.has_ended(self._now_s())

    def _now_s(self) -> float:
        return self._nodes.clock_s(self._instance.name)

    def _beat(self) -> None:
        instance = self._instance
        heartbeat = Heartbeat(instance.name, 0, False, self._now_s())
        instance.send(instance.membership.supervisor, heartbeat)
        instance.later(HEARTBEAT_S, "", self._beat)

    def _watch(self) -> None:
        """Look when the lease would end, or a little later."""
        left_s = self._nodes.until_s(self._instance.name, self._lease.ends_s)
        late_s = self._nodes.rng.uniform(*NOTICE_LEASE_END_S)
        # An entry of nobody: one that is stopped does not act any more when it goes on.
        self._world.timeline.push(left_s + late_s, None, "", self._look)

    def _look(self) -> None:
        if self._instance.is_alive:
            self.check()
            self._watch()


class Watch:
    """The leases that one supervisor grants.

    Args:
        on_ended: is told of an instance that has ended for certain, and that nobody has killed.
    """

    def __init__(
        self, supervisor: "Actor", platform: "Platform", on_ended: Callable[[str], None]
    ) -> None:
        self._supervisor = supervisor
        self._platform = platform
        self._on_ended = on_ended
        self._nodes = supervisor.world.nodes
        self._leases = supervisor.world.cores.granted_leases(LEASE_S)
        self._ending: set[str] = set()
        if self._nodes.num_nodes > 1:
            self._judge()

    def begin(self, member: str) -> None:
        """The member has joined, or a supervisor that is dead may just have answered it."""
        if self._nodes.is_away(member):
            self._leases.grant(member, self._now_s())

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Answer it, if its lease may be extended."""
        if heartbeat.asked_s is None:
            return
        if self._leases.may_answer(heartbeat.member, self._now_s()):
            answer = HeartbeatAnswer(self._supervisor.name, heartbeat.asked_s)
            self._supervisor.send(heartbeat.member, answer)

    def end(self, member: str) -> None:
        """Kill the member as soon as it is in reach; that it has ended is said then, or when it
        must have ended by itself."""
        if member in self._ending:
            return
        self._ending.add(member)
        self._leases.end(member)
        self._platform.kill_away(self._supervisor, member)
        left_s = self._nodes.until_s(self._supervisor.name, self._leases.certain_s(member))
        self._supervisor.later(left_s, f"lease of {member} is over", lambda: self._give_up(member))

    def forget(self, member: str) -> None:
        """The member has ended."""
        self._leases.forget(member)
        self._ending.discard(member)

    def _give_up(self, member: str) -> None:
        if member in self._ending:
            self._platform.give_up(member)
            self._on_ended(member)

    def _judge(self) -> None:
        for member in self._leases.ended(self._now_s()):
            self.end(member)
        self._supervisor.later(JUDGE_S, "", self._judge)

    def _now_s(self) -> float:
        return self._nodes.clock_s(self._supervisor.name)
