"""The processor time and the memory of what a benchmark has started, with real processes."""

import resource
import subprocess
import sys

import psutil
import pytest

from bench.common.machine import ForeignLoad, tree_cpu_s, tree_memory_bytes

USED_S = 0.5

BUSY = f"""
import sys, time
taken = bytearray(64 << 20)
while time.process_time() < {USED_S}:
    pass
print("done", flush=True)
sys.stdin.read()
"""


def own_s() -> float:
    """Of this process and of the children that it has waited for."""
    both = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in both)


def test_a_program_that_was_started_and_waited_for_is_none_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ForeignLoad, "_busy_s", staticmethod(own_s))
    others = ForeignLoad()
    subprocess.run(
        [sys.executable, "-c", BUSY], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        check=True, timeout=60,
    )  # fmt: skip
    assert others.cores() < 0.05


def test_a_program_that_others_started_is_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    busy_s = iter([0.0, 100.0])
    monkeypatch.setattr(ForeignLoad, "_busy_s", staticmethod(lambda: next(busy_s)))
    assert ForeignLoad().cores() > 1


def test_time_and_memory_of_a_process_and_of_what_it_has_started_are_counted() -> None:
    within = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", within], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"done\n"
        # The kernel counts in hundredths of a second.
        assert tree_cpu_s(psutil.Process(process.pid)) >= USED_S - 0.05
        assert tree_memory_bytes(psutil.Process(process.pid)) >= 60 << 20
        process.stdin.close()
