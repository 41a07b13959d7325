"""What is to be done for streams and their replicas (`pacing`). Pure."""

from dataclasses import dataclass

from sterna.frontend.resumable.telling import ToBuddy


@dataclass(frozen=True, slots=True)
class Hand:
    """Give vLLM's server this output."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """The events so far are all those of the record that was taken over; what follows was not
    known to the front end that had the stream."""

    stream_id: str


@dataclass(frozen=True, slots=True)
class RunAgain:
    """All outputs of the record that was taken over are with vLLM's server."""

    stream_id: str


@dataclass(frozen=True, slots=True)
class Parted:
    """A fact for the log: the stream has no replica any more.

    Attributes:
        reason: in words.
    """

    stream_id: str
    reason: str


PacingEffect = Hand | ToBuddy | RunAgain | CaughtUp | Parted


@dataclass(frozen=True, slots=True)
class Begun:
    """An engine request of a stream has come.

    Attributes:
        output_token_ids: what its client has already.
        has_ended: all its outputs are there; no instance is needed.
    """

    output_token_ids: tuple[int, ...]
    has_ended: bool
