"""Queue limit: the number of engine requests that may wait for their first token. Pure.

Waiting is counted as engines count it: an HTTP request of three prompts, with two choices each, is
six *engine requests*. Each waits from when its HTTP request is let in until its own first token. An
HTTP request counts as one until the number of its engine requests is known. A front end counts its
own requests exactly. For those of other front ends it has what the instances report as queuing,
once a second (`ClusterStats`): the part above its own number is theirs. So several front ends
together may exceed the limit for a second. One front end alone exceeds it only for a single HTTP
request with more engine requests than may wait, which is let in if nothing else waits, up to
`MOST_OF_ONE`. Without
recent reports, requests of other front ends count as none: an old report must not keep clients from
idle instances.
"""

import math
from collections import deque
from dataclasses import dataclass

from sterna.messages.actors import STATS_INTERVAL_S

NUM_STARTS = 50
"""The pace of the queue is measured over this number of starts."""

MIN_RETRY_S = 1
MAX_RETRY_S = 30
DEFAULT_RETRY_S = 5
"""Used while the pace is not known."""

MOST_OF_ONE = 4_096
"""Engine requests of one HTTP request that may wait, whatever else does. To begin them takes some
tenths of a second, by estimate, in which no other stream of the front end goes on; with a million
it would count as dead."""

QUEUING_KNOWN_S = 3 * STATS_INTERVAL_S
"""A report of queuing requests holds for this time: after it, its scheduler is dead or hangs."""


class TooManyAtOnceError(Exception):
    """One HTTP request has more engine requests than may ever wait; the message is for clients."""

    def __init__(self, num_asked: int) -> None:
        super().__init__(
            f"{num_asked:,} prompts and choices: one request may have {MOST_OF_ONE:,}; send it in "
            "parts"
        )


@dataclass(frozen=True, slots=True)
class Full:
    """The queue has no room.

    Attributes:
        num_waiting: waiting engine requests, without those of the refused request.
        num_asked: engine requests of the refused request, as far as they are known.
        retry_after_s: estimated time until those that wait now have begun, at the recent pace.
    """

    num_waiting: int
    limit: int
    retry_after_s: int
    num_asked: int = 1


