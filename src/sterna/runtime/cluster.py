"""The supervisor: carries out what the fleet needs, and tells everybody who is there (design:
Cluster).

What should be there is decided by the pure `Fleet`; here actors are placed, started, watched and
ended. Scheduler and front ends are replaced whenever one dies.
"""

import asyncio
import logging
from collections.abc import Iterable

import ray

from sterna.config import ClusterConfig
from sterna.engine.emulated.driver import EmulatedOptions
from sterna.engine.interface import EngineFacts
from sterna.errors import FleetError, InstanceStartError, SternaError
from sterna.fleet import (
    Announce,
    CancelStart,
    Cause,
    Close,
    Fleet,
    FleetEffect,
    GiveUpGeneration,
    Phase,
    Start,
)
from sterna.mailbox import Mailbox
from sterna.messages import (
    Absent,
    AddInstances,
    AdminReply,
    DrainInstance,
    Emptied,
    Instance,
    Membership,
    RestartInstances,
    StartInstances,
    TerminateInstance,
    WireMessage,
)
from sterna.runtime.actors import configure_logging, remote_class
from sterna.runtime.instance_actors import InstanceActors
from sterna.runtime.placement import find_again
from sterna.runtime.services import Services
from sterna.runtime.takeover import Found, SupervisorState, find_members, state_of
from sterna.runtime.tasks import Tasks
from sterna.types import InstanceId

logger = logging.getLogger(__name__)

NUM_INSTANCES_AT_ONCE = 100
"""What an operator may ask for in one go: more is a slip of the keyboard."""


