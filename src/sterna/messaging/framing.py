"""Division of a large message into parts, each in a frame of its own. Pure.

A mailbox has one size limit for the frames of all its connections, those of peers that have not
shown a key yet included. So the limit is the size of a part, not of the largest message.

Each part begins with a byte that says whether its frame continues in the next part.
"""

from collections.abc import Iterator, Sequence

PART_BYTES = 64 << 10
"""Largest frame on the wire. Nearly all messages are smaller, and are sent undivided."""

_ENDS, _CONTINUES = b"\0", b"\1"


def cut(frames: Sequence[bytes]) -> list[bytes]:
    """Divide the frames into parts."""
    return [part for frame in frames for part in _parts_of(memoryview(frame))]


def join(parts: Sequence[bytes]) -> list[bytes]:
    """Join the parts to frames.

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
        mark = _CONTINUES if begin + size < len(frame) else _ENDS
        yield mark + frame[begin : begin + size]
