"""Messages between front ends about resumable streams. Pure.

There are two conversations. A front end keeps *replicas* of another one's streams, so that it can
take them over (`KeepStream` to `ReplicasKept`). And a front end whose client asks for a stream of
another one finds it and relays its answer (`FindStream` to `StopReading`). Frames are payloads of
the engine, bodies of requests, and pieces of answers.
"""

from enum import Enum

import msgspec

from sterna.types import FrontendId

# ------------------------------------------------------------------------------------ replicas


class StreamHead(msgspec.Struct, frozen=True, array_like=True):
    """A streamed HTTP request, without its body.

    Attributes:
        stream_id: its X-Request-Id.
        owner: identifies the client; no other client may resume the stream.
        created_s: its arrival, in whole seconds of the wall clock.
    """

    stream_id: str
    owner: bytes
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    created_s: int


class Group(msgspec.Struct, frozen=True, array_like=True):
    """One output of the engine, as vLLM's server got it.

    Attributes:
        slot: name of the engine request, the same each time that the HTTP request is processed.
        is_finished: whether it is the slot's last output.
    """

    stream_id: str
    slot: str
    is_finished: bool


class KeepStream(msgspec.Struct, frozen=True, tag=True):
    """Holder -> buddy: keep a replica of this stream. Frames: its body, and each group's payload.

    Attributes:
        number: sequence number of the messages from this holder to this buddy.
        groups: all outputs so far.
        is_over: whether no more outputs will come.
        takeovers: for each takeover so far, the front end that took the stream over, and the number
            of groups that the record had then.
    """

    sender: FrontendId
    number: int
    head: StreamHead
    groups: tuple[Group, ...]
    is_over: bool
    takeovers: tuple[tuple[FrontendId, int], ...] = ()


class ExtendStreams(msgspec.Struct, frozen=True, tag=True):
    """Holder -> buddy: further outputs of these streams. Frames: each group's payload."""

    sender: FrontendId
    number: int
    groups: tuple[Group, ...]


class StreamOver(msgspec.Struct, frozen=True, tag=True):
    """Holder -> buddy: no more outputs of this stream will come; it can still be read."""

    sender: FrontendId
    number: int
    stream_id: str


class DropStream(msgspec.Struct, frozen=True, tag=True):
    """Holder -> buddy: drop the replica of this stream."""

    sender: FrontendId
    number: int
    stream_id: str


class ReplicasKept(msgspec.Struct, frozen=True, tag=True):
    """Buddy -> holder: all messages up to this number are kept."""

    sender: FrontendId
    number: int


# ----------------------------------------------------------------------------- reading elsewhere


class Finding(Enum):
    """Result of the search for a stream at one front end."""

    STREAM = "stream"
    """The stream itself: it can be read there."""
    REPLICA = "replica"
    """A replica: it can be read there if its holder is dead. In that case a second answer
    follows."""
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
    """Front end -> holder: answer this client from the next event on. Answer: one AnswerStart and
    AnswerParts.

    Attributes:
        last: the client's Last-Event-ID, unchanged.
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
    """Holder -> front end: more of the answer. Frame: the content.

    Attributes:
        is_broken: nothing more will come, and the answer is not whole.
    """

    sender: FrontendId
    query_id: int
    is_last: bool
    is_broken: bool = False


class PartsTaken(msgspec.Struct, frozen=True, tag=True):
    """Front end -> holder: this number of bytes of the answer has gone to the client."""

    sender: FrontendId
    query_id: int
    num_bytes: int


class StopReading(msgspec.Struct, frozen=True, tag=True):
    """Front end -> holder: the client has gone. Front end -> other front ends that have a replica
    or have not answered yet: the search is over."""

    sender: FrontendId
    query_id: int


ReplicaMessage = KeepStream | ExtendStreams | StreamOver | DropStream
"""A message from a holder to its buddy."""

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
