"""Replicas: the records of streams of other front ends, which this one would take over. Pure.

Front ends form a ring, in the order of the membership; each has its replicas at the next one, for
as long as both live. A front end that is missing from a newer membership is dead for good
(`Membership`): then the front end with its replicas has its streams.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sterna.messages.streams import (
    DropStream,
    ExtendStreams,
    Group,
    KeepStream,
    ReplicaMessage,
    ReplicasKept,
    StreamHead,
    StreamOver,
)
from sterna.types import FrontendId

GROUP_BYTES = 100
"""Memory of a group, beside its payload."""

_CREATED = re.compile(rb'^(data: \{(?:"[a-z_]+":"(?:[^"\\]|\\.)*",)*"created":)\d+', re.M)
# Only fields of text (the id, the kind of object, the tier) precede `created`. An event is JSON on
# one line: text of a model cannot look like its beginning.


class Payloads(Protocol):
    """Access to the contents of outputs; `engine.payload_parts` gives it for vLLM's."""

    def token_ids_of(self, payload: bytes) -> list[int]:
        """Return the tokens of an output."""

    def joined_outputs(self, first: bytes, second: bytes) -> bytes | None:
        """Return one output with the contents of both; None if they cannot be joined."""

    def renamed_output(self, payload: bytes, request_id: str) -> bytes:
        """Return the output as one of that request."""


MAX_DEATHS = 3
"""Number of front ends that may die with a stream, one after the other, if those that take it over
bring nothing new of it. Which of its streams has ended a front end is not known: if all die before
any stream gets further, all of them are refused.
"""


@dataclass(slots=True, eq=False)
class Record:
    """The record of one stream.

    Attributes:
        payloads: one for each group.
        is_over: its answer has ended.
        takeovers: each takeover, in order: the front end that took the stream over, and the number
            of groups in the record then. What the one before had sent beyond these died with it.
        num_bytes: approximate memory.
    """

    head: StreamHead
    body: bytes
    groups: list[Group] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    is_over: bool = False
    takeovers: tuple[tuple[FrontendId, int], ...] = ()
    num_bytes: int = 0

    def __post_init__(self) -> None:
        self.num_bytes += len(self.body) + sum(map(_size, self.payloads))

    @property
    def is_stuck(self) -> bool:
        """Whether front ends have taken the stream over, one after the other, and died without
        another output of it: it may be what ends them."""
        last = [num_groups for _, num_groups in self.takeovers[-MAX_DEATHS:]]
        has_all = bool(self.groups) and all(self.has_ended(each.slot) for each in self.groups)
        # What has ended is only read.
        can_end_one = not (self.is_over or has_all)
        return can_end_one and len(last) == MAX_DEATHS and len(set(last)) == 1

    def extend(self, group: Group, payload: bytes) -> int:
        """Add an output; returns by how many bytes the record has grown."""
        self.groups.append(group)
        self.payloads.append(payload)
        size = _size(payload)
        self.num_bytes += size
        return size

    def has_ended(self, slot: str) -> bool:
        """Whether the record contains the slot's last output."""
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
    head: StreamHead,
    groups: Iterable[Group],
    frames: list[bytes],
    *,
    is_over: bool,
    takeovers: tuple[tuple[FrontendId, int], ...] = (),
) -> Record:
    """Return the record of a KeepStream message.

    Raises:
        ValueError: the frames are not the body and one for each group.
    """
    body, *payloads = frames
    groups = list(groups)
    if len(groups) != len(payloads):
        raise ValueError(f"{len(groups)} groups came with {len(payloads)} payloads")
    return Record(head, body, groups, payloads, is_over, takeovers)


def dated(content: bytes, created_s: int) -> bytes:
    """Return this output of vLLM's server with `created_s` as the time of the answer."""
    return _CREATED.sub(rb"\g<1>%d" % created_s, content)


def _size(payload: bytes) -> int:
    return len(payload) + GROUP_BYTES


def buddy_of(
    frontend_id: FrontendId, frontends: Sequence[FrontendId], current: FrontendId | None
) -> FrontendId | None:
    """Return the front end for the replicas of this one: the current one if it lives, else the next
    in the ring; None if there is no other."""
    if current in frontends:
        return current
    if frontend_id not in frontends:
        return None
    place = frontends.index(frontend_id)
    ring = [*frontends[place + 1 :], *frontends[:place]]
    return ring[0] if ring else None


class Replicas:
    """The records that one front end keeps for others."""

    def __init__(self, frontend_id: FrontendId) -> None:
        self._frontend_id = frontend_id
        self._records: dict[FrontendId, dict[str, Record]] = {}
        self._live: frozenset[FrontendId] = frozenset()
        self._dead: set[FrontendId] = set()

    @property
    def records(self) -> Mapping[FrontendId, Mapping[str, Record]]:
        """The records by their holders and the ids of their streams."""
        return self._records

    def is_dead(self, frontend_id: FrontendId) -> bool:
        """Whether the front end has died; messages of it that still arrive are too late."""
        return frontend_id in self._dead

    def on_message(self, message: ReplicaMessage, frames: Sequence[bytes]) -> ReplicasKept:
        """A holder has sent this; returns the answer.

        Messages of a dead holder are ignored: its streams go on without it.

        Raises:
            ValueError: the frames do not fit the message.
        """
        if not self.is_dead(message.sender):
            self._take(message, frames)
        return ReplicasKept(self._frontend_id, message.number)

    def _take(self, message: ReplicaMessage, frames: Sequence[bytes]) -> None:
        records = self._records.setdefault(message.sender, {})
        match message:
            case KeepStream(_, _, head, groups, is_over, takeovers):
                records[head.stream_id] = record_of(
                    head, groups, list(frames), is_over=is_over, takeovers=takeovers
                )
            case ExtendStreams(_, _, groups):
                for group, payload in zip(groups, frames, strict=True):
                    record = records.get(group.stream_id)
                    if record is not None:
                        record.extend(group, payload)
            case StreamOver(_, _, stream_id):
                if stream_id in records:
                    records[stream_id].is_over = True
            case DropStream(_, _, stream_id):
                records.pop(stream_id, None)

    def on_frontends(self, live: Sequence[FrontendId]) -> list[Record]:
        """These front ends live; returns the streams of those that have died."""
        dead = sorted(self._live - set(live))
        self._live = frozenset(live)
        self._dead.update(dead)
        left = [record for each in dead for record in self._records.pop(each, {}).values()]
        for record in left:
            record.takeovers = (*record.takeovers, (self._frontend_id, len(record.groups)))
        return left

    def holder(self, stream_id: str, owner: bytes) -> FrontendId | None:
        """Return the front end that has the stream, if its replica is here and of that owner."""
        for frontend_id, records in self._records.items():
            record = records.get(stream_id)
            if record is not None and record.head.owner == owner:
                return frontend_id
        return None
