"""Trials: for each part a server, and the faults that show its use.

Faults of one trial hit the same server, one after the other, as long as it lives.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from ssl import SSLContext

from bench.common.small_disk import SHARED, on_small_disk
from bench.parts import bad_clients, crashes, removals
from bench.parts.removals import Change, Removal
from bench.parts.watching import Strike

TWO_INSTANCES = ("--engine", "emulated", "--instances", "2")
TWO_FRONTENDS = (*TWO_INSTANCES, "--frontends", "2")

SMALL_MEMORY = "200m"
"""Size of /dev/shm: enough for Ray's object store."""

NUM_DESCRIPTORS = 512
FEW_DESCRIPTORS = ("sh", "-c", f'ulimit -n {NUM_DESCRIPTORS} && exec "$@"', "sh")
"""A front end takes 256 connections then."""

SILENCE, REPLACED, MEMORY, UNSERVED = "silence", "replaced", "memory", "unserved"
"""What the table shows of a fault, besides cut streams, refused requests, and the server's end."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, in words and as a deed.

    Attributes:
        watch_s: time from the fault to the end of the watch.
        repeats: how often it is carried out.
        shows: what the table shows of it.
    """

    name: str
    strike: Strike
    watch_s: float
    repeats: int
    shows: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Trial:
    """A part, the server that has it or not, and the faults that show its use.

    Attributes:
        options: of `sterna serve`.
        within: a command in which the server runs.
        settings: changes of the source with and without the part.
        reserves: components that must be in reserve before a fault, if the part is there.
        has_tls: whether the server has a certificate.
    """

    name: str
    removal: Removal
    faults: tuple[Fault, ...]
    options: tuple[str, ...] = TWO_FRONTENDS
    within: tuple[str, ...] = ()
    settings: tuple[Change, ...] = ()
    reserves: tuple[str, ...] = ()
    has_tls: bool = False


@dataclass(frozen=True, slots=True)
class Tls:
    """A certificate for a server, as options, and what its clients trust."""

    options: tuple[str, ...]
    context: SSLContext


@contextmanager
def certified() -> Iterator[Tls]:
    """A certificate of this machine for as long as the context lasts."""
    with tempfile.TemporaryDirectory() as folder:
        certificate, key = bad_clients.make_certificate(Path(folder))
        options = ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key))
        yield Tls(options, bad_clients.trusting(certificate))


DRIVER = Trial(
    "driver",
    removals.DRIVER,
    (Fault("the driver is killed", crashes.kill_driver, 10.0, 3, (SILENCE,)),),
    reserves=("supervisor",),
)

DRIVER_PROCESS = Trial(
    "driver-process",
    removals.DRIVER_PROCESS,
    (Fault("Ray's GCS is killed", crashes.kill_gcs, 8.0, 1, (SILENCE,)),),
)

SUPERVISOR = Trial(
    "supervisor",
    removals.SUPERVISOR_RESERVE,
    (
        Fault(
            "the supervisor is killed, and then an instance",
            crashes.kill_supervisor_and_instance,
            20.0,
            3,
            (SILENCE, REPLACED),
        ),
    ),
    reserves=("supervisor",),
)

GCS = Trial(
    "gcs",
    removals.GCS,
    (
        Fault(
            "Ray's GCS is killed, and an instance",
            crashes.kill_gcs_and_instance,
            80.0,
            1,
            (SILENCE, REPLACED),
        ),
    ),
)

CONNECTIONS = Trial(
    "connections",
    removals.CONNECTION_LIMITS,
    (
        Fault(
            f"{bad_clients.NUM_CONNECTIONS} clients never finish their headers",
            bad_clients.hold_half_heads,
            20.0,
            1,
            (UNSERVED,),
        ),
        Fault(
            f"{bad_clients.NUM_CONNECTIONS} clients never finish their body",
            bad_clients.hold_half_bodies,
            20.0,
            1,
            (UNSERVED,),
        ),
        Fault(
            "a client sends headers of 200 MiB",
            bad_clients.send_large_head,
            12.0,
            1,
            (MEMORY, SILENCE),
        ),
        Fault(
            "a client sends a body of 200 MiB",
            bad_clients.send_large_body,
            12.0,
            1,
            (MEMORY, SILENCE),
        ),
    ),
    options=TWO_INSTANCES,
    within=FEW_DESCRIPTORS,
    settings=removals.SHORT_TIMEOUTS,
)

HANDSHAKES = Trial(
    "tls",
    removals.HANDSHAKES,
    (
        Fault(
            f"{bad_clients.NUM_CONNECTIONS} clients never begin TLS",
            bad_clients.send_no_handshake,
            70.0,
            1,
            (UNSERVED,),
        ),
    ),
    options=TWO_INSTANCES,
    within=FEW_DESCRIPTORS,
    has_tls=True,
)

METRIC_FILES = Trial(
    "metrics",
    removals.METRIC_FILES,
    (
        Fault(
            "/dev/shm is full, and two instances are killed",
            crashes.fill_memory_and_kill_instances,
            40.0,
            1,
            (UNSERVED,),
        ),
        Fault(
            "/dev/shm is full, and the front end is killed",
            crashes.fill_memory_and_kill_frontend,
            30.0,
            1,
            (UNSERVED,),
        ),
    ),
    options=TWO_INSTANCES,
    within=(*on_small_disk(crashes.SHARED_MEMORY, SMALL_MEMORY, SHARED),),
)

TRIALS = (DRIVER, DRIVER_PROCESS, SUPERVISOR, GCS, CONNECTIONS, HANDSHAKES, METRIC_FILES)
