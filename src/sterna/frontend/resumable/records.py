"""What is needed to come to the same events of a stream again. Pure.

vLLM's server makes events of the engine's outputs: it puts tokens into text, looks for stop
strings, parses tool calls. Given the same request and the same outputs, one by one in the same
order, it makes the same events. So a record is the request, and the outputs that were given: a
*group* each, for what vLLM's server takes at once becomes one event. `pacing` sees to it that it
takes them one by one.

What does not follow from these is the time of an answer, which is in its events: it belongs to the
record, and is put in its place (`dated`).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from sterna.messages.streams import Group, StreamHead

GROUP_BYTES = 100
"""Of memory for a group, besides its payload."""

_CREATED = re.compile(rb'^(data: \{(?:"[a-z_]+":"(?:[^"\\]|\\.)*",)*"created":)\d+', re.M)
# It stands behind fields of text (the id, the kind of object, the tier). An event is JSON on one
# line: what a model says cannot look like its beginning.


class Payloads(Protocol):
    """What must be known of outputs; `engine.payload_parts` knows it of vLLM's."""

    def token_ids_of(self, payload: bytes) -> list[int]:
        """Return the tokens of an output."""

    def joined_outputs(self, first: bytes, second: bytes) -> bytes | None:
        """Return one output with what both say of a request; None: they cannot be joined."""

    def renamed_output(self, payload: bytes, request_id: str) -> bytes:
        """Return the output as one of that request."""


@dataclass(slots=True, eq=False)
class Record:
    """One stream.

    Attributes:
        payloads: one for each group.
        is_over: its answer has ended.
        num_bytes: of memory, about.
    """

    head: StreamHead
    body: bytes
    groups: list[Group] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    is_over: bool = False
    num_bytes: int = 0

    def __post_init__(self) -> None:
        self.num_bytes += len(self.body) + sum(map(_size, self.payloads))

    def extend(self, group: Group, payload: bytes) -> int:
        """Add an output; returns how many bytes the record has grown."""
        self.groups.append(group)
        self.payloads.append(payload)
        size = _size(payload)
        self.num_bytes += size
        return size

    def has_ended(self, slot: str) -> bool:
        """Whether the slot's last output is there."""
        return any(each.is_finished for each in self.groups if each.slot == slot)

    def token_ids(self, slot: str, payloads: Payloads) -> tuple[int, ...]:
        """Return all tokens of the slot."""
        return tuple(
            token_id
            for group, payload in zip(self.groups, self.payloads, strict=True)
            if group.slot == slot
            for token_id in payloads.token_ids_of(payload)
        )


def record_of(
    head: StreamHead, groups: Iterable[Group], frames: list[bytes], *, is_over: bool
) -> Record:
    """Return the record that a KeepStream brings.

    Raises:
        ValueError: the frames are not the body and one for each group.
    """
    body, *payloads = frames
    groups = list(groups)
    if len(groups) != len(payloads):
        raise ValueError(f"{len(groups)} groups came with {len(payloads)} payloads")
    return Record(head, body, groups, payloads, is_over)


def dated(content: bytes, created_s: int) -> bytes:
    """Return what vLLM's server wrote of a stream with this as the time of the answer."""
    return _CREATED.sub(rb"\g<1>%d" % created_s, content)


def _size(payload: bytes) -> int:
    return len(payload) + GROUP_BYTES
