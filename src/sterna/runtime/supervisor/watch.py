"""The supervisor's watch: ends members of the cluster that have stopped working.

The pure `FailureDetector` decides which those are. The watch looks at their processes on the nodes
where they run, and kills them there. Members on other nodes hold leases (`lease`): one that cannot
be reached to be killed has ended when its lease has.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from sterna.config import WatchConfig
from sterna.errors import SternaError
from sterna.messages.actors import Heartbeat
from sterna.own_log import FILES_ADVICE, LogThrottle
from sterna.runtime.actors.addresses import node_address, node_addresses, own_node
from sterna.runtime.processes.process import end_process, state_of_process
from sterna.runtime.supervisor.ray_errors import reason_of
from sterna.runtime.supervisor.tasks import Tasks
from sterna.supervisor.failure_detector import FailureDetector, ProcessIdentity, ProcessState
from sterna.supervisor.lease import GrantedLeases

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_INTERVAL_S = 0.1
"""Time between two looks at the processes of a node."""

RETRY_DELAY_S = 1.0
"""Time until a node that did not answer is asked again."""

START_TIMEOUT_S = 600.0
"""Time for an actor's process and imports, enough for a busy machine."""


class _NodeActor:
    """Looks at and ends processes of a node that is not the supervisor's."""

    def __repr__(self) -> str:
        # Ray puts it before each line that the actor prints.
        return "watcher"

    async def look(self, processes: list[ProcessIdentity]) -> list[ProcessState]:
        """Return the states of these processes."""
        return list(map(state_of_process, processes))

    async def end(self, process: ProcessIdentity) -> None:
        """See `end_process`."""
        await end_process(process)


class NotStartedError(SternaError):
    """A member has stopped working, or does not answer, before it has started."""


