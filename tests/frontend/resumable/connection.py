"""A client's connection to an ASGI application, which can be dropped at any moment."""

import asyncio
import json
from collections.abc import Iterable
from typing import Any

from starlette.types import ASGIApp

PATH = "/v1/completions"


class Connection:
    """One POST of a body as JSON, and what has come back so far.

    Attributes:
        status: of the answer; 0 until it begins.
        content: of its body.
        task: the application's; done when the answer has ended.
    """

    def __init__(
        self,
        app: ASGIApp,
        body: dict[str, Any],
        headers: Iterable[tuple[bytes, bytes]],
        path: str = PATH,
    ) -> None:
        self._gone = asyncio.Event()
        self._news = asyncio.Event()
        self._body: bytes | None = json.dumps(body).encode()
        self.status = 0
        self.headers: dict[str, str] = {}
        self.content = b""
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": list(headers),
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            assert self.status == 0
            self.status = message["status"]
            self.headers = {name.decode().lower(): v.decode() for name, v in message["headers"]}
        else:
            self.content += message.get("body", b"")
        self._news.set()

    @property
    def events(self) -> list[str]:
        return [each for each in self.content.decode().split("\n\n") if each]

    async def until(self, num_events: int) -> None:
        """Wait until so many have come."""
        while len(self.events) < num_events:
            self._news.clear()
            await self._news.wait()

    async def leave(self) -> None:
        self._gone.set()
        await self.task
