"""Servers of an emulated engine that is quick, for tests of what surrounds the engine."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from bench.serving.ports import free_port
from tests.models import small_model
from tests.serve.server import START_TIMEOUT_S, STERNA_IS_READY, ServerProcess, serve_command

MODEL = "SmolLM2-135M-Instruct"
PROFILE = """
name: quick
description: an engine with steps of some milliseconds
source: made up for tests
engine:
  num_blocks: 400
  step_mode: chunked
  max_num_batched_tokens: 2048
step_time:
  prefill_s: 0.002
  prefill_token_s: 1.0e-6
  prefill_pair_s: 0.0
  prefill_min_s: 0.004
  decode_s: 0.02
  decode_request_s: 1.0e-5
  decode_token_s: 1.0e-8
copy_time:
  block_s: 0.0002
  stage_s: 0.004
"""


@contextmanager
def quick_server(
    folder: Path, *options: str, is_tls: bool = False, profile: str = PROFILE
) -> Iterator[ServerProcess]:
    """A server that is ready; ended afterwards.

    Args:
        folder: for its profile.
        is_tls: whether it answers https; the options say by what certificate.
        profile: how long its engines' steps take, and what they hold.
    """
    small_model()
    path = folder / "quick.yaml"
    path.write_text(profile)
    port = free_port()
    own = ("--engine", "emulated", "--profile", str(path), "--port", str(port))
    server = ServerProcess(serve_command(*own, "--shutdown-timeout", "0", *options), port=port)
    if is_tls:
        server.url = server.url.replace("http:", "https:")
    try:
        server.until_line(STERNA_IS_READY, START_TIMEOUT_S)
        yield server
    finally:
        server.end()


def many_connections() -> aiohttp.ClientSession:
    """A client that has as many connections as it is asked for."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=1500),
    )


def completion(number: int, max_tokens: int) -> dict[str, Any]:
    """The body of a request whose answer is a stream of so many tokens."""
    return {
        "model": MODEL,
        "prompt": f"Tern number {number}",
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


async def num_tokens(answer: aiohttp.ClientResponse) -> int:
    """Read a stream to its end; returns how many tokens it says that it has."""
    usage = None
    async for line in answer.content:
        name, _, data = line.strip().partition(b": ")
        if name != b"data" or data == b"[DONE]":
            continue
        event = json.loads(data)
        assert "error" not in event, event
        usage = event.get("usage") or usage
    assert usage is not None, "the stream did not end"
    return int(usage["completion_tokens"])
