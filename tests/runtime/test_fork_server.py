"""The process of which the others of a run are forks."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

HANG_S = 60.0

SERVER = """
import sys
from sterna.runtime import fork_server

fork_server._import_all = lambda: None
fork_server.main(sys.argv[1])
"""


def ask(address: str, question: bytes) -> socket.socket:
    """Connect, once that can be done, and say all of the question."""
    asking = socket.socket(socket.AF_UNIX)
    asking.settimeout(HANG_S)
    while asking.connect_ex(address) != 0:
        pass
    # The fork writes where the fork server does.
    socket.send_fds(asking, [question], [0, 1, 2])
    asking.shutdown(socket.SHUT_WR)
    return asking


@pytest.mark.parametrize("is_sense", [True, False])
def test_only_what_went_wrong_is_said_and_not_that_who_asked_has_ended(
    tmp_path: Path, is_sense: bool
) -> None:
    """As in a run that ends while it starts, because of its options: it says one line."""
    script = tmp_path / "script.py"
    script.write_text("")
    question = {"environment": dict(os.environ), "arguments": [str(script)], "folder": "/"}
    address = str(tmp_path / "socket")
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, address], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as server:
        ask(address, json.dumps(question).encode() if is_sense else b"terns").close()
        # It answers one after the other.
        with ask(address, json.dumps(question).encode()) as asking:
            assert int(asking.recv(100)) > 0
        _, said = server.communicate(timeout=HANG_S)
    assert server.returncode == 0
    if is_sense:
        assert said == b""
    else:
        assert said.startswith(b"fork server: Expecting value")
