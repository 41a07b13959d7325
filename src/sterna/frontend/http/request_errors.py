"""What a client is told whose request has failed: why, and whether to ask again.

vLLM's own server knows one message for all, "Internal server error". A payload that ends a request
with an error carries the reason where vLLM keeps what stopped a request, and here it becomes an
error of vLLM's that says it.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from vllm.exceptions import GenerationError, RetryableRequestError

from sterna.frontend.effects import Failure

_LASTING = frozenset({Failure.KILLED_INSTANCES, Failure.TOO_LARGE, Failure.RESUMABLE})
"""To ask again would come to the same."""

_FAILURES = {each.value: each for each in Failure}


def error_of(reason: str | None) -> GenerationError:
    """Return the error for a request that ended with this: status 503 where the client may ask
    again, else 500."""
    failure = _FAILURES.get(reason or "")
    if failure is None:
        return GenerationError(f"the request failed: {reason}") if reason else GenerationError()
    message = f"the request failed ({failure.name.lower()}): {failure.value}"
    return GenerationError(message) if failure in _LASTING else RetryableRequestError(message)


async def telling_why(outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """Return the outputs of an engine request.

    Raises:
        GenerationError: it has failed; the message says why.
    """
    async with aclosing(outputs):
        async for output in outputs:
            for each in output.outputs:
                if each.finish_reason == "error":
                    raise error_of(each.stop_reason)
            yield output
