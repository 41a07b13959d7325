"""The reaper: ends all processes that a run leaves behind, also when `sterna serve` is killed.

Ray ends its own processes with the process that started it, except for its per-node agents when
that process dies by SIGKILL. Every process of a run inherits one environment variable. A small
process outlives `sterna serve`, waits until the other end of its pipe closes, and then kills all
processes that have the variable. Then it removes the run's folders.
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
from sterna.own_log import FILES_ADVICE, LogThrottle

RUN_ID_VARIABLE = "STERNA_RUN_ID"
GRACE_S = 1.0
"""Time in which processes may end by themselves once `sterna serve` is gone."""

POLL_INTERVAL_S = 0.05

NOTE_INTERVAL_S = 0.5

logger = logging.getLogger("sterna.launch")


class Reaper:
    """The reaper's process, seen from `sterna serve`: to be started before anything else, and
    closed after everything else.

    Attributes:
        memory_folder: for files that processes of the run map; in memory if possible.
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
        """Remember the descendants of this process so far: one that has given itself a title no
        longer shows its environment."""
        assert self._process.stdin is not None
        known = dict(self._noted)
        try:
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._noted[process.pid] = process.create_time()
        except OSError as error:
            # Processes without a title are found without this; the end tries it again.
            logger.error("processes cannot be looked at reason=%s; %s", error, FILES_ADVICE)
        new = self._noted.items() - known.items()
        lines = "".join(f"{pid} {created_s}\n" for pid, created_s in new)
        # If the reaper was killed, `close` does its work.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(lines.encode())
            self._process.stdin.flush()

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Remember the descendants of this process again and again until the context is left.

        A parent that dies too soon may leave processes that cannot be recognized by their
        environment.
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
        """End all processes of the run but this one, the reaper, and those with these ids."""
        spared = {*spared, self._process.pid}
        reap(os.environ[RUN_ID_VARIABLE], os.getpid(), self._noted, spared)

    def close(self) -> None:
        """End the processes that are left of the run, and remove its folders."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        if self._process.wait() != 0:
            reap(os.environ[RUN_ID_VARIABLE], os.getpid(), self._noted)
        _remove(self._folders)
        os.environ.pop(RUN_FOLDER_VARIABLE, None)


def reap(
    run_id: str, owner_pid: int, noted: Mapping[int, float], spared: Collection[int] = ()
) -> None:
    """Kill every process of the run but its owner, which is `sterna serve`, after `GRACE_S`.

    Args:
        noted: ids of processes that belong to the run whatever their environment, and when each
            was created.
        spared: ids of more processes that live on.
    """
    left_alone = {owner_pid, os.getpid(), *spared}
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
    """Return the processes of the run; waits while no file can be opened to find them."""
    throttle = LogThrottle()
    while True:
        try:
            return _seen_processes(run_id, left_alone, noted)
        except OSError as error:
            if throttle.is_due():
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
            # It has ended, or belongs to another user.
            continue
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            # It is just ending, and its environment cannot be read.
            continue
    return found


def _remove(folders: Iterable[str]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Wait until the owner of the run has ended, then clean up."""
    noted: dict[int, float] = {}
    for line in sys.stdin:
        process_id, created_s = line.split()
        noted[int(process_id)] = float(created_s)
    run_id, owner_pid, *folders = sys.argv[1:]
    reap(run_id, int(owner_pid), noted)
    _remove(folders)


if __name__ == "__main__":
    main()