class Ticket:
    """The places of one HTTP request that was let in.

    Attributes:
        limit: that of its class.
        num_reserved: engine requests that have not begun yet, and count as waiting already.
        num_begun: engine requests that have begun, and wait for their first token.
        is_new: the number of its engine requests is not known yet.
        has_started: one of them has had its first token. Further engine requests of the same HTTP
            request are then never refused.
        refused: the reason for a refusal after it was let in, if there was one.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.num_reserved = 1
        self.num_begun = 0
        self.is_new = True
        self.has_started = False
        self.refused: Full | None = None


class Generation:
    """Engine requests of one name, which are the choices for one prompt, after they have begun.

    Attributes:
        num_waiting: number of those that wait for their first token.
    """

    def __init__(self, name: str, ticket: Ticket, num_choices: int) -> None:
        self.name = name
        self.ticket = ticket
        self.num_waiting = num_choices


class QueueLimit:
    """The engine requests of one front end that wait for their first token.

    Args:
        max_queued: None for no limit.
        urgent_reserve: additional places for urgent requests, as a fraction of the limit; at least
            one place.

    Attributes:
        num_waiting: number of waiting engine requests of this front end.
    """

    def __init__(self, max_queued: int | None, urgent_reserve: float) -> None:
        self._max_queued = max_queued
        self._urgent_reserve = urgent_reserve
        self._num_elsewhere = 0
        self._known_until_s = -math.inf
        # Clients may give several requests the same name.
        self._generations: dict[str, list[Generation]] = {}
        self._starts_s: deque[float] = deque(maxlen=NUM_STARTS)
        self.num_waiting = 0

    def enter(self, now_s: float, *, is_urgent: bool) -> Ticket | Full:
        """Let an HTTP request in, until `leave`, or refuse it."""
        full = self.full(now_s, is_urgent=is_urgent)
        if full is not None:
            return full
        self.num_waiting += 1
        return Ticket(self._limit(is_urgent))

    def full(self, now_s: float, *, is_urgent: bool) -> Full | None:
        """Return why no request can be let in now; None if one can."""
        return self._full(self._limit(is_urgent), self.num_waiting, 1, now_s)

    def reserve(self, ticket: Ticket, num_choices: int, now_s: float) -> Full | None:
        """Reserve places for this number of engine requests; returns the refusal if there is no
        room.

        Raises:
            TooManyAtOnceError: there never will be.
        """
        num_own = ticket.num_reserved + ticket.num_begun
        num_others = self.num_waiting - num_own
        num_asked = num_choices + (0 if ticket.is_new else num_own)
        if num_asked > MOST_OF_ONE:
            raise TooManyAtOnceError(num_asked)
        num_more = num_choices - ticket.is_new
        if num_more and not ticket.has_started and num_others + self._elsewhere(now_s) > 0:
            ticket.refused = self._full(ticket.limit, num_others, num_asked, now_s)
            if ticket.refused is not None:
                return ticket.refused
        self._change_reserved(ticket, num_more)
        ticket.is_new = False
        return None

    def leave(self, ticket: Ticket) -> None:
        """The HTTP request is answered; its engine requests may go on in the background."""
        self._change_reserved(ticket, -ticket.num_reserved)
        ticket.is_new = False

    def on_queuing(self, num_queuing: int, now_s: float) -> None:
        """Take in a report: this number of engine requests queue on all instances together."""
        self._num_elsewhere = max(0, num_queuing - self.num_waiting)
        self._known_until_s = now_s + QUEUING_KNOWN_S

    def begin(self, name: str, ticket: Ticket, num_choices: int) -> Generation:
        """The engine requests of this name begin; their places were reserved, unless the HTTP
        request has been answered."""
        self._change_reserved(ticket, -min(num_choices, ticket.num_reserved))
        generation = Generation(name, ticket, num_choices)
        self._generations.setdefault(name, []).append(generation)
        self._change_begun(ticket, num_choices)
        return generation

    def end(self, generation: Generation) -> None:
        """All engine requests of the generation have ended."""
        self._change_begun(generation.ticket, -generation.num_waiting)
        generation.num_waiting = 0
        generations = self._generations[generation.name]
        generations.remove(generation)
        if not generations:
            del self._generations[generation.name]

    def on_first_token(self, name: str, now_s: float) -> None:
        """An engine request of this name has its first token.

        If several generations have that name, any of them may count: the sum is the same.
        """
        for generation in self._generations.get(name, ()):
            if generation.num_waiting:
                generation.num_waiting -= 1
                generation.ticket.has_started = True
                self._change_begun(generation.ticket, -1)
                self._starts_s.append(now_s)
                return

    def _change_reserved(self, ticket: Ticket, by: int) -> None:
        ticket.num_reserved += by
        self.num_waiting += by

    def _change_begun(self, ticket: Ticket, by: int) -> None:
        ticket.num_begun += by
        self.num_waiting += by

    def _elsewhere(self, now_s: float) -> int:
        return self._num_elsewhere if now_s < self._known_until_s else 0

    def _full(self, limit: int | None, num_own: int, num_asked: int, now_s: float) -> Full | None:
        num_waiting = num_own + self._elsewhere(now_s)
        if limit is None or num_waiting + num_asked <= limit:
            return None
        return Full(num_waiting, limit, self._retry_after_s(num_waiting, now_s), num_asked)

    def _limit(self, is_urgent: bool) -> int | None:
        if self._max_queued is None or not is_urgent:
            return self._max_queued
        return self._max_queued + max(1, int(self._max_queued * self._urgent_reserve))

    def _retry_after_s(self, num_waiting: int, now_s: float) -> int:
        if not self._starts_s:
            return DEFAULT_RETRY_S
        # Measured up to now, so that the pace of a queue that stands still falls.
        elapsed_s = max(now_s - self._starts_s[0], 1e-3)
        wait_s = num_waiting * elapsed_s / len(self._starts_s)
        return math.ceil(min(max(wait_s, MIN_RETRY_S), MAX_RETRY_S))
