"""Paced outputs: outputs of engine requests that report how far vLLM's code has read them."""

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from sterna.frontend.http.request_context import current


class Pace(Protocol):
    """The receiver of these reports; methods as in `Pacing`."""

    def expect(self, stream_id: str, name: str, *, is_repeatable: bool) -> int | None: ...

    def on_asked(self, name: str, serial: int) -> None: ...

    def on_taken(self, name: str, serial: int) -> None: ...

    def on_left(self, name: str, serial: int) -> None: ...


def paced(
    pace: Pace, name: str, outputs: AsyncGenerator[Any, None], *, is_repeatable: bool
) -> AsyncGenerator[Any, None]:
    """Return these outputs of the engine request of this name, which report their pace if the
    request belongs to a stream.

    Args:
        is_repeatable: whether each output of the engine becomes one of these.
    """
    stream = current().stream
    if stream is None:
        return outputs
    serial = pace.expect(stream.stream_id, name, is_repeatable=is_repeatable)
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
        # Closing this generator closes the inner one, which aborts the request.
        await outputs.aclose()
