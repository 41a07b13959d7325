"""Which stream belongs to the HTTP request being answered, and its engine requests' pace."""

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol


class Pace(Protocol):
    """Where the engine requests of streams say how far vLLM's code is with them (`pacing`)."""

    def expect(self, stream_id: str, name: str, *, is_repeatable: bool) -> int | None:
        """See `Pacing`."""

    def on_asked(self, name: str, serial: int) -> None:
        """See `Pacing`."""

    def on_taken(self, name: str, serial: int) -> None:
        """See `Pacing`."""

    def on_left(self, name: str, serial: int) -> None:
        """See `Pacing`."""


@dataclass(frozen=True, slots=True)
class _Answering:
    stream_id: str
    is_taken_over: bool
    on_let_in: Callable[[], None]


_ANSWERING: ContextVar[_Answering | None] = ContextVar("sterna_stream", default=None)
# As the class (`tiers`), it belongs to a request that vLLM's serving code knows nothing of.


@contextmanager
def answering(
    stream_id: str, *, is_taken_over: bool, on_let_in: Callable[[], None]
) -> Iterator[None]:
    """What is called within answers the request of this stream.

    Args:
        is_taken_over: the request was let in before, by another front end.
        on_let_in: called when the request is let in.
    """
    previous = _ANSWERING.set(_Answering(stream_id, is_taken_over, on_let_in))
    try:
        yield
    finally:
        _ANSWERING.reset(previous)


def is_taken_over() -> bool:
    """Whether the request that is being answered was let in by another front end."""
    current = _ANSWERING.get()
    return current is not None and current.is_taken_over


def tell_let_in() -> None:
    """The request that is being answered is let in: from now on its stream is worth keeping."""
    current = _ANSWERING.get()
    if current is not None:
        current.on_let_in()


def paced(
    pace: Pace, name: str, outputs: AsyncGenerator[Any, None], *, is_repeatable: bool
) -> AsyncGenerator[Any, None]:
    """Return these outputs of the engine request of this name, which tell of their pace if the
    request belongs to a stream.

    Args:
        is_repeatable: whether each output of the engine becomes one of these.
    """
    current = _ANSWERING.get()
    if current is None:
        return outputs
    serial = pace.expect(current.stream_id, name, is_repeatable=is_repeatable)
    return outputs if serial is None else _paced(pace, name, serial, outputs)


async def _paced(
    pace: Pace, name: str, serial: int, outputs: AsyncGenerator[Any, None]
) -> AsyncGenerator[Any, None]:
    try:
        while True:
            pace.on_asked(name, serial)
            try:
                output = await anext(outputs)
            except StopAsyncIteration:
                return
            pace.on_taken(name, serial)
            yield output
    finally:
        pace.on_left(name, serial)
        # Who closes this one means the other: the request is aborted with it.
        await outputs.aclose()
