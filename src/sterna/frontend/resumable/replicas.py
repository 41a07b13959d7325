"""The streams of other front ends, as far as this one would go on with them. Pure.

Front ends stand in a ring, in the order of the membership; each has its replicas at the next one,
for as long as both live. A front end that is missing from a newer membership is dead for good
(`Membership`): then whoever has its replicas has its streams.
"""

from collections.abc import Sequence

from sterna.frontend.resumable.records import Record, record_of
from sterna.messages.streams import (
    DropStream,
    ExtendStreams,
    KeepStream,
    ReplicaMessage,
    ReplicasKept,
    StreamOver,
)
from sterna.types import FrontendId


def buddy_of(
    frontend_id: FrontendId, frontends: Sequence[FrontendId], current: FrontendId | None
) -> FrontendId | None:
    """Return who has the replicas of this front end: who has them already, if that lives, else the
    next in the ring; None when there is no other."""
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

    def is_dead(self, frontend_id: FrontendId) -> bool:
        """Whether it has lived, and does no more: what it had sent before comes too late."""
        return frontend_id in self._dead

    def on_message(self, message: ReplicaMessage, frames: Sequence[bytes]) -> ReplicasKept:
        """A holder says this; returns the answer.

        What a dead one had sent before it died comes too late: its streams go on without it.

        Raises:
            ValueError: the frames do not fit the message.
        """
        if not self.is_dead(message.sender):
            self._take(message, frames)
        return ReplicasKept(self._frontend_id, message.number)

    def _take(self, message: ReplicaMessage, frames: Sequence[bytes]) -> None:
        records = self._records.setdefault(message.sender, {})
        match message:
            case KeepStream(_, _, head, groups, is_over):
                records[head.stream_id] = record_of(head, groups, list(frames), is_over=is_over)
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
        """These front ends live; returns the streams of those that did and do no more."""
        dead = sorted(self._live - set(live))
        self._live = frozenset(live)
        self._dead.update(dead)
        return [record for each in dead for record in self._records.pop(each, {}).values()]

    def holder(self, stream_id: str, owner: bytes) -> FrontendId | None:
        """Return whose stream this is, if there is a replica here, and it is of that owner."""
        for frontend_id, records in self._records.items():
            record = records.get(stream_id)
            if record is not None and record.head.owner == owner:
                return frontend_id
        return None
