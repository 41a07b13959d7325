"""What front ends say to each other about streams that are read on. Pure.

Two conversations. A front end keeps, for another one, what is needed to go on with that one's
streams (*replicas*: `KeepStream` to `ReplicasKept`). And a front end that is asked for a stream of
another one looks for it and passes its answer on (`FindStream` to `StopReading`). Frames are
payloads of the engine, bodies of requests, and pieces of answers.
"""

from enum import Enum

import msgspec

from sterna.types import FrontendId

# ------------------------------------------------------------------------------------ replicas


class StreamHead(msgspec.Struct, frozen=True, array_like=True):
    """A streamed HTTP request, without its body.

    Attributes:
        stream_id: its X-Request-Id.
        owner: of the stream; nobody else may read on.
        created_s: when it came, in whole seconds of the wall clock.
    """

    stream_id: str
    owner: bytes
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    created_s: int


class Group(msgspec.Struct, frozen=True, array_like=True):
    """One output of the engine, as it was given to vLLM's server.

    Attributes:
        slot: the engine request, by a name that is the same whenever the request is run.
        is_finished: it is the slot's last one.
    """

    stream_id: str
    slot: str
    is_finished: bool


class KeepStream(msgspec.Struct, frozen=True, tag=True):
    """Holder -> buddy: keep a replica of this stream. Frames: its body, and each group's payload.

    Attributes:
        number: of this message; those of one holder to one buddy count up.
        groups: all so far.
        is_over: nothing more will come.
    """

    sender: FrontendId
    number: int
    head: StreamHead
    groups: tuple[Group, ...]
    is_over: bool


class ExtendStreams(msgspec.Struct, frozen=True, tag=True):
    """Holder -> buddy: these streams go on. Frames: each group's payload."""

    sender: FrontendId
    number: int
    groups: tuple[Group, ...]


class StreamOver(msgspec.Struct, frozen=True, tag=True):
    """Holder -> buddy: nothing more will come of this stream; it can still be read."""

    sender: FrontendId
    number: int
    stream_id: str


class DropStream(msgspec.Struct, frozen=True, tag=True):
    """Holder -> buddy: this stream need not be kept any more."""

    sender: FrontendId
    number: int
    stream_id: str


class ReplicasKept(msgspec.Struct, frozen=True, tag=True):
    """Buddy -> holder: all is kept up to the message of this number."""

    sender: FrontendId
    number: int


# ----------------------------------------------------------------------------- reading elsewhere


class Finding(Enum):
    """What a front end has of a stream that another one looks for."""

    STREAM = "stream"
    """The stream itself: it can be read there."""
    REPLICA = "replica"
    """A replica: it can be read there if its holder is dead. If that turns out to be so, another
    answer follows."""
    NOTHING = "nothing"


class FindStream(msgspec.Struct, frozen=True, tag=True):
    """Front end -> all others: do you have this stream of this owner? Answer: StreamFound."""

    sender: FrontendId
    query_id: int
    stream_id: str
    owner: bytes


class StreamFound(msgspec.Struct, frozen=True, tag=True):
    """Answer to FindStream."""

    sender: FrontendId
    query_id: int
    finding: Finding


class ReadStream(msgspec.Struct, frozen=True, tag=True):
    """Front end -> holder: answer this client, who has all up to an event. Answer: one AnswerStart
    and AnswerParts.

    Attributes:
        last: the client's Last-Event-ID, as it came.
    """

    sender: FrontendId
    query_id: int
    stream_id: str
    owner: bytes
    last: str


class AnswerStart(msgspec.Struct, frozen=True, tag=True):
    """Holder -> front end: the head of the answer."""

    sender: FrontendId
    query_id: int
    status: int
    headers: tuple[tuple[bytes, bytes], ...]


class AnswerPart(msgspec.Struct, frozen=True, tag=True):
    """Holder -> front end: more of the answer. Frame: the content."""

    sender: FrontendId
    query_id: int
    is_last: bool


class PartsTaken(msgspec.Struct, frozen=True, tag=True):
    """Front end -> holder: so many bytes of the answer have gone to the client."""

    sender: FrontendId
    query_id: int
    num_bytes: int


class StopReading(msgspec.Struct, frozen=True, tag=True):
    """Front end -> holder: the client has gone. Or -> who was asked, and has a replica, or has not
    answered yet: the stream is not looked for any more."""

    sender: FrontendId
    query_id: int


ReplicaMessage = KeepStream | ExtendStreams | StreamOver | DropStream
"""What a holder tells its buddy."""

StreamMessage = (
    KeepStream
    | ExtendStreams
    | StreamOver
    | DropStream
    | ReplicasKept
    | FindStream
    | StreamFound
    | ReadStream
    | AnswerStart
    | AnswerPart
    | PartsTaken
    | StopReading
)
