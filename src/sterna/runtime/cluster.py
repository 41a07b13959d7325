"""The supervisor: carries out what the fleet needs, and tells everybody who is there (design:
Cluster).

What should be there is decided by the pure `Fleet`; here actors are placed, started, watched and
ended. Scheduler and front ends are replaced whenever one dies.
"""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

import ray

from sterna.config import ClusterConfig
from sterna.engine.emulated.driver import EmulatedOptions
from sterna.errors import FleetError, InstanceStartError, SternaError
from sterna.fleet import (
    RETRY_DELAYS_S,
    Announce,
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
    Frontend,
    Instance,
    Membership,
    RestartInstances,
    StartInstances,
    TerminateInstance,
    WireMessage,
)
from sterna.runtime.actors import (
    FrontendActor,
    SchedulerActor,
    configure_logging,
    remote_class,
)
from sterna.runtime.forking import METRICS_FOLDER_VARIABLE, forked_runtime_env
from sterna.runtime.instance_actors import InstanceActors, end_of, kill, settle
from sterna.types import FrontendId, InstanceId

logger = logging.getLogger(__name__)

NUM_INSTANCES_AT_ONCE = 100
"""What an operator may ask for in one go: more is a slip of the keyboard."""


@dataclass(slots=True)
class _Member:
    actor: Any
    address: str


