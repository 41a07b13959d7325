"""The supervisor's shell: carries out the decisions of the pure `SupervisorCore` on Ray.

It places, starts, watches and ends actors, and announces the membership. Scheduler and front ends
are replaced whenever one dies.
"""

import asyncio
import logging
import math
from collections.abc import Iterable

import ray

from sterna.config import ClusterConfig
from sterna.engine.emulated.emulated_engine import EmulatedOptions
from sterna.engine.interface import EngineFacts
from sterna.errors import InstanceStartError
from sterna.messages.actors import DrainNode, Heartbeat, HeartbeatAnswer, WireMessage
from sterna.messaging.mailbox import Mailbox
from sterna.messaging.send_effects import KeepOnly, ToMailbox, Unexpected
from sterna.runtime.actors.actor_classes import remote_class
from sterna.runtime.actors.addresses import is_gcs_up, node_addresses, own_host
from sterna.runtime.actors.packed_args import PackedArgs
from sterna.runtime.processes.log_lines import configure_logging
from sterna.runtime.processes.process import own_identity
from sterna.runtime.supervisor.instance_actors import InstanceActors
from sterna.runtime.supervisor.placement import find_places
from sterna.runtime.supervisor.recovery import FRONTEND, SCHEDULER, find_members
from sterna.runtime.supervisor.services import Services
from sterna.runtime.supervisor.tasks import Tasks
from sterna.runtime.supervisor.watch import Watch
from sterna.supervisor.core import (
    NotTerminated,
    OperatorDrain,
    OperatorTermination,
    SupervisorCore,
    SupervisorEffect,
    next_number,
    state_of,
)
from sterna.supervisor.failure_detector import ProcessIdentity
from sterna.supervisor.fleet import (
    Announce,
    CancelStart,
    Close,
    Fleet,
    GiveUpGeneration,
    Phase,
    Start,
)
from sterna.types import InstanceId

logger = logging.getLogger(__name__)

RECOVERY_S = 3.0
"""Delay of the replacement of a dead instance if engines compute on the CPU: its start would take
the cores on which other instances compute the KV cache of its streams again."""

LONG_ANNOUNCEMENT_S, ANNOUNCEMENT_PAUSES = 0.02, 4
"""An announcement that takes longer is followed by a pause of as many times its duration, and what
changes meanwhile is announced together: with a thousand instances one takes 0.2 seconds, and each
of them is announced when it is up."""

WEIGHTS_DELAY_S = 0.5
"""Time after which the members are told that an instance's weights were updated. Meanwhile the
others say so of theirs: each tells it with its next heartbeat."""


