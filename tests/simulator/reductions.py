"""What tests make of runs, in the processes that ran them."""

import os
import signal
import threading

from sterna.simulator.runs import SimulationRun


def fingerprint(run: SimulationRun) -> tuple[int, bytes, bytes, bytes, int]:
    """Where the run was, and its records bit for bit."""
    records = run.records
    return (
        os.getpid(),
        records.first_token_s.tobytes(),
        records.end_s.tobytes(),
        run.cluster.fragmentation_proportion.tobytes(),
        run.cluster.migrations_committed,
    )


def be_killed(run: SimulationRun) -> None:
    """As the kernel does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def say_and_stay(run: SimulationRun) -> None:
    """Name this process on the standard output that it shares with its parent, and never end."""
    os.write(1, f"{os.getpid()}\n".encode())
    threading.Event().wait()


def stumble(run: SimulationRun) -> None:
    """A bug."""
    raise ZeroDivisionError("a bug in the reduction")
