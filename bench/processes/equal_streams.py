"""Many streams of one length at once, and the servers that get them: a real engine with so little
to compute that the front end has most of the work, and emulated instances with slow steps."""

import asyncio
import contextlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp

from bench.paced.cases import write_hardware
from bench.serving.client import NUM_SPARE_FILES, allow_files
from bench.serving.served import served
from sterna.engine.emulated.durations import StepTime
from sterna.engine.emulated.profiles import profile

PROMPT_TOKENS = 32

EVENT = b"data: "
END = b"data: [DONE]"

TINY_ENGINE = (
    *("--served-model-name", "small", "--max-model-len", "2048", "--block-size", "32"),
    *("--max-num-batched-tokens", "2048", "--max-num-seqs", "256", "--enforce-eager"),
    *("--kv-cache-memory-bytes", "500M"),
    *("--dtype", "float32"),
)

STEP_S = 0.5
"""That of emulated instances: with faster ones their own steps would take all cores here."""


@dataclass(frozen=True, slots=True)
class Load:
    """Streams of one length.

    Attributes:
        name: in rows and tables.
        num_streams: their number.
        at_once: as many are under way all the time.
        output_tokens: of each stream.
    """

    name: str
    num_streams: int
    at_once: int
    output_tokens: int


SHORT = Load("requests of 1 token", 2_000, 32, 1)
LONG = Load("256 streams of 256 tokens", 256, 256, 256)


def allow_streams(num_streams: int) -> None:
    """Let this process and its servers have as many connections open."""
    allow_files(num_streams + NUM_SPARE_FILES)


@contextlib.contextmanager
def slow_server(num_instances: int, num_frontends: int, load: Load, log: Path) -> Iterator[str]:
    """A server of emulated instances with long steps, which takes all streams of the load; yields
    its address."""
    hardware = profile("a10-llama-7b")
    steps = StepTime(STEP_S, 0.0, 0.0, STEP_S, STEP_S, 0.0, 0.0)
    engine = replace(hardware.engine, num_blocks=20_000)
    with tempfile.TemporaryDirectory() as folder:
        slow = replace(hardware, name="slow", engine=engine, step_time=steps)
        path = write_hardware(slow, Path(folder))
        options = (
            *("--engine", "emulated", "--profile", str(path), "--served-model-name", "small"),
            *("--instances", str(num_instances), "--frontends", str(num_frontends)),
            # By default 2,048 may wait, and others are refused.
            *("--max-queued-requests", str(2 * load.at_once)),
        )
        with served(options, log=log) as url:
            yield url


@dataclass(frozen=True, slots=True)
class Sent:
    """Streams that have ended.

    Attributes:
        duration_s: from the first request to the last answer's end.
        num_chunks: parts of answers that came, each with one token, or with more where the front
            end was late.
        most_open: the most answers that had begun and not ended at one time.
    """

    duration_s: float
    num_failed: int
    num_chunks: int
    most_open: int


async def send(url: str, load: Load) -> Sent:
    """Send the streams."""
    places = asyncio.Semaphore(load.at_once)
    num_chunks = num_open = most_open = 0
    clock = asyncio.get_running_loop().time
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=600.0)

    async def is_answered(session: aiohttp.ClientSession, number: int) -> bool:
        nonlocal num_chunks, num_open, most_open
        body = {
            **{"model": "small", "max_tokens": load.output_tokens, "stream": True},
            **{"ignore_eos": True, "temperature": 0.0},
            # A chunk has several tokens where the front end is late.
            "stream_options": {"include_usage": True},
            # Ids of words, other ones for each stream.
            "prompt": [1_000 + (number * PROMPT_TOKENS + k) % 40_000 for k in range(PROMPT_TOKENS)],
        }
        last = b"{}"
        async with places:
            try:
                async with session.post(f"{url}/v1/completions", json=body) as answer:
                    num_open += 1
                    most_open = max(most_open, num_open)
                    try:
                        async for line in answer.content:
                            if line.startswith(EVENT) and not line.startswith(END):
                                num_chunks += 1
                                last = line
                    finally:
                        num_open -= 1
            except (aiohttp.ClientError, TimeoutError):
                return False
        usage = json.loads(last.removeprefix(EVENT)).get("usage")
        if usage is None:
            return False
        # The last event has the usage, and no token.
        num_chunks -= 1
        return bool(usage.get("completion_tokens") == load.output_tokens)

    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        begun_s = clock()
        answered = await asyncio.gather(
            *(is_answered(session, number) for number in range(load.num_streams))
        )
        return Sent(clock() - begun_s, answered.count(False), num_chunks, most_open)
