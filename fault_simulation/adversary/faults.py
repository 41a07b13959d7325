"""The adversary: faults, and orders of operators meanwhile, drawn from the seed.

One component is down at a time, unless the plan allows more: the next one dies, hangs or is cut off
when the cluster is whole again. Troubles that the migration protocol claims to tolerate (lost,
repeated, overtaken messages, failed copies), slow links, long steps and operators' orders come at
any time. Each seed prefers some kinds of faults and leaves others out: one kind may hide, or
prevent, the effect of another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from random import Random

from fault_simulation.adversary.link_faults import CUTS, Links
from fault_simulation.processes.actors import Actor
from fault_simulation.processes.frontends import FrontendProcess
from fault_simulation.processes.instances import InstanceProcess
from fault_simulation.processes.ray import Platform
from fault_simulation.processes.schedulers import SchedulerProcess
from fault_simulation.virtual.network import Conditions
from fault_simulation.virtual.settings import LONG_STEP_SHARE, TELL_S
from fault_simulation.virtual.timeline import Process
from sterna.messages.actors import (
    DrainInstance,
    MigrateRequest,
    RestartInstances,
    StartInstances,
    WireMessage,
)
from sterna.migration.messages import Mode
from sterna.supervisor.fleet import Phase
from sterna.types import InstanceId


class Fault(Enum):
    """Faults of a component."""

    KILL = "killed"
    KILL_AT_EFFECT = "killed in the middle of what it does"
    HANG = "stopped for a time"
    STALL = "an engine steps nothing"
    CUT_OFF = "two components cannot reach each other"
    CUT_LINK = "nothing comes through to a node"


class Trouble(Enum):
    """Troubles that the cluster tolerates at any time."""

    MESSAGES = "messages are lost, repeated and overtaken"
    CONNECTIONS = "connections break, and cannot be opened"
    COPIES = "copies fail"
    SLOW = "the network is slow"
    LINK = "one way from one to another is slow"
    STEPS = "many steps take long"
    LAG = "instances hear late of what their engines did"
    STARTS = "instances do not start"


class Order(Enum):
    """Orders of operators and clients."""

    MIGRATE = "move a request"
    ABORT = "end a request where requests move"
    DRAIN = "drain an instance"
    UNDO = "let a drained instance serve on"
    START = "start an instance"
    RESTART = "replace all instances"


WEIGHTS: dict[Fault | Trouble | Order, float] = {
    **dict.fromkeys(Fault, 4.0),
    Fault.CUT_LINK: 24.0,
    **dict.fromkeys(Trouble, 1.0),
    Trouble.CONNECTIONS: 3.0,
    Order.MIGRATE: 12.0,
    Order.ABORT: 1.0,
    Order.DRAIN: 1.0,
    Order.UNDO: 1.0,
    Order.START: 0.5,
    Order.RESTART: 0.3,
}
"""The relative frequency of each. Many mistakes show only in the middle of a migration."""

PREFERENCES = (0.0, 0.3, 1.0, 1.0, 3.0)
"""Each seed multiplies each weight by one of these."""

CHANGE_OF_MIND_SHARE = 0.5
"""Of the drains that are undone soon, and then wanted again."""

CHANGE_OF_MIND_S = (0.05, 0.3)
"""Mean time until each of these orders: one of these."""


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """The faults that happen, and their frequency.

    Attributes:
        cuts: the kinds of cuts of links, by their length.
        interval_s: mean time between two attempts of the adversary to act.
        overlap: whether a component may die while another is down.
    """

    faults: tuple[Fault, ...] = tuple(Fault)
    troubles: tuple[Trouble, ...] = tuple(Trouble)
    orders: tuple[Order, ...] = tuple(Order)
    cuts: tuple[str, ...] = tuple(CUTS)
    interval_s: float = 0.06
    overlap: bool = False


LINKS_ONLY = FaultPlan((Fault.CUT_LINK,), (), ())
"""Links that are cut, and no other fault: shows the effect of leases alone."""

LOST_VERDICTS = FaultPlan((Fault.KILL,), (Trouble.MESSAGES,), (Order.MIGRATE,))
"""Requests move, messages are lost, and processes die. A source that was not told of the adoption
when its destination dies computes tokens again that the client has: in one seed of 100 (of 1,000
with all faults)."""


REFUSED_ACKS = FaultPlan(
    (Fault.CUT_OFF,), (Trouble.CONNECTIONS,), (Order.DRAIN, Order.UNDO, Order.START)
)
"""Instances are drained while they cannot be reached: a mailbox with a short queue refuses a final
acknowledgement, and no later one follows, in one seed of 400 (of 1,000 with all faults)."""


class Adversary:
    """Breaks things until `until_s`."""

    def __init__(self, platform: Platform, plan: FaultPlan, until_s: float) -> None:
        self._platform = platform
        self._world = platform.world
        self._plan = plan
        self._until_s = until_s
        self._links = Links(platform, plan.cuts)
        self._cut_off_until_s = 0.0
        self._num_orders = 0
        faults = list(plan.faults)
        if platform.world.nodes.num_nodes == 1 and Fault.CUT_LINK in faults:
            faults.remove(Fault.CUT_LINK)
        kinds: list[Fault | Trouble | Order] = [*faults, *plan.troubles, *plan.orders]
        weights = {each: WEIGHTS[each] * self._rng.choice(PREFERENCES) for each in kinds}
        self._weights = {each: weight for each, weight in weights.items() if weight > 0}

    @property
    def _rng(self) -> Random:
        return self._world.rng

    def begin(self) -> None:
        """Break the first thing soon."""
        self._schedule()

    def _schedule(self) -> None:
        delay_s = self._rng.expovariate(1.0) * self._plan.interval_s
        self._world.timeline.push(delay_s, None, "", self._act)

    def _act(self) -> None:
        if self._world.timeline.now_s >= self._until_s:
            self._heal()
            return
        if self._weights:
            (kind,) = self._rng.choices([*self._weights], [*self._weights.values()])
            if self._do(kind):
                self._world.counts[f"{type(kind).__name__.lower()}: {kind.value}"] += 1
        self._schedule()

    def _heal(self) -> None:
        self._world.timeline.note("", "all heals")
        self._world.network.heal()
        self._world.copies.failure_share = 0.0
        self._platform.start_failure_share = 0.0
        self._set_pace(LONG_STEP_SHARE, TELL_S)
        for process in self._world.processes.values():
            process.crash_after = None

    def _do(self, kind: Fault | Trouble | Order) -> bool:
        if isinstance(kind, Fault):
            may_break = self._has_enough_left() if self._plan.overlap else self._is_whole()
            if kind is Fault.CUT_LINK:
                return may_break and self._cut_a_link()
            return may_break and self._break(kind)
        if isinstance(kind, Trouble):
            self._trouble(kind)
            return True
        return self._order(kind)

    # -------------------------------------------------------------------------------- faults

    def _is_whole(self) -> bool:
        platform = self._platform
        supervisor = platform.supervisor
        if supervisor is None or not supervisor.is_alive or not supervisor.is_whole:
            return False
        if self._world.timeline.now_s < self._cut_off_until_s:
            return False
        processes = [*platform.members(), supervisor]
        if any(each.is_hung or each.crash_after is not None for each in processes):
            return False
        hosted = [each.name for each in platform.instances() if not each.engine.is_stalled]
        serving = supervisor.core.fleet.in_phase(Phase.SERVING, Phase.TERMINATING)
        return all(each in hosted for each in serving)

    def _has_enough_left(self) -> bool:
        """Whether the cluster can continue: more than three members are well, and more than two of
        them are instances that could serve."""
        within_reach = self._world.nodes.is_within_reach
        members = self._platform.members()
        well = [each for each in members if not each.is_hung and within_reach(each.name)]
        instances = [
            each
            for each in well
            if isinstance(each, InstanceProcess)
            and each.membership.version > 0
            and not each.engine.is_stalled
        ]
        return len(well) > 3 and len(instances) > 2

    def _break(self, fault: Fault) -> bool:
        process = self._victim()
        if process is None:
            return False
        rng, platform = self._rng, self._platform
        match fault:
            case Fault.KILL:
                platform.kill(process)
            case Fault.KILL_AT_EFFECT:
                self._crash_soon(process)
            case Fault.HANG:
                longest_s = 3.0 if isinstance(process, InstanceProcess) else 1.5
                duration_s = rng.uniform(0.02, longest_s)
                self._hinder(duration_s)
                platform.hang(process, duration_s)
            case Fault.STALL:
                if not isinstance(process, InstanceProcess):
                    return False
                platform.stall(process)
            case Fault.CUT_OFF:
                other = self._victim()
                if other is None or other is process:
                    return False
                duration_s = rng.uniform(0.05, 2.0)
                self._cut_off_until_s = self._hinder(duration_s)
                self._world.network.cut_off(process.name, other.name, duration_s)
                self._world.timeline.note(process.name, f"cut off from {other.name}")
        return True

    def _cut_a_link(self) -> bool:
        duration_s = self._links.cut_one()
        if duration_s is None:
            return False
        self._cut_off_until_s = self._hinder(duration_s)
        return True

    def _hinder(self, duration_s: float) -> float:
        """Tokens may come so late that they are taken as lost; returns the end of this time."""
        until_s = self._world.timeline.now_s + duration_s
        self._world.ledger.on_hindrance(until_s)
        return until_s

    def _crash_soon(self, process: Process) -> None:
        """Let it die in place of one of its next effects, if that one comes soon."""
        most = 60 if isinstance(process, InstanceProcess) else 10
        process.crash_after = self._rng.randint(0, most)

        def give_up() -> None:
            process.crash_after = None

        self._world.timeline.push(1.0, None, "", give_up)

    def _victim(self) -> Process | None:
        """Draw a component; of instances preferably one that is being emptied or migrates, or
        that is the destination of a migration at its last stage."""
        platform, rng = self._platform, self._rng
        instances = platform.instances()
        migrating = [each for each in instances if each.core.has_open_migrations]
        awaited = {peer for each in instances for peer in each.peers_at_the_last_stage()}
        members = platform.members()
        supervisor = platform.supervisor
        pools: list[tuple[float, list[Process]]] = [
            (0.15, [*instances]),
            (0.15, [*migrating]),
            (0.15, [each for each in instances if each.instance_id in awaited]),
            (0.1, [*self._terminating()]),
            (0.15, [each for each in members if isinstance(each, SchedulerProcess)]),
            (
                0.15 if self._world.streams is None else 0.45,
                [*self._platform.frontends()],
            ),
            (0.15, [supervisor] if supervisor is not None and supervisor.is_alive else []),
        ]
        (pool,) = rng.choices([each for _, each in pools], [share for share, _ in pools])
        return self._one_of(pool)

    def _terminating(self) -> list[InstanceProcess]:
        return [each for each in self._platform.instances() if each.engine.is_terminating]

    def _one_of(self, processes: Sequence[Process]) -> Process | None:
        return self._rng.choice(processes) if processes else None

    # ------------------------------------------------------------------------------ troubles

    def _trouble(self, trouble: Trouble) -> None:
        rng, network = self._rng, self._world.network
        is_over = rng.random() < 0.4
        conditions = network.conditions
        match trouble:
            case Trouble.MESSAGES:
                worse = Conditions(conditions.latency_s, unconnected=conditions.unconnected)
                if not is_over:
                    worse.loss = rng.choice((0.0, 0.05, 0.3))
                    worse.repetition = rng.choice((0.0, 0.1, 0.5))
                    worse.overtaking_s = rng.choice((0.0, 0.02, 0.5, 4.0))
                network.conditions = worse
            case Trouble.CONNECTIONS:
                conditions.unconnected = 0.0 if is_over else rng.choice((0.0, 0.3))
                network.break_one(rng.choice((1, 1, 2, 5, 20)))
            case Trouble.SLOW:
                conditions.latency_s = 0.0005 if is_over else rng.choice((0.0001, 0.005, 0.05))
            case Trouble.COPIES:
                self._world.copies.failure_share = 0.0 if is_over else rng.choice((0.1, 0.5))
            case Trouble.STARTS:
                share = 0.0 if is_over else rng.choice((0.2, 0.7))
                self._platform.start_failure_share = share
            case Trouble.LINK:
                self._slow_down_a_link()
            case Trouble.STEPS:
                self._set_pace(LONG_STEP_SHARE if is_over else rng.choice((0.1, 0.4)), None)
            case Trouble.LAG:
                self._set_pace(None, TELL_S if is_over else rng.choice((0.02, 0.3)))

    def _slow_down_a_link(self) -> None:
        sender, receiver = self._victim(), self._victim()
        if self._world.streams is not None and self._rng.random() < 0.5:
            # Messages between front ends about streams are slow too seldom otherwise.
            sender, receiver = (
                self._one_of(self._platform.frontends()),
                self._one_of(self._platform.frontends()),
            )
        if sender is not None and receiver is not None:
            duration_s = self._rng.uniform(0.3, 3.0)
            self._world.network.slow_down(sender.name, receiver.name, duration_s)

    def _set_pace(self, long_step_share: float | None, tell_s: float | None) -> None:
        """Set the pace of all present engines; None: unchanged."""
        for each in self._platform.instances():
            if long_step_share is not None:
                each.engine.long_step_share = long_step_share
            if tell_s is not None:
                each.engine.tell_s = tell_s

    # -------------------------------------------------------------------------------- orders

    def _order(self, order: Order) -> bool:
        rng, frontend, instances = self._rng, self._frontend(), self._platform.instances()
        if frontend is None or not instances:
            return False
        self._num_orders += 1
        number, reply_to = self._num_orders, frontend.name
        one = rng.choice(instances)
        match order:
            case Order.MIGRATE:
                return self._order_migration(frontend, number)
            case Order.ABORT:
                return self._abort()
            case Order.DRAIN | Order.UNDO:
                is_undo = order is Order.UNDO
                if not is_undo and rng.random() < CHANGE_OF_MIND_SHARE:
                    self._change_mind(one.instance_id)
                message = DrainInstance(reply_to, number, one.instance_id, is_undo)
                return _to_supervisor(frontend, message)
            case Order.START:
                return _to_supervisor(frontend, StartInstances(reply_to, number, 1))
            case Order.RESTART:
                has_surge = rng.random() < 0.7
                return _to_supervisor(frontend, RestartInstances(reply_to, number, has_surge))

    def _frontend(self) -> FrontendProcess | None:
        """A front end through which an operator can give an order."""
        frontends = [each for each in self._platform.frontends() if not each.is_hung]
        return self._rng.choice(frontends) if frontends else None

    def _change_mind(self, instance_id: InstanceId) -> None:
        """Soon let the instance, which is being drained, serve on; then have it drained again.
        Its messages to the supervisor may be late meanwhile."""
        if self._platform.supervisor is not None and self._rng.random() < 0.5:
            self._world.network.slow_down(instance_id, self._platform.supervisor.name, 1.5)

        def order(is_undo: bool) -> None:
            frontend = self._frontend()
            if frontend is not None and self._world.timeline.now_s < self._until_s:
                self._num_orders += 1
                _to_supervisor(
                    frontend,
                    DrainInstance(frontend.name, self._num_orders, instance_id, is_undo),
                )

        delay_s = 0.0
        for is_undo in (True, False):
            delay_s += self._rng.expovariate(1.0) * self._rng.choice(CHANGE_OF_MIND_S)
            self._world.timeline.push(delay_s, None, "", partial(order, is_undo))

    def _abort(self) -> bool:
        """Let a client go away whose request is, or may be, on its way."""
        ledger = self._world.ledger
        migrating = [each for each in self._platform.instances() if each.core.has_open_migrations]
        record = ledger.one_of(
            self._rng,
            [r.request_id for each in migrating for r in each.engine.core.requests()],
        )
        if record is None:
            return False
        frontend = self._world.processes[record.frontend]
        assert isinstance(frontend, FrontendProcess)
        request_id = record.ask.request_id
        what = f"{request_id} is aborted"
        self._world.timeline.push(0.0, frontend, what, lambda: frontend.on_client_gone(request_id))
        return True

    def _order_migration(self, frontend: FrontendProcess, number: int) -> bool:
        rng = self._rng
        instances = self._platform.instances()
        source, destination = rng.choice(instances), rng.choice(instances)
        requests = sorted(each.request_id for each in source.engine.core.requests())
        if not requests:
            return False
        mode = rng.choice((Mode.LIVE, Mode.LIVE, Mode.STOP_AND_COPY, Mode.RECOMPUTE))
        order = MigrateRequest(
            frontend.name, number, rng.choice(requests), destination.instance_id, mode
        )
        frontend.send(source.name, order)
        return True


def _to_supervisor(frontend: Actor, message: WireMessage) -> bool:
    assert isinstance(frontend, FrontendProcess)
    frontend.send(frontend.membership.supervisor, message)
    return True
