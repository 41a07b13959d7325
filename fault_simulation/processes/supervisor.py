"""The supervisor in virtual time: it starts, watches, kills and replaces the other processes.

As `runtime.supervisor`, with delays in place of Ray. The decisions are those of `SupervisorCore`.
"""

from collections.abc import Iterable, Sequence

from fault_simulation.processes.frontends import FrontendProcess
from fault_simulation.processes.granted_leases import Watch
from fault_simulation.processes.instances import InstanceProcess
from fault_simulation.processes.ray import Platform, Supervisor
from fault_simulation.processes.schedulers import SchedulerProcess
from fault_simulation.processes.world import World
from fault_simulation.virtual.timeline import Process, Violation
from sterna.messages.actors import FrontendMember, Heartbeat, WireMessage
from sterna.messaging.send_effects import KeepOnly, ToMailbox, Unexpected
from sterna.supervisor.core import (
    HostedInstance,
    OtherMembers,
    SupervisorEffect,
    next_number,
    state_of,
)
from sterna.supervisor.fleet import (
    Announce,
    CancelStart,
    Close,
    Fleet,
    GiveUpGeneration,
    Phase,
    Start,
)
from sterna.types import FrontendId, InstanceId

KV_FORMAT = "blocks without bytes"


class SupervisorProcess(Supervisor):
    """The supervisor."""

    def __init__(self, name: str, world: World, platform: Platform) -> None:
        super().__init__(name, world)
        self._platform = platform
        self._leases = Watch(self, platform, self._on_lease_over)
        self._hosted: dict[InstanceId, HostedInstance] = {}
        self._frontends: dict[FrontendId, str] = {}
        self._scheduler: str | None = None
        self._num_frontends_begun = 0
        self._num_schedulers_begun = 0

    def start(self, fleet: Fleet, num_frontends: int) -> None:
        """Start a cluster."""
        self.core = self.world.cores.supervisor(fleet)
        self._carry_out(fleet.begin(self.now_s))
        self._start_scheduler()
        for _ in range(num_frontends):
            self._start_frontend()

    def take_over(self, num_frontends: int) -> None:
        """Continue where another supervisor was, with the members that live."""
        before = self._platform.members()
        found = self._platform.find_members()
        memberships = [each.membership for each in found]
        newest = max(memberships, key=lambda each: each.version, default=None)
        if newest is None or not newest.state:
            raise Violation("no member of the cluster knows which others belong to it")
        state = state_of(newest)
        self.core = self.world.cores.supervisor.successor(newest)
        self._num_frontends_begun = next_number(
            state.num_frontends_begun,
            [each.frontend_id for each in before if isinstance(each, FrontendProcess)],
        )
        self._num_schedulers_begun = next_number(
            state.num_schedulers_begun,
            [each.number for each in before if isinstance(each, SchedulerProcess)],
        )
        instances = {each.instance_id for each in found if isinstance(each, InstanceProcess)}
        unheard = {
            instance_id: hosted
            for instance_id, hosted in state.hosted.items()
            if instance_id in state.fleet.members
            and not self.world.nodes.is_within_reach(instance_id)
        }
        effects = self.core.take_over(sorted({*instances, *unheard}), self.now_s)
        for each in found:
            if isinstance(each, InstanceProcess) and each.instance_id not in state.fleet.members:
                self._platform.kill(each)
            elif isinstance(each, InstanceProcess):
                self._hosted[each.instance_id] = HostedInstance(each.name, KV_FORMAT)
                self._watch(each)
            elif isinstance(each, FrontendProcess):
                self._frontends[each.frontend_id] = each.name
                self._watch(each)
            elif isinstance(each, SchedulerProcess):
                self._scheduler = each.name
                self._watch(each)
        for instance_id, hosted in unheard.items():
            # It may act until its lease ends, and counts until then.
            self._hosted[instance_id] = hosted
            self._watch(self.world.processes[instance_id])
            self._leases.end(instance_id)
        for _ in range(num_frontends - len(self._frontends)):
            self._start_frontend()
        if self._scheduler is None:
            self._start_scheduler()
        self._carry_out(effects)

    @property
    def is_whole(self) -> bool:
        """Whether, to its knowledge, no member is missing: an instance that dies has others beside
        it, though more may be on their way."""
        return (
            self._scheduler is not None
            and len(self._frontends) == self._platform.num_frontends
            and len(self.core.fleet.in_phase(Phase.SERVING)) >= 2
        )

    # ----------------------------------------------------------------------------- messages

    def receive(self, message: WireMessage, frames: Sequence[bytes]) -> None:
        if isinstance(message, Heartbeat):
            self._leases.on_heartbeat(message)
            return
        self._carry_out(self.core.on_message(message, self.now_s))

    def next_deadline_s(self) -> float | None:
        return self.core.fleet.next_deadline_s

    def on_time(self) -> None:
        self._carry_out(self.core.fleet.on_time(self.now_s))

    def _carry_out(self, effects: Iterable[SupervisorEffect]) -> None:
        must_announce = False
        for effect in effects:
            self.begin_effect()
            match effect:
                case Start(instance_id):
                    self._start_instance(instance_id)
                    must_announce = True
                case CancelStart(instance_id):
                    self._platform.cancel(instance_id)
                case Close(instance_id):
                    self._platform.close(instance_id)
                case Announce():
                    must_announce = True
                case ToMailbox(address, message):
                    self.send(address, message)
                case GiveUpGeneration():
                    pass
                case Unexpected(message):
                    raise Violation(f"{self.name} got what is not for a supervisor: {message}")
        if must_announce:
            self._announce()
        self.schedule_tick()

    def _announce(self) -> None:
        others = OtherMembers(
            tuple(FrontendMember(each, name) for each, name in self._frontends.items()),
            self._scheduler,
            self._num_frontends_begun,
            self._num_schedulers_begun,
            b"ready",
        )
        for effect in self.core.announce(self._hosted, others, self.name):
            self.begin_effect()
            match effect:
                case ToMailbox(address, message):
                    self.send(address, message)
                case KeepOnly(addresses):
                    self.world.network.keep_only(self, addresses)

    # -------------------------------------------------------------------------------- actors

    def _start_instance(self, instance_id: InstanceId) -> None:
        def on_up() -> None:
            self._hosted[instance_id] = HostedInstance(instance_id, KV_FORMAT)
            self._watch(self.world.processes[instance_id])
            self._carry_out(self.core.fleet.on_started(instance_id, self.now_s))

        def on_failed() -> None:
            self._carry_out(self.core.fleet.on_start_failed(instance_id, "failed", self.now_s))

        def on_pending(reason: str | None) -> None:
            fleet = self.core.fleet
            self._carry_out(
                fleet.on_placed(instance_id, None)
                if reason is None
                else fleet.on_pending(instance_id, reason)
            )

        self._platform.start_instance(self, instance_id, on_up, on_failed, on_pending)

    def _start_scheduler(self) -> None:
        number = self._num_schedulers_begun
        name = f"s{number}"
        self._num_schedulers_begun += 1

        def on_up() -> None:
            self._scheduler = name
            self._watch(self.world.processes[name])
            self._announce()

        self._platform.start_other(self, lambda: SchedulerProcess(name, self.world, number), on_up)

    def _start_frontend(self) -> None:
        frontend_id = FrontendId(self._num_frontends_begun)
        self._num_frontends_begun += 1
        name = f"f{frontend_id}"

        def on_up() -> None:
            self._frontends[frontend_id] = name
            self._watch(self.world.processes[name])
            self._announce()

        self._platform.start_other(
            self, lambda: FrontendProcess(name, self.world, frontend_id), on_up
        )

    def _watch(self, process: Process) -> None:
        self._leases.begin(process.name)
        self._platform.watch(self, process, lambda: self._on_death(process))

    def on_node_lost(self, instance_id: InstanceId) -> None:
        """Ray says that the instance is dead, as it has given up its node."""
        if instance_id in self._hosted:
            self._leases.end(instance_id)

    def _on_lease_over(self, member: str) -> None:
        self._on_death(self.world.processes[member])

    def _on_death(self, process: Process) -> None:
        """The process is dead, and will not act again."""
        self._leases.forget(process.name)
        if isinstance(process, InstanceProcess):
            if self._hosted.pop(process.instance_id, None) is None:
                return  # Its lease was over before its death was noticed.
            self._carry_out(self.core.fleet.on_gone(process.instance_id, self.now_s))
        elif isinstance(process, FrontendProcess):
            del self._frontends[process.frontend_id]
            self._announce()
            self._start_frontend()
        else:
            self._scheduler = None
            self._announce()
            self._start_scheduler()
