"""Watches the members of a cluster for its supervisor, and ends those that work no more.

Which those are is decided by the pure `Progress`; here their processes are looked at, on the
nodes where they run, and killed there.
"""

import asyncio
import contextlib
import logging
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from sterna.config import WatchConfig
from sterna.messages import Heartbeat
from sterna.progress import ProcessIdentity, ProcessState, Progress
from sterna.runtime.process import end_process, state_of_process
from sterna.runtime.tasks import Tasks

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.1
"""Time between two looks at the processes of a node."""

RETRY_DELAY_S = 1.0
"""What a node that did not answer has until it is asked again."""


class _NodeActor:
    """Looks at, and ends, the processes of a node that is not the supervisor's."""

    def __repr__(self) -> str:
        # Ray puts it before each line that the actor prints.
        return "watcher"

    async def look(self, processes: list[ProcessIdentity]) -> list[ProcessState]:
        """Say how these processes are."""
        return list(map(state_of_process, processes))

    async def end(self, process: ProcessIdentity) -> None:
        """See `end_process`."""
        await end_process(process)


class Watch:
    """All members that one supervisor watches.

    Args:
        tasks: where it looks from.
    """

    def __init__(self, config: WatchConfig, tasks: Tasks) -> None:
        self._progress = Progress(config)
        self._tasks = tasks
        self._own_node = ray.get_runtime_context().get_node_id()
        self._processes: dict[str, ProcessIdentity] = {}
        self._halted: dict[str, asyncio.Future[str]] = {}
        self._nodes: dict[str, Any] = {}
        tasks.begin(self._judge())
        tasks.begin(self._look_at(self._own_node))

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        """A member says how it gets on."""
        self._progress.on_heartbeat(heartbeat, _now_s())

    async def until_ended(
        self,
        member: str,
        actor: Any,
        process: ProcessIdentity,
        *,
        stopped_timeout_s: float | None = None,
        silence_timeout_s: float | None = None,
    ) -> str:
        """Wait until the member's `run` ends, or it has died or works no more; returns why, when
        its process has ended for certain.

        Args:
            stopped_timeout_s, silence_timeout_s: see `Progress.on_joined`.
        """
        self._progress.on_joined(
            member, stopped_timeout_s=stopped_timeout_s, silence_timeout_s=silence_timeout_s
        )
        self._processes[member] = process
        halted = self._halted[member] = asyncio.get_running_loop().create_future()
        if process.node_id not in (self._own_node, *self._nodes):
            self._nodes[process.node_id] = None
            self._tasks.begin(self._look_at(process.node_id))
        run = asyncio.ensure_future(end_of(actor))
        try:
            await asyncio.wait((run, halted), return_when=asyncio.FIRST_COMPLETED)
            reason = run.result() if run.done() else halted.result()
            await self.end(process)
        finally:
            run.cancel()
            self._progress.on_left(member)
            del self._processes[member], self._halted[member]
        return reason

    async def end(self, process: ProcessIdentity) -> None:
        """Kill the process on its node; returns when it has ended, or its node has."""
        if process.node_id == self._own_node:
            await end_process(process)
            return
        while True:
            try:
                await self._node_actor(process.node_id).end.remote(process)
            except ray.exceptions.RayError as error:
                if not await self._is_back(process.node_id, error):
                    return
            else:
                return

    # ---------------------------------------------------------------------------- internals

    async def _judge(self) -> None:
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            for each in self._progress.on_time(_now_s()):
                halted = self._halted[each.member]
                if not halted.done():
                    halted.set_result(each.reason)

    async def _look_at(self, node_id: str) -> None:
        """Look at a node's processes, for as long as there is the node."""
        while True:
            members = [each for each, p in self._processes.items() if p.node_id == node_id]
            processes = [self._processes[each] for each in members]
            try:
                states = await self._states(node_id, processes)
            except ray.exceptions.RayError as error:
                if await self._is_back(node_id, error):
                    continue
                logger.error("node lost node=%s", node_id)
                return
            now_s = _now_s()
            for member, process, state in zip(members, processes, states, strict=True):
                if self._processes.get(member) == process:
                    self._progress.on_state(member, state, now_s)
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
        """Whether a node, whose watcher was lost, may be asked again; if not, it is dead, and all
        its processes with it."""
        reason = str(error).strip().splitlines()[0]
        logger.warning("watcher lost node=%s reason=%s", node_id, reason)
        await asyncio.sleep(RETRY_DELAY_S)
        is_alive = await asyncio.to_thread(_is_alive, node_id)
        if is_alive:
            self._nodes[node_id] = None
        else:
            self._nodes.pop(node_id, None)
        return is_alive


async def end_of(actor: Any) -> str:
    """Wait until the actor's `run` ends or the actor dies; returns why."""
    try:
        return str(await actor.run.remote())
    except ray.exceptions.RayError as error:
        return str(error).strip().splitlines()[0]


async def forget(actor: Any) -> None:
    """Let Ray know that an actor whose process has ended is dead. Ray may be away for a while."""
    with contextlib.suppress(ray.exceptions.RayError):
        await asyncio.to_thread(ray.kill, actor)


def _is_alive(node_id: str) -> bool:
    return any(node["NodeID"] == node_id and node["Alive"] for node in ray.nodes())


def _now_s() -> float:
    return asyncio.get_running_loop().time()


# An actor that dies is replaced by another.
_NODE_ACTOR = ray.remote(max_restarts=0, num_cpus=0)(_NodeActor)
