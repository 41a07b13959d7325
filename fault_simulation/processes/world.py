"""The world of one seed: the parts that all its processes share."""

from collections import Counter
from dataclasses import dataclass, field
from random import Random

from fault_simulation.engine.copies import Copies
from fault_simulation.engine.engine import SimulatedEngine
from fault_simulation.engine.engine_kinds import EngineKind
from fault_simulation.engine.immovable import Immovables
from fault_simulation.oracle.ledger import Ledger
from fault_simulation.oracle.stream_ledger import StreamLedger
from fault_simulation.virtual.network import Network
from fault_simulation.virtual.nodes import Nodes
from fault_simulation.virtual.timeline import Process, Timeline
from sterna.config import PolicyConfig, ScalingConfig
from sterna.frontend.requests.core import FrontendCore
from sterna.frontend.resumable.pacing import Pacing
from sterna.frontend.resumable.replicas import Replicas
from sterna.instance.core import InstanceCore
from sterna.messaging.mailbox_core import MailboxCore
from sterna.scheduler.core import SchedulerCore
from sterna.supervisor.core import SupervisorCore
from sterna.supervisor.lease import GrantedLeases, HeldLease
from sterna.types import FrontendId


@dataclass(frozen=True, slots=True)
class Cores:
    """The classes that decide: those of production, or ones with a planted mistake.

    Attributes:
        is_fenced: whether an instance that hangs is killed before its death is reported.
    """

    instance: type[InstanceCore] = InstanceCore
    frontend: type[FrontendCore] = FrontendCore
    scheduler: type[SchedulerCore] = SchedulerCore
    supervisor: type[SupervisorCore] = SupervisorCore
    engine: type[SimulatedEngine] = SimulatedEngine
    held_lease: type[HeldLease] = HeldLease
    granted_leases: type[GrantedLeases] = GrantedLeases
    pacing: type[Pacing] = Pacing
    replicas: type[Replicas] = Replicas
    mailbox: type[MailboxCore] = MailboxCore
    is_fenced: bool = True


@dataclass(slots=True)
class World:
    """The world of one seed.

    Attributes:
        processes: all that were ever started, by name, with those that are dead.
        immovables: draws the requests that cannot move.
        kind: that of its engines.
        policy: the rules of its scheduler.
        counts: how often each thing worth counting happened.
        streams: those that outlive their front ends; None: there are none in this cluster.
        replicas: those that each front end ever had of others' streams.
    """

    rng: Random
    timeline: Timeline
    nodes: Nodes
    network: Network
    copies: Copies
    ledger: Ledger
    immovables: Immovables
    kind: EngineKind
    policy: PolicyConfig
    cores: Cores = field(default_factory=Cores)
    scaling: ScalingConfig | None = None
    processes: dict[str, Process] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    streams: StreamLedger | None = None
    replicas: dict[FrontendId, Replicas] = field(default_factory=dict)

    def is_alive(self, name: str) -> bool:
        """Whether such a process runs, or hangs."""
        process = self.processes.get(name)
        return process is not None and process.is_alive
