"""Looks for a stream at all other front ends. Pure.

Whoever has the stream says so, and then it is found. It is nowhere when all have denied it; one
that dies has. Who has a replica of it may come to have the stream itself: then its holder has died,
and some time after that everybody knows. So a stream of which there is a replica is waited for.
"""

from collections.abc import Iterable
from enum import Enum

from sterna.stream_messages import Finding
from sterna.types import FrontendId


class Nowhere(Enum):
    """The outcome of a search that finds nothing."""

    NOWHERE = "no front end has the stream"


class Search:
    """One search.

    Args:
        others: who is asked.
        has_replica: whether the front end that asks has a replica itself.
    """

    def __init__(self, others: Iterable[FrontendId], *, has_replica: bool) -> None:
        self._unanswered = set(others)
        self._replicas: set[FrontendId | None] = {None} if has_replica else set()
        self._holder: FrontendId | None = None

    @property
    def outcome(self) -> FrontendId | Nowhere | None:
        """Who has the stream; None while that is open."""
        if self._holder is not None:
            return self._holder
        is_open = self._unanswered or self._replicas
        return None if is_open else Nowhere.NOWHERE

    @property
    def replicas(self) -> list[FrontendId]:
        """Others that have a replica."""
        return sorted(each for each in self._replicas if each is not None)

    def on_answer(self, sender: FrontendId, finding: Finding) -> None:
        """A front end says what it has; its newest answer counts."""
        self._unanswered.discard(sender)
        self._replicas.discard(sender)
        match finding:
            case Finding.STREAM:
                self._holder = sender
            case Finding.REPLICA:
                self._replicas.add(sender)
            case Finding.NOTHING:
                pass

    def on_frontends(self, live: Iterable[FrontendId]) -> None:
        """These front ends live; what others had said is void."""
        live = set(live)
        self._unanswered &= live
        self._replicas &= {None, *live}
        if self._holder not in live:
            self._holder = None
