"""Soak test, half an hour of every kind of client: memory and descriptors of all processes stay.

`make soak` runs it, into bench/results/soak.json; `make soak SOAK_SECONDS=180` for less, into
nothing.
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
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from bench.common import results_io
from tests.serve.emulated.quick import completion, many_connections, num_tokens, quick_server
from tests.serve.server import ServerProcess, has_ended, until

WHOLE_S = 1800.0
"""What is shorter says less, and is not kept."""

DURATION_S = float(os.environ.get("SOAK_SECONDS", WHOLE_S))
NUM_SAMPLES = 60
NUM_CLIENTS = 40
RESERVE = "ray::_SupervisorActor.stand_by"

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
        memory, files = by_quarter(self.memory_bytes), by_quarter(self.num_files)
        return memory[3] - memory[1], files[3] - files[1]


def by_quarter(values: list[int]) -> list[float]:
    """The median of each quarter of the time."""
    quarter = max(1, len(values) // 4)
    starts = (0, quarter, 2 * quarter, len(values) - quarter)
    return [statistics.median(values[start : start + quarter] or values) for start in starts]


OPTIONS = (
    *("--instances", "3", "--frontends", "2", "--reader-timeout", "2"),
    *("--max-queued-requests", "60", "--resumable-streams", "--resume-window", "10"),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with quick_server(tmp_path_factory.mktemp("soak"), *OPTIONS) as server:
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


async def come_back(http: aiohttp.ClientSession, url: str, draw: random.Random) -> str:
    """Read a stream in pieces, each over a connection of its own, at whichever front end."""
    wanted = draw.randrange(1, 150)
    body = completion(draw.randrange(1 << 30), wanted)
    headers = {"X-Request-Id": f"soak-{draw.getrandbits(64):x}"}
    num_events, last_id, is_over = 0, "0", False
    while not is_over:
        async with http.post(f"{url}/v1/completions", json=body, headers=headers) as answer:
            if answer.status == 429 and not num_events:
                return "refused"
            assert answer.status == 200, await answer.text()
            at_most = draw.randrange(1, 60)
            async for line in answer.content:
                if line.startswith(b"id: "):
                    own_id = line.removeprefix(b"id: ").strip().decode()
                if not line.startswith(b"data: "):
                    continue
                assert b'"error"' not in line, line
                num_events += 1
                last_id = own_id
                is_over = line.strip() == b"data: [DONE]"
                at_most -= 1
                if is_over or not at_most:
                    break
        headers["Last-Event-ID"] = last_id
    # Each token is an event, or part of one; then come the usage and the end.
    assert 3 <= num_events <= wanted + 2
    return "came back"


async def move_one(http: aiohttp.ClientSession, url: str, draw: random.Random) -> str:
    """As an operator does; it may end meanwhile, or be on its way already."""
    async with http.get(f"{url}/admin/requests") as answer:
        running = [each for each in await answer.json() if each.get("num_output_tokens", 0)]
    if not running:
        return "moved nothing"
    chosen = draw.choice(running)
    others = sorted({f"i{n}" for n in range(3)} - {chosen["instance"]})
    body = {"request": chosen["id"], "to": draw.choice(others)}
    async with http.post(f"{url}/admin/migrate", json=body) as answer:
        assert answer.status < 500, await answer.text()
        return "moved" if answer.status == 200 else "moved nothing"


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


KINDS = [
    *(read_whole, read_whole, come_back, come_back, go_away),
    *(send_nonsense, keep_half_open, look_around, move_one),
]


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
            # Without folders, which say nothing of it and would be told in the report.
            name = " ".join(Path(word).name for word in process.cmdline()[:4])[:60].strip()
            memory_bytes, num_files = process.memory_info().rss, process.num_fds()
            mine = samples.setdefault(process.pid, Samples(name))
            mine.memory_bytes.append(memory_bytes)
            mine.num_files.append(num_files)


async def watch(processes: list[psutil.Process], until_s: float) -> dict[int, Samples]:
    samples: dict[int, Samples] = {}
    while time.monotonic() < until_s:
        sample(processes, samples)
        await asyncio.sleep(DURATION_S / NUM_SAMPLES)
    return samples


def keep(counts: dict[str, int], samples: list[Samples]) -> None:
    """Write what was seen among the results of benchmarks."""
    rows: list[dict[str, Any]] = []
    for each in samples:
        more_bytes, more_files = each.growth()
        rows.append(
            {
                "process": each.name,
                "is_ours": each.is_ours,
                "memory_mib": [round(one / 2**20, 2) for one in by_quarter(each.memory_bytes)],
                "growth_mib": round(more_bytes / 2**20, 2),
                "files": each.num_files[-1],
                "growth_files": more_files,
            }
        )
    ours = [row for row in rows if row["is_ours"]]
    summary = {
        "seconds": DURATION_S,
        "requests": sum(counts.values()),
        "processes": len(ours),
        "max_growth_mib": max(row["growth_mib"] for row in ours),
        "max_growth_files": max(row["growth_files"] for row in ours),
    }
    config = {"server": ["--engine", "emulated", *OPTIONS], "clients": NUM_CLIENTS}
    results_io.write("soak", config, rows, summary=summary, more={"ends": dict(counts)})


def has_reserve(processes: list[psutil.Process]) -> bool:
    """Whether the supervisor in reserve is among them, which begins some seconds after a server is
    ready."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if RESERVE in " ".join(process.cmdline()):
                return True
    return False


def test_nothing_grows(server: ServerProcess) -> None:
    until(lambda: has_reserve(server.processes()), "another supervisor stands by")
    processes = server.processes()

    async def run() -> tuple[dict[str, int], dict[int, Samples]]:
        until_s = time.monotonic() + DURATION_S
        return await asyncio.gather(be_clients(server, until_s), watch(processes, until_s))

    counts, samples = asyncio.run(run())
    print(f"\n{DURATION_S:.0f} s: " + ", ".join(f"{n} {end}" for end, n in sorted(counts.items())))
    for each in samples.values():
        more_bytes, more_files = each.growth()
        print(
            f"{each.memory_bytes[-1] / 2**20:7.0f} MiB {more_bytes / 2**20:+6.1f}  "
            f"{each.num_files[-1]:4} files {more_files:+3.0f}  {each.name}"
        )
    if DURATION_S >= WHOLE_S:
        keep(counts, list(samples.values()))
    ends = {"answered", "came back", "gone", "half open", "looked", "moved", "nonsense"}
    assert ends <= counts.keys()
    until(server.is_empty, "every instance is empty")
    ours = [each for each in samples.values() if each.is_ours]
    assert len(ours) >= 8, "three instances, two front ends; two supervisors, one scheduler"
    # Who died and was replaced would have begun anew.
    ended = {each.pid for each in processes if has_ended(each)}
    assert [each.name for pid, each in samples.items() if each.is_ours and pid in ended] == []
    for each in ours:
        more_bytes, more_files = each.growth()
        assert more_files <= MAX_MORE_FILES, each.name
        assert more_bytes <= MAX_MORE_BYTES, each.name
    assert "Traceback" not in server.log
