"""Which events of a front end's streams its buddy has, as one sees who can look into both."""

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from fault_simulation.oracle.stream_ledger import Excuse, Loss
from fault_simulation.virtual.settings import PATIENCE_S
from fault_simulation.virtual.timeline import Timeline, Violation
from sterna.frontend.resumable.pacing import Pacing
from sterna.frontend.resumable.replicas import Replicas
from sterna.types import FrontendId


@dataclass(slots=True, eq=False)
class Given:
    """The events of one stream that were given out.

    Attributes:
        num_old: events that its former front end has recorded.
        excuses: why an event was given out that the buddy did not have.
        confirmed_by: who had an event when it was given out.
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
    """Of one front end."""

    def __init__(self, cluster: Cluster, frontend_id: FrontendId, pacing: Pacing) -> None:
        self._cluster = cluster
        self._frontend_id = frontend_id
        self._pacing = pacing
        # What the buddy has not confirmed, and when it was sent.
        self._unconfirmed: deque[tuple[int, float]] = deque()

    def on_sent(self, number: int) -> None:
        """The buddy was told this."""
        self._unconfirmed.append((number, self._cluster.timeline.now_s))

    def on_kept(self, sender: FrontendId, number: int) -> None:
        """A front end has all that it was told up to this."""
        if sender == self._pacing.buddy:
            while self._unconfirmed and self._unconfirmed[0][0] <= number:
                self._unconfirmed.popleft()

    def on_other_buddy(self) -> None:
        """The one before counts no more."""
        self._unconfirmed.clear()

    def check(self, given: Given, number: int) -> None:
        """The server is given what becomes the event of this number.

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
        """What others have of a stream of so many events, whose front end has died.

        Raises:
            Violation: the buddy had an event, and has it no more.
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
        return sent_s + PATIENCE_S <= self._cluster.timeline.now_s

    def _num_kept(self, buddy: FrontendId, stream_id: str) -> int:
        """How many events of the stream that front end has; -1: not the stream itself."""
        records = self._cluster.replicas[buddy].records
        record = records.get(self._frontend_id, {}).get(stream_id)
        return -1 if record is None else len(record.groups)
