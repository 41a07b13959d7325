"""Exhaustion of a server's disk or file descriptors: it serves less, and does not crash."""

import contextlib
import resource
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bench.serving.ports import free_port
from tests.serve.emulated.quick import MODEL, quick_server
from tests.serve.emulated.test_overload import frontend
from tests.serve.server import (
    END_TIMEOUT_S,
    HANG_TIMEOUT_S,
    START_TIMEOUT_S,
    ServerProcess,
    serve_command,
    until,
)

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

HELLO = {"model": MODEL, "prompt": "Hello", "max_tokens": 3}
SOFT_LIMIT = 1024
"""What shells usually allow."""


def is_answering(port: int) -> bool:
    with contextlib.suppress(httpx.TransportError):
        url = f"http://127.0.0.1:{port}/v1/completions"
        answer = httpx.post(url, json=HELLO, timeout=HANG_TIMEOUT_S)
        return answer.status_code == 200
    return False


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(SOFT_LIMIT, hard), hard))
    try:
        with quick_server(tmp_path_factory.mktemp("files"), "--instances", "2") as server:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            yield server
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_limit_of_open_files_is_raised_at_the_start(server: ServerProcess) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, _ = frontend(server).rlimit(resource.RLIMIT_NOFILE)
    assert soft == min(65_536, hard) or soft == 65_536


def test_a_front_end_without_descriptors_lives_and_answers_when_it_has_some_again(
    server: ServerProcess,
) -> None:
    """The limit is taken from under it, below what it counts on: worse than what can happen."""
    process = frontend(server)
    before = process.rlimit(resource.RLIMIT_NOFILE)
    process.rlimit(resource.RLIMIT_NOFILE, (process.num_fds() + 20, before[1]))
    clients = []
    try:
        for _ in range(60):
            client = socket.create_connection(("127.0.0.1", server.port))
            clients.append(client)
        until(lambda: process.num_fds() >= process.rlimit(resource.RLIMIT_NOFILE)[0] - 2, "full")
    finally:
        for client in clients:
            client.close()
        process.rlimit(resource.RLIMIT_NOFILE, before)
    until(lambda: is_answering(server.port), "it answers again")
    assert frontend(server).pid == process.pid


def test_a_supervisor_without_descriptors_gives_nobody_up(server: ServerProcess) -> None:
    """It cannot look at its members' processes, and says so; they serve on."""
    instances = [each.pid for each in server.at_work("ray::_InstanceActor")]
    supervisor = server.at_work("ray::_SupervisorActor")[0]
    before = supervisor.rlimit(resource.RLIMIT_NOFILE)
    supervisor.rlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        until(lambda: "processes cannot be looked at" in server.log, "it says so")
        assert is_answering(server.port)
    finally:
        supervisor.rlimit(resource.RLIMIT_NOFILE, before)
    assert is_answering(server.port)
    assert [each.pid for each in server.at_work("ray::_InstanceActor")] == instances
    assert "its process has ended" not in server.log


def test_a_server_whose_log_has_no_room_serves_and_ends(tmp_path: Path) -> None:
    """/dev/full answers every write as a full disk does."""
    port = free_port()
    command = serve_command(
        *("--engine", "emulated", "--instances", "1", "--port", str(port)),
        *("--shutdown-timeout", "0"),
    )
    with Path("/dev/full").open("w") as full:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=full,
            start_new_session=True,
        )
    try:
        until(
            lambda: process.poll() is not None or is_answering(port), "it answers", START_TIMEOUT_S
        )
        assert process.poll() is None, "it has ended"
        process.terminate()
        assert process.wait(END_TIMEOUT_S) == 0
    finally:
        if process.poll() is None:
            process.kill()
