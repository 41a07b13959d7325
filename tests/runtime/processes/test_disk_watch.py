"""What is said of a disk that fills, and of a server that is to start on a full one."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sterna.runtime.home.launch import Run
from sterna.runtime.processes import limits
from sterna.runtime.processes.limits import (
    INTERVAL_S,
    LOW_BYTES,
    LOW_INODES,
    DiskWatch,
    NoRoomError,
)
from tests.small_disk import with_small_disk


class Disk:
    """What os.statvfs says of one."""

    def __init__(self, free_bytes: int, num_inodes: int = 10**6) -> None:
        self.free_bytes, self.num_inodes = free_bytes, num_inodes

    def status(self, _: str) -> SimpleNamespace:
        return SimpleNamespace(
            f_bavail=self.free_bytes // 512,
            f_frsize=512,
            f_files=10**6,
            f_favail=self.num_inodes,
        )


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk(4 * LOW_BYTES)
    monkeypatch.setattr(limits, "os", SimpleNamespace(stat=os.stat, statvfs=disk.status))
    return disk


def test_a_disk_that_fills_is_told_of_once_and_when_it_has_room(
    disk: Disk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    # Both folders are on one disk.
    (tmp_path / "inner").mkdir()
    watch, now_s, told = DiskWatch((str(tmp_path), str(tmp_path / "inner"))), 100.0, []
    for free_bytes in (4.0, 1.0, 0.9, 0.0, 0.9, 1.5, 2.0, 1.5, 0.9):
        disk.free_bytes = int(free_bytes * LOW_BYTES)
        caplog.clear()
        watch.look(now_s)
        watch.look(now_s + INTERVAL_S / 2)
        now_s += INTERVAL_S
        told.append([record.levelname for record in caplog.records])
    assert told == [[], [], ["ERROR"], [], [], [], ["INFO"], [], ["ERROR"]]


def test_a_disk_that_can_have_no_more_files_is_told_of(
    disk: Disk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk.num_inodes = LOW_INODES - 1
    DiskWatch((str(tmp_path),)).look(100.0)
    assert "disk nearly full" in caplog.text


def test_a_server_does_not_start_on_a_full_disk(disk: Disk) -> None:
    """Ray would be waited for, two minutes at a time."""
    disk.free_bytes = LOW_BYTES - 512
    with pytest.raises(NoRoomError, match="nearly full"):
        Run({}).__enter__()


SCRIPT = """
import os, tempfile
from pathlib import Path
from sterna.runtime.home.launch import Run
from sterna.runtime.processes.limits import NoRoomError
from tests.small_disk import fill

fill(Path(os.environ["TMPDIR"]))
# What it tries when the first one is full.
tempfile._candidate_tempdir_list = lambda: [os.environ["TMPDIR"]]
try:
    Run({}).__enter__()
except NoRoomError as error:
    print(error)
"""


def test_a_server_without_any_temporary_folder_says_so(tmp_path: Path) -> None:
    command = with_small_disk(tmp_path, "1m", [sys.executable, "-c", SCRIPT])
    ended = subprocess.run(
        command,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        cwd=Path(__file__).resolve().parents[3],
        capture_output=True,
        text=True,
    )
    assert "No usable temporary directory" in ended.stdout, ended.stderr
