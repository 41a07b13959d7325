"""What is known of the HTTP request that is being answered, in one ContextVar.

vLLM's serving code lies between the HTTP request and the engine's, and hands nothing of ours on.
Everything that a request becomes on its way (several choices, the turns of a tool loop) finds here
whose it is. The door's middlewares add to it one after the other; `door` opens it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from sterna.frontend.http.queue_limit import Ticket
from sterna.frontend.http.routes import Route
from sterna.priority_classes import ApiKey, PriorityClass

LAST_EVENT_ID = "Last-Event-ID"
"""The header of a client that reads a stream on (`--resumable-streams`)."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks for what.

    Attributes:
        path: without the root path.
        authorization: the header; None: there is none.
        route: what the table says of the path.
        key: the API key in the header; None: it is none of the server's.
        is_known: the server has no keys, or this is one of them.
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
    """What class the request may have, and has.

    Attributes:
        highest: the highest class that its API key may ask for; None for any.
        used: its class; None where only vLLM knows what it asks for.
    """

    highest: PriorityClass | None
    used: PriorityClass | None


@dataclass(frozen=True, slots=True)
class AnsweredStream:
    """The resumable stream that the request is, or was at another front end.

    Attributes:
        is_taken_over: the request was let in before, by another front end.
        on_let_in: called when the request is let in.
    """

    stream_id: str
    is_taken_over: bool
    on_let_in: Callable[[], None]


def _nothing_to_keep() -> Callable[[], None]:
    return lambda: None


@dataclass(frozen=True, slots=True)
class RequestContext:
    """One request; what is not known yet, or does not apply, is None.

    Attributes:
        keep_body: says that the body is needed when its client has gone, too; returns what is to be
            called when the answer begins, or the body is not needed any more.
        ticket: what the request may have waiting.
    """

    caller: Caller | None = None
    keep_body: Callable[[], Callable[[], None]] = _nothing_to_keep
    stream: AnsweredStream | None = None
    admission: Admission | None = None
    ticket: Ticket | None = None


# The default is frozen, and can be shared.
_CONTEXT: ContextVar[RequestContext] = ContextVar("sterna_request", default=RequestContext())  # noqa: B039


def current() -> RequestContext:
    """Return that of the request being answered; outside of one, it is empty."""
    return _CONTEXT.get()


def caller() -> Caller:
    """Return who asks for what; for code behind `OpenContext` alone."""
    found = _CONTEXT.get().caller
    assert found is not None, "no request is being answered"
    return found


@contextmanager
def entered(context: RequestContext) -> Iterator[None]:
    """Have what is called within answer this request."""
    previous = _CONTEXT.set(context)
    try:
        yield
    finally:
        _CONTEXT.reset(previous)


def is_taken_over() -> bool:
    """Whether the request that is being answered was let in by another front end."""
    stream = current().stream
    return stream is not None and stream.is_taken_over


def tell_let_in() -> None:
    """Say that the request that is being answered is let in: its stream is worth keeping."""
    stream = current().stream
    if stream is not None:
        stream.on_let_in()
