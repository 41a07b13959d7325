"""Deaths of processes of a server, each at the moment at which a part is of use."""

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

import psutil

from bench.chaos.faults import MARKS, Processes, kill
from bench.common.small_disk import fill
from bench.parts.watching import POLL_S, Scene

SHARED_MEMORY = Path("/dev/shm")

REPLACED_TIMEOUT_S = 15.0
"""Time in which a dead instance is replaced, if it can be."""


async def kill_driver(_: Scene) -> None:
    """SIGKILL of the driver."""
    kill(_the("driver"))


async def kill_supervisor_and_instance(scene: Scene) -> None:
    """SIGKILL of the supervisor, and of an instance before anything can follow it."""
    victim = min(await scene.running())
    kill(_the("supervisor"))
    _kill_instance(scene, victim)


async def kill_gcs(_: Scene) -> None:
    """SIGKILL of Ray's GCS."""
    kill(_the("gcs"))


async def kill_gcs_and_instance(scene: Scene) -> None:
    """SIGKILL of Ray's GCS, and of an instance."""
    victim = min(await scene.running())
    kill(_the("gcs"))
    _kill_instance(scene, victim)


async def fill_memory_and_kill_instances(scene: Scene) -> None:
    """Leave no room in /dev/shm; then SIGKILL of one instance, and of another one when that is
    replaced: the metrics of those that follow need room."""
    filling = _fill_shared_memory(scene)
    try:
        for victim in sorted(await scene.running()):
            num_running = len(await scene.running())
            _kill_instance(scene, victim)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPLACED_TIMEOUT_S):
                    await _until_replaced(scene, num_running)
        await asyncio.get_running_loop().create_future()
    finally:
        filling.unlink(missing_ok=True)


async def fill_memory_and_kill_frontend(scene: Scene) -> None:
    """Leave no room in /dev/shm; then SIGKILL of a front end, whose successor needs room for its
    metrics."""
    filling = _fill_shared_memory(scene)
    try:
        kill(_the("front-end"))
        await asyncio.get_running_loop().create_future()
    finally:
        filling.unlink(missing_ok=True)


async def settle(scene: Scene, num_instances: int, reserves: Sequence[str], limit_s: float) -> bool:
    """Wait until the server is whole, with these components in reserve; returns whether it is,
    since the wait has a limit."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + limit_s
    while loop.time() < deadline_s:
        processes = Processes()
        has_reserves = all(processes.in_reserve(MARKS[each]) for each in reserves)
        if has_reserves and len(await scene.running()) >= num_instances:
            return True
        await asyncio.sleep(POLL_S)
    return False


def _the(component: str) -> psutil.Process:
    return Processes().marked(MARKS[component])[0]


def _kill_instance(scene: Scene, instance_id: str) -> None:
    scene.lost.append(instance_id)
    if (process := scene.instance(instance_id)) is not None:
        kill(process)


async def _until_replaced(scene: Scene, num_instances: int) -> None:
    while True:
        running = await scene.running()
        if len(running) >= num_instances and not running & {*scene.lost}:
            return
        await asyncio.sleep(POLL_S)


def _fill_shared_memory(scene: Scene) -> Path:
    """Fill the file system that the server sees there, which is not this program's."""
    server = scene.server()
    assert server is not None
    seen = Path(f"/proc/{server.pid}/root{SHARED_MEMORY}")
    assert seen.stat().st_dev != SHARED_MEMORY.stat().st_dev
    return fill(seen)
