"""Nodes in virtual time: the processes on them, their links that are cut, and their clocks.

On the first node, at home, are supervisor, scheduler and front ends; on the others instances only.
A link that is cut lets nothing through between a node and all others.
"""

from dataclasses import dataclass
from random import Random

from fault_simulation.virtual.timeline import Timeline
from sterna.supervisor.lease import DRIFT

HOME = 0

BACKLOG_S = 0.05
"""Time within which everything arrives that a cut link has held back."""


@dataclass(frozen=True, slots=True)
class _Clock:
    offset_s: float
    pace: float


class Nodes:
    """The nodes of one cluster.

    Args:
        rng: not that of the rest, so that a cluster of one node is the same with it.
        num_nodes: the home included.
    """

    def __init__(self, timeline: Timeline, rng: Random, num_nodes: int) -> None:
        self.num_nodes = num_nodes
        self.rng = rng
        self._timeline = timeline
        self._clocks = [
            _Clock(rng.uniform(-1e6, 1e6), rng.uniform(1.0, 1.0 + DRIFT)) for _ in range(num_nodes)
        ]
        self._node_of: dict[str, int] = {}
        self._cut_until_s: dict[int, float] = {}
        # Given up by Ray, which no longer kills processes there.
        self._lost: set[int] = set()

    # ------------------------------------------------------------------------------- places

    def place(self, name: str) -> None:
        """Choose the node of the process of this name: while a link is cut, the home."""
        if self.num_nodes > 1:
            is_whole = not self._lost and not self._is_any_cut
            self._node_of[name] = self.rng.randrange(self.num_nodes) if is_whole else HOME

    def node_of(self, name: str) -> int:
        """The node of a process."""
        return self._node_of.get(name, HOME)

    def is_away(self, name: str) -> bool:
        """Whether the process is on another node than supervisors are."""
        return self.node_of(name) != HOME

    # --------------------------------------------------------------------------------- links

    def cut(self, node: int, duration_s: float) -> None:
        """Let nothing through between this node and all others for this time."""
        self._cut_until_s[node] = self._timeline.now_s + duration_s

    def lose(self, node: int) -> None:
        """Ray gives the node up, whether or not processes run there."""
        self._lost.add(node)

    def is_lost(self, name: str) -> bool:
        """Whether Ray has given up the node of this process."""
        return self.node_of(name) in self._lost

    def cut_left_s(self, one: str, other: str) -> float:
        """Time until the two processes can reach each other; 0: they can."""
        if not self._cut_until_s:
            return 0.0
        nodes = self.node_of(one), self.node_of(other)
        if nodes[0] == nodes[1]:
            return 0.0
        until_s = max(self._cut_until_s.get(each, 0.0) for each in nodes)
        return max(0.0, until_s - self._timeline.now_s)

    def is_within_reach(self, name: str) -> bool:
        """Whether a supervisor can look at the process, and kill it."""
        return not self.is_lost(name) and self.home_cut_left_s(name) == 0.0

    def home_cut_left_s(self, name: str) -> float:
        """Time until the process and the home can reach each other; 0: they can."""
        return max(0.0, self._cut_until_s.get(self.node_of(name), 0.0) - self._timeline.now_s)

    @property
    def _is_any_cut(self) -> bool:
        return any(each > self._timeline.now_s for each in self._cut_until_s.values())

    # -------------------------------------------------------------------------------- clocks

    def clock_s(self, name: str) -> float:
        """The clock of the node of this process."""
        clock = self._clocks[self.node_of(name)]
        return clock.offset_s + clock.pace * self._timeline.now_s

    def until_s(self, name: str, clock_s: float) -> float:
        """Return the true time until the clock of this process shows `clock_s`."""
        clock = self._clocks[self.node_of(name)]
        return max(0.0, (clock_s - self.clock_s(name)) / clock.pace)
