"""Looks for a stream at all other front ends. Pure.

Whoever has the stream says so, and then it is found. It is nowhere when all have denied it. Who has
a replica of it may come to have the stream itself: then its holder has died, and some time after
that everybody knows. So a stream of which there is a replica is waited for. One that has denied it
may get a replica from its next holder, and be the only one that has it when that one dies too. So
when one dies, all others are asked again.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from sterna.messages.streams import Finding, FindStream, StopReading, StreamFound
from sterna.types import FrontendId


class NotFound(Enum):
    """The outcome of a search that finds nothing."""

    NOWHERE = "no front end has the stream"
    ASK_AGAIN = "a front end has died, and what others said before may hold no more"


class Search:
    """One search.

    Args:
        others: who is asked.
        has_replica: whether the front end that asks has a replica itself.
    """

    def __init__(self, others: Iterable[FrontendId], *, has_replica: bool) -> None:
        self._others = frozenset(others)
        self._unanswered = set(others)
        self._replicas: set[FrontendId | None] = {None} if has_replica else set()
        self._holder: FrontendId | None = None
        self._has_one_died = False

    @property
    def outcome(self) -> FrontendId | NotFound | None:
        """Who has the stream; None while that is open."""
        if self._holder is not None:
            return self._holder
        if self._has_one_died:
            return NotFound.ASK_AGAIN
        is_open = self._unanswered or self._replicas
        return None if is_open else NotFound.NOWHERE

    @property
    def hoped_for(self) -> list[FrontendId]:
        """Others that have a replica, or may be about to say so: they remember who looks on."""
        return sorted(each for each in self._replicas | self._unanswered if each is not None)

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
        """These front ends live; others are dead for good."""
        live = set(live)
        self._unanswered &= live
        self._has_one_died = self._has_one_died or not self._others <= live
        self._replicas &= {None, *live}
        if self._holder not in live:
            self._holder = None


@dataclass(frozen=True, slots=True)
class ToFrontend:
    """Say this to the other front end."""

    frontend_id: FrontendId
    message: FindStream | StreamFound | StopReading


class Searches:
    """The searches of one front end, and its answers to those of others."""

    def __init__(self, frontend_id: FrontendId) -> None:
        self._frontend_id = frontend_id
        self._live: tuple[FrontendId, ...] = ()
        self._searches: dict[int, Search] = {}
        # Who was told of a replica, and looks on.
        self._hopeful: dict[tuple[FrontendId, int], tuple[str, bytes]] = {}
        self._next_id = 1

    @property
    def is_idle(self) -> bool:
        """Whether nobody looks for anything here, or hopes for more from here."""
        return not self._searches and not self._hopeful

    def next_id(self) -> int:
        """Return a number that no other query of this front end has."""
        query_id, self._next_id = self._next_id, self._next_id + 1
        return query_id

    def on_frontends(self, live: Iterable[FrontendId]) -> None:
        """These front ends live; others are dead for good."""
        self._live = tuple(each for each in live if each != self._frontend_id)
        for search in self._searches.values():
            search.on_frontends(self._live)
        for key in [key for key in self._hopeful if key[0] not in self._live]:
            del self._hopeful[key]

    # -------------------------------------------------------------------------- its own

    def begin(
        self, stream_id: str, owner: bytes, *, has_replica: bool
    ) -> tuple[int, list[ToFrontend]]:
        """Look for a stream; returns the search's number, and what is to be said."""
        query_id = self.next_id()
        self._searches[query_id] = Search(self._live, has_replica=has_replica)
        query = FindStream(self._frontend_id, query_id, stream_id, owner)
        return query_id, [ToFrontend(each, query) for each in self._live]

    def outcome(self, query_id: int) -> FrontendId | NotFound | None:
        """See `Search`."""
        return self._searches[query_id].outcome

    def on_found(self, found: StreamFound) -> bool:
        """An answer came; returns whether somebody looks for it still."""
        search = self._searches.get(found.query_id)
        if search is not None:
            search.on_answer(found.sender, found.finding)
        return search is not None

    def end(self, query_id: int) -> list[ToFrontend]:
        """Look no more; returns what is to be said."""
        stop = StopReading(self._frontend_id, query_id)
        return [ToFrontend(each, stop) for each in self._searches.pop(query_id).hoped_for]

    # -------------------------------------------------------------------- those of others

    def on_find(self, query: FindStream, *, has_stream: bool, has_replica: bool) -> ToFrontend:
        """Return the answer to another one, who hears more if it is told of a replica."""
        finding = Finding.NOTHING
        if has_stream:
            finding = Finding.STREAM
        elif has_replica:
            finding = Finding.REPLICA
            self._hopeful[query.sender, query.query_id] = query.stream_id, query.owner
        found = StreamFound(self._frontend_id, query.query_id, finding)
        return ToFrontend(query.sender, found)

    def on_stop(self, sender: FrontendId, query_id: int) -> None:
        """The other one looks no more."""
        self._hopeful.pop((sender, query_id), None)

    def on_taken_over(self, has_stream: Callable[[str, bytes], bool]) -> list[ToFrontend]:
        """Streams of a dead front end are here; returns what is to be said."""
        found = []
        for (asker, query_id), (stream_id, owner) in list(self._hopeful.items()):
            if has_stream(stream_id, owner):
                del self._hopeful[asker, query_id]
                answer = StreamFound(self._frontend_id, query_id, Finding.STREAM)
                found.append(ToFrontend(asker, answer))
        return found
