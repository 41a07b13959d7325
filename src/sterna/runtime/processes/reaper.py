"""Ends whatever a server's run leaves behind, also when its driver is killed.

Ray ends its own processes with the driver, except for its per-node agents when the driver dies
by SIGKILL. Every process of a run inherits one environment variable; a small process that
outlives the driver waits for the driver's end of a pipe to close and then kills all that have
it. Then it removes the folders in which they had theirs.
"""

import contextlib
import errno
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping

import psutil

from sterna.folders import RUN_FOLDER_VARIABLE, memory_folder
from sterna.log_throttle import FILES_ADVICE, LogThrottle

RUN_ID_VARIABLE = "STERNA_RUN_ID"
GRACE_S = 1.0
"""What processes have for ending by themselves once the driver is gone."""

POLL_INTERVAL_S = 0.05

NOTE_INTERVAL_S = 0.5

logger = logging.getLogger("sterna.launch")


class Reaper:
    """The driver's side: start it before anything else, close it after everything else.

    Attributes:
        memory_folder: for files that processes of the run map; in memory where that can be.
    """

    def __init__(self) -> None:
        run_id = uuid.uuid4().hex
        environment = {k: v for k, v in os.environ.items() if k != RUN_ID_VARIABLE}
        self._noted: dict[int, float] = {}
        run_folder = tempfile.mkdtemp(prefix="sterna-")
        self.memory_folder = memory_folder(run_folder)
        self._folders = (run_folder, self.memory_folder)
        os.environ[RUN_ID_VARIABLE] = run_id
        os.environ[RUN_FOLDER_VARIABLE] = run_folder
        own = [run_id, str(os.getpid()), *self._folders]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sterna.runtime.processes.reaper", *own],
            stdin=subprocess.PIPE,
            env=environment,
            # A Ctrl-C in the terminal goes to the whole process group.
            start_new_session=True,
        )

    def note_descendants(self) -> None:
        """Remember what this process has started so far: one that has given itself a title no
        longer shows its environment."""
        assert self._process.stdin is not None
        try:
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._noted[process.pid] = process.create_time()
        except OSError as error:
            # What has no title is found without; it is tried again before the end.
            logger.error("processes cannot be looked at reason=%s; %s", error, FILES_ADVICE)
        lines = "".join(f"{pid} {created_s}\n" for pid, created_s in self._noted.items())
        # Where it was killed, `close` does its work.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(lines.encode())
            self._process.stdin.flush()

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Remember all along what this process starts.

        A parent that dies too soon leaves behind what nobody could tell by its environment.
        """
        is_over = threading.Event()

        def note() -> None:
            while not is_over.wait(NOTE_INTERVAL_S):
                self.note_descendants()

        thread = threading.Thread(target=note, name="note-descendants", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def reap_now(self, spared: Collection[int]) -> None:
        """End what there is of the run but this process, what waits for its end, and the processes
        with these ids."""
        spared = {*spared, self._process.pid}
        reap(os.environ[RUN_ID_VARIABLE], os.getpid(), self._noted, spared)

    def close(self) -> None:
        """End what is left of the run, and remove its folders; returns when that is done."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        if self._process.wait() != 0:
            reap(os.environ[RUN_ID_VARIABLE], os.getpid(), self._noted)
        _remove(self._folders)
        os.environ.pop(RUN_FOLDER_VARIABLE, None)


def reap(
    run_id: str, driver_pid: int, noted: Mapping[int, float], spared: Collection[int] = ()
) -> None:
    """Kill every process of the run but the driver, after a grace.

    Args:
        noted: process ids that belong to the run by all means, and when each was created.
        spared: ids of more processes that live on.
    """
    left_alone = {driver_pid, os.getpid(), *spared}
    deadline_s = time.monotonic() + GRACE_S
    while (left := _processes(run_id, left_alone, noted)) and time.monotonic() < deadline_s:
        time.sleep(POLL_INTERVAL_S)
    for process in left:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(left, timeout=GRACE_S)


def _processes(
    run_id: str, left_alone: Collection[int], noted: Mapping[int, float]
) -> list[psutil.Process]:
    """Return what there is of the run; waits while no file can be opened to see that."""
    complaint = LogThrottle()
    while True:
        try:
            return _seen_processes(run_id, left_alone, noted)
        except OSError as error:
            if complaint.is_due():
                logger.error("processes cannot be looked at reason=%s; %s", error, FILES_ADVICE)
        time.sleep(POLL_INTERVAL_S)


def _seen_processes(
    run_id: str, left_alone: Collection[int], noted: Mapping[int, float]
) -> list[psutil.Process]:
    """Raises OSError: no file can be opened."""
    found = []
    for process in psutil.process_iter():
        if process.pid in left_alone:
            continue
        try:
            is_noted = noted.get(process.pid) == process.create_time()
            if is_noted or process.environ().get(RUN_ID_VARIABLE) == run_id:
                found.append(process)
        except psutil.Error:
            # It ended meanwhile, or belongs to somebody else.
            continue
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            # What it has ended with was half gone.
            continue
    return found


def _remove(folders: Iterable[str]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Wait for the driver's end, then clean up."""
    noted: dict[int, float] = {}
    for line in sys.stdin:
        process_id, created_s = line.split()
        noted[int(process_id)] = float(created_s)
    run_id, driver_pid, *folders = sys.argv[1:]
    reap(run_id, int(driver_pid), noted)
    _remove(folders)


if __name__ == "__main__":
    main()
