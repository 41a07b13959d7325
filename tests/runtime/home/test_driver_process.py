"""Driver process: its replacement, and the ends that are those of the server."""

import errno
import os
import pickle
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from sterna.config import ClusterConfig, FrontendConfig, LlumletConfig, TransportConfig
from sterna.policy.presets import STERNA
from sterna.runtime.actors.packed_args import PackedArgs
from sterna.runtime.home import driver_process
from sterna.runtime.home.driver_messages import REPORTED_STATUS, Changed, Serve
from sterna.runtime.home.driver_process import DriverProcess
from sterna.runtime.processes.restarts import MAX_SHORT_LIVES

HANG_S = 60.0

CONFIG = ClusterConfig(LlumletConfig(STERNA), TransportConfig(), FrontendConfig())

NEWS = pickle.dumps(Changed(is_ready=True))

DRIVER = f"""#!{sys.executable} -SE
import os, sys, time

orders, news = map(int, sys.argv[-2:])
os.write(news, {struct.pack("!i", len(NEWS)) + NEWS!r})
# Until it is told something.
os.read(orders, 1)
"""
"""Serves, as far as it says, and ends when it gets an order."""

Begin = Callable[[str], DriverProcess]


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    """Begins a driver that ends like this once it has orders, as all of its successors do."""
    begun: list[DriverProcess] = []

    def begin(end: str) -> DriverProcess:
        program = tmp_path / "driver"
        program.write_text(DRIVER + end)
        program.chmod(0o700)
        monkeypatch.setattr(driver_process, "sys", SimpleNamespace(executable=str(program)))
        driver = DriverProcess({}, "")
        begun.append(driver)
        return driver

    yield begin
    for each in begun:
        each.close()


def have_it_end(driver: DriverProcess, *, has_served: bool = True) -> None:
    process = driver._process
    if has_served:
        assert driver.news(HANG_S)
    driver.use_ray("127.0.0.1:1")
    driver.serve(Serve(CONFIG, PackedArgs(b"", b""), None, 0.0))
    process.wait(HANG_S)


@pytest.mark.parametrize(
    "end",
    [
        f"os.kill(os.getpid(), {signal.SIGKILL:d})",
        f"os.kill(os.getpid(), {signal.SIGTERM:d})",
        # As Ray has SIGTERM end whoever uses it.
        f"sys.exit({signal.SIGTERM:d})",
        "raise OSError('no descriptor is left')",
    ],
    ids=["killed", "terminated", "exits", "raises"],
)
def test_a_driver_that_was_not_to_end_is_replaced(begin: Begin, end: str) -> None:
    driver = begin(end)
    first = driver._process.pid
    have_it_end(driver)
    assert driver.keep_up() is None
    assert driver._process.pid != first
    assert driver.news(HANG_S)


@pytest.mark.parametrize(("status", "expected"), [(0, 0), (REPORTED_STATUS, 1)])
def test_a_driver_that_ends_on_purpose_is_not_replaced(
    begin: Begin, status: int, expected: int
) -> None:
    """It was told to, or has told why the server cannot go on."""
    driver = begin(f"os._exit({status})")
    have_it_end(driver)
    assert driver.keep_up() == expected


def test_drivers_that_fail_one_after_the_other_end_the_server(
    begin: Begin, caplog: pytest.LogCaptureFixture
) -> None:
    driver = begin("os._exit(1)")
    have_it_end(driver)
    for _ in range(MAX_SHORT_LIVES - 1):
        assert driver.keep_up() is None
        # Its orders were sent with its start.
        driver._process.wait(HANG_S)
    assert driver.keep_up() == 1
    assert f"{MAX_SHORT_LIVES} drivers in a row died soon after they began" in caplog.text


def test_a_driver_that_fails_before_it_has_served_ends_the_server(begin: Begin) -> None:
    driver = begin("os._exit(1)")
    have_it_end(driver, has_served=False)
    assert driver.keep_up() == 1


def test_a_driver_that_is_stopped_is_killed_and_replaced(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes no orders, and might go on later, beside its successor."""
    monkeypatch.setattr(driver_process, "STOPPED_TIMEOUT_S", 1e-9)
    driver = begin("time.sleep(1000)")
    first = driver._process
    assert driver.news(HANG_S)
    driver.use_ray("127.0.0.1:1")
    driver.serve(Serve(CONFIG, PackedArgs(b"", b""), None, 0.0))
    assert driver.keep_up() is None
    assert driver._process is first
    first.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, first.pid, os.WSTOPPED | os.WNOWAIT)
    for _ in range(2):
        # It is seen stopped, and then that it has been for its time.
        assert driver.keep_up() is None
    assert first.returncode == -signal.SIGKILL
    assert driver._process is not first
    assert driver.news(HANG_S)


def test_a_driver_that_does_not_end_in_time_after_an_urgent_order_is_killed(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the server ends with it. After another order requests may take their time."""
    monkeypatch.setattr(driver_process, "CLOSE_TIMEOUT_S", 0.0)
    driver = begin("time.sleep(1000)")
    assert driver.news(HANG_S)
    driver.stop(is_urgent=False)
    assert driver.keep_up() is None
    driver.stop(is_urgent=True)
    assert driver.keep_up() == 1
    assert driver._process.returncode == -signal.SIGKILL


def forbid_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(driver_process.subprocess, "Popen", refuse)


@pytest.fixture
def lost(begin: Begin) -> DriverProcess:
    """One that was killed while it served."""
    driver = begin(f"os.kill(os.getpid(), {signal.SIGKILL:d})")
    have_it_end(driver)
    return driver


def test_a_driver_without_room_for_a_successor_has_one_as_soon_as_there_is_some(
    lost: DriverProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What it manages goes on meanwhile."""
    first = lost._process.pid
    with monkeypatch.context() as full:
        forbid_processes(full)
        full.setattr(driver_process, "RETRY_DELAY_S", 0.0)
        # It is one death, however often it is tried.
        for _ in range(2 * MAX_SHORT_LIVES):
            assert lost.keep_up() is None
            assert lost.news(0.0) is None
    assert "driver not replaced, again in 0 s" in caplog.text
    assert lost.keep_up() is None
    assert lost._process.pid != first
    assert lost.news(HANG_S)


def test_whoever_has_no_driver_does_not_try_or_ask_without_a_pause(
    lost: DriverProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_processes(monkeypatch)
    monkeypatch.setattr(driver_process, "RETRY_DELAY_S", HANG_S)
    assert lost.keep_up() is None
    begin = time.monotonic()
    assert lost.news(0.1) is None
    assert time.monotonic() - begin >= 0.1
    monkeypatch.undo()
    first = lost._process.pid
    assert lost.keep_up() is None
    assert lost._process.pid == first


def test_a_server_without_a_driver_ends_when_it_is_to_end_in_a_hurry(
    lost: DriverProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_processes(monkeypatch)
    assert lost.keep_up() is None
    lost.stop(is_urgent=False)
    assert lost.keep_up() is None
    lost.stop(is_urgent=True)
    assert lost.keep_up() == 1
