"""The global scheduler: the production core, interpreted in virtual time."""

from collections.abc import Iterable, Sequence

from fault_simulation.processes.actors import Actor
from fault_simulation.processes.world import World
from fault_simulation.virtual.timeline import Violation
from sterna.messages.actors import (
    Held,
    Membership,
    WireMessage,
)
from sterna.messaging.send_effects import KeepOnly, ToMailbox, Unexpected


class SchedulerProcess(Actor):
    """The scheduler."""

    def __init__(self, name: str, world: World, number: int) -> None:
        super().__init__(name, world)
        self.number = number
        self.core = world.cores.scheduler(
            world.policy,
            now_s=self.now_s,
            scaling=world.scaling,
            first_dispatch_number=int(self.now_s * 1e6) + 1,
        )
        self.schedule_tick()

    @property
    def membership(self) -> Membership:
        """The newest that it has heard of."""
        return self.core.membership

    def receive(self, message: WireMessage, frames: Sequence[bytes]) -> None:
        self._carry_out(self.core.on_message(message, self.now_s))

    def next_deadline_s(self) -> float | None:
        return self.core.next_deadline_s

    def on_time(self) -> None:
        self._carry_out(self.core.on_tick(self.now_s))

    def _carry_out(self, effects: Iterable[object]) -> None:
        for effect in effects:
            self.begin_effect()
            match effect:
                case ToMailbox(address, message):
                    if isinstance(message, Held):
                        self.world.counts["request held for memory"] += len(message.request_ids)
                    self.send(address, message)
                case KeepOnly(addresses):
                    self.world.network.keep_only(self, addresses)
                case Unexpected(message):
                    raise Violation(f"{self.name} got what is not for a scheduler: {message}")
        self.schedule_tick()
