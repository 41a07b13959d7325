"""The outputs of one stream on their way to vLLM's server, and how far that is with it. Pure."""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from sterna.frontend.resumable.replicas import Payloads, Record
from sterna.types import RequestId

MAX_WAITING = 4
"""Outputs of a stream on their way to vLLM's server; further ones are gathered."""

JOINED_BYTES = 1000
"""Outputs are joined up to this size."""


class Asker(Enum):
    """Where vLLM's code is with one engine request."""

    WORKS = "works on what it took, or has not begun"
    ASKS = "waits for an output"
    HANDED = "will find an output"


@dataclass(slots=True)
class Waiting:
    """An output on its way to vLLM's server.

    Attributes:
        number: of the message after which the buddy has it; 0: nobody needs to have it.
        is_old: of a record that was taken over.
    """

    slot: str
    payload: bytes
    number: int
    is_old: bool = False


@dataclass(slots=True)
class Gathered:
    """Outputs of a slot that are joined until there is room for them."""

    slot: str
    payload: bytes
    is_finished: bool


@dataclass(slots=True, eq=False)
class PacedStream:
    """A stream that is kept.

    Attributes:
        serial: no other stream of this front end has it.
        slots: the engine requests that have come, by slot, as vLLM's code calls them this time.
        askers: by the name by which vLLM's server asked.
        pending: the slot of the output that is in vLLM's hands.
        closed: slots that take no more.
        is_paced: its engine requests come here.
        is_replicated: its record is at the buddy, if there is one.
        is_running_again: outputs of the record that was taken over are still to be given.
        is_behind: outputs of the record that was taken over are still to be given, or have not
            become events yet.
    """

    record: Record
    serial: int
    waiting: deque[Waiting] = field(default_factory=deque)
    slots: dict[str, RequestId] = field(default_factory=dict)
    askers: dict[str, Asker] = field(default_factory=dict)
    gathered: list[Gathered] = field(default_factory=list)
    pending: str | None = None
    closed: set[str] = field(default_factory=set)
    is_paced: bool = True
    is_replicated: bool = True
    is_running_again: bool = False
    is_behind: bool = False

    def gather(self, output: Gathered, payloads: Payloads) -> None:
        """Keep an output until there is room for it, joined with others of its slot."""
        last = next((each for each in reversed(self.gathered) if each.slot == output.slot), None)
        if last is not None and len(last.payload) < JOINED_BYTES:
            joined = payloads.joined_outputs(last.payload, output.payload)
            if joined is not None:
                last.payload, last.is_finished = joined, output.is_finished
                return
        self.gathered.append(output)