class Cluster:
    """Starts the actors of one cluster and keeps them alive.

    The first front end begins to import what it needs at once: that takes longer than to find
    out what to serve.

    Args:
        environment: environment variables of processes that run vLLM.
        metrics_folder: where front ends keep their counters; they answer on one port, and any of
            them shows the metrics of all.
        is_successor: whether it is to take over what another supervisor has started.
    """

    _mailbox: Mailbox
    _fleet: Fleet
    _instances: InstanceActors

    def __init__(
        self, environment: dict[str, str], metrics_folder: str, *, is_successor: bool = False
    ) -> None:
        self._environment = environment
        self._version = 0
        # Of the terminating instances (`Instance.emptied_since`).
        self._emptied_since: dict[InstanceId, int] = {}
        self._starts: dict[InstanceId, asyncio.Task[None]] = {}
        # Further options of vLLM by generation; later ones overrule those of `sterna serve`.
        self._options: dict[int, tuple[str, ...]] = {0: ()}
        self._tasks = Tasks()
        self._services = Services(environment, metrics_folder, self._tasks, self._announce)
        self._timer: asyncio.TimerHandle | None = None
        self._is_closing = False
        if not is_successor:
            self._services.begin_imports()

    async def start(
        self, config: ClusterConfig, args: bytes, emulated: EmulatedOptions | None = None
    ) -> None:
        """Start everything side by side; returns when requests can be served.

        Args:
            args: the pickled options of `vllm serve`, for engines and front ends. Unpickling
                imports vLLM, which only they need, and only when their environment is set.
            emulated: the engine that instances emulate; None for vLLM.

        Raises:
            InstanceStartError: an instance could not be started; the others are left to be
                closed.
        """
        self._configure(config, args, emulated)
        scaling = config.scaling
        self._fleet = Fleet(
            wanted=config.num_instances,
            min_instances=1 if scaling is None else scaling.min_instances,
            max_instances=None if scaling is None else scaling.max_instances,
        )
        instances = [
            self._start_instance(effect.instance_id, effect.generation)
            for effect in self._fleet.begin(_now_s())
            if isinstance(effect, Start)
        ]
        frontends, *_ = await asyncio.gather(
            self._services.prepare(), self._services.start_scheduler(), *instances
        )
        await self._services.start_frontends(frontends)
        # Before, they would only take time from those that are needed first.
        self._carry_out(self._fleet.on_pool(config.num_warm_instances, _now_s()))

    async def take_over(
        self, config: ClusterConfig, args: bytes, emulated: EmulatedOptions | None = None
    ) -> None:
        """Go on where a supervisor that died was: with the members that live, towards what was
        wanted. Streams have not noticed.

        Args: as `start`.

        Raises:
            NothingFoundError: nobody is left who knows what there was.
        """
        found = await find_members()
        membership = found.membership()
        state = state_of(membership)
        self._version = membership.version
        self._fleet, self._options = state.fleet, state.options
        self._services.num_frontends_begun = state.num_frontends_begun
        self._services.num_schedulers_begun = state.num_schedulers_begun
        self._services.ready_response = state.ready_response
        self._emptied_since = state.emptied_since
        self._configure(config, args, emulated)
        effects: list[FleetEffect] = []
        for instance_id in list(self._fleet.members):
            effects += self._take_over_instance(instance_id, found)
        self._fleet.never_use(found.instances)
        for instance_id, (actor, _) in found.instances.items():
            # It came up when nobody could tell of it any more.
            ray.kill(actor)
            _give_back_place(instance_id)
        self._services.take_over(found)
        logger.info("supervisor took over instances=%s", ",".join(self._fleet.members))
        self._carry_out([Announce(), *effects])

    def _take_over_instance(self, instance_id: InstanceId, found: Found) -> list[FleetEffect]:
        if instance_id not in found.instances:
            _give_back_place(instance_id)
            return self._fleet.on_gone(instance_id, _now_s())
        actor, status = found.instances.pop(instance_id)
        self._instances.take_over(instance_id, actor, status)
        self._on_facts(status.facts)
        self._tasks.begin(self._watch_instance(instance_id))
        return self._fleet.on_found(instance_id, _now_s())

    def _configure(
        self, config: ClusterConfig, args: bytes, emulated: EmulatedOptions | None
    ) -> None:
        self._services.configure(config, args)
        self._instances = InstanceActors(config, args, emulated, self._environment)
        self._mailbox = Mailbox(config.internal_host)
        self._tasks.begin(self._mailbox.deliver(self._on_message))

    def _on_facts(self, facts: EngineFacts | None) -> None:
        if self._services.ready_response is None and facts is not None:
            self._services.ready_response = facts.ready_response

    async def drain(self, timeout_s: float) -> int:
        """See `Services.drain`."""
        return await self._services.drain(timeout_s)

    async def failed(self) -> None:
        """Return never; raises what has broken the supervisor."""
        await self._tasks.failed()

    async def close(self) -> None:
        """Stop front ends first, then instances, then the scheduler."""
        self._is_closing = True
        if self._timer is not None:
            self._timer.cancel()
        self._tasks.cancel()
        await self._services.stop_frontends()
        await self._instances.close_all()
        self._mailbox.close()

    # ------------------------------------------------------------------------------ messages

    def _on_message(self, message: WireMessage, frames: list[bytes]) -> None:
        now_s = _now_s()
        match message:
            case AddInstances(num_instances):
                self._carry_out(self._fleet.on_needed(num_instances, now_s))
            case TerminateInstance(instance_id):
                try:
                    self._carry_out(self._fleet.on_terminate(instance_id, Cause.SCALING, now_s))
                except SternaError as error:
                    # The scheduler's view was older than ours.
                    logger.info("not terminated instance=%s reason=%s", instance_id, error)
            case Emptied(instance_id, emptied_since):
                # What is said of an earlier emptying, which was undone, is void.
                if self._emptied_since.get(instance_id) == emptied_since:
                    self._carry_out(self._fleet.on_emptied(instance_id, now_s))
            case DrainInstance() | StartInstances() | RestartInstances():
                self._obey(message)
            case _:
                logger.error("unexpected message type=%s", type(message).__name__)

    def _obey(self, order: DrainInstance | StartInstances | RestartInstances) -> None:
        """Do what an operator wants, and say what was begun."""
        error = None
        try:
            self._carry_out(self._effects_of(order))
        except SternaError as refusal:
            error = str(refusal)
        self._mailbox.send(order.reply_to, AdminReply(order.query_id, b"null", error))

    def _effects_of(
        self, order: DrainInstance | StartInstances | RestartInstances
    ) -> list[FleetEffect]:
        now_s = _now_s()
        match order:
            case DrainInstance(_, _, instance_id, is_undo):
                logger.info("an operator drains instance=%s undo=%s", instance_id, is_undo)
                if is_undo:
                    return self._fleet.on_undo(instance_id, now_s)
                return self._fleet.on_terminate(instance_id, Cause.OPERATOR, now_s)
            case StartInstances(_, _, num_instances):
                if not 1 <= num_instances <= NUM_INSTANCES_AT_ONCE:
                    raise FleetError(
                        f"can start 1 to {NUM_INSTANCES_AT_ONCE} instances, not {num_instances}"
                    )
                limit = self._fleet.max_instances
                if limit is not None and self._fleet.wanted + num_instances > limit:
                    raise FleetError(
                        f"{self._fleet.wanted} instances are wanted, and --max-instances is {limit}"
                    )
                return self._fleet.on_add(num_instances, now_s)
            case RestartInstances(_, _, has_surge, options):
                before = self._options[self._fleet.generation]
                effects = self._fleet.on_restart(now_s, has_surge=has_surge)
                self._options[self._fleet.generation] = (*before, *options)
                return effects

    # ------------------------------------------------------------------------------- effects

    def _carry_out(self, effects: Iterable[FleetEffect]) -> None:
        must_announce = False
        for effect in effects:
            match effect:
                case Start(instance_id, generation):
                    start = self._start_later(instance_id, generation)
                    self._starts[instance_id] = self._tasks.begin(start)
                    must_announce = True
                case CancelStart(instance_id):
                    self._starts.pop(instance_id).cancel()
                case Close(instance_id):
                    self._tasks.begin(self._instances.close(instance_id))
                case GiveUpGeneration(generation, reason):
                    logger.error(
                        "rolling restart given up, instances keep their options generation=%d "
                        "reason=%s",
                        generation,
                        reason,
                    )
                case Announce():
                    must_announce = True
        if must_announce:
            self._announce()
        self._schedule_retry()

    def _schedule_retry(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline_s = self._fleet.next_deadline_s
        if deadline_s is not None and not self._is_closing:
            self._timer = asyncio.get_running_loop().call_at(deadline_s, self._retry)

    def _retry(self) -> None:
        self._timer = None
        self._carry_out(self._fleet.on_time(_now_s()))

    # ----------------------------------------------------------------------------- instances

    async def _start_later(self, instance_id: InstanceId, generation: int) -> None:
        """Start an instance of a cluster that serves: a failure is not its end."""
        try:
            await self._start_instance(instance_id, generation)
        except (ray.exceptions.RayError, InstanceStartError) as error:
            reason = str(error).strip().splitlines()[0]
            logger.error("instance not started instance=%s reason=%s", instance_id, reason)
            self._carry_out(self._fleet.on_start_failed(instance_id, reason, _now_s()))
        finally:
            self._starts.pop(instance_id, None)

    async def _start_instance(self, instance_id: InstanceId, generation: int) -> None:
        """Raises InstanceStartError: it did not start, and nothing is left of it."""
        facts = await self._instances.start(
            instance_id,
            self._options[generation],
            lambda reason: self._carry_out(self._fleet.on_pending(instance_id, reason)),
        )
        self._on_facts(facts)
        self._tasks.begin(self._watch_instance(instance_id))
        self._carry_out(self._fleet.on_started(instance_id, _now_s()))

    async def _watch_instance(self, instance_id: InstanceId) -> None:
        reason = await self._instances.ended(instance_id)
        if self._fleet.members[instance_id].phase is Phase.CLOSING:
            logger.info("instance ended instance=%s", instance_id)
        else:
            logger.error("instance lost instance=%s reason=%s", instance_id, reason)
        self._carry_out(self._fleet.on_gone(instance_id, _now_s()))

    # ----------------------------------------------------------------------------- membership

    def _announce(self) -> None:
        """Tell everybody who is there."""
        self._version += 1
        self._note_emptying()
        instances = tuple(
            self._describe(instance_id)
            for instance_id in self._fleet.in_phase(Phase.SERVING, Phase.TERMINATING, Phase.CLOSING)
        )
        absent = tuple(
            self._describe_absent(instance_id)
            for instance_id in self._fleet.in_phase(Phase.STARTING, Phase.SPARE)
        )
        frontends, scheduler = self._services.frontends, self._services.scheduler
        membership = Membership(
            self._version,
            instances,
            frontends,
            scheduler,
            absent,
            self._mailbox.address,
            self._state().encode(),
        )
        addresses = {i.address for i in instances} | {f.address for f in frontends}
        if scheduler is not None:
            addresses.add(scheduler)
        for address in addresses:
            self._mailbox.send(address, membership)
        self._mailbox.keep_only(addresses)

    def _state(self) -> SupervisorState:
        services = self._services
        return SupervisorState(
            self._fleet,
            self._options,
            self._emptied_since,
            services.num_frontends_begun,
            services.num_schedulers_begun,
            services.ready_response,
        )

    def _describe(self, instance_id: InstanceId) -> Instance:
        member = self._fleet.members[instance_id]
        is_terminating = member.phase is not Phase.SERVING
        note = None if member.cause is None else member.cause.value
        return Instance(
            instance_id,
            self._instances.address(instance_id),
            is_terminating,
            note,
            member.generation,
            self._instances.kv_format(instance_id),
            self._emptied_since.get(instance_id, 0),
        )

    def _describe_absent(self, instance_id: InstanceId) -> Absent:
        member = self._fleet.members[instance_id]
        state = member.phase.value if member.pending is None else "pending"
        return Absent(instance_id, state, member.pending, member.generation)

    def _note_emptying(self) -> None:
        self._emptied_since = {
            each: self._emptied_since.get(each, self._version)
            for each in self._fleet.in_phase(Phase.TERMINATING, Phase.CLOSING)
        }


def _give_back_place(instance_id: InstanceId) -> None:
    if (place := find_again(instance_id)) is not None:
        place.give_back()


def _now_s() -> float:
    """Return the time of the loop's own clock, by which timers are set."""
    return asyncio.get_running_loop().time()


class _ClusterActor:
    """Hosts the supervisor."""

    def __init__(
        self, environment: dict[str, str], metrics_folder: str, *, is_successor: bool = False
    ) -> None:
        self._cluster = Cluster(environment, metrics_folder, is_successor=is_successor)

    def __repr__(self) -> str:
        # Ray puts it before each line that the actor prints.
        return "supervisor"

    async def start(
        self, config: ClusterConfig, args: bytes, emulated: EmulatedOptions | None = None
    ) -> None:
        """See `Cluster.start`."""
        configure_logging(config.log_level)
        await self._cluster.start(config, args, emulated)

    async def take_over(
        self, config: ClusterConfig, args: bytes, emulated: EmulatedOptions | None = None
    ) -> None:
        """See `Cluster.take_over`."""
        configure_logging(config.log_level)
        await self._cluster.take_over(config, args, emulated)

    async def run(self) -> None:
        """Return never: whoever waits for it learns of the supervisor's death."""
        await self._cluster.failed()

    async def drain(self, timeout_s: float) -> int:
        """See `Cluster.drain`."""
        return await self._cluster.drain(timeout_s)

    async def close(self) -> None:
        """See `Cluster.close`."""
        await self._cluster.close()


ClusterActor = remote_class(_ClusterActor)
