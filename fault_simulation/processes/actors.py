"""Actors in virtual time: processes with a mailbox, effects and a timer."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from fault_simulation.processes.world import World
from fault_simulation.virtual.settings import WIDE
from fault_simulation.virtual.timeline import Crashed, Process
from sterna.messages.actors import (
    WireMessage,
)


class Actor(Process, ABC):
    """A process with a mailbox, effects and one timer."""

    def __init__(self, name: str, world: World) -> None:
        super().__init__(name)
        self.world = world
        self._tick_s: float | None = None
        world.network.join(self, self.receive, self.queue_limit())

    @abstractmethod
    def receive(self, message: WireMessage, frames: Sequence[bytes]) -> None:
        """A message has arrived."""

    @abstractmethod
    def next_deadline_s(self) -> float | None:
        """Return when `on_time` is due, or None."""

    @abstractmethod
    def on_time(self) -> None:
        """Time has passed."""

    @property
    def now_s(self) -> float:
        """The time of the world."""
        return self.world.timeline.now_s

    def later(self, delay_s: float, what: str, action: Callable[[], None]) -> None:
        """Let something happen to this process."""
        self.world.timeline.push(delay_s, self, what, action)

    def send(self, address: str | None, message: WireMessage, frames: Sequence[bytes] = ()) -> bool:
        """Send, unless there is no address to send to; returns False when the mailbox refuses."""
        if address is None or self.world.network.send(self, address, message, frames):
            return True
        self.on_unsent(address, message)
        return False

    def queue_limit(self) -> int:
        """Number of messages that its mailbox keeps for a peer."""
        return WIDE.of_frontends

    def on_unsent(self, address: str, message: WireMessage) -> None:
        """The mailbox has refused this message."""

    def begin_effect(self) -> None:
        """Die in place of the next effect, if the adversary wants that.

        Raises:
            Crashed: it does.
        """
        if self.crash_after is not None:
            if self.crash_after == 0:
                raise Crashed(self)
            self.crash_after -= 1

    def schedule_tick(self) -> None:
        """Have `on_time` called when it is due; an earlier call does no harm."""
        deadline_s = self.next_deadline_s()
        if deadline_s is None or (self._tick_s is not None and self._tick_s <= deadline_s):
            return
        self._tick_s = deadline_s
        self.world.timeline.push_at(deadline_s, self, "time", lambda: self._tick(deadline_s))

    def _tick(self, set_for_s: float) -> None:
        if self._tick_s != set_for_s:
            return  # An earlier one has been set since.
        self._tick_s = None
        deadline_s = self.next_deadline_s()
        if deadline_s is not None and deadline_s <= self.now_s:
            self.on_time()
        self.schedule_tick()
