"""Paced stream: the outputs of one stream on their way to vLLM's server, and its state. Pure."""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from sterna.frontend.resumable.replicas import Payloads, Record
from sterna.types import RequestId

MAX_WAITING = 4
"""Outputs of a stream on their way to vLLM's server; further ones are gathered."""

JOINED_BYTES = 1000
"""Outputs are joined up to this size."""


class ConsumerState(Enum):
    """The state of vLLM's code towards one engine request."""

    WORKING = "works on the output that it took, or has not begun"
    ASKING = "waits for an output"
    HANDED = "will find an output"


@dataclass(slots=True)
class Waiting:
    """An output on its way to vLLM's server.

    Attributes:
        number: that of the message by which the buddy gets it; 0 if the buddy need not have it.
        is_old: whether it is from a record that was taken over.
    """

    slot: str
    payload: bytes
    number: int
    is_old: bool = False


@dataclass(slots=True)
class Gathered:
    """Outputs of a slot, joined until there is room for them."""

    slot: str
    payload: bytes
    is_finished: bool


@dataclass(slots=True, eq=False)
class PacedStream:
    """A stream that is kept.

    Attributes:
        serial: unique among the streams of this front end.
        sent: ids of engine requests that are on their way to the router.
        slots: the engine requests that have begun, by slot; their ids differ in each run of the
            HTTP request.
        consumers: by the name under which vLLM's server asked for the engine request.
        pending: the slot of the output that vLLM's code has.
        closed: slots that take no further output.
        is_paced: the outputs of its engine requests pass through here.
        is_replicated: its record is at the buddy, if there is one.
        is_replaying: outputs of the record that was taken over are still to be handed out.
        is_behind: outputs of the record that was taken over are still to be handed out, or have not
            become events yet.
        num_replayed: of these outputs, those that have been handed out, or are not needed.
        takeovers_ahead: numbers of groups of `Record.takeovers`, in order, that have not become
            events yet.
    """

    record: Record
    serial: int
    waiting: deque[Waiting] = field(default_factory=deque)
    sent: set[RequestId] = field(default_factory=set)
    slots: dict[str, RequestId] = field(default_factory=dict)
    consumers: dict[str, ConsumerState] = field(default_factory=dict)
    gathered: list[Gathered] = field(default_factory=list)
    pending: str | None = None
    closed: set[str] = field(default_factory=set)
    is_paced: bool = True
    is_replicated: bool = True
    is_replaying: bool = False
    is_behind: bool = False
    num_replayed: int = 0
    takeovers_ahead: list[int] = field(default_factory=list)

    def gather(self, output: Gathered, payloads: Payloads) -> None:
        """Keep an output until there is room for it, joined with others of its slot."""
        last = next((each for each in reversed(self.gathered) if each.slot == output.slot), None)
        if last is not None and len(last.payload) < JOINED_BYTES:
            joined = payloads.joined_outputs(last.payload, output.payload)
            if joined is not None:
                last.payload, last.is_finished = joined, output.is_finished
                return
        self.gathered.append(output)