class Supervisor:
    """Starts the actors of one cluster and keeps them alive.

    The first front end begins its imports at once: they take longer than reading the
    configuration.

    Args:
        environment: environment variables of processes that run vLLM.
        metrics_folder: folder of the front ends' counters; they answer on one port, and any of
            them shows the metrics of all.
        is_successor: whether it is to take over from another supervisor.
    """

    _mailbox: Mailbox
    _core: SupervisorCore
    _instances: InstanceActors
    _watch: Watch

    def __init__(
        self, environment: dict[str, str], metrics_folder: str, *, is_successor: bool = False
    ) -> None:
        self._environment = environment
        self._starts: dict[InstanceId, asyncio.Task[None]] = {}
        self._tasks = Tasks()
        self._services = Services(environment, metrics_folder, self._tasks, self._announce)
        self._timer: asyncio.TimerHandle | None = None
        self._announcement: asyncio.TimerHandle | None = None
        self._announcement_due_s = 0.0
        self._announces_from_s = -math.inf
        self._is_closing = False
        if not is_successor:
            self._services.begin_imports()

    async def start(
        self, config: ClusterConfig, args: PackedArgs, emulated: EmulatedOptions | None = None
    ) -> None:
        """Start everything concurrently; returns when requests can be served.

        Args:
            args: the options of `vllm serve`, for engines and front ends.
            emulated: the engine that instances emulate; None for vLLM.

        Raises:
            InstanceStartError: an instance could not be started; the caller closes the others.
        """
        self._configure(config, args, emulated)
        scaling = config.scaling
        self._core = SupervisorCore(
            Fleet(
                wanted=config.num_instances,
                min_instances=1 if scaling is None else scaling.min_instances,
                max_instances=None if scaling is None else scaling.max_instances,
            )
        )
        for effect in self._fleet.begin(_now_s()):
            if isinstance(effect, Start):
                start = self._start_instance(effect.instance_id, effect.generation)
                self._starts[effect.instance_id] = asyncio.ensure_future(start)
        instances = [self._until_up(*each) for each in self._starts.items()]
        preparing = asyncio.ensure_future(self._services.prepare())
        await asyncio.gather(preparing, self._services.start_scheduler(), *instances)
        await self._services.start_frontends(preparing.result())
        self._carry_out(self._fleet.on_pool(config.num_warm_instances, _now_s()))

    async def take_over(
        self, config: ClusterConfig, args: PackedArgs, emulated: EmulatedOptions | None = None
    ) -> None:
        """Take over from a supervisor that died, with the members that live. Streams go on
        meanwhile.

        Args: as `start`.

        Raises:
            NothingFoundError: no member is left that knows the state.
        """
        found = await find_members()
        places = await asyncio.to_thread(find_places)
        membership = found.membership()
        state = state_of(membership)
        self._core = SupervisorCore.successor(membership)
        self._services.num_frontends_begun = next_number(
            state.num_frontends_begun, found.numbers[FRONTEND]
        )
        self._services.num_schedulers_begun = next_number(
            state.num_schedulers_begun, found.numbers[SCHEDULER]
        )
        self._services.ready = state.ready
        self._configure(config, args, emulated)
        known = list(self._fleet.members)
        silent = {each: up for each, up in state.hosted.items() if each not in found.instances}
        effects = self._core.take_over({*found.instances, *silent}, _now_s())
        for instance_id in known:
            if instance_id in found.instances:
                actor, instance = found.instances.pop(instance_id)
                # An instance has a place as long as it lives.
                place = places.pop(instance_id)
                self._instances.take_over(instance_id, actor, instance, place)
                self._on_facts(instance.facts)
                self._tasks.begin(self._watch_instance(instance_id))
            elif instance_id in silent:
                # It may act until it has been killed or its lease ends, and counts until then. The
                # takeover does not wait for that: the kernel may keep a process for long.
                self._instances.take_over_silent(
                    instance_id, silent[instance_id], places.pop(instance_id, None)
                )
                self._tasks.begin(self._watch_instance(instance_id))
        for actor, _ in found.instances.values():
            # It came up after the last announcement, so that the fleet does not know it.
            ray.kill(actor)
        for place in places.values():
            # Its instance is dead, or did not come up.
            self._tasks.begin(place.give_back())
        self._services.take_over(found)
        logger.info("supervisor took over instances=%s", ",".join(self._fleet.members))
        self._carry_out(effects)

    @property
    def _fleet(self) -> Fleet:
        return self._core.fleet

    def _configure(
        self, config: ClusterConfig, args: PackedArgs, emulated: EmulatedOptions | None
    ) -> None:
        self._watch = Watch(config.watch, self._tasks)
        self._services.configure(config, args.for_frontends, self._watch)
        self._instances = InstanceActors(
            config,
            args.for_instances,
            emulated,
            self._environment,
            self._watch,
            self._tasks,
            lambda: self._fleet.drained_nodes,
        )
        self._mailbox = Mailbox(own_host(config.internal_host), config.mailbox_keys)
        self._tasks.begin(self._mailbox.deliver(self._on_message))

    def _on_facts(self, facts: EngineFacts | None) -> None:
        if self._services.ready is None and facts is not None:
            self._services.ready = facts.ready

    async def finish_requests(self, timeout_s: float) -> int:
        """See `Services.finish_requests`."""
        return await self._services.finish_requests(timeout_s)

    async def failed(self) -> None:
        """Wait for an error of the supervisor, and raise it."""
        await self._tasks.failed()

    async def close(self) -> None:
        """Stop front ends first, then instances, then the scheduler."""
        self._is_closing = True
        for timer in (self._timer, self._announcement):
            if timer is not None:
                timer.cancel()
        self._tasks.cancel()
        await self._services.stop_frontends()
        await self._instances.close_all()
        self._mailbox.close()

    # ------------------------------------------------------------------------------ messages

    def _on_message(self, message: WireMessage, frames: list[bytes]) -> None:
        if isinstance(message, Heartbeat):
            instance_id = InstanceId(message.member)
            if self._watch.on_heartbeat(message):
                self._answer(instance_id, message.asked_s)
            if self._instances.on_weights(instance_id, message.weight_updates):
                self._announce(WEIGHTS_DELAY_S)
            return
        if isinstance(message, DrainNode):
            self._tasks.begin(self._on_drain_node(message))
            return
        self._carry_out(self._core.on_message(message, _now_s()))

    async def _on_drain_node(self, order: DrainNode) -> None:
        """Carry out the order with the nodes that there are."""
        found = await asyncio.to_thread(node_addresses) if is_gcs_up() else {}
        nodes = sorted(set(found.values()))
        self._carry_out(self._core.on_drain_node(order, nodes, _now_s()))

    def _answer(self, instance_id: InstanceId, asked_s: float | None = None) -> None:
        """Answer the heartbeat that an instance sent at this time; None asks for the first one."""
        address = self._instances.address(instance_id)
        if address is not None:
            self._mailbox.send(address, HeartbeatAnswer(self._mailbox.address, asked_s))

    # ------------------------------------------------------------------------------- effects

    def _carry_out(self, effects: Iterable[SupervisorEffect], start_delay_s: float = 0.0) -> None:
        must_announce = False
        for effect in effects:
            match effect:
                case Start(instance_id, generation):
                    start = self._start_later(instance_id, generation, start_delay_s)
                    self._starts[instance_id] = self._tasks.begin(start)
                    must_announce = True
                case CancelStart(instance_id):
                    logger.info(
                        "start given up while it waited for a place instance=%s", instance_id
                    )
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
                case ToMailbox(address, message):
                    self._mailbox.send(address, message)
                case NotTerminated(instance_id, reason):
                    logger.info("not terminated instance=%s reason=%s", instance_id, reason)
                case OperatorTermination(instance_id, is_undo):
                    logger.info("an operator drains instance=%s undo=%s", instance_id, is_undo)
                case OperatorDrain(node, is_undo):
                    logger.info("an operator drains node=%s undo=%s", node, is_undo)
                case Unexpected(message):
                    logger.error("unexpected message type=%s", type(message).__name__)
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

    async def _start_later(self, instance_id: InstanceId, generation: int, delay_s: float) -> None:
        """Start an instance of a cluster that serves, which goes on if the start fails."""
        await asyncio.sleep(delay_s)
        try:
            await self._start_instance(instance_id, generation)
        except (ray.exceptions.RayError, InstanceStartError) as error:
            reason = str(error).strip().splitlines()[0]
            logger.error("instance not started instance=%s reason=%s", instance_id, reason)
            is_of_options = not isinstance(error, InstanceStartError) or error.is_of_options
            failed = self._fleet.on_start_failed(
                instance_id, reason, _now_s(), is_of_options=is_of_options
            )
            self._carry_out(failed)
        finally:
            self._starts.pop(instance_id, None)

    async def _until_up(self, instance_id: InstanceId, start: asyncio.Future[None]) -> None:
        """Wait for one of the first instances, unless auto-scaling calls its start off.

        Raises:
            InstanceStartError: it did not start.
        """
        try:
            await asyncio.wait([start])
        except asyncio.CancelledError:
            start.cancel()
            await asyncio.wait([start])
            raise
        finally:
            self._starts.pop(instance_id, None)
        if not start.cancelled():
            start.result()

    async def _start_instance(self, instance_id: InstanceId, generation: int) -> None:
        """Raises InstanceStartError: it did not start, and nothing is left of it."""
        facts = await self._instances.start(
            instance_id,
            self._core.options[generation],
            lambda reason: self._carry_out(self._fleet.on_pending(instance_id, reason)),
            lambda node: self._carry_out(self._fleet.on_placed(instance_id, node)),
        )
        self._on_facts(facts)
        self._tasks.begin(self._watch_instance(instance_id))
        self._carry_out(self._fleet.on_started(instance_id, _now_s()))

    async def _watch_instance(self, instance_id: InstanceId) -> None:
        self._answer(instance_id)
        reason = await self._instances.ended(instance_id)
        start_delay_s = 0.0
        if self._fleet.members[instance_id].phase is Phase.CLOSING:
            logger.info("instance ended instance=%s", instance_id)
        else:
            logger.error("instance lost instance=%s reason=%s", instance_id, reason)
            start_delay_s = self._recovery_s()
        self._carry_out(self._fleet.on_gone(instance_id, _now_s()), start_delay_s)

    def _recovery_s(self) -> float:
        """Return the time for which streams need the cores that a start would take from them."""
        can_go_on = bool(self._instances.hosted())
        return RECOVERY_S if can_go_on and self._instances.compute_on_cpu else 0.0

    # ----------------------------------------------------------------------------- membership

    def _announce(self, delay_s: float = 0.0) -> None:
        """Send the membership to all members, by this time unless they are very many."""
        now_s = _now_s()
        due_s = max(now_s + delay_s, self._announces_from_s)
        if self._announcement is not None:
            # The time is kept here: uvloop's handle for a timer that is due already has no time.
            if self._announcement_due_s <= due_s:
                return
            self._announcement.cancel()
        if due_s > now_s and not self._is_closing:
            loop = asyncio.get_running_loop()
            self._announcement_due_s = due_s
            self._announcement = loop.call_at(due_s, self._announce_now)
        else:
            self._announce_now()

    def _announce_now(self) -> None:
        self._announcement = None
        began_s = _now_s()
        others = self._services.others()
        for effect in self._core.announce(self._instances.hosted(), others, self._mailbox.address):
            match effect:
                case ToMailbox(address, message):
                    self._mailbox.send(address, message)
                case KeepOnly(addresses):
                    self._mailbox.keep_only(set(addresses))
        ended_s = _now_s()
        if ended_s - began_s > LONG_ANNOUNCEMENT_S:
            self._announces_from_s = ended_s + ANNOUNCEMENT_PAUSES * (ended_s - began_s)