class Cluster:
    """Starts the actors of one cluster and keeps them alive.

    The first front end begins to import what it needs at once: that takes longer than to find
    out what to serve.

    Args:
        environment: environment variables of processes that run vLLM.
        metrics_folder: where front ends keep their counters; they answer on one port, and any of
            them shows the metrics of all.
    """

    _config: ClusterConfig
    _args: bytes
    _mailbox: Mailbox
    _fleet: Fleet
    _instances: InstanceActors

    def __init__(self, environment: dict[str, str], metrics_folder: str) -> None:
        self._environment = environment
        self._metrics_folder = metrics_folder
        self._version = 0
        self._num_frontends_begun = 0
        # The version of the membership by which each terminating instance is being emptied.
        self._emptied_since: dict[InstanceId, int] = {}
        # Further options of vLLM by generation; later ones overrule those of `sterna serve`.
        self._options: dict[int, tuple[str, ...]] = {0: ()}
        self._frontends: dict[FrontendId, _Member] = {}
        self._scheduler: _Member | None = None
        self._ready_response: bytes | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closing = False
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._first_frontend = self._import_frontend()

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
        self._config = config
        self._args = args
        self._instances = InstanceActors(config, args, emulated, self._environment)
        self._mailbox = Mailbox(config.internal_host)
        scaling = config.scaling
        self._fleet = Fleet(
            wanted=config.num_instances,
            min_instances=1 if scaling is None else scaling.min_instances,
            max_instances=None if scaling is None else scaling.max_instances,
        )
        self._begin(self._mailbox.deliver(self._on_message))
        more = [self._import_frontend() for _ in range(config.num_frontends - 1)]
        frontends = [
            self._prepare_frontend(*frontend) for frontend in (self._first_frontend, *more)
        ]
        instances = [
            self._start_instance(effect.instance_id, effect.generation)
            for effect in self._fleet.begin(_now_s())
            if isinstance(effect, Start)
        ]
        prepared, *_ = await asyncio.gather(
            asyncio.gather(*frontends), self._start_scheduler(), *instances
        )
        await asyncio.gather(*(self._start_frontend(*frontend) for frontend in prepared))
        # Before, they would only take time from those that are needed first.
        self._carry_out(self._fleet.on_pool(config.num_warm_instances, _now_s()))

    async def drain(self, timeout_s: float) -> int:
        """Let no more requests in, and wait for the answers under way; returns how many are left
        after so long."""
        left = await asyncio.gather(
            *(member.actor.drain.remote(timeout_s) for member in self._frontends.values()),
            return_exceptions=True,
        )
        return sum(each for each in left if isinstance(each, int))

    async def close(self) -> None:
        """Stop front ends first, then instances, then the scheduler."""
        self._is_closing = True
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await settle(*(member.actor.stop.remote() for member in self._frontends.values()))
        await self._instances.close_all()
        self._mailbox.close()

    # ------------------------------------------------------------------------------ messages

    def _on_message(self, message: WireMessage, frames: list[bytes]) -> None:
        now_s = _now_s()
        match message:
            case AddInstances(num_instances):
                self._carry_out(self._fleet.on_add(num_instances, now_s))
            case TerminateInstance(instance_id):
                try:
                    self._carry_out(self._fleet.on_terminate(instance_id, Cause.SCALING, now_s))
                except SternaError as error:
                    # The scheduler's view was older than ours.
                    logger.info("not terminated instance=%s reason=%s", instance_id, error)
            case Emptied(instance_id, version):
                # What is said of an earlier emptying, which was undone, is void.
                if version >= self._emptied_since.get(instance_id, version + 1):
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
                    self._begin(self._start_later(instance_id, generation))
                    must_announce = True
                case Close(instance_id):
                    self._begin(self._instances.close(instance_id))
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

    async def _start_instance(self, instance_id: InstanceId, generation: int) -> None:
        """Raises InstanceStartError: it did not start, and nothing is left of it."""
        facts = await self._instances.start(
            instance_id,
            self._options[generation],
            lambda reason: self._carry_out(self._fleet.on_pending(instance_id, reason)),
        )
        self._ready_response = self._ready_response or facts.ready_response
        self._begin(self._watch_instance(instance_id))
        self._carry_out(self._fleet.on_started(instance_id, _now_s()))

    async def _watch_instance(self, instance_id: InstanceId) -> None:
        reason = await self._instances.ended(instance_id)
        if self._fleet.members[instance_id].phase is Phase.CLOSING:
            logger.info("instance ended instance=%s", instance_id)
        else:
            logger.error("instance lost instance=%s reason=%s", instance_id, reason)
        self._carry_out(self._fleet.on_gone(instance_id, _now_s()))

    # ------------------------------------------------------------------ scheduler, front ends

    async def _start_scheduler(self) -> None:
        actor = SchedulerActor.remote()
        config = self._config
        address = await actor.start.remote(
            config.llumlet.policy, config.internal_host, config.log_level, config.scaling
        )
        self._scheduler = _Member(actor, address)
        self._begin(self._watch_scheduler(actor))
        self._announce()

    async def _watch_scheduler(self, actor: Any) -> None:
        reason = await end_of(actor)
        logger.error("global scheduler lost, front ends go on without reason=%s", reason)
        await kill(actor)
        self._scheduler = None
        self._announce()
        await self._replace("global scheduler", self._start_scheduler)

    def _import_frontend(self) -> tuple[FrontendId, Any]:
        frontend_id = FrontendId(self._num_frontends_begun)
        self._num_frontends_begun += 1
        environment = {**self._environment, METRICS_FOLDER_VARIABLE: self._metrics_folder}
        actor = FrontendActor.options(runtime_env=forked_runtime_env()).remote(
            f"front end {frontend_id}", environment
        )
        return frontend_id, actor

    async def _prepare_frontend(
        self, frontend_id: FrontendId, actor: Any
    ) -> tuple[FrontendId, Any, str]:
        config = self._config
        address = await actor.prepare.remote(config.internal_host, config.log_level)
        return frontend_id, actor, address

    async def _start_frontend(self, frontend_id: FrontendId, actor: Any, address: str) -> None:
        self._frontends[frontend_id] = _Member(actor, address)
        self._announce()
        assert self._ready_response is not None
        await actor.start.remote(
            frontend_id, self._args, self._config.frontend, self._ready_response
        )
        self._begin(self._watch_frontend(frontend_id, actor))

    async def _watch_frontend(self, frontend_id: FrontendId, actor: Any) -> None:
        reason = await end_of(actor)
        logger.error("front end lost frontend=%d reason=%s", frontend_id, reason)
        await kill(actor)
        del self._frontends[frontend_id]
        self._announce()
        await self._replace("front end", self._replace_frontend)

    async def _replace(self, what: str, start: Callable[[], Awaitable[None]]) -> None:
        """Start a successor, and try again for as long as it does not come up."""
        delays_s = itertools.chain(RETRY_DELAYS_S, itertools.repeat(RETRY_DELAYS_S[-1]))
        while not self._is_closing:
            try:
                await start()
            except ray.exceptions.RayError as error:
                delay_s = next(delays_s)
                reason = str(error).strip().splitlines()[0]
                logger.error("%s not replaced, again in %.0f s reason=%s", what, delay_s, reason)
                await asyncio.sleep(delay_s)
            else:
                return

    async def _replace_frontend(self) -> None:
        frontend_id, actor, address = await self._prepare_frontend(*self._import_frontend())
        try:
            await self._start_frontend(frontend_id, actor, address)
        except ray.exceptions.RayError:
            del self._frontends[frontend_id]
            ray.kill(actor)
            raise

    # ----------------------------------------------------------------------------- membership

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_ended)

    def _on_task_ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A bug: the driver is to learn of it, and to end the service.
            logger.error("supervisor failed", exc_info=error)
            if not self.failure.done():
                self.failure.set_exception(error)

    def _announce(self) -> None:
        """Tell everybody who is there."""
        self._version += 1
        instances = tuple(
            self._describe(instance_id)
            for instance_id in self._fleet.in_phase(Phase.SERVING, Phase.TERMINATING, Phase.CLOSING)
        )
        absent = tuple(
            self._describe_absent(instance_id)
            for instance_id in self._fleet.in_phase(Phase.STARTING, Phase.SPARE)
        )
        self._note_emptying(instances)
        frontends = tuple(
            Frontend(frontend_id, member.address) for frontend_id, member in self._frontends.items()
        )
        scheduler = None if self._scheduler is None else self._scheduler.address
        membership = Membership(
            self._version, instances, frontends, scheduler, absent, self._mailbox.address
        )
        addresses = {i.address for i in instances} | {f.address for f in frontends}
        if scheduler is not None:
            addresses.add(scheduler)
        for address in addresses:
            self._mailbox.send(address, membership)
        self._mailbox.keep_only(addresses)

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
        )

    def _describe_absent(self, instance_id: InstanceId) -> Absent:
        member = self._fleet.members[instance_id]
        state = member.phase.value if member.pending is None else "pending"
        return Absent(instance_id, state, member.pending, member.generation)

    def _note_emptying(self, instances: Iterable[Instance]) -> None:
        terminating = {each.instance_id for each in instances if each.is_terminating}
        self._emptied_since = {
            each: self._emptied_since.get(each, self._version) for each in terminating
        }


def _now_s() -> float:
    """Return the time of the loop's own clock, by which timers are set."""
    return asyncio.get_running_loop().time()


class _ClusterActor:
    """Hosts the supervisor."""

    def __init__(self, environment: dict[str, str], metrics_folder: str) -> None:
        self._cluster = Cluster(environment, metrics_folder)

    def __repr__(self) -> str:
        # Ray puts it before each line that the actor prints.
        return "supervisor"

    async def start(
        self, config: ClusterConfig, args: bytes, emulated: EmulatedOptions | None = None
    ) -> None:
        """See `Cluster.start`."""
        configure_logging(config.log_level)
        await self._cluster.start(config, args, emulated)

    async def run(self) -> None:
        """Return never: whoever waits for it learns of the supervisor's death."""
        await self._cluster.failure

    async def drain(self, timeout_s: float) -> int:
        """See `Cluster.drain`."""
        return await self._cluster.drain(timeout_s)

    async def close(self) -> None:
        """See `Cluster.close`."""
        await self._cluster.close()


ClusterActor = remote_class(_ClusterActor)
