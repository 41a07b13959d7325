"""Servers of which one runs at a time, with real processes."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator

import psutil

from bench.plain_vllm.turns import Turns

WITH_A_CHILD = """
import subprocess, sys
command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
child = subprocess.Popen(command, stdin=subprocess.PIPE)
print(child.pid, flush=True)
sys.stdin.read()
child.stdin.close()
child.wait()
"""


@contextlib.contextmanager
def server(ended: list[str]) -> Iterator[str]:
    """A program that ends when its input does; yields the process id of its child."""
    with subprocess.Popen(
        [sys.executable, "-c", WITH_A_CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        child = process.stdout.readline().decode().strip()
        yield child
        process.stdin.close()
        # One that is stopped would not end.
        process.wait(timeout=30)
        ended.append(child)


def is_stopped(process_id: str) -> bool:
    return psutil.Process(int(process_id)).status() == psutil.STATUS_STOPPED


def test_one_server_runs_and_the_processes_of_the_others_are_stopped() -> None:
    ended: list[str] = []
    with Turns(settle_s=0.0) as turns:
        first = turns.start("first", server(ended))
        assert is_stopped(first)
        second = turns.start("second", server(ended))
        assert is_stopped(first)
        assert is_stopped(second)
        for _ in range(2):
            with turns.alone("first") as process:
                assert process.status() != psutil.STATUS_STOPPED
                assert not is_stopped(first)
                assert is_stopped(second)
            assert is_stopped(first)
        with turns.alone("second"):
            assert is_stopped(first)
            assert not is_stopped(second)
    assert ended == [second, first]
