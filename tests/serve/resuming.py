"""Clients of `--resumable-streams`: they leave, come back, and know who answers them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from tests.serve.server import HANG_TIMEOUT_S, ServerProcess, until

FRONTEND = "ray::_FrontendActor"


class TryAgainError(Exception):
    """The server says so."""


@dataclass
class Reader:
    """A client of one stream, over several connections.

    Attributes:
        events: number and content of each.
    """

    server: ServerProcess
    path: str
    body: dict[str, Any]
    request_id: str
    events: list[tuple[int, str]] = field(default_factory=list)
    last_id: str = ""

    @property
    def is_over(self) -> bool:
        return bool(self.events) and self.events[-1][1] == "[DONE]"

    @contextmanager
    def connection(
        self, to: psutil.Process | None = None, over: httpx.Client | None = None
    ) -> Iterator[tuple[httpx.Response, Iterator[None]]]:
        """A connection, of its own to this front end if there is none that it is to go over, and a
        way to read one event after the other."""
        headers = {"X-Request-Id": self.request_id}
        if self.events:
            headers["Last-Event-ID"] = self.last_id
        with (
            nullcontext(over) if over else connected(self.server, to) as http,
            http.stream("POST", self.path, json=self.body, headers=headers) as answer,
        ):
            if answer.status_code == 503:
                raise TryAgainError
            if answer.status_code != 200:
                answer.read()
                raise AssertionError(f"{answer.status_code} {answer.text}")
            yield answer, self._read(answer)

    def read(
        self,
        at_most: int = 1_000_000,
        to: psutil.Process | None = None,
        over: httpx.Client | None = None,
    ) -> psutil.Process | None:
        """Read so many events, or to the end; returns who answers."""
        with self.connection(to, over) as (answer, reading):
            process = answerer(self.server, answer, to)
            for _, _ in zip(reading, range(at_most), strict=False):
                pass
        return process

    def read_to_the_end(self, timeout_s: float = HANG_TIMEOUT_S) -> None:
        """As a client does that comes back until it has all."""

        def is_over() -> bool:
            try:
                self.read()
            except (httpx.TransportError, TryAgainError):
                # The port was still that of the dead front end, too; or not all know of its death.
                return False
            return self.is_over

        until(is_over, "the stream is over", timeout_s)

    def _read(self, answer: httpx.Response) -> Iterator[None]:
        own_id = ""
        for line in answer.iter_lines():
            name, _, value = line.partition(": ")
            if name == "id":
                own_id = value
            elif name == "data":
                self.last_id = own_id
                self.events.append((int(own_id.partition("-")[0]), value))
                yield

    def said(self) -> dict[int, "Choice"]:
        """What is said, by choice: how it is cut into events is chance. The numbers of the events
        have no gaps, and all events have one id and one time."""
        assert [number for number, _ in self.events] == list(range(1, len(self.events) + 1))
        chunks = [json.loads(content) for _, content in self.events if content != "[DONE]"]
        assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
        found: dict[int, Choice] = {}
        for chunk in chunks:
            for part in chunk["choices"]:
                found.setdefault(part["index"], Choice()).add(part)
        return found


@dataclass
class Choice:
    """One choice of an answer, put together from its events."""

    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, part: dict[str, Any]) -> None:
        """Add what an event says of it."""
        assert self.finish_reason is None
        self.text += part["delta"].get("content") or "" if "delta" in part else part["text"]
        self.finish_reason = part["finish_reason"]
        logprobs = part.get("logprobs") or {}
        self.logprobs += logprobs.get("token_logprobs") or []
        self.logprobs += [each["logprob"] for each in logprobs.get("content") or []]


@contextmanager
def connected(server: ServerProcess, to: psutil.Process | None) -> Iterator[httpx.Client]:
    """A client whose first request goes to this front end: which one gets a connection is the
    kernel's choice, so that several may be tried. It keeps the connection as long as the front end
    does."""
    while True:
        with server.http(limits=httpx.Limits(keepalive_expiry=HANG_TIMEOUT_S)) as http:
            if to is None or _has_connection(http, server, to):
                yield http
                return


def _has_connection(http: httpx.Client, server: ServerProcess, to: psutil.Process) -> bool:
    with http.stream("GET", "/health") as answer:
        # What is read to its end leaves the connection for the next request.
        answer.read()
        return answerer(server, answer, to) == to


def answerer(
    server: ServerProcess, answer: httpx.Response, likely: psutil.Process | None = None
) -> psutil.Process:
    """The front end at the other end of the answer's connection; whether it is the likely one is
    seen without a look at every process there is."""
    own = answer.extensions["network_stream"].get_extra_info("socket").getsockname()[1]

    def has_it(process: psutil.Process) -> bool:
        return any(
            each.raddr and each.raddr.port == own and each.laddr.port == server.port
            for each in process.net_connections("tcp")
        )

    if likely is not None and has_it(likely):
        return likely
    found = next(filter(has_it, front_ends(server)), None)
    assert found is not None, "nobody has the connection"
    return found


def front_ends(server: ServerProcess) -> list[psutil.Process]:
    """The processes of the front ends."""
    return [each for each in server.processes() if _is_front_end(each)]


def _is_front_end(process: psutil.Process) -> bool:
    try:
        return FRONTEND in " ".join(process.cmdline())
    except psutil.Error:
        # It has ended meanwhile.
        return False


def read_elsewhere(reader: Reader, not_at: psutil.Process, at_most: int) -> None:
    """Read on at another front end than this one: which one gets a connection is the kernel's
    choice."""

    def is_elsewhere() -> bool:
        try:
            with reader.connection() as (answer, reading):
                if answerer(reader.server, answer) == not_at:
                    return False
                for _, _ in zip(reading, range(at_most), strict=False):
                    pass
        except (httpx.TransportError, TryAgainError):
            # Some front end has just died.
            return False
        return True

    until(is_elsewhere, "another front end has got the connection")
