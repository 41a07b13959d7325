"""Removals of parts: changes of a copy of the source, which must match it exactly.

A removal is the smallest change after which a part does nothing. It is applied to a copy of `src`,
and a server runs from that copy. A text that is not found exactly once ends the benchmark, so that
a removal never measures a part that is still there.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.common.results_io import ROOT
from sterna.errors import SternaError

SOURCE = ROOT / "src"

PACKAGE = "sterna"

PATH_VARIABLE = "PYTHONPATH"


class StaleChangeError(SternaError):
    """The source no longer has the text that a change replaces."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change of one file.

    Attributes:
        file: relative to the package.
        old: a text that the file has exactly once.
        new: the text in its place.
    """

    file: str
    old: str
    new: str

    def applied(self, source: str) -> str:
        """The changed text of the file.

        Raises:
            StaleChangeError: the old text is not in it exactly once.
        """
        if (count := source.count(self.old)) != 1:
            raise StaleChangeError(
                f"{self.file} has {count} times, not once: {self.old.strip()!r}; bring "
                "bench/parts/removals.py up to date"
            )
        return source.replace(self.old, self.new)


@dataclass(frozen=True, slots=True)
class Removal:
    """A part, and the changes that remove it.

    Attributes:
        part: its name in tables.
        changes: of different files, or of different places of one.
    """

    part: str
    changes: tuple[Change, ...]


DRIVER = Removal(
    "successors of the driver",
    (
        Change(
            "runtime/home/driver_process.py",
            "        if self._is_ending() or not self._has_served:\n",
            "        if True:\n",
        ),
    ),
)

_DRIVER_THREAD = """class _DriverThread:
    pid = __import__("os").getpid()
    status: int | None = None

    def __init__(self, ends: tuple[int, int]) -> None:
        from threading import Thread

        from sterna.runtime.home.driver import main

        def run() -> None:
            self.status = main(ends)

        Thread(target=run, daemon=True).start()

    def poll(self) -> int | None:
        return self.status

    def kill(self) -> None:
        return

    def wait(self) -> None:
        return


def _end_of(status: int) -> str:
"""

DRIVER_PROCESS = Removal(
    "driver as a process of its own",
    (
        Change(
            "runtime/home/driver_process.py",
            """        self._process = subprocess.Popen(
            [sys.executable, "-m", "sterna.runtime.home.driver", *map(str, ends)],
            stdin=subprocess.DEVNULL,
            pass_fds=ends,
            # Signals of the terminal are for this process.
            start_new_session=True,
        )
""",
            "        self._process = _DriverThread(ends)\n",
        ),
        Change(
            "runtime/home/driver_process.py",
            "        orders.close()\n        news.close()\n",
            "        self._ends = (orders, news)\n",
        ),
        Change(
            "runtime/home/driver_process.py",
            "def _end_of(status: int) -> str:\n",
            _DRIVER_THREAD,
        ),
        Change("runtime/home/driver.py", "def main() -> int:\n", "def main(ends) -> int:\n"),
        Change(
            "runtime/home/driver.py",
            "(Connection(int(each)) for each in sys.argv[1:3])\n",
            "(Connection(each) for each in ends)\n",
        ),
        Change(
            "runtime/home/driver.py", "                os._exit(1)\n", "                return\n"
        ),
        # The process of `sterna serve` is connected to Ray already, and has handlers of signals.
        Change(
            "runtime/home/driver.py",
            """        ray.init(
            address=connect.address,
            namespace=NAMESPACE,
            log_to_driver=True,
            logging_level="warning",
            configure_logging=True,
        )
""",
            "",
        ),
        Change(
            "runtime/home/driver.py",
            "        signal.signal(signal.SIGTERM, signal.SIG_DFL)\n",
            "",
        ),
        Change(
            "runtime/home/launch.py",
            "                    log_to_driver=False,\n",
            "                    log_to_driver=True,\n",
        ),
    ),
)

SUPERVISOR_RESERVE = Removal(
    "supervisor in reserve",
    (
        Change(
            "runtime/home/driver.py",
            "        elif now_s >= self._reserve_due_s:\n",
            "        elif False:\n",
        ),
    ),
)

GCS = Removal(
    "GCS that is kept up",
    (
        Change(
            "runtime/home/launch.py",
            "            if self._gcs.keep_up(now_s):\n",
            "            if False:\n",
        ),
        # Without successors of the GCS, nothing would be gained by waiting for one.
        Change(
            "runtime/home/ray_environment.py",
            "RECONNECT_TIMEOUT_S = 86_400\n",
            "RECONNECT_TIMEOUT_S = 60\n",
        ),
    ),
)

CONNECTION_LIMITS = Removal(
    "limits for connections and bodies",
    (
        Change(
            "frontend/vllm_server/server.py",
            "    config.http_protocol_class = with_limits(\n"
            "        config.http_protocol_class, connection_limit, door.head_timeout_s, "
            "door.reader_timeout_s\n"
            "    )\n",
            "",
        ),
        Change(
            "frontend/http/door.py",
            "        config.max_body_bytes,\n        config.body_timeout_s,\n"
            "        config.max_waiting_body_bytes,\n",
            "        1 << 40,\n        86_400.0,\n        1 << 40,\n",
        ),
    ),
)

HANDSHAKES = Removal(
    "TLS handshakes within the limits",
    (
        Change(
            "frontend/vllm_server/server.py",
            "    if not config.is_ssl:\n",
            "    if True:\n",
        ),
    ),
)

METRIC_FILES = Removal(
    "metric files allocated in advance",
    (
        Change(
            "runtime/actors/actor_classes.py",
            "        allocate_metrics()\n",
            "",
        ),
    ),
)

REMOVALS = (
    DRIVER,
    DRIVER_PROCESS,
    SUPERVISOR_RESERVE,
    GCS,
    CONNECTION_LIMITS,
    HANDSHAKES,
    METRIC_FILES,
)

SHORT_TIMEOUTS = (
    Change("config.py", "    head_timeout_s: float = 60.0\n", "    head_timeout_s: float = 6.0\n"),
    Change("config.py", "    body_timeout_s: float = 300.0\n", "    body_timeout_s: float = 6.0\n"),
)
"""Time-outs without an option, shorter with and without the part: a trial need not take minutes."""


def copy_source(folder: Path, changes: Sequence[Change]) -> dict[str, str]:
    """Copy the source into the folder and change it; returns the environment variables with which
    Python imports the copy.

    Raises:
        StaleChangeError: a change does not match, or Python imports something else.
    """
    copy = folder / "src"
    # Compiled files stay valid for what is not changed.
    shutil.copytree(SOURCE / PACKAGE, copy / PACKAGE)
    for change in changes:
        path = copy / PACKAGE / change.file
        path.write_text(change.applied(path.read_text("utf-8")), "utf-8")
    before = os.environ.get(PATH_VARIABLE)
    environment = {PATH_VARIABLE: os.pathsep.join([str(copy), *([before] if before else [])])}
    asked = subprocess.run(
        [sys.executable, "-P", "-c", f"import {PACKAGE}; print({PACKAGE}.__file__)"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    if not Path(asked.stdout.strip()).is_relative_to(copy):
        raise StaleChangeError(f"Python imports {asked.stdout.strip()} instead of the changed copy")
    return environment
