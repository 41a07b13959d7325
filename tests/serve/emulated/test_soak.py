"""Half an hour of every kind of client: memory and descriptors of all processes stay as they are.

`make soak` runs it; `make soak SOAK_SECONDS=180` for less.
"""

import asyncio
import contextlib
import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import aiohttp
import psutil
import pytest

from tests.serve.emulated.quick import completion, many_connections, num_tokens, quick_server
from tests.serve.server import ServerProcess, until

DURATION_S = float(os.environ.get("SOAK_SECONDS", "1800"))
NUM_SAMPLES = 60
NUM_CLIENTS = 40

MAX_MORE_FILES = 10
MAX_MORE_BYTES = 16 << 20
"""Of one process, from the second quarter to the last: in half an hour a leak of 10 KiB a second is
as much."""

pytestmark = [
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.soak,
    pytest.mark.timeout(DURATION_S + 900),
]


@dataclass
class Samples:
    """What one process held, from the beginning to the end."""

    name: str
    memory_bytes: list[int] = field(default_factory=list)
    num_files: list[int] = field(default_factory=list)

    @property
    def is_ours(self) -> bool:
        """Whether Sterna's code runs in it, and not only Ray's own."""
        return "sterna" in self.name or "ray::" in self.name

    def growth(self) -> tuple[float, float]:
        """Bytes and files more in the last quarter than in the second one."""
        return _growth(self.memory_bytes), _growth(self.num_files)


def _growth(values: list[int]) -> float:
    quarter = max(1, len(values) // 4)
    return statistics.median(values[-quarter:]) - statistics.median(values[quarter : 2 * quarter])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    options = ("--instances", "3", "--reader-timeout", "2", "--max-queued-requests", "60")
    with quick_server(tmp_path_factory.mktemp("soak"), *options) as server:
        yield server


async def read_whole(http: aiohttp.ClientSession, url: str, draw: random.Random) -> str:
    wanted = draw.randrange(1, 150)
    body = completion(draw.randrange(1 << 30), wanted)
    async with http.post(f"{url}/v1/completions", json=body) as answer:
        if answer.status != 200:
            assert answer.status == 429, await answer.text()
            return "refused"
        assert await num_tokens(answer) == wanted
    return "answered"


async def go_away(http: aiohttp.ClientSession, url: str, draw: random.Random) -> str:
    body = completion(draw.randrange(1 << 30), 2000)
    async with http.post(f"{url}/v1/completions", json=body) as answer:
        for _ in range(draw.randrange(5)):
            await answer.content.readline()
    return "gone"


async def send_nonsense(http: aiohttp.ClientSession, url: str, draw: random.Random) -> str:
    content = draw.choice([b"{", b'{"model": 5}', b"\xff" * 1000, bytes(70 << 20), b"[]"])
    headers = {"Content-Type": "application/json"}
    with contextlib.suppress(aiohttp.ClientConnectionError):
        # What is refused unread may end while it is still sent.
        async with http.post(f"{url}/v1/completions", data=content, headers=headers) as answer:
            assert 400 <= answer.status < 500
    return "nonsense"


async def keep_half_open(http: aiohttp.ClientSession, url: str, draw: random.Random) -> str:
    host, _, port = url.removeprefix("http://").rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"[
            : draw.randrange(80)
        ]
    )
    if draw.random() < 0.5:
        writer.write_eof()
    await asyncio.sleep(draw.random())
    writer.close()
    return "half open"


async def look_around(http: aiohttp.ClientSession, url: str, draw: random.Random) -> str:
    path = draw.choice(["/metrics", "/health", "/v1/models", "/admin/instances", "/nowhere"])
    async with http.get(f"{url}{path}") as answer:
        await answer.read()
        assert answer.status < 500
    return "looked"


KINDS = [read_whole, read_whole, read_whole, go_away, send_nonsense, keep_half_open, look_around]


async def be_clients(server: ServerProcess, until_s: float) -> dict[str, int]:
    """Ask in every way until then; returns how often each came to which end."""
    counts: dict[str, int] = defaultdict(int)

    async def client(number: int, http: aiohttp.ClientSession) -> None:
        draw = random.Random(number)
        while time.monotonic() < until_s:
            counts[await draw.choice(KINDS)(http, server.url, draw)] += 1

    async with many_connections() as http, asyncio.TaskGroup() as group:
        for number in range(NUM_CLIENTS):
            group.create_task(client(number, http))
    return counts


def sample(processes: list[psutil.Process], samples: dict[int, Samples]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            name = " ".join(process.cmdline())[:100]
            memory_bytes, num_files = process.memory_info().rss, process.num_fds()
            mine = samples.setdefault(process.pid, Samples(name))
            mine.memory_bytes.append(memory_bytes)
            mine.num_files.append(num_files)


async def watch(server: ServerProcess, until_s: float) -> dict[int, Samples]:
    samples: dict[int, Samples] = {}
    processes = await asyncio.to_thread(server.processes)
    while time.monotonic() < until_s:
        sample(processes, samples)
        await asyncio.sleep(DURATION_S / NUM_SAMPLES)
    return samples


def test_nothing_grows(server: ServerProcess) -> None:
    async def run() -> tuple[dict[str, int], dict[int, Samples]]:
        until_s = time.monotonic() + DURATION_S
        counts, samples = await asyncio.gather(be_clients(server, until_s), watch(server, until_s))
        return counts, samples

    counts, samples = asyncio.run(run())
    print(f"\n{DURATION_S:.0f} s: " + ", ".join(f"{n} {end}" for end, n in sorted(counts.items())))
    for each in samples.values():
        more_bytes, more_files = each.growth()
        print(
            f"{each.memory_bytes[-1] / 2**20:7.0f} MiB {more_bytes / 2**20:+6.1f}  "
            f"{each.num_files[-1]:4} files {more_files:+3.0f}  {each.name[:70]}"
        )
    assert {"answered", "gone", "nonsense", "half open", "looked"} <= counts.keys()
    until(server.is_empty, "every instance is empty")
    ours = [each for each in samples.values() if each.is_ours]
    assert len(ours) >= 6, "supervisor, scheduler, three instances and a front end"
    for each in ours:
        more_bytes, more_files = each.growth()
        assert more_files <= MAX_MORE_FILES, each.name
        assert more_bytes <= MAX_MORE_BYTES, each.name
    assert "Traceback" not in server.log
