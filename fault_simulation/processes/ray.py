"""Ray in virtual time: processes begin after some time, and their deaths are noticed after some.

A process that hangs is killed before its death is reported; so is an instance whose engine has
stopped stepping.
"""

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from random import Random

from fault_simulation.processes.actors import Actor
from fault_simulation.processes.frontends import FrontendProcess
from fault_simulation.processes.instances import InstanceProcess
from fault_simulation.processes.schedulers import SchedulerProcess
from fault_simulation.processes.world import World
from fault_simulation.virtual.settings import DELAYS
from fault_simulation.virtual.timeline import Process
from sterna.supervisor.core import SupervisorCore
from sterna.supervisor.fleet import Fleet
from sterna.types import InstanceId

Action = Callable[[], None]
Member = InstanceProcess | FrontendProcess | SchedulerProcess


class Supervisor(Actor):
    """A supervisor, as Ray and the adversary see it."""

    core: SupervisorCore

    @abstractmethod
    def start(self, fleet: Fleet, num_frontends: int) -> None:
        """Start a cluster."""

    @abstractmethod
    def take_over(self, num_frontends: int) -> None:
        """Continue where another supervisor was, with the members that live."""

    @property
    @abstractmethod
    def is_whole(self) -> bool:
        """Whether, to its knowledge, no member is missing: an instance that dies has others beside
        it, though more may be on their way."""

    @abstractmethod
    def on_node_lost(self, instance_id: InstanceId) -> None:
        """Ray says that the instance is dead, as it has given up its node."""


