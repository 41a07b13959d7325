"""Ray's GCS where each new one dies, as on a full disk."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from sterna.runtime.home.ray_head import RESTART_DELAYS_S, SHORT_LIFE_S, UNREACHABLE_TIMEOUT_S, Gcs

DELAYS_S = RESTART_DELAYS_S[1:]


class Node:
    """Ray's node, with processes that are told when to end in place of a GCS."""

    def __init__(self) -> None:
        self.all_processes: dict[str, list[Any]] = {}
        self.num_starts = 0
        self.refusal: OSError | None = None
        self.door = socket.create_server(("127.0.0.1", 0))
        self.gcs_address = f"127.0.0.1:{self.door.getsockname()[1]}"
        self.start_gcs_server()

    def start_gcs_server(self) -> None:
        if self.refusal is not None:
            raise self.refusal
        assert "gcs_server" not in self.all_processes
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE
        )
        self.all_processes["gcs_server"] = [SimpleNamespace(process=self.process)]
        self.num_starts += 1

    def kill_gcs_server(self, check_alive: bool) -> None:
        assert not check_alive
        self.end()
        del self.all_processes["gcs_server"]

    def kill(self) -> None:
        """It has ended then, and nobody has waited for it yet."""
        self.process.kill()
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()

    def close(self) -> None:
        """It lives, and takes no connections, as Ray's does after SIGTERM."""
        self.door.close()


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    node = Node()
    monkeypatch.setattr(ray._private.worker, "_global_node", node)
    yield node
    node.end()
    node.close()


def test_a_gcs_that_dies_is_started_again_at_once(node: Node) -> None:
    gcs = Gcs()
    assert not gcs.keep_up(100.0)
    node.kill()
    assert gcs.keep_up(101.0)
    assert not gcs.keep_up(102.0)
    node.kill()
    assert gcs.keep_up(101.0 + SHORT_LIFE_S + 1.0)
    assert node.num_starts == 3


def test_one_that_dies_soon_after_each_start_is_started_ever_later(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the log is full of it, and a processor busy with it."""
    gcs, now_s = Gcs(), 100.0
    node.kill()
    assert gcs.keep_up(now_s)
    for delay_s in (*DELAYS_S, DELAYS_S[-1]):
        node.kill()
        assert not gcs.keep_up(now_s)
        assert not gcs.keep_up(now_s + delay_s - 0.1)
        now_s += delay_s
        assert gcs.keep_up(now_s)
    # What is there again for long has come up.
    node.kill()
    assert gcs.keep_up(now_s + SHORT_LIFE_S + 1.0)


def test_one_that_lives_and_takes_no_connections_is_ended_and_started_again(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    gcs, now_s = Gcs(), 100.0
    assert not gcs.keep_up(now_s)
    node.close()
    now_s += UNREACHABLE_TIMEOUT_S
    process = node.process
    assert gcs.keep_up(now_s)
    assert process.poll() is not None
    assert "accepted no connections" in caplog.text
    # The next one has as long to begin.
    assert not gcs.keep_up(now_s + UNREACHABLE_TIMEOUT_S - 1.0)
    assert node.process.poll() is None
    now_s += UNREACHABLE_TIMEOUT_S
    assert not gcs.keep_up(now_s)
    assert gcs.keep_up(now_s + DELAYS_S[0])


def test_one_that_cannot_be_started_is_tried_again(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """Ray opens files for it: that fails where there is no room for them."""
    gcs, now_s = Gcs(), 100.0
    node.refusal = OSError(28, "No space left on device")
    node.kill()
    assert not gcs.keep_up(now_s)
    assert "No space left on device" in caplog.text
    for delay_s in DELAYS_S:
        assert not gcs.keep_up(now_s + delay_s - 0.1)
        now_s += delay_s
        assert not gcs.keep_up(now_s)
    node.refusal = None
    assert gcs.keep_up(now_s + DELAYS_S[-1])
    assert node.num_starts == 2
