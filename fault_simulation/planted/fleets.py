"""Mistakes that leave the fleet short of its size, or an instance that never ends."""

from collections.abc import Collection, Iterable
from typing import Any

from sterna.frontend.requests.core import FrontendCore
from sterna.instance.core import InstanceCore
from sterna.instance.termination import Termination
from sterna.supervisor.core import SupervisorCore, SupervisorEffect
from sterna.supervisor.fleet import Close, Fleet
from sterna.types import FrontendId, InstanceId


class LeavesWhatWasClosing(SupervisorCore):
    """Does not end the instances that its predecessor was ending when it died."""

    def take_over(self, found: Collection[InstanceId], now_s: float) -> list[SupervisorEffect]:
        effects = super().take_over(found, now_s)
        return [each for each in effects if not isinstance(each, Close)]


class _TriesOnce(Fleet):
    __slots__ = ()

    @property
    def next_deadline_s(self) -> float | None:
        return None


class StartsNothingAgain(SupervisorCore):
    """Does not try a start again that has failed, unless something else happens."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.fleet.__class__ = _TriesOnce


class _NotifiesOnce(Termination):
    def next_notice(self, frontends: Iterable[FrontendId], version: int) -> int | None:
        if self._since is not None and self._notified_version == -self._since:
            return None
        since = super().next_notice(frontends, version)
        if since is not None:
            self._notified_version = -since
        return since


class ReportsItsEndOnce(InstanceCore):
    """Reports once that it is empty, though the supervisor may have died before it heard so."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._termination.__class__ = _NotifiesOnce


class AcknowledgesOnce(FrontendCore):
    """Does not send a final acknowledgement again that its mailbox has refused."""

    def on_final_ack_unsent(self, instance_id: InstanceId, now_s: float) -> None:
        pass
