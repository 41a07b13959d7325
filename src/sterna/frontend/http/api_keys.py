"""API keys: the caller of a request, found by constant-time comparison, and the caller's rights.

The file with the keys may change while the server runs: a key is revoked, or has another class.
"""

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Sequence
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from sterna.errors import ConfigurationError
from sterna.frontend.http.request_context import Caller, caller, current
from sterna.frontend.http.routes import Access, route_of
from sterna.priority_classes import ApiKey
from sterna.priority_files import KeyFile

LOOK_INTERVAL_S = 2.0
"""Time between two looks at the file with the keys."""

logger = logging.getLogger(__name__)


class ApiKeys:
    """All keys of a server; without keys, every caller may do everything.

    Args:
        keys: those at the server's start.
        file: the file that they are from; None for keys that do not change.
    """

    def __init__(self, keys: Sequence[ApiKey] = (), file: KeyFile | None = None) -> None:
        self._keys = tuple(keys)
        self._file = file
        # States of the file: when it was last read, and when that last failed.
        self._read: tuple[int, ...] | None = None
        self._failed: tuple[int, ...] | None = None

    @property
    def are_needed(self) -> bool:
        """Whether the server has keys at all."""
        return bool(self._keys)

    async def follow(self) -> None:
        """Look at the file again and again, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            await self.look()

    async def look(self) -> None:
        """Take the keys of the file, if it has changed since it was last read. If it cannot be
        used, the keys stay as they are, and each later look tries again."""
        if self._file is None:
            return
        # Files may be on other machines, and large ones take long to parse.
        state: tuple[int, ...] | None = None
        try:
            state = await asyncio.to_thread(self._file.state)
            if state == self._read:
                return
            keys = await asyncio.to_thread(self._file.read)
        except (ConfigurationError, RuntimeError) as error:
            # The latter where no thread can be started.
            if state is None or state != self._failed:
                logger.error("API keys stay as they were reason=%s", error)
            self._failed = state
            return
        self._read, self._failed = state, None
        if keys != self._keys:
            self._keys = keys
            logger.info("API keys changed file=%s num_keys=%d", self._file.path, len(keys))

    def find(self, authorization: str | None) -> ApiKey | None:
        """Return the key of an `Authorization: Bearer KEY` header; None if the server has no such
        key."""
        scheme, _, key = (authorization or "").partition(" ")
        digest = hashlib.sha256(key.encode()).digest()
        # Every key is compared, so that the time taken does not show which one was close.
        matches = [each for each in self._keys if secrets.compare_digest(digest, each.digest)]
        return matches[0] if matches and scheme.lower() == "bearer" else None


class Callers:
    """Finds the caller of a request: its path, its API key and the rules for them.

    Args:
        root_path: the prefix that a proxy may leave before the paths (`--root-path`).
    """

    def __init__(self, keys: ApiKeys, root_path: str = "") -> None:
        self._keys = keys
        self._root_path = root_path

    def of(self, scope: Scope) -> Caller:
        """Return the caller of a request: the known one if path and key have not changed."""
        # vLLM's application writes its root path into the scope.
        path = scope["path"].removeprefix(scope.get("root_path") or self._root_path)
        authorization = Headers(scope=scope).get("Authorization")
        known = current().caller
        if known is not None and (known.path, known.authorization) == (path, authorization):
            return known
        key = self._keys.find(authorization) if self._keys.are_needed else None
        is_known = key is not None or not self._keys.are_needed
        return Caller(path, authorization, route_of(path), key, is_known)


class KeyCheck:
    """Refuses callers without the rights for their path; replaces vLLM's check."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or one connection of another kind."""
        if self._may_pass(scope):
            await self._app(scope, receive, send)
            return
        # vLLM's own answer.
        refusal = JSONResponse({"error": "Unauthorized"}, HTTPStatus.UNAUTHORIZED)
        await refusal(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        # Browsers send preflight requests (OPTIONS) without a key.
        if scope["type"] not in ("http", "websocket") or scope.get("method") == "OPTIONS":
            return True
        asking = caller()
        if asking.route.access in (Access.PUBLIC, Access.OWN_CHECK) or asking.is_operator:
            return True
        return asking.is_known and asking.route.access is Access.ANY_KEY
