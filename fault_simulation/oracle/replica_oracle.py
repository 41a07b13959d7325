"""Oracle of replicas: it sees both a front end and its buddy, which keeps its replicas."""

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from fault_simulation.oracle.stream_ledger import Excuse, Loss
from fault_simulation.virtual.settings import REPLICA_TIMEOUT_S
from fault_simulation.virtual.timeline import Timeline, Violation
from sterna.frontend.resumable.pacing import Pacing
from sterna.frontend.resumable.replicas import Replicas
from sterna.types import FrontendId


@dataclass(slots=True, eq=False)
class Given:
    """The events of one stream that were given out.

    Attributes:
        num_old: number of events that its former front end has recorded.
        excuses: by event, the reason that it was given out before the buddy had it.
        confirmed_by: by event, the front end that had it when it was given out.
    """

    stream_id: str
    num_old: int = 0
    excuses: dict[int, Excuse] = field(default_factory=dict)
    confirmed_by: dict[int, FrontendId] = field(default_factory=dict)


class Cluster(Protocol):
    """The cluster of the front end.

    Attributes:
        replicas: those that each front end ever had of others' streams.
    """

    timeline: Timeline
    replicas: dict[FrontendId, Replicas]

    def is_alive(self, name: str) -> bool:
        """Whether a process of this name runs, or hangs."""


class Confirmations:
    """The confirmations that one front end gets from its buddy."""

    def __init__(self, cluster: Cluster, frontend_id: FrontendId, pacing: Pacing) -> None:
        self._cluster = cluster
        self._frontend_id = frontend_id
        self._pacing = pacing
        # The messages that the buddy has not confirmed, and when they were sent.
        self._unconfirmed: deque[tuple[int, float]] = deque()

    def on_sent(self, number: int) -> None:
        """A message of this number was sent to the buddy."""
        self._unconfirmed.append((number, self._cluster.timeline.now_s))

    def on_kept(self, sender: FrontendId, number: int) -> None:
        """A front end has everything up to the message of this number."""
        if sender == self._pacing.buddy:
            while self._unconfirmed and self._unconfirmed[0][0] <= number:
                self._unconfirmed.popleft()

    def on_other_buddy(self) -> None:
        """The front end has another buddy; the former one no longer counts."""
        self._unconfirmed.clear()

    def check(self, given: Given, number: int) -> None:
        """The server is given the output that becomes the event of this number.

        Raises:
            Violation: the buddy does not have it, and there is no excuse for that.
        """
        buddy = self._pacing.buddy
        if number <= given.num_old:
            given.excuses[number] = Excuse.REPEATED
        elif buddy is None:
            given.excuses[number] = Excuse.ALONE
        elif self._num_kept(buddy, given.stream_id) >= number:
            given.confirmed_by[number] = buddy
        elif self._is_silent():
            given.excuses[number] = Excuse.SILENT
        else:
            raise Violation(
                f"f{self._frontend_id} gives event {number} of {given.stream_id} out, and f{buddy} "
                "does not have it"
            )

    def loss(self, given: Given, num_events: int) -> Loss:
        """Return what others have of a stream with this number of events, whose front end has died.

        Raises:
            Violation: the buddy had an event, and no longer has it.
        """
        buddy = self._pacing.buddy
        num_kept = -1
        is_kept = False
        if buddy is not None and self._cluster.is_alive(f"f{buddy}"):
            is_kept = True
            num_kept = self._num_kept(buddy, given.stream_id)
        excuse = Excuse.UNSAID
        for number in range(max(num_kept, 0) + 1, max(given.num_old, num_events) + 1):
            excuse = given.excuses.get(number, Excuse.BUDDY_DIED)
            if number <= given.num_old:
                excuse = Excuse.REPEATED
            elif is_kept and given.confirmed_by.get(number) == buddy:
                raise Violation(f"f{buddy} had event {number} of {given.stream_id}, and lost it")
        return Loss(num_kept if num_kept >= 0 else None, excuse)

    def _is_silent(self) -> bool:
        if not self._unconfirmed:
            return False
        _, sent_s = self._unconfirmed[0]
        return sent_s + REPLICA_TIMEOUT_S <= self._cluster.timeline.now_s

    def _num_kept(self, buddy: FrontendId, stream_id: str) -> int:
        """Return the number of events of the stream that the buddy has; -1: not even the stream."""
        records = self._cluster.replicas[buddy].records
        record = records.get(self._frontend_id, {}).get(stream_id)
        return -1 if record is None else len(record.groups)
