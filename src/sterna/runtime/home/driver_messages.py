"""Messages over pipes between the process of `sterna serve`, the one that reads its options, and
its driver."""

import contextlib
import sys
from dataclasses import dataclass
from typing import TextIO

from sterna.config import ClusterConfig
from sterna.engine.emulated.emulated_engine import EmulatedOptions
from sterna.runtime.actors.packed_args import PackedArgs

NAMESPACE = "sterna"
"""Ray's namespace for the actors of a run."""

REPORTED_STATUS = 3
"""Exit status of a driver that has reported why the server cannot go on; Python and Ray end no
process with it."""


@dataclass(frozen=True, slots=True)
class UseRay:
    """Order: connect to this Ray.

    Attributes:
        environment: environment variables of processes that run vLLM.
        metrics_folder: folder of the front ends' counters.
        is_resumed: whether another driver has started a supervisor already.
    """

    address: str
    environment: dict[str, str]
    metrics_folder: str
    is_resumed: bool


@dataclass(frozen=True, slots=True)
class Serve:
    """Order: serve with this configuration.

    Attributes:
        args: the options of `vllm serve`.
        emulated: the engine that instances emulate; None for vLLM.
        shutdown_timeout_s: time for requests to finish when the server is told to end.
    """

    config: ClusterConfig
    args: PackedArgs
    emulated: EmulatedOptions | None
    shutdown_timeout_s: float


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of `sterna serve` that have been read and checked.

    Attributes:
        host, port: where the server listens; no host is everywhere.
        serve: the order to the driver, without keys of mailboxes.
        engine: what the instances run, for people.
        compiles: whether the engines compile the model.
        example: a command that asks the server.
    """

    host: str | None
    port: int
    serve: Serve
    engine: str
    compiles: bool
    example: str


@dataclass(frozen=True, slots=True)
class Resubscribe:
    """Order: subscribe to the lines that actors print at Ray's GCS, which has been replaced."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Order: end; requests may finish first unless it is urgent."""

    is_urgent: bool


@dataclass(frozen=True, slots=True)
class Changed:
    """News: more processes run than before.

    Attributes:
        is_ready: whether requests can be served.
    """

    is_ready: bool


Order = UseRay | Serve | Resubscribe | Stop


def say(line: str, stream: TextIO | None = None) -> None:
    """Print a line for the user, on stderr by default."""
    # A full disk under the log is no reason to end.
    with contextlib.suppress(OSError):
        print(line, file=stream or sys.stderr, flush=True)
