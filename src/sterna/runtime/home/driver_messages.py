"""What the process of `sterna serve` and its driver say to each other, over pipes of their own."""

import contextlib
import sys
from dataclasses import dataclass
from typing import TextIO

from sterna.config import ClusterConfig
from sterna.engine.emulated.emulated_engine import EmulatedOptions
from sterna.runtime.actors.packed_args import PackedArgs

NAMESPACE = "sterna"
"""In Ray, of a run's actors."""

TOLD_STATUS = 3
"""Exit status of a driver that has told why the server cannot go on: not one with which Python or
Ray end a process."""


@dataclass(frozen=True, slots=True)
class UseRay:
    """Order: connect to this Ray.

    Attributes:
        environment: environment variables of processes that run vLLM.
        metrics_folder: where front ends keep their counters.
        is_resumed: whether there is a supervisor to go on with.
    """

    address: str
    environment: dict[str, str]
    metrics_folder: str
    is_resumed: bool


@dataclass(frozen=True, slots=True)
class Serve:
    """Order: serve this.

    Attributes:
        args: the options of `vllm serve`.
        emulated: the engine that instances emulate; None for vLLM.
        shutdown_timeout_s: what requests have to finish when the server is told to end.
    """

    config: ClusterConfig
    args: PackedArgs
    emulated: EmulatedOptions | None
    shutdown_timeout_s: float


@dataclass(frozen=True, slots=True)
class ListenAgain:
    """Order: Ray's GCS, through which the lines that actors print come, is another one."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Order: end; requests may finish first unless it is urgent."""

    is_urgent: bool


@dataclass(frozen=True, slots=True)
class Changed:
    """News: there are processes that there were not before.

    Attributes:
        is_ready: whether requests can be served.
    """

    is_ready: bool


Order = UseRay | Serve | ListenAgain | Stop


def say(line: str, stream: TextIO | None = None) -> None:
    """Tell the user, on stderr unless elsewhere."""
    # A full disk under the log is no reason to end.
    with contextlib.suppress(OSError):
        print(line, file=stream or sys.stderr, flush=True)
