"""Errors in OpenAI's format: of the front end itself, and of engine requests that have failed.

vLLM's own server has one message for every engine request that fails, "Internal server error". A
payload that ends a request with an error carries the reason in the field where vLLM keeps the stop
reason. Here it becomes an error of vLLM's with that reason, and with a status that says whether to
try again.
"""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse

from sterna.frontend.requests.request_effects import Failure

if TYPE_CHECKING:
    # The other modules of the front door do without vLLM, whose import takes seconds.
    from vllm.exceptions import GenerationError

_LASTING = frozenset({Failure.KILLED_INSTANCES, Failure.TOO_LARGE, Failure.RESUMABLE})
"""Failures that would happen again if the client tried again."""

_FAILURES = {each.value: each for each in Failure}


def error_response(
    status: HTTPStatus,
    message: str,
    *,
    kind: str | None = None,
    parameter: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """Return the answer.

    Args:
        kind: the error's type; by default that of vLLM's server, which is the status in words.
        parameter: the field of the request that is wrong, or None.
    """
    error = {
        "message": message,
        "type": kind or f"{status.phrase.replace(' ', '')}Error",
        "param": parameter,
        "code": status.value,
    }
    return JSONResponse({"error": error}, status.value, headers)


def error_of(reason: str | None) -> "GenerationError":
    """Return the error for a request that ended for this reason: status 503 if the client may try
    again, else 500."""
    from vllm.exceptions import GenerationError, RetryableRequestError

    failure = _FAILURES.get(reason or "")
    if failure is None:
        return GenerationError(f"the request failed: {reason}") if reason else GenerationError()
    message = f"the request failed ({failure.name.lower()}): {failure.value}"
    return GenerationError(message) if failure in _LASTING else RetryableRequestError(message)


async def raising_failures(outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """Return the outputs of an engine request.

    Raises:
        GenerationError: the request has failed; the message says why.
    """
    async with aclosing(outputs):
        async for output in outputs:
            for each in output.outputs:
                if each.finish_reason == "error":
                    raise error_of(each.stop_reason)
            yield output
