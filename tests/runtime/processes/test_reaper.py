"""What a run leaves behind when its process is killed is removed: processes, and their folders."""

import errno
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from sterna import folders
from sterna.folders import memory_folder, private_folder
from sterna.runtime.processes.process import identity_of, state_of_process
from sterna.runtime.processes.reaper import RUN_ID_VARIABLE, reap
from sterna.supervisor.failure_detector import ProcessState

HANG_S = 60.0

RUN = """
import subprocess, sys, time
from sterna.folders import private_folder
from sterna.runtime.processes.reaper import Reaper

reaper = Reaper()
folder = private_folder("sockets")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
print(folder.name, reaper.memory_folder, child.pid, flush=True)
if sys.argv[1] == "waits":
    time.sleep(1000)
reaper.close()
folder.cleanup()
"""

WITHOUT_REAPER = """
import os, psutil, subprocess, sys, time
from sterna.folders import RUN_FOLDER_VARIABLE
from sterna.runtime.processes.reaper import Reaper

reaper = Reaper()
(process,) = psutil.Process().children()
process.kill()
while process.status() != psutil.STATUS_ZOMBIE:
    time.sleep(0.01)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
print(os.environ[RUN_FOLDER_VARIABLE], child.pid, flush=True)
for _ in range(2):
    reaper.note_descendants()
reaper.close()
"""

LEFT_BEHIND = """
import subprocess, time
from sterna.runtime.processes.reaper import Reaper

reaper = Reaper()
with reaper.noting():
    parent = subprocess.Popen(
        ["sh", "-c", "env -i sleep 1000 > /dev/null & echo $!; read wait"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )
    child = int(parent.stdout.readline())
    while child not in reaper._noted:
        time.sleep(0.01)
    parent.kill()
    parent.wait()
print(child, flush=True)
input()
reaper.reap_now(spared=[])
print("reaped", reaper._process.poll(), flush=True)
input()
reaper.close()
"""

WITHOUT_DESCRIPTORS = """
from sterna.runtime.processes.reaper import Reaper
from tests.descriptors import descriptors_left

reaper = Reaper()
with descriptors_left(0):
    reaper.note_descendants()
reaper.close()
"""


@pytest.mark.parametrize("way", ["waits", "closes"])
def test_the_end_of_a_run_is_that_of_its_processes_and_folders(way: str) -> None:
    """It is killed, or closes its run by itself."""
    run = subprocess.Popen([sys.executable, "-c", RUN, way], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    *names, process_id = run.stdout.readline().split()
    folder, memory_folder = map(Path, names)
    child = identity_of(int(process_id))
    assert child is not None
    run_folder = folder.parent
    assert run_folder.name.startswith("sterna-")
    if way == "waits":
        assert folder.is_dir()
        assert memory_folder.stat().st_mode & 0o777 == 0o700
        run.kill()
    assert (run.wait(HANG_S) == 0) == (way == "closes")
    deadline_s = time.monotonic() + HANG_S
    while (run_folder.exists() or memory_folder.exists()) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not run_folder.exists()
    assert not memory_folder.exists()
    assert state_of_process(child) is ProcessState.GONE


def test_a_run_whose_reaper_was_killed_ends_in_good_order() -> None:
    """As by a kernel that has no memory left: what is left to the run is to end by itself."""
    run = subprocess.Popen(
        [sys.executable, "-c", WITHOUT_REAPER], stdout=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    run_folder, process_id = run.stdout.readline().split()
    child = identity_of(int(process_id))
    assert child is not None
    assert run.wait(HANG_S) == 0
    assert not Path(run_folder).exists()
    assert state_of_process(child) is ProcessState.GONE


def test_what_a_dead_process_leaves_behind_ends_where_only_its_parent_told_whose_it_is() -> None:
    """As the agents of a Ray that came up too slowly: their titles overwrite their environments."""
    pipe = subprocess.PIPE
    run = subprocess.Popen([sys.executable, "-c", LEFT_BEHIND], stdin=pipe, stdout=pipe, text=True)
    assert run.stdin is not None
    assert run.stdout is not None
    child = identity_of(int(run.stdout.readline()))
    assert child is not None
    run.stdin.write("\n")
    run.stdin.flush()
    assert run.stdout.readline().split() == ["reaped", "None"]
    assert state_of_process(child) is ProcessState.GONE
    run.communicate("\n", HANG_S)
    assert run.returncode == 0


def test_without_a_run_a_folder_is_its_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process on another node, which hears of a folder that is not there."""
    monkeypatch.setenv("STERNA_RUN_FOLDER", "/nowhere")
    folder = private_folder("sockets")
    with folder as name:
        assert Path(name).is_dir()
        assert Path(name).name.startswith("sterna-sockets-")
    assert not Path(name).exists()


def test_without_memory_for_files_a_run_has_them_on_its_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "MEMORY", "/nowhere")
    folder = Path(memory_folder(str(tmp_path)))
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o777 == 0o700


RUN_ID = uuid.uuid4().hex
"""Another checkout may be tested on this machine at the same time."""


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    command = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    environments = [{RUN_ID_VARIABLE: RUN_ID}, {RUN_ID_VARIABLE: RUN_ID}, {}]
    sleepers = [subprocess.Popen(command, env={**os.environ, **each}) for each in environments]
    deadline_s = time.monotonic() + HANG_S
    while not all(psutil.Process(each.pid).environ() for each in sleepers):
        # A process that has just been started shows none yet.
        assert time.monotonic() < deadline_s
    yield sleepers
    for each in sleepers:
        each.kill()
        each.wait()


def test_all_of_a_run_but_those_that_are_spared_end(
    sleepers: list[subprocess.Popen[bytes]],
) -> None:
    """When Ray comes up too slowly it is begun again; the driver, begun before, waits for it."""
    ours, driver, strangers = sleepers
    reap(RUN_ID, os.getpid(), {}, spared=[driver.pid])
    assert ours.poll() is not None
    assert driver.poll() is strangers.poll() is None


def test_what_cannot_be_looked_at_has_not_ended(
    sleepers: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine whose file table is full has room again in a moment."""
    look, unseen = psutil.Process.environ, {each.pid for each in sleepers}

    def environ(process: psutil.Process) -> dict[str, str]:
        if process.pid in unseen:
            unseen.remove(process.pid)
            raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))
        return look(process)

    monkeypatch.setattr(psutil.Process, "environ", environ)
    monkeypatch.setattr("sterna.runtime.processes.reaper.GRACE_S", 0.0)
    first, second, strangers = sleepers
    reap(RUN_ID, os.getpid(), {})
    # They sleep for longer.
    first.wait(HANG_S / 4)
    second.wait(HANG_S / 4)
    assert strangers.poll() is None


def test_a_run_that_cannot_look_at_its_descendants_goes_on() -> None:
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_DESCRIPTORS], capture_output=True, text=True, timeout=HANG_S
    )
    assert run.returncode == 0, run.stderr
    assert "processes cannot be looked at" in run.stderr