def _now_s() -> float:
    """Return the time of the loop's own clock, by which timers are set."""
    return asyncio.get_running_loop().time()


class _SupervisorActor:
    """Hosts the supervisor."""

    def __init__(
        self, environment: dict[str, str], metrics_folder: str, *, is_successor: bool = False
    ) -> None:
        self._process = own_identity()
        self._supervisor = Supervisor(environment, metrics_folder, is_successor=is_successor)
        self._has_begun = asyncio.Event()

    def __repr__(self) -> str:
        # Ray puts it before each line that the actor prints.
        return "supervisor"

    async def stand_by(self) -> None:
        """Wait in reserve, with everything imported, until it begins to act."""
        await self._has_begun.wait()

    async def has_begun(self) -> bool:
        """Return whether it has begun to act."""
        return self._has_begun.is_set()

    async def start(
        self, config: ClusterConfig, args: PackedArgs, emulated: EmulatedOptions | None = None
    ) -> None:
        """See `Supervisor.start`."""
        self._has_begun.set()
        configure_logging(config.log_level)
        await self._supervisor.start(config, args, emulated)

    async def take_over(
        self, config: ClusterConfig, args: PackedArgs, emulated: EmulatedOptions | None = None
    ) -> None:
        """See `Supervisor.take_over`."""
        self._has_begun.set()
        configure_logging(config.log_level)
        await self._supervisor.take_over(config, args, emulated)

    async def run(self) -> None:
        """Never return: the driver's call ends when the supervisor dies."""
        await self._supervisor.failed()

    async def process(self) -> ProcessIdentity:
        """Return the actor's process."""
        return self._process

    async def finish_requests(self, timeout_s: float) -> int:
        """See `Supervisor.finish_requests`."""
        return await self._supervisor.finish_requests(timeout_s)

    async def close(self) -> None:
        """See `Supervisor.close`."""
        await self._supervisor.close()


SupervisorActor = remote_class(_SupervisorActor)
