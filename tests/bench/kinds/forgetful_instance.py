"""Instances whose data planes copy nothing, in a module that their processes can import."""

from bench.kinds.counting_instance import _CountingInstance
from sterna.engine.interface import EngineFacts
from sterna.runtime.actors.actor_classes import InstanceSpec, remote_class


class _ForgetfulInstance(_CountingInstance):
    """An instance that receives every stage, and leaves its pages as they are."""

    async def start(self, spec: InstanceSpec) -> tuple[str, EngineFacts]:
        """See `_InstanceActor.start`."""
        from sterna.transport.memory.layout import KvLayout

        KvLayout.scatter = lambda self, tile, block_ids, buffer: None  # type: ignore[method-assign]
        return await super().start(spec)


ForgetfulInstance = remote_class(_ForgetfulInstance)
