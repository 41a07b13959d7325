"""How a front end says that it will not do what it was asked: with OpenAI's error object."""

from collections.abc import Mapping
from http import HTTPStatus

from starlette.responses import JSONResponse


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
