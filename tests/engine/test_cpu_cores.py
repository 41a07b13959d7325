"""Cores that engines on CPU take for themselves."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sterna.engine import cpu_cores
from sterna.engine.cpu_cores import physical_cores, take_cores


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_cores, "physical_cores", lambda: [0, 2, 4, 6])


@pytest.mark.usefixtures("four_cores")
def test_engines_have_cores_of_their_own(tmp_path: Path) -> None:
    first, second = take_cores(2, tmp_path), take_cores(1, tmp_path)
    assert first is not None
    assert second is not None
    assert (first.numbers, second.numbers) == ({0, 2}, {4})
    # One is left, and stays so.
    assert take_cores(2, tmp_path) is None
    third = take_cores(1, tmp_path)
    assert third is not None
    assert third.numbers == {6}
    first.release()
    again = take_cores(2, tmp_path)
    assert again is not None
    assert again.numbers == {0, 2}


@pytest.mark.usefixtures("four_cores")
def test_the_cores_of_a_process_that_dies_are_free(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from sterna.engine import cpu_cores; "
        "cpu_cores.physical_cores = lambda: [0, 2, 4, 6]; "
        f"held = cpu_cores.take_cores(4, Path({str(tmp_path)!r})); "
        "print(len(held.numbers), flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        (sys.executable, "-c", script), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "4\n"
        assert take_cores(1, tmp_path) is None
        process.kill()
    assert take_cores(4, tmp_path) is not None


def test_a_folder_that_cannot_be_used_leaves_the_engine_unbound(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert take_cores(1, tmp_path / "file") is None


def test_threads_of_a_bound_thread_are_bound_unless_it_leaves_its_cores(tmp_path: Path) -> None:
    everywhere = os.sched_getaffinity(0)
    found: list[set[int]] = []

    def look() -> None:
        found.append(os.sched_getaffinity(0))

    def start_one() -> None:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()

    def compute() -> None:
        held = take_cores(1, tmp_path)
        assert held is not None
        held.bind()
        look()
        start_one()
        with held.left():
            start_one()
        look()

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    own = {physical_cores()[0]}
    assert found == [own, own, everywhere, own]
    assert os.sched_getaffinity(0) == everywhere


def test_one_processor_of_each_core_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        (tmp_path / str(number)).write_text(f"{siblings}\n")
    monkeypatch.setattr(cpu_cores, "SIBLINGS", str(tmp_path / "{}"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3, 9})
    assert physical_cores() == [0, 1, 9]
