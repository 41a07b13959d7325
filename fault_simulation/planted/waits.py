"""Mistakes of a global scheduler with requests that wait there: for memory, or for a copy of their
prefix."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from sterna.scheduler.core import SchedulerCore
from sterna.scheduler.global_scheduler import Effect, GlobalScheduler
from sterna.scheduler.held_requests import HeldRequests
from sterna.types import InstanceId, InstanceLoad, RequestId

FOR_EVER_S = 1e6


class _LooksAtNewOnes(GlobalScheduler):
    def on_loads(self, loads: Iterable[InstanceLoad], now_s: float) -> list[Effect]:
        return self._without_held(partial(super().on_loads, loads, now_s))

    def on_tick(self, now_s: float) -> list[Effect]:
        return self._without_held(partial(super().on_tick, now_s))

    def _without_held(self, event: Callable[[], list[Effect]]) -> list[Effect]:
        held, self._held = self._held, HeldRequests(self._policy)
        effects = event()
        self._held = held
        return effects


class _AwaitsWhatWasGivenUp(GlobalScheduler):
    def on_prefix_done(
        self, request_id: RequestId, now_s: float, *, is_copied: bool = False
    ) -> list[Effect]:
        awaited = self._copies._awaited.get(request_id)
        if not is_copied and awaited is not None:
            self._copies._awaited[request_id] = replace(awaited, since_s=now_s + FOR_EVER_S)
            return []
        return super().on_prefix_done(request_id, now_s, is_copied=is_copied)


class _ExpectsAWaitBehindEachCopy(GlobalScheduler):
    def on_prefix_done(
        self, request_id: RequestId, now_s: float, *, is_copied: bool = False
    ) -> list[Effect]:
        awaited = self._copies._awaited[request_id]
        return super().on_prefix_done(awaited.request.request_id, now_s, is_copied=is_copied)


class _NeverBackInLine(HeldRequests):
    def await_prefix(
        self, request_id: RequestId, instances: Iterable[InstanceId], until_s: float
    ) -> None:
        super().await_prefix(request_id, instances, until_s + FOR_EVER_S)

    def end_waits_for(self, instance_id: InstanceId, room_tokens: float) -> None:
        pass


class _WithOtherRules(SchedulerCore):
    rules: type[GlobalScheduler]

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._core.__class__ = self.rules


class LooksOnlyAtNewOnes(_WithOtherRules):
    """Looks at what it holds when another request comes, and not when memory becomes free."""

    rules = _LooksAtNewOnes


class AwaitsPrefixesForEver(SchedulerCore):
    """Never puts a request that waits for its prefix back in line."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._core._held.__class__ = _NeverBackInLine


class AwaitsGivenUpCopies(_WithOtherRules):
    """Holds a request until its prefix has been copied, also where the copy was given up."""

    rules = _AwaitsWhatWasGivenUp


class ExpectsAWaitBehindEachCopy(_WithOtherRules):
    """Takes every end of a copy for that of one for which a request waits: none waits for copies
    ahead of a session's next turn, or any longer where it was cancelled."""

    rules = _ExpectsAWaitBehindEachCopy
