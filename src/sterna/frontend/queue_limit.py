"""How many requests may wait: one more is told at once to come again. Pure.

A request waits from when it is let in until its first token. A front end counts its own exactly. Of
the others' it knows what the instances report as queuing, once a second (`ClusterStats`): as far as
that is more than its own, it is others'. So several front ends may let in more together, for a
second, than the limit says; one alone never does.
"""

import math
from collections import deque
from dataclasses import dataclass

NUM_STARTS = 50
"""Of the last so many starts the pace of the queue is taken."""

MIN_RETRY_S = 1
MAX_RETRY_S = 30
DEFAULT_RETRY_S = 5
"""Where the pace is not known yet."""


@dataclass(frozen=True, slots=True)
class Full:
    """No room.

    Attributes:
        retry_after_s: by then those that wait now will have begun, at the pace of the last ones.
    """

    num_waiting: int
    limit: int
    retry_after_s: int


class Ticket:
    """One request's place in the queue.

    Several may hold it: the connection that waits for the answer, and each generation of tokens
    for it. It is given back with the first token, or when nobody holds it any more.
    """

    def __init__(self, limit: "QueueLimit") -> None:
        self._limit = limit
        self._num_holders = 0
        self._has_started = False

    @property
    def _is_waiting(self) -> bool:
        return self._num_holders > 0 and not self._has_started

    def hold(self) -> None:
        """Somebody more waits for the request."""
        was_waiting = self._is_waiting
        self._num_holders += 1
        self._limit.num_waiting += self._is_waiting - was_waiting

    def release(self) -> None:
        """One of those does no more."""
        was_waiting = self._is_waiting
        self._num_holders -= 1
        self._limit.num_waiting += self._is_waiting - was_waiting

    def start(self) -> bool:
        """The request's first token is there; returns False when that is no news."""
        if self._has_started:
            return False
        was_waiting = self._is_waiting
        self._has_started = True
        self._limit.num_waiting += self._is_waiting - was_waiting
        return True


class QueueLimit:
    """The requests of one front end that wait for their first token.

    Args:
        max_queued: None: there is no limit.
        urgent_reserve: this fraction more is for urgent requests, at least one place.

    Attributes:
        num_waiting: how many of this front end's wait.
    """

    def __init__(self, max_queued: int | None, urgent_reserve: float) -> None:
        self._max_queued = max_queued
        self._urgent_reserve = urgent_reserve
        self._num_elsewhere = 0
        # Clients may give several requests the same name.
        self._expected: dict[str, list[Ticket]] = {}
        self._starts_s: deque[float] = deque(maxlen=NUM_STARTS)
        self.num_waiting = 0

    def enter(self, now_s: float, *, is_urgent: bool) -> Ticket | Full:
        """Let a request in, which the caller holds from then on, or not."""
        limit = self._limit(is_urgent)
        num_waiting = self.num_waiting + self._num_elsewhere
        if limit is not None and num_waiting >= limit:
            return Full(num_waiting, limit, self._retry_after_s(num_waiting, now_s))
        ticket = Ticket(self)
        ticket.hold()
        return ticket

    def on_queuing(self, num_queuing: int) -> None:
        """So many requests queue on all instances together."""
        self._num_elsewhere = max(0, num_queuing - self.num_waiting)

    def expect(self, name: str, ticket: Ticket) -> None:
        """The ticket is that of the engine request of this name, which is begun now."""
        ticket.hold()
        self._expected.setdefault(name, []).append(ticket)

    def forget(self, name: str, ticket: Ticket) -> None:
        """The engine request of this name has ended."""
        ticket.release()
        tickets = self._expected.get(name, [])
        if ticket in tickets:
            tickets.remove(ticket)
        if not tickets:
            self._expected.pop(name, None)

    def on_first_token(self, name: str, now_s: float) -> None:
        """The first token of the engine request of this name is there.

        Of several of that name it is not known which; as many wait no more, whichever it is.
        """
        if any(ticket.start() for ticket in self._expected.get(name, ())):
            self._starts_s.append(now_s)

    def _limit(self, is_urgent: bool) -> int | None:
        if self._max_queued is None or not is_urgent:
            return self._max_queued
        return self._max_queued + max(1, int(self._max_queued * self._urgent_reserve))

    def _retry_after_s(self, num_waiting: int, now_s: float) -> int:
        if not self._starts_s:
            return DEFAULT_RETRY_S
        # Counted to now: a queue that has come to a halt has a pace that falls.
        elapsed_s = max(now_s - self._starts_s[0], 1e-3)
        wait_s = num_waiting * elapsed_s / len(self._starts_s)
        return math.ceil(min(max(wait_s, MIN_RETRY_S), MAX_RETRY_S))
