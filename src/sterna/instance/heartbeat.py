"""An instance's heartbeats: what the supervisor notices a hang by (`progress`), and what the
instance's lease is asked for with (`lease`)."""

import asyncio

from sterna.engine.interface import Engine
from sterna.instance.lease_guard import LeaseGuard
from sterna.instance.shell import Instance
from sterna.messages.actors import HEARTBEAT_INTERVAL_S, Heartbeat
from sterna.types import InstanceId


async def beat(
    instance_id: InstanceId, instance: Instance, engine: Engine, lease: LeaseGuard | None
) -> None:
    """Tell the supervisor how the engine gets on, forever.

    It runs in the same loop as everything else of the instance, for a loop that hangs must not
    look alive; the engine itself is only looked at.
    """
    while True:
        progress = engine.progress()
        asked_s = None if lease is None else lease.now_s()
        instance.tell_supervisor(
            Heartbeat(instance_id, progress.num_ended, progress.is_busy, asked_s)
        )
        await asyncio.sleep(HEARTBEAT_INTERVAL_S)
