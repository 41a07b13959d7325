"""API keys, and which routes ask for one, where the server has keys, and for whose.

vLLM's own check guards what begins with /v1, /v2, /inference or /cohere. The same inference is open
to everybody under other names there (/invocations, /tokenize), and so is what changes the engines
in vLLM's development mode. Here a route is an operator's unless it is named below: what a later
vLLM adds is closed until somebody has thought about it.
"""

import hashlib
import secrets
from collections.abc import Sequence
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from sterna.classes import ApiKey

OPEN_PATHS = frozenset(
    {
        "/health",
        "/ping",
        "/load",
        "/version",
        "/metrics",
        "/metrics/",
        "/docs",
        "/docs/oauth2-redirect",
        # What vLLM's page of the API is made of where no browser gets it elsewhere
        # (--enable-offline-docs).
        "/static/swagger-ui-bundle.js",
        "/static/swagger-ui.css",
        "/redoc",
        "/openapi.json",
    }
)
"""For everybody, as in vLLM: probes, scrapers, and what the API looks like. No prompt, no answer
and no name of a user is among it."""

USERS_PREFIXES = ("/v1/", "/v2/", "/inference/", "/cohere/")
USERS_PATHS = frozenset(
    {
        "/tokenize",
        "/detokenize",
        "/tokenizer_info",
        "/invocations",
        "/generative_scoring",
        "/pooling",
        "/classify",
        "/score",
        "/rerank",
    }
)
"""For every key: inference."""

OPERATORS_PATHS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
"""For operators' keys, although they begin as inference does: they change the engines."""


class ApiKeys:
    """All keys of a server; without any, everybody may do everything."""

    def __init__(self, keys: Sequence[ApiKey] = ()) -> None:
        self._keys = tuple(keys)

    @property
    def are_needed(self) -> bool:
        """Whether the server has keys at all."""
        return bool(self._keys)

    def refuse(self, authorization: str | None) -> bool:
        """Whether the server has keys, and this header has none of them."""
        return self.are_needed and self.find(authorization) is None

    def find(self, authorization: str | None) -> ApiKey | None:
        """Return the key of an `Authorization: Bearer KEY` header; None where it is none."""
        scheme, _, key = (authorization or "").partition(" ")
        digest = hashlib.sha256(key.encode()).digest()
        # Every key is compared, so that the time taken does not tell which one was close.
        matches = [each for each in self._keys if secrets.compare_digest(digest, each.digest)]
        return matches[0] if matches and scheme.lower() == "bearer" else None


class KeyCheck:
    """Lets those in who may; stands in the place of vLLM's check."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or one connection of another kind."""
        if self._may_pass(scope):
            await self._app(scope, receive, send)
            return
        # vLLM's own answer.
        refusal = JSONResponse({"error": "Unauthorized"}, HTTPStatus.UNAUTHORIZED)
        await refusal(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        # A browser asks with OPTIONS, and without a key, whether it may ask at all.
        if scope["type"] not in ("http", "websocket") or scope.get("method") == "OPTIONS":
            return True
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        # The operators' API checks for itself (`admin`), and answers in its own words.
        if path in OPEN_PATHS or path.startswith("/admin/"):
            return True
        key = self._keys.find(Headers(scope=scope).get("Authorization"))
        if key is None:
            return False
        return key.is_admin or (
            path not in OPERATORS_PATHS and (path in USERS_PATHS or path.startswith(USERS_PREFIXES))
        )
