"""How many requests may wait: one more is told at once to come again. Pure.

What waits is counted as engines count it: a request of three prompts, with two choices each, is six
*engine requests*. Each waits from when its request is let in until its own first token; a request
of which nobody knows yet how many it has counts as one. A front end counts its own exactly. Of the
others' it knows what the instances report as queuing, once a second (`ClusterStats`): as far as
that is more than its own, it is others'. So several front ends may let in more together, for a
second, than the limit says; one alone never does, but for a request that has by itself more engine
requests than may wait. Those are let in where nothing else waits. Where nobody reports any more,
others' requests count as none: idle instances are not to be kept from clients by an old report.
"""

import math
from collections import deque
from dataclasses import dataclass

from sterna.messages.actors import STATS_INTERVAL_S

NUM_STARTS = 50
"""Of the last so many starts the pace of the queue is taken."""

MIN_RETRY_S = 1
MAX_RETRY_S = 30
DEFAULT_RETRY_S = 5
"""Where the pace is not known yet."""

QUEUING_KNOWN_S = 3 * STATS_INTERVAL_S
"""How long a report of what queues holds: then the scheduler that sent it is dead, or hangs."""


@dataclass(frozen=True, slots=True)
class Full:
    """No room.

    Attributes:
        num_waiting: engine requests, without those of the request that is refused.
        num_asked: engine requests of the one that is refused, as far as they are known.
        retry_after_s: by then those that wait now will have begun, at the pace of the last ones.
    """

    num_waiting: int
    limit: int
    retry_after_s: int
    num_asked: int = 1


class Ticket:
    """What one request that is let in may have waiting.

    Attributes:
        limit: of its class.
        num_reserved: engine requests that are to begin, and wait already.
        num_begun: engine requests that have begun, and wait.
        is_new: nobody knows yet which engine requests it has.
        has_started: one of them has had its first token: what is asked for it from then on is to
            be done, since it was let in.
        refused: why it got no further, if it did not.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.num_reserved = 1
        self.num_begun = 0
        self.is_new = True
        self.has_started = False
        self.refused: Full | None = None


class Generation:
    """Engine requests of one name, the choices for one prompt, from their beginning on.

    Attributes:
        num_waiting: how many of them wait.
    """

    def __init__(self, name: str, ticket: Ticket, num_choices: int) -> None:
        self.name = name
        self.ticket = ticket
        self.num_waiting = num_choices


class QueueLimit:
    """The engine requests of one front end that wait for their first token.

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
        self._known_until_s = -math.inf
        # Clients may give several requests the same name.
        self._generations: dict[str, list[Generation]] = {}
        self._starts_s: deque[float] = deque(maxlen=NUM_STARTS)
        self.num_waiting = 0

    def enter(self, now_s: float, *, is_urgent: bool) -> Ticket | Full:
        """Let a request in, until it leaves, or not."""
        full = self.full(now_s, is_urgent=is_urgent)
        if full is not None:
            return full
        self.num_waiting += 1
        return Ticket(self._limit(is_urgent))

    def full(self, now_s: float, *, is_urgent: bool) -> Full | None:
        """Return why no request could be let in now; None: one could."""
        return self._full(self._limit(is_urgent), self.num_waiting, 1, now_s)

    def reserve(self, ticket: Ticket, num_choices: int, now_s: float) -> Full | None:
        """So many engine requests more are about to begin for the request; returns why they may
        not, if they may not."""
        num_own = ticket.num_reserved + ticket.num_begun
        num_others = self.num_waiting - num_own
        num_asked = num_choices + (0 if ticket.is_new else num_own)
        if not ticket.has_started and num_others + self._elsewhere(now_s) > 0:
            ticket.refused = self._full(ticket.limit, num_others, num_asked, now_s)
            if ticket.refused is not None:
                return ticket.refused
        self._change_reserved(ticket, num_choices - ticket.is_new)
        ticket.is_new = False
        return None

    def leave(self, ticket: Ticket) -> None:
        """The request is answered; what has begun for it may go on in the background."""
        self._change_reserved(ticket, -ticket.num_reserved)
        ticket.is_new = False

    def on_queuing(self, num_queuing: int, now_s: float) -> None:
        """So many engine requests queue on all instances together."""
        self._num_elsewhere = max(0, num_queuing - self.num_waiting)
        self._known_until_s = now_s + QUEUING_KNOWN_S

    def begin(self, name: str, ticket: Ticket, num_choices: int) -> Generation:
        """The engine requests of this name begin, which were reserved, unless the request has been
        answered."""
        self._change_reserved(ticket, -min(num_choices, ticket.num_reserved))
        generation = Generation(name, ticket, num_choices)
        self._generations.setdefault(name, []).append(generation)
        self._change_begun(ticket, num_choices)
        return generation

    def end(self, generation: Generation) -> None:
        """All of them have ended."""
        self._change_begun(generation.ticket, -generation.num_waiting)
        generation.num_waiting = 0
        generations = self._generations[generation.name]
        generations.remove(generation)
        if not generations:
            del self._generations[generation.name]

    def on_first_token(self, name: str, now_s: float) -> None:
        """The first token of an engine request of this name is there.

        Of several of that name it is not known which; as many wait no more, whichever it is.
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
        # Counted to now: a queue that has come to a halt has a pace that falls.
        elapsed_s = max(now_s - self._starts_s[0], 1e-3)
        wait_s = num_waiting * elapsed_s / len(self._starts_s)
        return math.ceil(min(max(wait_s, MIN_RETRY_S), MAX_RETRY_S))
