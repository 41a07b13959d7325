"""The outermost of the door's middlewares, which those behind it need."""

from collections.abc import Sequence

from starlette.types import ASGIApp

from sterna.frontend.http.api_keys import ApiKeys, Callers
from sterna.frontend.http.door import OpenContext
from sterna.priority_classes import ApiKey


def opened(app: ASGIApp, keys: Sequence[ApiKey] = (), root_path: str = "") -> OpenContext:
    """The application, with a context for each of its requests."""
    return OpenContext(app, Callers(ApiKeys(keys), root_path))
