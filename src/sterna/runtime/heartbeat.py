"""An instance's heartbeats: what the supervisor notices a hang by (`progress`)."""

import asyncio

from sterna.engine.interface import Engine
from sterna.mailbox import Mailbox
from sterna.messages import HEARTBEAT_INTERVAL_S, Heartbeat
from sterna.runtime.instance import Instance
from sterna.types import InstanceId


async def beat(
    instance_id: InstanceId, instance: Instance, engine: Engine, mailbox: Mailbox
) -> None:
    """Tell the supervisor how the engine gets on, forever.

    It runs in the same loop as everything else of the instance, for a loop that hangs must not
    look alive; the engine itself is only looked at.
    """
    while True:
        # A supervisor's successor makes itself known by its first membership.
        supervisor = instance.membership.supervisor
        if supervisor is not None:
            progress = engine.progress()
            mailbox.send(supervisor, Heartbeat(instance_id, progress.num_ended, progress.is_busy))
        await asyncio.sleep(HEARTBEAT_INTERVAL_S)
