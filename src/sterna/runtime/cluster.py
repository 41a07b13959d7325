"""The supervisor: who should be there, who is there, and telling everybody (design: Cluster).

Level-triggered: after every change it compares the wanted members with the present ones, starts
what is missing, and sends the whole membership to all.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import ray

from sterna.config import ClusterConfig
from sterna.engine.emulated.driver import EmulatedOptions
from sterna.errors import InstanceStartError
from sterna.mailbox import Mailbox
from sterna.messages import Frontend, Instance, Membership
from sterna.runtime.actors import (
    FrontendActor,
    InstanceActor,
    SchedulerActor,
    configure_logging,
    remote_class,
)
from sterna.types import FrontendId, InstanceId

logger = logging.getLogger(__name__)

RESTART_DELAYS_S = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Time between two attempts to replace a member that does not start; the last one repeats."""


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
    _emulated: EmulatedOptions | None
    _mailbox: Mailbox

    def __init__(self, environment: dict[str, str], metrics_folder: str) -> None:
        self._environment = environment
        self._metrics_folder = metrics_folder
        self._version = 0
        self._num_instances_begun = 0
        self._num_frontends_begun = 0
        self._instances: dict[InstanceId, _Member] = {}
        self._frontends: dict[FrontendId, _Member] = {}
        self._scheduler: _Member | None = None
        self._ready_response: bytes | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closing = False
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
        self._emulated = emulated
        self._mailbox = Mailbox(config.internal_host)
        more = [self._import_frontend() for _ in range(config.num_frontends - 1)]
        frontends = [
            self._prepare_frontend(*frontend) for frontend in (self._first_frontend, *more)
        ]
        instances = [self._start_instance() for _ in range(config.num_instances)]
        prepared, *_ = await asyncio.gather(
            asyncio.gather(*frontends), self._start_scheduler(), *instances
        )
        await asyncio.gather(*(self._start_frontend(*frontend) for frontend in prepared))

    async def close(self) -> None:
        """Stop front ends first, then instances, then the scheduler."""
        self._is_closing = True
        for task in self._tasks:
            task.cancel()
        await _settle(*(member.actor.stop.remote() for member in self._frontends.values()))
        await _settle(*(member.actor.close.remote() for member in self._instances.values()))
        self._mailbox.close()

    # ------------------------------------------------------------------------------ starting

    async def _start_scheduler(self) -> None:
        actor = SchedulerActor.remote()
        config = self._config
        address = await actor.start.remote(
            config.llumlet.policy, config.internal_host, config.log_level
        )
        self._scheduler = _Member(actor, address)
        self._watch(self._watch_scheduler(actor))
        self._announce()

    async def _start_instance(self) -> None:
        instance_id = InstanceId(f"i{self._num_instances_begun}")
        self._num_instances_begun += 1
        config = self._config
        actor = InstanceActor.options(num_gpus=config.num_gpus_per_instance).remote(
            f"instance {instance_id}"
        )
        try:
            address, facts = await actor.start.remote(
                instance_id,
                self._args,
                config.llumlet,
                config.transport,
                config.internal_host,
                self._environment,
                config.log_level,
                self._emulated,
            )
        except ray.exceptions.RayTaskError as error:
            ray.kill(actor)
            raise InstanceStartError(f"instance {instance_id}: {error.cause}") from error
        except ray.exceptions.RayError as error:
            raise InstanceStartError(f"instance {instance_id} died while starting") from error
        self._ready_response = facts.ready_response
        self._instances[instance_id] = _Member(actor, address)
        self._watch(self._watch_instance(instance_id, actor))
        self._announce()

    def _import_frontend(self) -> tuple[FrontendId, Any]:
        frontend_id = FrontendId(self._num_frontends_begun)
        self._num_frontends_begun += 1
        environment = {**self._environment, "PROMETHEUS_MULTIPROC_DIR": self._metrics_folder}
        actor = FrontendActor.remote(f"front end {frontend_id}", environment)
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
        self._watch(self._watch_frontend(frontend_id, actor))

    # ------------------------------------------------------------------------------ watching

    def _watch(self, watcher: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(watcher)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch_instance(self, instance_id: InstanceId, actor: Any) -> None:
        reason = await _end_of(actor)
        logger.error("instance lost instance=%s reason=%s", instance_id, reason)
        # Whatever is left of it must not act again before others take over its requests.
        await _kill(actor)
        del self._instances[instance_id]
        self._announce()
        await self._replace("instance", self._start_instance)

    async def _watch_scheduler(self, actor: Any) -> None:
        reason = await _end_of(actor)
        logger.error("global scheduler lost, front ends go on without reason=%s", reason)
        await _kill(actor)
        self._scheduler = None
        self._announce()
        await self._replace("global scheduler", self._start_scheduler)

    async def _watch_frontend(self, frontend_id: FrontendId, actor: Any) -> None:
        reason = await _end_of(actor)
        logger.error("front end lost frontend=%d reason=%s", frontend_id, reason)
        await _kill(actor)
        del self._frontends[frontend_id]
        self._announce()
        await self._replace("front end", self._replace_frontend)

    async def _replace(self, what: str, start: Callable[[], Awaitable[None]]) -> None:
        """Start a successor, and try again for as long as it does not come up."""
        delays_s = itertools.chain(RESTART_DELAYS_S, itertools.repeat(RESTART_DELAYS_S[-1]))
        while not self._is_closing:
            try:
                await start()
            except (ray.exceptions.RayError, InstanceStartError) as error:
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

    def _announce(self) -> None:
        """Tell everybody who is there."""
        self._version += 1
        instances = tuple(
            Instance(instance_id, member.address) for instance_id, member in self._instances.items()
        )
        frontends = tuple(
            Frontend(frontend_id, member.address) for frontend_id, member in self._frontends.items()
        )
        scheduler = None if self._scheduler is None else self._scheduler.address
        membership = Membership(self._version, instances, frontends, scheduler)
        addresses = {i.address for i in instances} | {f.address for f in frontends}
        if scheduler is not None:
            addresses.add(scheduler)
        for address in addresses:
            self._mailbox.send(address, membership)
        self._mailbox.keep_only(addresses)


async def _end_of(actor: Any) -> str:
    """Wait until the actor's `run` ends or the actor dies; returns why."""
    try:
        return str(await actor.run.remote())
    except ray.exceptions.RayError as error:
        return str(error).strip().splitlines()[0]


async def _kill(actor: Any) -> None:
    """Kill the actor; returns when Ray knows that it is dead."""
    ray.kill(actor)
    with contextlib.suppress(ray.exceptions.RayError):
        await actor.process_id.remote()


async def _settle(*references: Any) -> None:
    """Wait for calls whose callee may already be dead."""
    await asyncio.gather(*references, return_exceptions=True)


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
        """Never return: whoever waits for it learns of the supervisor's death."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        """See `Cluster.close`."""
        await self._cluster.close()


ClusterActor = remote_class(_ClusterActor)
