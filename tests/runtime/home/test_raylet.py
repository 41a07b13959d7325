"""A server notices that the raylet of its node has died."""

import os
import signal
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import ray

from sterna.runtime.home.ray_head import Raylet, RayletDiedError


@pytest.fixture
def raylet(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A process that Ray takes for its raylet."""
    process = subprocess.Popen(["sleep", "1000"])
    node = SimpleNamespace(all_processes={"raylet": [SimpleNamespace(process=process)]})
    monkeypatch.setattr(ray._private.worker, "_global_node", node)
    yield process
    process.kill()
    process.wait()


def test_a_raylet_that_lives_is_well_even_if_it_is_stopped(
    raylet: subprocess.Popen[bytes],
) -> None:
    """Ray gives its node up after a time, and then it ends."""
    watched = Raylet()
    watched.check()
    os.kill(raylet.pid, signal.SIGSTOP)
    os.waitpid(raylet.pid, os.WUNTRACED)
    watched.check()
    watched.check()


def test_one_that_has_died_is_told_with_what_to_do(raylet: subprocess.Popen[bytes]) -> None:
    watched = Raylet()
    watched.check()
    raylet.kill()
    os.waitid(os.P_PID, raylet.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(RayletDiedError, match=r"raylet of this machine has died \(.+\).* again$"):
        watched.check()
