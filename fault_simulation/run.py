"""One seed from the first process to the last check."""

import traceback
from dataclasses import dataclass, field
from random import Random

from fault_simulation.adversary.clients import Clients
from fault_simulation.adversary.faults import Adversary, FaultPlan
from fault_simulation.engine.copies import Copies
from fault_simulation.engine.engine_kinds import kind_of, policy_of
from fault_simulation.engine.immovable import Immovables
from fault_simulation.oracle.checkers import Checkers, check_prefixes, check_rest
from fault_simulation.oracle.fleet_checks import Drains, unsettled
from fault_simulation.oracle.ledger import Ledger, Status
from fault_simulation.oracle.stream_ledger import StreamLedger
from fault_simulation.processes.instances import InstanceProcess
from fault_simulation.processes.ray import Platform, Supervisor
from fault_simulation.processes.supervisor import SupervisorProcess
from fault_simulation.processes.world import Cores, World
from fault_simulation.virtual.network import Network
from fault_simulation.virtual.nodes import Nodes
from fault_simulation.virtual.settings import (
    RESUMABLE_SHARE,
    SHORT_FRONTEND_QUEUES,
    SHORT_QUEUES_SHARE,
    SHORT_TOKEN_QUEUES,
    WIDE,
    WINDOW_S,
    Queues,
)
from fault_simulation.virtual.timeline import Crashed, Timeline, Violation
from sterna.config import ScalingConfig
from sterna.scheduler.global_scheduler import IN_FLIGHT_LEASE_S
from sterna.supervisor.fleet import Fleet

FAULTS_BEGIN_S = 2.5
HEAL_S = 8.0
NODES_SHARE = 0.3
"""Of the seeds: those with more than one node."""

LIVENESS_LIMIT_S = 60.0
"""Time after the last fault by which every request has ended."""

NUMS_FRONTENDS = (1, 2, 2, 3, 3, 3, 4)
"""Of clusters whose streams outlive their front ends."""

REST_S = 6.0
"""Time after the last request's end by which nothing is left of any."""

FLEET_LIMIT_S = 45.0
"""Time after that by which the fleet has its size: a failed start waits for up to 30 s."""


@dataclass(slots=True)
class Result:
    """The result of one seed.

    Attributes:
        violation: the broken promise, or None.
        where: the traceback of an error in the code under test.
        digest: a hash of all events.
        counts: the number of faults, migrations, ends of requests and other events.
        trace: the last events.
    """

    seed: int
    violation: str | None
    where: str
    digest: str
    num_events: int
    end_s: float
    counts: dict[str, int]
    trace: list[str] = field(default_factory=list)


def run_seed(seed: int, plan: FaultPlan | None = None, cores: Cores | None = None) -> Result:
    """Run the seed; a broken promise is in the result."""
    return Run(seed, plan or FaultPlan(), cores or Cores()).result()


def nodes_of(seed: int) -> tuple[int, Random]:
    """Return the number of nodes of the seed's cluster, and the random numbers for further draws:
    its own ones, so that clusters of one node do not depend on them."""
    rng = Random(f"nodes of {seed}")
    return rng.choice((2, 3)) if rng.random() < NODES_SHARE else 1, rng


def has_streams(seed: int) -> bool:
    """Whether the seed's front ends have streams that outlive them."""
    return Random(f"streams of {seed}").random() < RESUMABLE_SHARE


def queues_of(seed: int) -> Queues:
    """How much the mailboxes of the seed's cluster keep."""
    rng = Random(f"queues of {seed}")
    if has_streams(seed) or rng.random() >= SHORT_QUEUES_SHARE:
        return WIDE
    return Queues(rng.choice(SHORT_FRONTEND_QUEUES), rng.choice(SHORT_TOKEN_QUEUES))


