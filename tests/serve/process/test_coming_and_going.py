"""Instances come, go and are replaced while real streams run, and no client notices."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.serve.nodes import states
from tests.serve.server import (
    HANG_TIMEOUT_S,
    MODEL_NAME,
    START_TIMEOUT_S,
    ServerProcess,
    start_sterna,
    until,
)

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_STREAMS = 8
NUM_TOKENS = 400


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """Two instances in float32, in which what shares a batch does not change what is said."""
    server = start_sterna("--dtype", "float32")
    yield server
    server.end()


def sterna(server: ServerProcess, *arguments: str) -> str:
    """Run a command of `sterna` on this server; returns what it printed."""
    command = [str(Path(sys.executable).with_name("sterna")), *arguments]
    place = command.index("--") if "--" in command else len(command)
    command[place:place] = ["--url", server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT_S)
    return f"{done.stdout}{done.stderr}"


def answer(server: ServerProcess, number: int) -> str:
    """Read one stream to its end, that of its length."""
    chunks = server.client(timeout=HANG_TIMEOUT_S).completions.create(
        model=MODEL_NAME,
        prompt=f"Terns number {number} flew",
        max_tokens=NUM_TOKENS,
        temperature=0.0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert choices[-1].finish_reason == "length"
    return "".join(each.text for each in choices)


def begin_streams(server: ServerProcess, threads: ThreadPoolExecutor) -> list[Future[str]]:
    streams = [threads.submit(answer, server, number) for number in range(NUM_STREAMS)]
    until(
        lambda: sum(each["running"] for each in server.instances()) == NUM_STREAMS,
        "all streams run",
    )
    return streams


@pytest.fixture(scope="module")
def expected(server: ServerProcess) -> list[str]:
    """What the same streams say when nothing happens to the instances."""
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        return [each.result() for each in begin_streams(server, threads)]


def test_streams_say_the_same_over_a_drain_and_a_rolling_restart(
    server: ServerProcess, expected: list[str]
) -> None:
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        streams = begin_streams(server, threads)
        assert "can serve" in sterna(server, "start")
        assert "has ended" in sterna(server, "drain", "i0")
        said = sterna(server, "restart", "--rolling", "--", "--max-num-seqs", "12")
        assert "restarted: i3, i4 serve" in said
        assert [each.result() for each in streams] == expected
    assert states(server) == {"i3": "running", "i4": "running"}
    until(server.is_empty, "all blocks are free again")


def test_options_with_which_no_instance_starts_cost_none(server: ServerProcess) -> None:
    before = states(server)
    said = sterna(server, "restart", "--rolling", "--", "--kv-cache-memory-bytes", "1000")
    assert "the instances are as they were" in said
    assert states(server) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("drain", "i99"), "no instance is called i99"),
        (("drain", "--undo", "i3"), "i3 is not being drained"),
        (("start", "0"), "can start 1 to 100 instances, not 0"),
        (("restart", "--rolling", "--", "--port", "1"), "not for a rolling restart"),
        (("restart", "--rolling", "--", "--max-num-seqs", "x"), "invalid int value"),
        (("restart",), "--rolling"),
    ],
)
def test_what_cannot_be_done_is_refused_in_words(
    server: ServerProcess, arguments: tuple[str, ...], words: str
) -> None:
    assert words in sterna(server, *arguments)


def test_after_sigterm_admitted_streams_finish_and_nobody_else_comes_in() -> None:
    server = start_sterna("--shutdown-timeout", "900")
    try:
        with ThreadPoolExecutor(NUM_STREAMS) as threads, server.http() as client:
            streams = begin_streams(server, threads)
            server.send_signal(signal.SIGTERM)
            server.until_line("shutting down", HANG_TIMEOUT_S)
            until(lambda: client.get("/health").status_code == 503, "the server is not healthy")
            refused = client.post("/v1/completions", json={"model": MODEL_NAME, "prompt": "Terns"})
            assert refused.status_code == 503
            assert refused.json()["error"]["message"] == "the server is shutting down"
            assert all(each.result() for each in streams)
        assert server.until_end(HANG_TIMEOUT_S) == 0
    finally:
        server.end()
