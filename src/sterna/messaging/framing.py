"""A large message goes in parts, each in a frame of its own. Pure.

A mailbox has one limit for what a connection may announce, whoever is at its other end: also who
has not shown a key yet. So the limit is that of a part, and not of the largest message.

Each part begins with a byte that says whether its frame goes on in the next one.
"""

from collections.abc import Iterator, Sequence

PART_BYTES = 64 << 10
"""Of a frame on the wire: more than nearly all messages have, which go as they are."""

_ENDS, _GOES_ON = b"\0", b"\1"


def cut(frames: Sequence[bytes]) -> list[bytes]:
    """Return the parts of these frames."""
    return [part for frame in frames for part in _parts_of(memoryview(frame))]


def join(parts: Sequence[bytes]) -> list[bytes]:
    """Return the frames of these parts.

    Raises:
        ValueError: they are not what `cut` returns.
    """
    frames: list[bytes] = []
    begun: list[memoryview] = []
    for part in parts:
        begun.append(memoryview(part)[1:])
        match part[:1]:
            case b"\0":
                frames.append(b"".join(begun))
                begun = []
            case b"\1":
                continue
            case _:
                raise ValueError("a part must say whether its frame goes on")
    if begun or not frames:
        raise ValueError("the last part of a message must end a frame")
    return frames


def _parts_of(frame: memoryview) -> Iterator[bytes]:
    size = PART_BYTES - 1
    # An empty frame is one part as well.
    for begin in range(0, max(1, len(frame)), size):
        mark = _GOES_ON if begin + size < len(frame) else _ENDS
        yield mark + frame[begin : begin + size]
