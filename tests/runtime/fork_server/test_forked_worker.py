"""What Ray starts for a worker, where the folder that it would work in has been removed."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sterna.runtime.fork_server import forked_worker
from sterna.runtime.fork_server.forked_worker import ADDRESS_VARIABLE

HANG_S = 60.0


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Prints the folder in which it runs."""
    script = tmp_path / "script.py"
    script.write_text("import os; print(os.getcwd())")
    return script


def begin_in_a_removed_folder(script: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    folder = script.parent / "removed"
    folder.mkdir()
    worker = [sys.executable, "-SE", forked_worker.__file__, str(script)]
    return subprocess.Popen(
        ["sh", "-c", 'rmdir "$PWD" && exec "$@"', "sh", *worker],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_worker_is_one_itself_in_another_folder_where_its_own_is_gone(script: Path) -> None:
    with begin_in_a_removed_folder(script, {}) as worker:
        printed, _ = worker.communicate(timeout=HANG_S)
    assert worker.returncode == 0
    assert printed == "/\n"


def test_a_worker_asks_for_a_fork_in_another_folder_where_its_own_is_gone(script: Path) -> None:
    address = str(script.parent / "socket")
    with socket.socket(socket.AF_UNIX) as server:
        server.settimeout(HANG_S)
        server.bind(address)
        server.listen()
        with begin_in_a_removed_folder(script, {ADDRESS_VARIABLE: address}) as worker:
            connection, _ = server.accept()
            with connection, connection.makefile("rb") as said:
                question = json.load(said)
                connection.sendall(b"1")
            printed, _ = worker.communicate(timeout=HANG_S)
    assert question["folder"] == "/"
    assert question["arguments"] == [str(script)]
    assert worker.returncode == 0
    assert printed == ""
