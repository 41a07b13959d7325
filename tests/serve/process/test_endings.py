"""However a server's driver ends, nothing of it is left: no process, no port, no file."""

import itertools
import signal
from collections.abc import Iterator

import psutil
import pytest

from bench.serving.ports import is_port_free
from tests.models import small_model
from tests.serve.server import (
    END_TIMEOUT_S,
    START_TIMEOUT_S,
    ServerProcess,
    begin_sterna,
    has_ended,
    start_emulated,
    start_sterna,
    until,
)

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]


SUPERVISOR = "ray::_SupervisorActor"


@pytest.fixture
def servers() -> Iterator[list[ServerProcess]]:
    """What a test has started, for it to be ended if the test fails."""
    begun: list[ServerProcess] = []
    yield begun
    for server in begun:
        server.end()


def start_one() -> ServerProcess:
    """One with an instance that computes nothing."""
    small_model()
    return start_emulated("--instances", "1")


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
        assert "not everything ended by itself" not in server.log


def test_ctrl_c_ends_a_server_whose_driver_is_stopped(servers: list[ServerProcess]) -> None:
    """Whoever has started the driver does not wait for it."""
    server = start_one()
    servers.append(server)
    family = server.processes()
    server.at_work("sterna.runtime.home.driver")[0].suspend()
    server.interrupt()
    server.until_end()
    assert_all_gone(server, family)


def test_a_server_whose_supervisors_die_one_after_the_other_ends_and_says_so(
    servers: list[ServerProcess],
) -> None:
    server = start_one()
    servers.append(server)
    family = server.processes()
    own = psutil.Process(server.pid)
    for number in itertools.count():

        def is_next(number: int = number) -> bool:
            is_there = server.log.count("supervisor took over") >= number
            return has_ended(own) or (is_there and bool(server.at_work(SUPERVISOR)))

        until(is_next, "the next one is at work, or the server ends", START_TIMEOUT_S)
        supervisors = server.at_work(SUPERVISOR)
        if has_ended(own) or not supervisors:
            break
        supervisors[0].kill()
    assert server.until_end() == 1
    assert "4 in a row did, soon after they began" in server.log
    assert number >= 4
    assert_all_gone(server, family)


@pytest.mark.parametrize("name", ["raylet", "ray::DashboardAgent", "ray::RuntimeEnvAgent"])
def test_a_server_ends_with_the_raylet_of_its_only_node(
    servers: list[ServerProcess], name: str
) -> None:
    """Nobody can start anything there any more, not even a supervisor; and Ray ends it with either
    of its agents."""
    server = start_one()
    servers.append(server)
    family = server.processes()
    (process,) = [each for each in family if each.name().strip() == name]
    process.kill()
    assert server.until_end() == 1
    assert "sterna: error: Ray's raylet of this machine has died" in server.log
    assert_all_gone(server, family)


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
