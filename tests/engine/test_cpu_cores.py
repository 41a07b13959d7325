"""Cores that engines on CPU take for themselves."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sterna.engine import cpu_cores
from sterna.engine.cpu_cores import num_usable_cores, physical_cores, take_core
from sterna.folders import users_folder


@pytest.fixture(autouse=True)
def no_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the tests run in one."""
    monkeypatch.setattr(cpu_cores, "FIRST_NAMESPACE", os.stat(cpu_cores.PID_NAMESPACE).st_ino)


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_cores, "physical_cores", lambda: [0, 2, 4, 6])


@pytest.mark.usefixtures("four_cores")
def test_engines_have_cores_of_their_own(tmp_path: Path) -> None:
    held = [take_core(tmp_path) for _ in range(4)]
    assert [each and each.number for each in held] == [0, 2, 4, 6]
    assert take_core(tmp_path) is None
    assert held[1] is not None
    held[1].release()
    held[1].release()
    again = take_core(tmp_path)
    assert again is not None
    assert again.number == 2


@pytest.mark.usefixtures("four_cores")
def test_the_core_of_a_process_that_dies_is_free(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from sterna.engine import cpu_cores; "
        "cpu_cores.physical_cores = lambda: [0]; "
        f"cpu_cores.FIRST_NAMESPACE = {cpu_cores.FIRST_NAMESPACE}; "
        f"held = cpu_cores.take_core(Path({str(tmp_path)!r})); "
        "print(held.number, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        (sys.executable, "-c", script), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "0\n"
        other = take_core(tmp_path)
        assert other is not None
        assert other.number == 2
        process.kill()
    first = take_core(tmp_path)
    assert first is not None
    assert first.number == 0


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize(("num_cores", "number"), [(8, 0), (4, None)])
def test_in_a_container_only_cores_of_its_own_are_taken(
    num_cores: int, number: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_cores, "FIRST_NAMESPACE", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 4, 6})
    monkeypatch.setattr(os, "cpu_count", lambda: num_cores)
    held = take_core(tmp_path)
    assert (held and held.number) == number


def test_a_link_in_place_of_a_lock_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("notes")
    folder = users_folder("cores", tmp_path)
    for number in physical_cores():
        (folder / str(number)).symlink_to(precious)
    assert take_core(tmp_path) is None
    assert precious.read_text() == "notes"


@pytest.mark.parametrize(
    ("quota", "num_cores"),
    [("max 100000", 4), ("250000 100000", 3), ("900000 100000", 4), ("none", 4)],
)
@pytest.mark.usefixtures("four_cores")
def test_a_containers_share_of_the_processors_counts(
    quota: str, num_cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cpu.max"
    monkeypatch.setattr(cpu_cores, "QUOTAS", ((str(path),),))
    assert num_usable_cores() == 4
    path.write_text(f"{quota}\n")
    assert num_usable_cores() == num_cores


@pytest.mark.parametrize(("quota", "num_cores"), [("-1", 4), ("250000", 3)])
@pytest.mark.usefixtures("four_cores")
def test_its_share_is_in_two_files_of_the_first_version_of_control_groups(
    quota: str, num_cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = tmp_path / "cpu.cfs_quota_us", tmp_path / "cpu.cfs_period_us"
    monkeypatch.setattr(cpu_cores, "QUOTAS", (("missing",), tuple(map(str, paths))))
    paths[0].write_text(f"{quota}\n")
    paths[1].write_text("100000\n")
    assert num_usable_cores() == num_cores


def test_a_folder_that_cannot_be_used_leaves_the_engine_unbound(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert take_core(tmp_path / "file") is None


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
        held = take_core(tmp_path)
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
