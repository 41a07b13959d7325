"""The global scheduler and the front ends of a cluster: started, watched, and replaced when one
dies."""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from prometheus_client.multiprocess import mark_process_dead

from sterna.config import ClusterConfig
from sterna.messages.actors import SCHEDULER_NAME, FrontendMember, frontend_name
from sterna.runtime.actors.actor_classes import FrontendActor, SchedulerActor
from sterna.runtime.actors.addresses import is_gcs_up, staying_here
from sterna.runtime.fork_server.launcher import METRICS_FOLDER_VARIABLE, forked_runtime_env
from sterna.runtime.supervisor.instance_actors import settle, surviving_as
from sterna.runtime.supervisor.ray_errors import reason_of
from sterna.runtime.supervisor.recovery import SCHEDULER, FoundMembers
from sterna.runtime.supervisor.tasks import Tasks
from sterna.runtime.supervisor.watch import (
    START_TIMEOUT_S,
    NotStartedError,
    Watch,
    forget,
    process_of,
)
from sterna.supervisor.core import OtherMembers
from sterna.supervisor.failure_detector import ProcessIdentity
from sterna.supervisor.fleet import RETRY_DELAYS_S
from sterna.types import FrontendId

FRONTEND_SILENCE_FACTOR = 3.0
"""A front end may be silent for this multiple of an instance's timeout."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Member:
    actor: Any
    address: str
    process: ProcessIdentity


def _hide_gauges_of_the_dead(metrics_folder: str) -> None:
    """Delete the gauges of processes that have ended; those of a front end stand for what it sees,
    and a successor does not know what it has shown."""
    for path in Path(metrics_folder).glob("gauge_live*_*.db"):
        process_id = path.stem.rpartition("_")[2]
        if process_id.isdecimal() and not psutil.pid_exists(int(process_id)):
            mark_process_dead(int(process_id), metrics_folder)  # type: ignore[no-untyped-call]


class Services:
    """One scheduler and some front ends.

    Args:
        environment: environment variables of processes that run vLLM.
        metrics_folder: folder of the front ends' metrics.
        tasks: runs the tasks that watch and replace them.
        on_change: called when a member has come or gone.
    """

    _config: ClusterConfig
    _args: bytes
    _watch: Watch

    def __init__(
        self,
        environment: dict[str, str],
        metrics_folder: str,
        tasks: Tasks,
        on_change: Callable[[], None],
    ) -> None:
        self._environment = {**environment, METRICS_FOLDER_VARIABLE: metrics_folder}
        self._metrics_folder = metrics_folder
        self._tasks = tasks
        self._on_change = on_change
        self._frontends: dict[FrontendId, _Member] = {}
        self._imported: tuple[FrontendId, Any] | None = None
        self._scheduler: _Member | None = None
        self._is_finishing = False
        self.num_frontends_begun = 0
        self.num_schedulers_begun = 0
        self.ready: bytes | None = None

    def others(self) -> OtherMembers:
        """The members that are up, and what a successor of the supervisor needs to start more."""
        return OtherMembers(
            tuple(FrontendMember(each, member.address) for each, member in self._frontends.items()),
            None if self._scheduler is None else self._scheduler.address,
            self.num_frontends_begun,
            self.num_schedulers_begun,
            self.ready,
        )

    def configure(self, config: ClusterConfig, args: bytes, watch: Watch) -> None:
        """Set the configuration and the watch; to be called before all other methods but
        `begin_imports`."""
        self._config = config
        self._args = args
        self._watch = watch

    def begin_imports(self) -> None:
        """Start the process of the first front end, which begins its imports."""
        self._imported = self._import_frontend()

    async def prepare(self) -> list[tuple[FrontendId, _Member]]:
        """Return all front ends when their imports are done."""
        assert self._imported is not None
        more = [self._import_frontend() for _ in range(self._config.num_frontends - 1)]
        return list(
            await asyncio.gather(*(self._prepare(*each) for each in (self._imported, *more)))
        )

    async def start_frontends(self, prepared: list[tuple[FrontendId, _Member]]) -> None:
        """Return when all of them answer."""
        await asyncio.gather(*(self._start_frontend(*each) for each in prepared))

    async def start_scheduler(self) -> None:
        """Start the scheduler; returns when it schedules."""
        actor = self._begin_scheduler()
        config = self._config
        try:
            process = await process_of(SCHEDULER_NAME, actor, START_TIMEOUT_S)
            start = actor.start.remote(
                config.llumlet.policy,
                config.internal_host,
                config.log_level,
                config.scaling,
                config.mailbox_keys,
            )
            address = await self._watch.until_started(
                SCHEDULER_NAME, process, start, timeout_s=START_TIMEOUT_S
            )
        except (ray.exceptions.RayError, NotStartedError):
            await forget(actor)
            raise
        self._host_scheduler(_Member(actor, address, process))
        self._on_change()

    def take_over(self, found: FoundMembers) -> None:
        """Go on with those that another supervisor has started, and replace those that are
        missing."""
        for frontend_id, (actor, status) in found.frontends.items():
            self._host_frontend(frontend_id, _Member(actor, status.address, status.process))
        # Of front ends that died with the other supervisor.
        _hide_gauges_of_the_dead(self._metrics_folder)
        for _ in range(self._config.num_frontends - len(self._frontends)):
            self._tasks.begin(self._replace("front end", self._replace_frontend))
        if found.scheduler is None:
            self._tasks.begin(self._replace("global scheduler", self.start_scheduler))
        else:
            actor, status = found.scheduler
            self._host_scheduler(_Member(actor, status.address, status.process))

    async def finish_requests(self, timeout_s: float) -> int:
        """Accept no more requests, and wait for the answers under way; returns the number that is
        left after this time."""
        # Also keeps new front ends from starting, which would accept requests.
        self._is_finishing = True
        left = await asyncio.gather(
            *(each.actor.finish_requests.remote(timeout_s) for each in self._frontends.values()),
            return_exceptions=True,
        )
        return sum(each for each in left if isinstance(each, int))

    async def stop_frontends(self) -> None:
        """Stop all front ends, and with them the answers under way."""
        await settle(*(member.actor.stop.remote() for member in self._frontends.values()))

    # ----------------------------------------------------------------------------- scheduler

    def _begin_scheduler(self) -> Any:
        """Start a process for a scheduler."""
        name = f"{SCHEDULER}{self.num_schedulers_begun}"
        self.num_schedulers_begun += 1
        return SchedulerActor.options(**surviving_as(name), **staying_here()).remote()

    def _host_scheduler(self, member: _Member) -> None:
        self._scheduler = member
        self._tasks.begin(self._watch_scheduler(member))

    async def _watch_scheduler(self, member: _Member) -> None:
        reason = await self._watch.until_ended(SCHEDULER_NAME, member.actor, member.process)
        logger.error("global scheduler lost, front ends go on without reason=%s", reason)
        self._scheduler = None
        self._on_change()
        self._tasks.begin(forget(member.actor))
        await self._replace("global scheduler", self.start_scheduler)

    # ---------------------------------------------------------------------------- front ends

    def _import_frontend(self) -> tuple[FrontendId, Any]:
        frontend_id = FrontendId(self.num_frontends_begun)
        self.num_frontends_begun += 1
        name = frontend_name(frontend_id)
        options = {"runtime_env": forked_runtime_env(), **surviving_as(name), **staying_here()}
        return frontend_id, FrontendActor.options(**options).remote(name, self._environment)

    async def _prepare(self, frontend_id: FrontendId, actor: Any) -> tuple[FrontendId, _Member]:
        config = self._config
        name = frontend_name(frontend_id)
        process = await process_of(name, actor, START_TIMEOUT_S)
        preparing = actor.prepare.remote(
            config.internal_host, config.log_level, config.mailbox_keys
        )
        address = await self._watch.until_started(
            name, process, preparing, timeout_s=START_TIMEOUT_S
        )
        return frontend_id, _Member(actor, address, process)

    async def _start_frontend(self, frontend_id: FrontendId, member: _Member) -> None:
        # It needs a membership to start, which names the instances.
        self._frontends[frontend_id] = member
        self._on_change()
        assert self.ready is not None
        start = member.actor.start.remote(
            frontend_id, self._args, self._config.frontend, self.ready
        )
        await self._watch.until_started(
            frontend_name(frontend_id), member.process, start, timeout_s=START_TIMEOUT_S
        )
        self._host_frontend(frontend_id, member)

    def _host_frontend(self, frontend_id: FrontendId, member: _Member) -> None:
        self._frontends[frontend_id] = member
        self._tasks.begin(self._watch_frontend(frontend_id, member))

    async def _watch_frontend(self, frontend_id: FrontendId, member: _Member) -> None:
        reason = await self._watch.until_ended(
            frontend_name(frontend_id),
            member.actor,
            member.process,
            # Longer than for others: its end cuts its clients' streams, a pause only delays them.
            stopped_timeout_s=self._config.watch.instance_timeout_s,
            silence_timeout_s=FRONTEND_SILENCE_FACTOR * self._config.watch.instance_timeout_s,
        )
        logger.error("front end lost frontend=%d reason=%s", frontend_id, reason)
        self._remove_frontend(frontend_id)
        self._tasks.begin(forget(member.actor))
        if not self._is_finishing:
            await self._replace("front end", self._replace_frontend)

    async def _replace_frontend(self) -> None:
        frontend_id, actor = self._import_frontend()
        try:
            prepared = await self._prepare(frontend_id, actor)
            if self._is_finishing:
                return
            await self._start_frontend(*prepared)
            if self._is_finishing:
                # `finish_requests` was called before it could accept connections.
                await actor.finish_requests.remote(0.0)
        except (ray.exceptions.RayError, NotStartedError):
            await forget(actor)
            self._remove_frontend(frontend_id)
            raise

    def _remove_frontend(self, frontend_id: FrontendId) -> None:
        """Take out a front end that has ended, if it was announced."""
        if (member := self._frontends.pop(frontend_id, None)) is not None:
            # A successor does not know of which instances and classes it has shown gauges.
            mark_process_dead(member.process.process_id, self._metrics_folder)  # type: ignore[no-untyped-call]
            self._on_change()

    async def _replace(self, what: str, start: Callable[[], Awaitable[None]]) -> None:
        """Start a successor, again and again until it comes up."""
        delays_s = itertools.chain(RETRY_DELAYS_S, itertools.repeat(RETRY_DELAYS_S[-1]))
        while True:
            try:
                if not is_gcs_up():
                    raise TimeoutError("Ray's GCS does not answer")
                await start()
            except (ray.exceptions.RayError, NotStartedError, TimeoutError) as error:
                delay_s = next(delays_s)
                reason = reason_of(error) if str(error).strip() else "it does not answer"
                logger.error("%s not replaced, again in %.0f s reason=%s", what, delay_s, reason)
                await asyncio.sleep(delay_s)
            else:
                return