class Watch:
    """All members that one supervisor watches.

    Args:
        tasks: runs the tasks that look at processes.
    """

    def __init__(self, config: WatchConfig, tasks: Tasks) -> None:
        self._detector = FailureDetector(config)
        self._leases = GrantedLeases(config.lease_s)
        self._tasks = tasks
        self._own_node = own_node()
        self._processes: dict[str, ProcessIdentity] = {}
        self._halted: dict[str, asyncio.Future[str]] = {}
        self._nodes: dict[str, Any] = {}
        tasks.begin(self._find_halted())
        tasks.begin(self._look_at(self._own_node))

    def on_heartbeat(self, heartbeat: Heartbeat) -> bool:
        """Take in a heartbeat; returns whether to answer it, which extends the member's lease."""
        self._detector.on_heartbeat(heartbeat, _now_s())
        if heartbeat.asked_s is None:
            return False
        return self._leases.may_answer(heartbeat.member, _now_s())

    async def until_started(
        self,
        member: str,
        process: ProcessIdentity,
        start: Awaitable[T],
        *,
        timeout_s: float | None = None,
    ) -> T:
        """Wait until the member has started; returns the result of `start`.

        Args:
            timeout_s: time for the start; None for no limit.

        Raises:
            NotStartedError: it has stopped working, or took too long. If it is on this node, its
                process has ended; elsewhere Ray ends it, since no member knows it yet.
        """
        starting = asyncio.ensure_future(start)
        try:
            with self._watched(member, process) as halted:
                await asyncio.wait(
                    (starting, halted), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
                )
                if starting.done():
                    return starting.result()
                reason = halted.result() if halted.done() else f"it took {timeout_s:g} s"
                if process.node_id == self._own_node:
                    await end_process(process)
        finally:
            starting.cancel()
        raise NotStartedError(f"{member} did not start: {reason}")

    async def until_ended(
        self,
        member: str,
        actor: Any | None,
        process: ProcessIdentity,
        *,
        stopped_timeout_s: float | None = None,
        silence_timeout_s: float | None = None,
    ) -> str:
        """Wait until the member's `run` ends, or the member dies or stops working. Returns the
        reason, when its process has ended for certain.

        Args:
            actor: None if it cannot be reached, and is to end.
            stopped_timeout_s, silence_timeout_s: those of `FailureDetector.on_joined`.
        """
        is_remote = process.node_id != self._own_node
        with self._watched(member, process, stopped_timeout_s, silence_timeout_s) as halted:
            if is_remote:
                # Its lease may have begun just now, or been extended by a supervisor that has died.
                self._leases.grant(member, _now_s())
            run = asyncio.ensure_future(_end_of(actor))
            try:
                await asyncio.wait((run, halted), return_when=asyncio.FIRST_COMPLETED)
                reason = run.result() if run.done() else halted.result()
                if is_remote:
                    await self._end_there(member, process)
                else:
                    await end_process(process)
            finally:
                run.cancel()
        return reason

    # ---------------------------------------------------------------------------- internals

    @contextmanager
    def _watched(
        self,
        member: str,
        process: ProcessIdentity,
        stopped_timeout_s: float | None = None,
        silence_timeout_s: float | None = None,
    ) -> Iterator[asyncio.Future[str]]:
        """Watch a member; the future gets the reason when it has stopped working."""
        self._detector.on_joined(
            member,
            stopped_timeout_s=stopped_timeout_s,
            silence_timeout_s=silence_timeout_s,
            is_remote=process.node_id != self._own_node,
        )
        self._processes[member] = process
        self._halted[member] = asyncio.get_running_loop().create_future()
        if process.node_id not in (self._own_node, *self._nodes):
            self._nodes[process.node_id] = None
            self._tasks.begin(self._look_at(process.node_id))
        try:
            yield self._halted[member]
        finally:
            self._detector.on_left(member)
            self._leases.forget(member)
            del self._processes[member], self._halted[member]

    async def _end_there(self, member: str, process: ProcessIdentity) -> None:
        """Kill a process on another node; returns when it has ended, or its lease has."""
        self._leases.end(member)
        killing = asyncio.ensure_future(self._kill_there(process))
        try:
            left_s = self._leases.certain_s(member) - _now_s()
            await asyncio.wait((killing,), timeout=max(0.0, left_s))
            if killing.done():
                killing.result()
            else:
                logger.warning("not killed, but its lease has ended member=%s", member)
        finally:
            killing.cancel()

    async def _kill_there(self, process: ProcessIdentity) -> None:
        """Return when the process has been killed on its node; never if the node is lost."""
        while True:
            try:
                await self._node_actor(process.node_id).end.remote(process)
            except ray.exceptions.RayError as error:
                if not await self._is_back(process.node_id, error):
                    # Its processes may run on although Ray has lost it.
                    await asyncio.get_running_loop().create_future()
            else:
                return

    async def _find_halted(self) -> None:
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            now_s = _now_s()
            for each in self._detector.on_time(now_s):
                self._halt(each.member, each.reason)
            for member in self._leases.ended(now_s):
                self._halt(member, "it is out of reach, and its lease has ended")

    def _halt(self, member: str, reason: str) -> None:
        halted = self._halted[member]
        if not halted.done():
            halted.set_result(reason)

    async def _look_at(self, node_id: str) -> None:
        """Look at a node's processes until the node is lost, or none of them is left."""
        throttle = LogThrottle()
        while True:
            members = [each for each, p in self._processes.items() if p.node_id == node_id]
            if not members and node_id != self._own_node:
                # A watcher that is left would keep Ray's autoscaler from releasing the node.
                if (actor := self._nodes.pop(node_id, None)) is not None:
                    self._tasks.begin(forget(actor))
                return
            processes = [self._processes[each] for each in members]
            try:
                states = await self._states(node_id, processes)
            except ray.exceptions.RayError as error:
                if await self._is_back(node_id, error):
                    continue
                address = await asyncio.to_thread(node_address, node_id)
                logger.error("node lost node=%s ray_id=%s", address, node_id)
                return
            if ProcessState.UNSEEN in states and throttle.is_due():
                logger.error(
                    "processes cannot be looked at, and count as running ray_id=%s unseen=%d; %s",
                    node_id,
                    states.count(ProcessState.UNSEEN),
                    FILES_ADVICE,
                )
            now_s = _now_s()
            for member, process, state in zip(members, processes, states, strict=True):
                if self._processes.get(member) == process:
                    self._detector.on_state(member, state, now_s)
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def _states(self, node_id: str, processes: list[ProcessIdentity]) -> list[ProcessState]:
        if not processes or node_id == self._own_node:
            return list(map(state_of_process, processes))
        states: list[ProcessState] = await self._node_actor(node_id).look.remote(processes)
        return states

    def _node_actor(self, node_id: str) -> Any:
        if self._nodes.get(node_id) is None:
            place = NodeAffinitySchedulingStrategy(node_id, soft=False)
            self._nodes[node_id] = _NODE_ACTOR.options(scheduling_strategy=place).remote()
        return self._nodes[node_id]

    async def _is_back(self, node_id: str, error: ray.exceptions.RayError) -> bool:
        """Whether a node whose watcher was lost may be asked again; if not, Ray has lost it."""
        address = await asyncio.to_thread(node_address, node_id)
        logger.warning("watcher lost node=%s reason=%s", address, reason_of(error))
        await asyncio.sleep(RETRY_DELAY_S)
        is_alive = node_id in await asyncio.to_thread(node_addresses)
        if is_alive:
            self._nodes[node_id] = None
        else:
            self._nodes.pop(node_id, None)
        return is_alive


async def process_of(member: str, actor: Any, timeout_s: float) -> ProcessIdentity:
    """Return the process of an actor that was just created.

    Raises:
        NotStartedError: it has not answered in time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            process: ProcessIdentity = await actor.process.remote()
    except TimeoutError:
        reason = f"it has not answered within {timeout_s:g} s"
        raise NotStartedError(f"{member} did not start: {reason}") from None
    return process


async def _end_of(actor: Any | None) -> str:
    """Wait until the actor's `run` ends or the actor dies; returns the reason."""
    if actor is None:
        return "it did not answer the supervisor's successor"
    while True:
        try:
            return str(await actor.run.remote())
        except ray.exceptions.ActorUnavailableError:
            # The connection broke, and it may be alive; its process and heartbeats will show.
            await asyncio.sleep(RETRY_DELAY_S)
        except ray.exceptions.RayError as error:
            return reason_of(error)


async def forget(actor: Any) -> None:
    """Report to Ray that an actor is dead whose process has ended. This may take long if Ray's GCS
    is away."""
    with contextlib.suppress(ray.exceptions.RayError):
        await asyncio.to_thread(ray.kill, actor)


def _now_s() -> float:
    return asyncio.get_running_loop().time()


# An actor that dies is replaced by another.
_NODE_ACTOR = ray.remote(max_restarts=0, num_cpus=0)(_NodeActor)