class Platform:
    """Starts, watches and kills the processes of one cluster.

    Args:
        new_supervisor: makes a supervisor of this name.
        num_places: number of instances that can be there at once.
    """

    def __init__(
        self,
        world: World,
        new_supervisor: Callable[[str, World, "Platform"], Supervisor],
        num_frontends: int,
        num_places: int,
    ) -> None:
        self.world = world
        self.num_frontends = num_frontends
        self.start_failure_share = 0.0
        self.supervisor: Supervisor | None = None
        self._make_supervisor = new_supervisor
        self._num_places = num_places
        self._num_supervisors = 0
        # By instance: the supervisor that starts it.
        self._starting: dict[InstanceId, Actor] = {}
        self._watches: dict[str, tuple[Actor, Action]] = {}

    @property
    def _rng(self) -> Random:
        return self.world.rng

    def begin(self, fleet: Fleet) -> None:
        """Start the first supervisor, which starts the others."""
        self._new_supervisor().start(fleet, self.num_frontends)

    def members(self) -> list[Member]:
        """The members that live, in the order of their births."""
        processes = self.world.processes.values()
        return [each for each in processes if isinstance(each, Member) and each.is_alive]

    def instances(self) -> list[InstanceProcess]:
        """The instances that live."""
        return [each for each in self.members() if isinstance(each, InstanceProcess)]

    def frontends(self) -> list[FrontendProcess]:
        """The front ends that live."""
        return [each for each in self.members() if isinstance(each, FrontendProcess)]

    def schedulers(self) -> list[SchedulerProcess]:
        """The schedulers that live."""
        return [each for each in self.members() if isinstance(each, SchedulerProcess)]

    def open_frontend(self) -> FrontendProcess | None:
        """Any front end that accepts connections."""
        frontends = [each for each in self.frontends() if each.is_served and not each.is_hung]
        return self._rng.choice(frontends) if frontends else None

    @property
    def has_place(self) -> bool:
        """Whether another instance can be there."""
        return len(self.instances()) < self._num_places

    # -------------------------------------------------------------------------------- starts

    def start_instance(
        self,
        supervisor: Actor,
        instance_id: InstanceId,
        on_up: Action,
        on_failed: Action,
        on_pending: Callable[[str | None], None],
    ) -> None:
        """Start the instance as soon as there is a place; then tell the supervisor, if it lives."""
        self._starting[instance_id] = supervisor
        self._seek_place(supervisor, instance_id, on_up, on_failed, on_pending)

    def _seek_place(
        self,
        supervisor: Actor,
        instance_id: InstanceId,
        on_up: Action,
        on_failed: Action,
        on_pending: Callable[[str | None], None],
    ) -> None:
        if self._starting.get(instance_id) is not supervisor:
            return
        num_before = sorted(self._starting, key=_number).index(instance_id)
        if len(self.instances()) + num_before >= self._num_places:
            self._notify(supervisor, 0.0, "pending", lambda: on_pending("no place"))
            self._later(
                0.2,
                lambda: self._seek_place(supervisor, instance_id, on_up, on_failed, on_pending),
            )
            return

        def begin() -> None:
            on_pending(None)
            if self._starting.get(instance_id) is supervisor:
                self._begin_instance(supervisor, instance_id, on_up, on_failed)

        # The supervisor begins the start of an instance that has a place.
        self._notify(supervisor, 0.0, "placed", begin)

    def _begin_instance(
        self, supervisor: Actor, instance_id: InstanceId, on_up: Action, on_failed: Action
    ) -> None:
        self.world.nodes.place(instance_id)

        def come_up() -> None:
            # A dead supervisor may have begun a start of the same instance.
            if self._starting.get(instance_id) is not supervisor:
                return
            del self._starting[instance_id]
            if self._rng.random() < self.start_failure_share:
                self._notify(supervisor, 0.01, "start failed", on_failed, instance_id)
                return
            process = InstanceProcess(instance_id, self.world)
            self._add(process)
            self._notify(supervisor, self._rng.random() * 0.05, "started", answered, instance_id)

        def answered() -> None:
            # Of a node that Ray has given up meanwhile it says that all there is dead.
            (on_failed if self.world.nodes.is_lost(instance_id) else on_up)()

        self._later(self._rng.uniform(*DELAYS.start_instance), come_up)

    def cancel(self, instance_id: InstanceId) -> None:
        """Give up a start."""
        self._starting.pop(instance_id, None)

    def start_other(self, supervisor: Actor, make: Callable[[], Member], on_up: Action) -> None:
        """Start a scheduler or a front end; then tell the supervisor."""

        def come_up() -> None:
            # A process that a dead supervisor began is killed by the successor before it is up.
            if supervisor.is_alive:
                self._add(make())
                self._notify(supervisor, self._rng.random() * 0.01, "started", on_up)

        self._later(self._rng.uniform(*DELAYS.start_other), come_up)

    def _add(self, process: Process) -> None:
        self.world.processes[process.name] = process
        self.world.timeline.note(process.name, "up")

    def _new_supervisor(self) -> Supervisor:
        name = f"v{self._num_supervisors}"
        self._num_supervisors += 1
        self.supervisor = self._make_supervisor(name, self.world, self)
        self._add(self.supervisor)
        return self.supervisor

    # -------------------------------------------------------------------------------- deaths

    def find_members(self) -> list[Member]:
        """The members that answer; one that does not, or is not up yet, is killed, if it can be."""
        self._starting.clear()
        within_reach = self.world.nodes.is_within_reach
        for each in filter(lambda each: within_reach(each.name), self.members()):
            # A front end needs a membership to come up.
            is_up = not isinstance(each, FrontendProcess) or each.membership.version >= 0
            if each.is_hung or not is_up:
                self.kill(each)
        return [each for each in self.members() if within_reach(each.name)]

    def close(self, instance_id: InstanceId) -> None:
        """End an instance in order: no request may be lost by that."""
        process = self.world.processes[instance_id]
        delay_s = self._rng.uniform(*DELAYS.close)
        self._when_within_reach(process.name, delay_s, lambda: self.kill(process, is_in_order=True))

    def kill_away(self, supervisor: Actor, name: str) -> None:
        """Kill a process on another node, as soon as it can be reached."""
        delay_s = self.world.nodes.rng.random() * 0.05

        def kill() -> None:
            if supervisor.is_alive:
                self.kill(self.world.processes[name])

        self._when_within_reach(name, delay_s, kill)

    def give_up(self, name: str) -> None:
        """The supervisor takes the instance for dead, though its death was not reported."""
        self._watches.pop(name, None)
        process = self.world.processes[name]
        assert isinstance(process, InstanceProcess)
        self.world.counts["instance given up by its lease"] += 1
        self.world.timeline.note(name, "is given up")
        if process.may_act:
            self.world.ledger.given_up.add(process.instance_id)
        else:
            self.world.ledger.dead_instances.add(process.instance_id)

    def lose_node(self, node: int) -> None:
        """Ray gives the node up, and reports all that run there as dead."""
        nodes, supervisor = self.world.nodes, self.supervisor
        nodes.lose(node)
        self.world.counts["node lost"] += 1
        self.world.timeline.note("", f"Ray has lost node {node}")
        for each in self.instances():
            if nodes.node_of(each.name) == node and supervisor is not None:
                tell = partial(supervisor.on_node_lost, each.instance_id)
                self._notify(supervisor, self._rng.random() * 0.05, f"{each.name} is lost", tell)

    def _when_within_reach(self, name: str, delay_s: float, action: Action) -> None:
        """Let an action of the supervisor happen to a process; never if Ray has lost its node."""

        def act() -> None:
            nodes = self.world.nodes
            if (left_s := nodes.home_cut_left_s(name)) > 0:
                self._later(left_s, act)
            elif not nodes.is_lost(name):
                action()

        self._later(delay_s, act)

    def watch(self, supervisor: Actor, process: Process, on_death: Action) -> None:
        """Tell the supervisor when the process is dead."""
        self._watches[process.name] = (supervisor, on_death)
        if not process.is_alive:
            self._notice(process)

    def kill(self, process: Process, *, is_in_order: bool = False) -> None:
        """End the process: it no longer acts."""
        if not process.is_alive:
            return
        process.is_alive = False
        process.frozen.clear()
        world = self.world
        world.timeline.note(process.name, "dead")
        world.counts[f"ended: {type(process).__name__.removesuffix('Process').lower()}"] += 1
        world.network.on_death(process)
        world.copies.on_death(process)
        if isinstance(process, InstanceProcess):
            if is_in_order:
                core = process.engine.core
                ids = [each.request_id for each in core.requests()]
                # A request that is suspended has moved: its release waits for the end of a step.
                left = [each for each in ids if not core.is_drained(each)]
                world.ledger.on_ended_in_order(process.instance_id, left)
            else:
                world.ledger.dead_instances.add(process.instance_id)
        elif isinstance(process, FrontendProcess):
            world.ledger.on_frontend_death(process.name)
            if process.streams is not None:
                process.streams.on_death()
        if process is self.supervisor:
            self._later(self._rng.uniform(*DELAYS.successor), self._succeed)
        else:
            self._notice(process)

    def _succeed(self) -> None:
        self._watches.clear()
        self.world.counts["supervisor succeeded"] += 1
        self._new_supervisor().take_over(self.num_frontends)

    def _notice(self, process: Process) -> None:
        watch = self._watches.pop(process.name, None)
        if watch is not None:
            supervisor, on_death = watch
            if isinstance(process, InstanceProcess) and process.is_alive:
                self.world.ledger.given_up.add(process.instance_id)
            is_soon = self._rng.random() < 1 / 3
            delay_s = self._rng.uniform(
                *(DELAYS.notice_death_soon if is_soon else DELAYS.notice_death)
            )
            what = f"{process.name} is dead"
            self._notify(supervisor, delay_s, what, on_death, process.name)

    # ---------------------------------------------------------------------------------- hangs

    def hang(self, process: Process, duration_s: float) -> None:
        """The process does nothing for this time; an instance that hangs for too long is killed."""
        process.is_hung = True
        self.world.timeline.note(process.name, f"hangs for {duration_s:.2f} s")
        self._later(duration_s, lambda: self._continue(process))
        if isinstance(process, InstanceProcess):
            self._later(self._rng.uniform(*DELAYS.notice_hang), lambda: self._fence(process))

    def _continue(self, process: Process) -> None:
        if not process.is_hung or not process.is_alive:
            return
        process.is_hung = False
        process.went_on_s = self.world.timeline.now_s
        frozen, process.frozen = process.frozen, []
        for what, action in frozen:
            self.world.timeline.push(0.0, process, what, action)

    def stall(self, instance: InstanceProcess) -> None:
        """The engine stops stepping, and the instance still answers."""
        self.world.timeline.note(instance.name, "its engine steps nothing")
        instance.engine.stall(True)
        self._later(self._rng.uniform(*DELAYS.notice_hang), lambda: self._fence(instance))

    def _fence(self, instance: InstanceProcess) -> None:
        if (left_s := self.world.nodes.home_cut_left_s(instance.name)) > 0:
            # While it cannot be reached, a hang of it cannot be noticed.
            delay_s = self._rng.uniform(*DELAYS.notice_hang)
            self._later(left_s + delay_s, lambda: self._fence(instance))
        elif instance.is_hung or instance.engine.is_stalled:
            self.world.counts["instance fenced"] += instance.is_alive
            if self.world.cores.is_fenced:
                self.kill(instance)
            else:
                self._notice(instance)

    # ---------------------------------------------------------------------------------- time

    def _notify(
        self, supervisor: Actor, delay_s: float, what: str, action: Action, about: str = ""
    ) -> None:
        """Notify the supervisor about the process of that name, when it can be known."""
        delay_s += self.world.nodes.home_cut_left_s(about)
        self.world.timeline.push(delay_s, supervisor, what, action)

    def _later(self, delay_s: float, action: Action) -> None:
        self.world.timeline.push(delay_s, None, "", action)


def _number(instance_id: InstanceId) -> int:
    return int(instance_id.removeprefix("i"))
