"""Leases of instances on other nodes, in virtual time: the part of the supervisor.

As `runtime.supervisor.watch`; the decisions are those of `GrantedLeases`.
"""

from collections.abc import Callable

from fault_simulation.processes.actors import Actor
from fault_simulation.processes.ray import Platform
from fault_simulation.virtual.settings import JUDGE_S, LEASE_S
from sterna.messages.actors import Heartbeat, HeartbeatAnswer


class Watch:
    """The leases that one supervisor grants.

    Args:
        on_ended: is called for an instance that has certainly ended, and was not killed.
    """

    def __init__(
        self, supervisor: Actor, platform: Platform, on_ended: Callable[[str], None]
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
        """The member has joined, or a dead supervisor may just have answered it."""
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
        """Kill the member as soon as it can be reached; its end is reported then, or when it must
        have ended by itself."""
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
