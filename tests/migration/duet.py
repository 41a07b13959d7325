"""Both machines of one migration over a perfect network, and what they did, line by line.

Engines answer with the outcomes that a test gives, else as if all went well. A test can strike
after any line: give a machine an event, or lose what is under way.
"""

from collections import deque
from collections.abc import Mapping, Sequence

from sterna.config import MigrationConfig
from sterna.migration.destination import DestinationMessage
from sterna.migration.messages import (
    Abort,
    Aborted,
    Adopt,
    Adopted,
    AdoptFailed,
    BlocksReserved,
    Commit,
    CopyBlocks,
    Drain,
    Drained,
    DrainRefused,
    Effect,
    Ended,
    Event,
    FreeReservation,
    Inspect,
    Inspected,
    Message,
    Mode,
    Reason,
    Received,
    ReservationFreed,
    Reserve,
    ReserveBlocks,
    Reserved,
    ReserveFailed,
    Send,
    StageCopied,
    StageReceived,
)
from tests.migration.machines import (
    CONFIG,
    RECEIVERS,
    START_S,
    STATE,
    new_destination,
    new_source,
)

LOSE = "lose what is under way"
Strike = tuple[str, Event] | str


def shown(effect: Effect | Message) -> str:
    """An effect or message with what matters of it."""
    match effect:
        case Send(_, message):
            return f"send {shown(message)}"
        case Reserve() | ReserveBlocks():
            last = ", last" if effect.is_last else ""
            return (
                f"{type(effect).__name__} {effect.stage}"
                f" (blocks {effect.first_block}+{effect.num_blocks}{last})"
            )
        case CopyBlocks():
            return f"CopyBlocks {effect.stage} (blocks {effect.first_block}+{effect.num_blocks})"
        case Reserved() | StageCopied():
            return f"{type(effect).__name__} {effect.stage}"
        case Drain():
            return f"Drain (blocks {effect.first_block}+{effect.max_blocks})"
        case Commit() | Adopt():
            return f"{type(effect).__name__} ({effect.num_blocks} blocks)"
        case Abort() | Aborted():
            return f"{type(effect).__name__} {effect.reason.name}"
        case Ended():
            how = "committed" if effect.aborted is None else effect.aborted.name
            return f"Ended {how}, {effect.stages} stages"
        case _:
            return type(effect).__name__


class Duet:
    """A migration from A to B, played to its end.

    Args:
        inspected: outcomes of Inspect, one after the other.
        refused: stages that cannot be reserved.
        drains: outcomes of Drain, one after the other; after them the request is drained with
            the blocks that it had when it was inspected last.
        adoption: outcome of Adopt.
        strikes: after which line what happens: LOSE, or a machine's name and an event.
    """

    def __init__(
        self,
        *inspected: Inspected,
        refused: Mapping[int, Reason] | None = None,
        drains: Sequence[Drained | DrainRefused] = (),
        adoption: Adopted | AdoptFailed | None = None,
        mode: Mode = Mode.LIVE,
        config: MigrationConfig = CONFIG,
        strikes: Mapping[str, Sequence[Strike]] | None = None,
    ) -> None:
        self.source = new_source(mode, config)
        self.destination = new_destination(config)
        self.lines: list[str] = []
        self._inspected = deque(inspected)
        self._refused = dict(refused or {})
        self._drains = deque(drains)
        self._adoption = adoption or Adopted()
        self._strikes = {line: list(each) for line, each in (strikes or {}).items()}
        self._under_way: deque[tuple[str, Event]] = deque()
        self._now_s = START_S
        self._num_blocks = 0
        self._take("A", "start", self.source.start(START_S))
        self.go_on()

    def go_on(self) -> list[str]:
        """Play until nothing is under way; returns the lines."""
        while self._under_way:
            self.tell(*self._under_way.popleft())
        return self.lines

    def tell(self, side: str, event: Event, after_s: float = 0.0) -> None:
        """Give A or B an event, so long after the last one."""
        self._now_s += after_s
        machine = self.source if side == "A" else self.destination
        what = shown(event.message) if isinstance(event, Received) else type(event).__name__
        self._take(side, what, machine.on_event(event, self._now_s))

    def _take(self, side: str, what: str, effects: list[Effect]) -> None:
        line = f"{side} {what}: {'; '.join(map(shown, effects)) or '-'}"
        self.lines.append(line)
        for effect in effects:
            self._under_way.extend(self._consequences(side, effect))
        for strike in self._strikes.pop(f"{side} {what}", ()):
            if isinstance(strike, str):
                self._under_way.clear()
            else:
                self.tell(*strike)

    def _consequences(self, side: str, effect: Effect) -> list[tuple[str, Event]]:
        match effect:
            case Send(_, message):
                to = "B" if isinstance(message, DestinationMessage) else "A"
                return [(to, Received(message))]
            case Inspect():
                inspected = self._inspected.popleft()
                if inspected.progress is not None:
                    self._num_blocks = inspected.progress.num_blocks
                return [(side, inspected)]
            case Drain():
                drained = Drained(self._num_blocks, STATE)
                return [(side, self._drains.popleft() if self._drains else drained)]
            case ReserveBlocks(stage=stage) if stage in self._refused:
                return [(side, ReserveFailed(stage, self._refused[stage]))]
            case ReserveBlocks(stage=stage):
                return [(side, BlocksReserved(stage, RECEIVERS))]
            case CopyBlocks():
                return [("B", StageReceived(effect.stage))]
            case FreeReservation():
                return [(side, ReservationFreed())]
            case Adopt():
                return [(side, self._adoption)]
            case _:
                return []
