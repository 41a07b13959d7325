"""Request context: facts about the HTTP request that is being answered, in one ContextVar.

vLLM's serving code lies between the HTTP request and the engine requests, and passes on nothing of
ours. All engine requests of an HTTP request (several choices, the turns of a tool loop) find the
facts here. `door` opens the context; the door's middlewares add to it one after the other.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from sterna.frontend.http.queue_limit import Ticket
from sterna.frontend.http.routes import Route
from sterna.priority_classes import ApiKey, PriorityClass

LAST_EVENT_ID = "Last-Event-ID"
"""The header of a client that resumes a stream (`--resumable-streams`)."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request, and its path.

    Attributes:
        path: without the root path.
        authorization: the header; None if there is none.
        route: the row of the path in the table.
        key: the API key in the header; None if the server has no such key.
        is_known: the server has no keys, or the caller has one of them.
    """

    path: str
    authorization: str | None
    route: Route
    key: ApiKey | None
    is_known: bool

    @property
    def is_operator(self) -> bool:
        """Whether the caller may do everything."""
        return self.is_known if self.key is None else self.key.is_admin


@dataclass(frozen=True, slots=True)
class Admission:
    """The priority class of the request, and its limit.

    Attributes:
        highest: the highest class that its API key may ask for; None for any.
        used: its class; None if only vLLM knows the class that it asks for.
    """

    highest: PriorityClass | None
    used: PriorityClass | None


@dataclass(frozen=True, slots=True)
class AnsweredStream:
    """The resumable stream of the request, begun here or at another front end.

    Attributes:
        is_taken_over: the request was let in before, by another front end.
        on_let_in: called when the request is let in.
        carry_marks: called where middlewares may change the answer, or hand its parts on late;
            returns what stands in front of its next part, for those outside of them.
    """

    stream_id: str
    is_taken_over: bool
    on_let_in: Callable[[], None]
    carry_marks: Callable[[], Callable[[], bytes]] = lambda: lambda: b""


def _nothing_to_keep() -> Callable[[], None]:
    return lambda: None


@dataclass(frozen=True, slots=True)
class RequestContext:
    """One request; a field that is not known yet, or does not apply, is None.

    Attributes:
        keep_body: requests that the body be kept even if its client goes; returns a function to
            call when the answer begins, or the body is no longer needed.
        ticket: the request's places in the queue.
        on_checked: called, in place of vLLM's routes, when the request has passed the checks.
    """

    caller: Caller | None = None
    keep_body: Callable[[], Callable[[], None]] = _nothing_to_keep
    stream: AnsweredStream | None = None
    admission: Admission | None = None
    ticket: Ticket | None = None
    on_checked: Callable[[], None] | None = None


# The default is frozen, and can be shared.
_CONTEXT: ContextVar[RequestContext] = ContextVar("sterna_request", default=RequestContext())  # noqa: B039

# Apart, since each request needs it, and a new context takes ten times as long.
_ENGINE_REQUESTS: ContextVar[list[str] | None] = ContextVar("sterna_engine_requests", default=None)


def current() -> RequestContext:
    """Return the context of the request being answered; outside of a request, an empty one."""
    return _CONTEXT.get()


def caller() -> Caller:
    """Return the caller of the request being answered; only for code within `OpenContext`."""
    found = _CONTEXT.get().caller
    assert found is not None, "no request is being answered"
    return found


@contextmanager
def entered(context: RequestContext) -> Iterator[None]:
    """Make this the context of the code within."""
    previous = _CONTEXT.set(context)
    try:
        yield
    finally:
        _CONTEXT.reset(previous)


def collect_engine_requests() -> list[str]:
    """Return a list to which the names of the engine requests of the request that is being answered
    will be added."""
    names: list[str] = []
    _ENGINE_REQUESTS.set(names)
    return names


def add_engine_request(name: str) -> None:
    """Note the name of an engine request of the request that is being answered."""
    names = _ENGINE_REQUESTS.get()
    if names is not None:
        names.append(name)


def is_taken_over() -> bool:
    """Whether the request that is being answered was let in by another front end."""
    stream = current().stream
    return stream is not None and stream.is_taken_over


def aborts_others() -> bool:
    """Whether the request that is being answered aborts those of other callers."""
    found = current().caller
    return found is not None and found.route.aborts_others


def notify_let_in() -> None:
    """Notify the stream of the request that is being answered, if it has one, that the request is
    let in: the stream is worth keeping."""
    stream = current().stream
    if stream is not None:
        stream.on_let_in()
