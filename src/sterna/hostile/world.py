"""What all processes of one run share."""

from collections import Counter
from dataclasses import dataclass, field
from random import Random

from sterna.config import ScalingConfig
from sterna.frontend.core import FrontendCore
from sterna.frontend.resumable.pacing import Pacing
from sterna.frontend.resumable.replicas import Replicas
from sterna.hostile.copies import Copies
from sterna.hostile.engine import HostileEngine
from sterna.hostile.ledger import Ledger
from sterna.hostile.network import Network
from sterna.hostile.nodes import Nodes
from sterna.hostile.staying import Staying
from sterna.hostile.stream_ledger import StreamLedger
from sterna.hostile.timeline import Process, Timeline
from sterna.instance_core import InstanceCore
from sterna.lease import GrantedLeases, HeldLease
from sterna.scheduler_core import SchedulerCore
from sterna.supervisor_core import SupervisorCore


@dataclass(frozen=True, slots=True)
class Cores:
    """The classes whose code decides: those that serve, or ones with a planted mistake.

    Attributes:
        is_fenced: whether an instance that hangs is killed before its death is told of.
    """

    instance: type[InstanceCore] = InstanceCore
    frontend: type[FrontendCore] = FrontendCore
    scheduler: type[SchedulerCore] = SchedulerCore
    supervisor: type[SupervisorCore] = SupervisorCore
    engine: type[HostileEngine] = HostileEngine
    held_lease: type[HeldLease] = HeldLease
    granted_leases: type[GrantedLeases] = GrantedLeases
    pacing: type[Pacing] = Pacing
    replicas: type[Replicas] = Replicas
    is_fenced: bool = True


@dataclass(slots=True)
class World:
    """The world of one seed.

    Attributes:
        processes: all that were ever started, by name, the dead included.
        staying: which requests cannot move.
        counts: how often each thing worth counting happened.
        streams: those that outlive their front ends; None: there are none in this cluster.
    """

    rng: Random
    timeline: Timeline
    nodes: Nodes
    network: Network
    copies: Copies
    ledger: Ledger
    staying: Staying
    cores: Cores = field(default_factory=Cores)
    scaling: ScalingConfig | None = None
    processes: dict[str, Process] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    streams: StreamLedger | None = None

    def is_alive(self, name: str) -> bool:
        """Whether such a process runs, or hangs."""
        process = self.processes.get(name)
        return process is not None and process.is_alive
