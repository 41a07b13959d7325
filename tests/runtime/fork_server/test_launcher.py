"""A fork server that dies, seen from the process that has started it."""

import os
import socket
import time
from collections.abc import Iterator

import psutil
import pytest

from sterna.runtime.fork_server.forked_worker import ADDRESS_VARIABLE
from sterna.runtime.fork_server.launcher import (
    RETRY_DELAY_S,
    SHORT_LIFE_S,
    STOPPED_TIMEOUT_S,
    ForkServer,
)

HANG_S = 60.0


@pytest.fixture
def server() -> Iterator[ForkServer]:
    with ForkServer({}) as server:
        the_process()
        yield server
    assert processes() == []
    assert ADDRESS_VARIABLE not in os.environ


def processes() -> list[psutil.Process]:
    """Those of fork servers; their imports have only begun."""
    own = psutil.Process().children()
    return [each for each in own if "sterna.runtime.fork_server.fork_server" in each.cmdline()]


def the_process() -> psutil.Process:
    """Wait for it: one that has just been started has no command line for a moment, or the
    test's."""
    begun_s = time.monotonic()
    while len(found := processes()) != 1:
        assert time.monotonic() - begun_s < HANG_S
        time.sleep(0.01)
    return found[0]


def kill() -> None:
    """It has ended then, and nobody has waited for it yet."""
    process = the_process()
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def test_one_that_dies_is_started_again_at_the_same_place(
    server: ForkServer, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = time.monotonic()
    address = os.environ[ADDRESS_VARIABLE]
    assert not server.keep_up(now_s)
    until_asked(address)
    kill()
    with socket.socket(socket.AF_UNIX) as asking:
        # Meanwhile nobody is there, which whoever asks hears at once.
        assert asking.connect_ex(address) != 0
    now_s += SHORT_LIFE_S + 1.0
    assert server.keep_up(now_s)
    assert not server.keep_up(now_s)
    assert "fork server lost, starting it again" in caplog.text
    until_asked(address)


def test_one_that_dies_of_its_imports_is_started_again_later(
    server: ForkServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Else a processor is busy with them for ever."""
    now_s = time.monotonic()
    kill()
    assert not server.keep_up(now_s)
    assert f"again in {RETRY_DELAY_S:.0f} s" in caplog.text
    assert not server.keep_up(now_s + RETRY_DELAY_S - 0.1)
    assert processes() == []
    assert server.keep_up(now_s + RETRY_DELAY_S)
    until_asked(os.environ[ADDRESS_VARIABLE])


def test_one_that_cannot_be_started_is_tried_again(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = time.monotonic() + SHORT_LIFE_S + 1.0

    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(24, "Too many open files")

    kill()
    with monkeypatch.context() as patch:
        patch.setattr("sterna.runtime.fork_server.launcher.subprocess.Popen", refuse)
        assert not server.keep_up(now_s)
    assert "Too many open files" in caplog.text
    assert server.keep_up(now_s + RETRY_DELAY_S)


def test_one_that_is_stopped_for_long_is_ended_and_started_again(server: ForkServer) -> None:
    now_s = time.monotonic() + SHORT_LIFE_S + 1.0
    process = the_process()
    process.suspend()
    stopped_s = time.monotonic()
    while not server.keep_up(now_s):
        assert time.monotonic() - stopped_s < HANG_S
        time.sleep(0.05)
    assert time.monotonic() - stopped_s >= STOPPED_TIMEOUT_S
    assert not process.is_running()
    the_process()


def until_asked(address: str) -> None:
    """Wait until it hears who asks, which is before it imports anything."""
    begun_s = time.monotonic()
    while True:
        with socket.socket(socket.AF_UNIX) as asking:
            if asking.connect_ex(address) == 0:
                return
        assert time.monotonic() - begun_s < HANG_S
        time.sleep(0.05)