class Run:
    """The world of one seed, and its loop."""

    def __init__(self, seed: int, plan: FaultPlan, cores: Cores) -> None:
        self._seed = seed
        rng = Random(seed)
        self._timeline = timeline = Timeline()
        num_nodes, nodes_rng = nodes_of(seed)
        nodes = Nodes(timeline, nodes_rng, num_nodes)
        breaks = Random(f"connections of {seed}")
        network = Network(timeline, rng, nodes, breaks, cores.mailbox, queues_of(seed))
        self._ledger = ledger = Ledger()
        num_instances = rng.randint(2, 4)
        scaling = None
        if rng.random() < 0.3:
            scaling = ScalingConfig(
                min_instances=2,
                max_instances=5,
                low_freeness_steps=15.0,
                high_freeness_steps=60.0,
                period_s=1.0,
            )
        kind = kind_of(seed)
        policy = policy_of(seed, kind)
        self._world = World(
            rng,
            timeline,
            nodes,
            network,
            Copies(timeline, network, rng),
            ledger,
            Immovables(seed, policy),
            kind,
            policy,
            cores,
            scaling,
        )
        num_frontends, num_places = rng.randint(1, 3), num_instances + rng.randint(0, 3)
        # Drawn apart, so that the other seeds stay as they would be without it.
        if has_streams(seed):
            self._world.streams = StreamLedger(self._world.counts)
            num_frontends = Random(f"front ends of {seed}").choice(NUMS_FRONTENDS)
        self._platform = Platform(self._world, SupervisorProcess, num_frontends, num_places)
        fleet = Fleet(
            num_instances,
            min_instances=2 if scaling else 1,
            max_instances=scaling.max_instances if scaling else None,
        )
        self._platform.begin(fleet)
        num_requests = rng.randint(5, 60)
        self._clients = Clients(self._platform, num_requests, FAULTS_BEGIN_S, HEAL_S)
        timeline.push(
            FAULTS_BEGIN_S, None, "", lambda: Adversary(self._platform, plan, HEAL_S).begin()
        )
        self._checkers = Checkers(self._world.counts)
        self._drains = Drains()

    def result(self) -> Result:
        """Run to the end."""
        violation, where = None, ""
        try:
            self._run()
        except Violation as broken:
            violation = str(broken)
        except Exception as error:
            violation = f"{type(error).__name__}: {error}"
            where = traceback.format_exc()
        timeline = self._timeline
        return Result(
            self._seed,
            violation,
            where,
            timeline.digest,
            timeline.num_events,
            timeline.now_s,
            self._counts(),
            list(timeline.trace()) if violation else [],
        )

    def _counts(self) -> dict[str, int]:
        requests = {f"request {each.value}": self._ledger.count(each) for each in Status}
        num_preemptions = 0
        for process in self._world.processes.values():
            if isinstance(process, InstanceProcess):
                num_preemptions += process.engine.num_preemptions
        counts = {**self._world.counts, **self._world.network.counts}
        return {**counts, **requests, "preemptions": num_preemptions}

    def _run(self) -> None:
        timeline = self._timeline
        streams = self._world.streams
        while timeline.now_s < HEAL_S or self._clients.num_to_come or self._num_open:
            self._step()
            if timeline.now_s > HEAL_S + LIVENESS_LIMIT_S:
                self._ledger.check_ended(timeline.now_s)
                if streams is not None:
                    streams.check_ended(timeline.now_s)
        rest_s = timeline.now_s + REST_S + (0.0 if streams is None else WINDOW_S)
        if self._world.network.counts["refused: CancelDispatch"]:
            # The scheduler takes such a request for dispatched until its lease is over, and holds
            # others meanwhile.
            rest_s += IN_FLIGHT_LEASE_S
        while timeline.now_s < rest_s:
            self._step()
        platform = self._platform
        check_rest(platform.instances(), platform.frontends(), platform.schedulers())
        if self._world.policy.looks_at_prefixes:
            check_prefixes(self._platform.instances(), self._platform.schedulers())
        self._world.network.check_rest()
        limit_s = timeline.now_s + FLEET_LIMIT_S
        while (left := self._unsettled()) is not None:
            if timeline.now_s > limit_s:
                raise Violation(left)
            self._step()

    def _unsettled(self) -> str | None:
        """Return what the supervisor has still to do, or None."""
        platform = self._platform
        if platform.supervisor is None or not platform.supervisor.is_alive:
            return "there is no supervisor"
        acting = {each.instance_id for each in platform.instances() if each.may_act}
        return unsettled(platform.supervisor.core.fleet, acting, has_place=platform.has_place)

    @property
    def _num_open(self) -> int:
        streams = self._world.streams
        return self._ledger.num_open + (0 if streams is None else streams.num_open)

    def _step(self) -> None:
        """Let the next event happen, and check the instance that it has changed."""
        timeline = self._timeline
        process, what, action = timeline.pop()
        if process is not None:
            if not process.is_alive:
                return
            if process.is_hung:
                process.frozen.append((what, action))
                return
            if what != "":
                timeline.note(process.name, what)
        try:
            action()
        except Crashed as crashed:
            self._platform.kill(crashed.process)
        if isinstance(process, InstanceProcess):
            self._checkers.check(process)
        elif isinstance(process, Supervisor):
            calm_s = max(HEAL_S, self._ledger.hindered_until_s)
            self._drains.check(process.core.fleet, timeline.now_s, calm_s)
