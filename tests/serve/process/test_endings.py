"""However a server's driver ends, nothing of it is left: no process, no port, no file."""

import signal
from collections.abc import Iterator

import psutil
import pytest

from bench.serving.ports import is_port_free
from tests.serve.server import (
    END_TIMEOUT_S,
    START_TIMEOUT_S,
    ServerProcess,
    begin_sterna,
    start_sterna,
    until,
)

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture
def servers() -> Iterator[list[ServerProcess]]:
    """What a test has started, for it to be ended if the test fails."""
    begun: list[ServerProcess] = []
    yield begun
    for server in begun:
        server.end()


def assert_all_gone(server: ServerProcess, family: list[psutil.Process]) -> None:
    """Looks at the process table; how long it takes is not asserted."""
    _, alive = psutil.wait_procs(family, timeout=END_TIMEOUT_S)
    assert not alive
    until(lambda: is_port_free(server.port), "the port is free", END_TIMEOUT_S)
    assert not [p for p in psutil.process_iter(["ppid"]) if p.info["ppid"] == server.pid]


@pytest.mark.parametrize("way", ["ctrl-c", "sigterm", "sigkill"])
def test_a_server_that_ends_leaves_nothing_behind(servers: list[ServerProcess], way: str) -> None:
    """Also when a stream is running: it is cut, but no process stays for it."""
    server = start_sterna()
    servers.append(server)
    family = server.processes()
    # The driver, the reaper, the supervisor, the scheduler, two instances and a front end.
    assert len(family) >= 7
    folder = server.folder()
    # Sockets, and what Ray's GCS knows; counters.
    assert {each.name.partition("-")[0] for each in folder.iterdir()} >= {"frontend", "gcs"}
    memory_folder = server.memory_folder()
    assert list(memory_folder.glob("counter_*.db"))
    next(iter(server.stream()))
    if way == "ctrl-c":
        server.interrupt()
    else:
        server.send_signal(signal.SIGTERM if way == "sigterm" else signal.SIGKILL)
    status = server.until_end()
    assert_all_gone(server, family)
    assert status == (-signal.SIGKILL if way == "sigkill" else 0)
    until(
        lambda: not folder.exists() and not memory_folder.exists(),
        "its folders are gone",
        END_TIMEOUT_S,
    )
    if way != "sigkill":
        assert "Traceback" not in server.log


@pytest.mark.parametrize("line", ["", "^starting 2 instances"], ids=["while_reading", "starting"])
def test_ctrl_c_while_starting_leaves_nothing_behind(
    servers: list[ServerProcess], line: str
) -> None:
    server = begin_sterna()
    servers.append(server)
    if line:
        server.until_line(line, START_TIMEOUT_S)
        until(lambda: len(server.processes()) >= 10, "instances have processes")
    else:
        until(lambda: len(server.processes()) >= 4, "Ray has processes")
    family = server.processes()
    server.interrupt()
    assert server.until_end() == 0
    assert_all_gone(server, family)
    assert "Traceback" not in server.log
