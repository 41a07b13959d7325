"""The process of which the others of a run are forks."""

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

HANG_S = 60.0

SERVER = """
import sys
from sterna.runtime.fork_server import fork_server

fork_server._import_all = lambda: None
fork_server.main(sys.argv[1])
"""


def ask(address: str, question: bytes, descriptors: Sequence[int] = (0, 1, 2)) -> socket.socket:
    """Connect, once that can be done, and say all of the question."""
    asking = socket.socket(socket.AF_UNIX)
    asking.settimeout(HANG_S)
    while asking.connect_ex(address) != 0:
        pass
    # The fork writes where the fork server does.
    socket.send_fds(asking, [question], descriptors)
    asking.shutdown(socket.SHUT_WR)
    return asking


@pytest.fixture
def script(tmp_path: Path) -> str:
    script = tmp_path / "script.py"
    script.write_text("")
    return str(script)


@contextlib.contextmanager
def fork_server(address: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Ends with all that it has started."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, address], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as server:
        try:
            yield server
        finally:
            if server.poll() is None:
                for each in (*psutil.Process(server.pid).children(), server):
                    each.kill()


def question(script: str, folder: str = "/") -> bytes:
    asked = {"environment": dict(os.environ), "arguments": [script], "folder": folder}
    return json.dumps(asked).encode()


@pytest.mark.parametrize("is_sense", [True, False])
def test_only_what_went_wrong_is_said_and_not_that_who_asked_has_ended(
    tmp_path: Path, script: str, is_sense: bool
) -> None:
    """As in a run that ends while it starts, because of its options: it says one line."""
    address = str(tmp_path / "socket")
    with fork_server(address) as server:
        ask(address, question(script) if is_sense else b"terns").close()
        # It answers one after the other.
        with ask(address, question(script)) as asking:
            assert int(asking.recv(100)) > 0
        _, said = server.communicate(timeout=HANG_S)
    assert server.returncode == 0
    if is_sense:
        assert said == b""
    else:
        assert said.startswith(b"fork server: Expecting value")


def test_an_environment_without_vllm_is_reported_by_the_reader_of_the_options(
    tmp_path: Path,
) -> None:
    """In one line, which would stand below a traceback."""
    server = """
import sys
from sterna.errors import ConfigurationError
from sterna.runtime.fork_server import fork_server

def refuse():
    raise ConfigurationError("vLLM is not installed here")

fork_server._import_all = refuse
fork_server.main(sys.argv[1])
"""
    done = subprocess.run(
        [sys.executable, "-c", server, str(tmp_path / "socket")],
        capture_output=True,
        timeout=HANG_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, b"")


def test_a_fork_that_cannot_become_what_was_asked_for_is_none(tmp_path: Path, script: str) -> None:
    """Whoever asked is an ordinary process then, and the fork no second server."""
    address = str(tmp_path / "socket")
    with fork_server(address) as server:
        with ask(address, question(script, str(tmp_path / "removed"))) as asking:
            assert asking.recv(100) == b""
        with ask(address, question(script)) as asking:
            assert int(asking.recv(100)) > 0
        forks = psutil.Process(server.pid).children()
        _, alive = psutil.wait_procs(forks, timeout=HANG_S)
        assert alive == []


def test_a_question_without_all_of_its_streams_is_refused(tmp_path: Path, script: str) -> None:
    """The kernel leaves out descriptors for which there is no room."""
    address = str(tmp_path / "socket")
    with fork_server(address) as server:
        with ask(address, question(script), (1, 2)) as asking:
            assert asking.recv(100) == b""
        with ask(address, question(script)) as asking:
            assert int(asking.recv(100)) > 0
        _, said = server.communicate(timeout=HANG_S)
    assert server.returncode == 0
    assert said == b"fork server: 2 of 3 descriptors came\n"


def test_without_descriptors_questions_wait_until_there_are_some(
    tmp_path: Path, script: str
) -> None:
    address = str(tmp_path / "socket")
    with fork_server(address) as server:
        with ask(address, question(script)) as asking:
            assert int(asking.recv(100)) > 0
        limits = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (0, limits[1]))
        with ask(address, question(script)) as asking:
            assert server.stderr is not None
            assert server.stderr.readline().startswith(b"fork server: [Errno 24]")
            resource.prlimit(server.pid, resource.RLIMIT_NOFILE, limits)
            assert int(asking.recv(100)) > 0
        _, said = server.communicate(timeout=HANG_S)
    assert server.returncode == 0
    assert said == b""
