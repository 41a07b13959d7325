"""Search for a stream at all other front ends. Pure.

The search ends when a front end says that it has the stream, or when all have denied it. A front
end with a replica may get the stream itself: its holder has died then, which the others learn some
time later. So a search goes on while there is a replica. A front end that has denied the stream may
get a replica from its next holder, and be the only one that has it when that one dies too. So when
a front end dies, all others are asked again.

Only those are asked that the front end knows. So a new front end introduces itself to all others
(`INTRODUCTION`) before it has a stream.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from sterna.messages.streams import Finding, FindStream, StopReading, StreamFound
from sterna.types import FrontendId

INTRODUCTION = ""
"""The id of no stream. A front end that answers a search for it knows the one that asks."""


class NotFound(Enum):
    """The outcome of a search that finds nothing."""

    NOWHERE = "no front end has the stream"
    ASK_AGAIN = "a front end has died, and earlier answers of others may no longer be true"


class Search:
    """One search.

    Args:
        others: the front ends that are asked.
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
        """The front end that has the stream, or why none was found; None while that is open."""
        if self._holder is not None:
            return self._holder
        if self._has_one_died:
            return NotFound.ASK_AGAIN
        is_open = self._unanswered or self._replicas
        return None if is_open else NotFound.NOWHERE

    @property
    def awaited(self) -> list[FrontendId]:
        """Others that have a replica, or may be about to say so: they remember this search."""
        return sorted(each for each in self._replicas | self._unanswered if each is not None)

    def on_answer(self, sender: FrontendId, finding: Finding) -> None:
        """A front end has answered; its latest answer counts."""
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
    """Send this to the other front end."""

    frontend_id: FrontendId
    message: FindStream | StreamFound | StopReading


class Searches:
    """The searches of one front end, and its answers to those of others."""

    def __init__(self, frontend_id: FrontendId) -> None:
        self._frontend_id = frontend_id
        self._live: tuple[FrontendId, ...] = ()
        self._searches: dict[int, Search] = {}
        # Searches of others that wait for a stream of which this front end has a replica.
        self._waiting: dict[tuple[FrontendId, int], tuple[str, bytes]] = {}
        self._next_id = 1

    @property
    def is_idle(self) -> bool:
        """Whether no search of this front end is under way, and none of others waits for it."""
        return not self._searches and not self._waiting

    def next_id(self) -> int:
        """Return an id that no other query of this front end has."""
        query_id, self._next_id = self._next_id, self._next_id + 1
        return query_id

    def on_frontends(self, live: Iterable[FrontendId]) -> None:
        """These front ends live; others are dead for good."""
        self._live = tuple(each for each in live if each != self._frontend_id)
        for search in self._searches.values():
            search.on_frontends(self._live)
        for key in [key for key in self._waiting if key[0] not in self._live]:
            del self._waiting[key]

    # ----------------------------------------------------------------------- own searches

    def begin(
        self, stream_id: str, owner: bytes, *, has_replica: bool
    ) -> tuple[int, list[ToFrontend]]:
        """Begin a search; returns its id, and the messages to send."""
        query_id = self.next_id()
        self._searches[query_id] = Search(self._live, has_replica=has_replica)
        query = FindStream(self._frontend_id, query_id, stream_id, owner)
        return query_id, [ToFrontend(each, query) for each in self._live]

    def outcome(self, query_id: int) -> FrontendId | NotFound | None:
        """See `Search`."""
        return self._searches[query_id].outcome

    def on_found(self, found: StreamFound) -> bool:
        """An answer has arrived; returns whether its search is still under way."""
        search = self._searches.get(found.query_id)
        if search is not None:
            search.on_answer(found.sender, found.finding)
        return search is not None

    def end(self, query_id: int) -> list[ToFrontend]:
        """End the search; returns the messages to send."""
        stop = StopReading(self._frontend_id, query_id)
        return [ToFrontend(each, stop) for each in self._searches.pop(query_id).awaited]

    # ----------------------------------------------------------------- searches of others

    def on_find(self, query: FindStream, *, has_stream: bool, has_replica: bool) -> ToFrontend:
        """Return the answer to another front end, which gets a second one later if this front end
        has a replica."""
        finding = Finding.NOTHING
        if has_stream:
            finding = Finding.STREAM
        elif has_replica:
            finding = Finding.REPLICA
            self._waiting[query.sender, query.query_id] = query.stream_id, query.owner
        found = StreamFound(self._frontend_id, query.query_id, finding)
        return ToFrontend(query.sender, found)

    def on_stop(self, sender: FrontendId, query_id: int) -> None:
        """The other front end has ended its search."""
        self._waiting.pop((sender, query_id), None)

    def on_taken_over(self, has_stream: Callable[[str, bytes], bool]) -> list[ToFrontend]:
        """Streams of a dead front end have been taken over; returns the messages to send."""
        found = []
        for (asker, query_id), (stream_id, owner) in list(self._waiting.items()):
            if has_stream(stream_id, owner):
                del self._waiting[asker, query_id]
                answer = StreamFound(self._frontend_id, query_id, Finding.STREAM)
                found.append(ToFrontend(asker, answer))
        return found
