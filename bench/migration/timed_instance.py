"""The production instance actor, with a clock at the points of a migration.

All processes of a host read the same monotonic clock, so that points of two instances can be
compared.
"""

from collections.abc import Sequence
from typing import Any

from bench.migration.samples import Moments
from sterna.engine.interface import EngineFacts
from sterna.instance.core import InstanceCore, InstanceEffect
from sterna.messages.actors import MigrationMessage, TokenSpan, WireMessage
from sterna.migration.messages import Adopted, Commit, Drained, Event, StageReceived
from sterna.runtime.actors.actor_classes import InstanceSpec, _InstanceActor, remote_class
from sterna.types import FrontendId, MigrationId


class TimedCore(InstanceCore):
    """The instance's core; notes when the latest migration and all outputs came by."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._moments = Moments()

    def take_moments(self) -> Moments:
        """Return the moments since the last call."""
        taken, self._moments = self._moments, Moments()
        return taken

    def on_message(
        self, message: WireMessage, frames: Sequence[bytes], now_s: float
    ) -> list[InstanceEffect]:
        """See `InstanceCore.on_message`."""
        if isinstance(message, MigrationMessage) and isinstance(message.message, Commit):
            self._moments.commit_s = now_s
        return super().on_message(message, frames, now_s)

    def on_outcome(
        self, migration_id: MigrationId, event: Event, now_s: float
    ) -> list[InstanceEffect]:
        """See `InstanceCore.on_outcome`."""
        match event:
            case Drained():
                self._moments.drained_s = now_s
            case StageReceived():
                self._moments.received_s = now_s
            case Adopted():
                self._moments.adopted_s = now_s
        return super().on_outcome(migration_id, event, now_s)

    def on_outputs(
        self,
        frontend_id: FrontendId,
        spans: tuple[TokenSpan, ...],
        payloads: Sequence[bytes],
        now_s: float,
    ) -> list[InstanceEffect]:
        """See `InstanceCore.on_outputs`."""
        for span in spans:
            self._moments.outputs_s[span.request_id, span.first_index] = now_s
        return super().on_outputs(frontend_id, spans, payloads, now_s)


class TimedInstanceHost(_InstanceActor):
    """One instance with such a core."""

    async def start(self, spec: InstanceSpec) -> tuple[str, EngineFacts]:
        """See `_InstanceActor.start`."""
        from sterna.instance import shell

        vars(shell)["InstanceCore"] = TimedCore
        return await super().start(spec)

    async def take_moments(self) -> Moments:
        """Return the moments since the last call."""
        core: Any = self._instance._core
        taken: Moments = core.take_moments()
        return taken


TimedInstance = remote_class(TimedInstanceHost)
