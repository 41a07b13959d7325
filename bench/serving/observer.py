"""Samples the instances of a running Sterna server."""

import asyncio
from typing import Final

import aiohttp
import msgspec

from bench.serving.target import Target, refusal
from sterna.errors import ConfigurationError

DEFAULT_INTERVAL_S = 0.5
ANSWER_TIMEOUT_S = 5.0
"""A sample that takes longer is left out, since its time would be uncertain."""

UNKNOWN: Final = frozenset({404, 405, 501})
"""Answers of servers that are not Sterna's."""


class InstanceSample(msgspec.Struct, frozen=True):
    """One instance at one moment, with the fields of `sterna instances --json`.

    Attributes:
        total_tokens: memory that requests may have: all but the watermark.
        head_demand_tokens: of the request at the head of its line; 0 for no line.
        preemptions: since the instance started, like migrations, which count at their source.
            None where the server does not report them.
    """

    id: str
    state: str
    total_tokens: int
    used_tokens: int
    freeness: float | None
    running: int
    queuing: int
    migrating: int
    head_demand_tokens: int | None = None
    preemptions: int | None = None
    migrations_committed: int | None = None
    migrations_aborted: int | None = None


class ClusterSample(msgspec.Struct, frozen=True):
    """All instances at one moment, in seconds since the run began."""

    time_s: float
    instances: tuple[InstanceSample, ...]


class Observer:
    """Polls a server for its instances at an interval.

    Attributes:
        samples: so far, in order; the first is from before the run.
    """

    def __init__(self, target: Target, interval_s: float = DEFAULT_INTERVAL_S) -> None:
        self._target = target
        self._interval_s = interval_s
        self.samples: list[ClusterSample] = []

    async def look(self, session: aiohttp.ClientSession, begin_s: float) -> bool:
        """Take one sample; returns whether the server reports its instances at all.

        The sample of a server that does not answer in time, or is temporarily unable to, is left
        out.

        Raises:
            ConfigurationError: the server needs another key.
        """
        try:
            async with session.get(f"{self._target.url}/admin/instances") as answer:
                status, content = answer.status, await answer.read()
        except (aiohttp.ClientError, OSError):
            return True
        if status in UNKNOWN:
            return False
        if status in (401, 403):
            raise ConfigurationError(
                f"{self._target.url} does not show its instances ({refusal(status, content)})"
            )
        if status == 200:
            now_s = asyncio.get_running_loop().time() - begin_s
            try:
                instances = msgspec.json.decode(content, type=tuple[InstanceSample, ...])
            except msgspec.DecodeError:
                return False
            self.samples.append(ClusterSample(now_s, instances))
        return True

    async def watch(self, session: aiohttp.ClientSession, begin_s: float) -> None:
        """Take samples until cancelled."""
        loop = asyncio.get_running_loop()
        due_s = begin_s
        while True:
            due_s = max(due_s + self._interval_s, loop.time())
            await asyncio.sleep(due_s - loop.time())
            await self.look(session, begin_s)

    def session(self) -> aiohttp.ClientSession:
        """Connections of its own, so that no stream delays a sample."""
        return self._target.session(aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S))
