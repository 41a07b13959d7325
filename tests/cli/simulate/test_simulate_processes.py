"""`sterna simulate` as a process: what it imports, shows on a terminal, and leaves behind."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from contextlib import suppress

import psutil
import pytest

from tests.cli.simulate.simulations import SMALL

HEAVY = ("numpy", "numba", "matplotlib", "rich", "ray", "vllm", "torch")


def imported_by(*arguments: str) -> set[str]:
    """The heavy libraries that the command imports."""
    script = (
        "import sys\nfrom sterna.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        f"print('\\n', *({HEAVY!r} & sys.modules.keys()))".replace(repr(HEAVY), repr(set(HEAVY)))
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


def test_help_imports_nothing_that_takes_time() -> None:
    assert imported_by("simulate", "--help") == set()


@pytest.mark.slow
def test_json_needs_neither_tables_nor_plots_nor_a_server() -> None:
    assert imported_by("simulate", *SMALL, "--json") == {"numpy"}


@pytest.mark.slow
def test_progress_goes_to_a_terminal_on_stderr_and_nowhere_else() -> None:
    """Standard output stays JSON, whatever stderr is."""
    command, terminal = started("--json", "--seed", "1", "2")
    shown = shown_until_end(terminal)
    output, _ = command.communicate()
    assert command.returncode == 0
    assert len(json.loads(output)) == 2
    assert b"simulating" in shown


@pytest.mark.slow
def test_the_progress_of_a_run_is_that_of_its_requests() -> None:
    command, terminal = started("--requests", "2000")
    shown = shown_until_end(terminal)
    command.communicate()
    assert command.returncode == 0
    assert {int(each) for each in re.findall(rb"(\d+)%", shown)} - {0, 100} != set()


@pytest.mark.slow
def test_ctrl_c_ends_the_command_and_all_its_processes_in_silence() -> None:
    command, terminal = started("--requests", "1000000", "--seed", "1", "2")
    shown = b""
    while b"simulating" not in shown:
        shown += os.read(terminal, 65536)
    os.killpg(command.pid, signal.SIGINT)
    shown = shown_until_end(terminal)
    output, _ = command.communicate()
    assert command.returncode == 130
    assert b"Traceback" not in shown
    assert output == ""
    # Nobody has the terminal open any more, so that whoever was started is gone or on its way.
    left = [each for each in psutil.process_iter() if _session(each.pid) == command.pid]
    assert psutil.wait_procs(left, timeout=EXIT_TIMEOUT_S)[1] == []


EXIT_TIMEOUT_S = 60.0


def started(*options: str) -> tuple["subprocess.Popen[str]", int]:
    """The command in a session of its own, and the terminal that its stderr is."""
    ours, theirs = pty.openpty()
    command = subprocess.Popen(
        [sys.executable, "-m", "sterna.cli.main", "simulate", *SMALL, *options],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm"},
        start_new_session=True,
        text=True,
    )
    os.close(theirs)
    return command, ours


def shown_until_end(terminal: int) -> bytes:
    """All that comes until nobody has the terminal open any more."""
    shown = b""
    with suppress(OSError):  # How a terminal without another end says that nothing more comes.
        while chunk := os.read(terminal, 65536):
            shown += chunk
    os.close(terminal)
    return shown


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None
