"""Mistakes of instances, of their engines, and of leases on either side."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from fault_simulation.engine.engine import SimulatedEngine
from fault_simulation.oracle.token_oracle import EMPTY
from sterna.instance.core import InstanceCore, InstanceEffect
from sterna.instance.llumlet import LlumletEffect
from sterna.messages.actors import AbortRequests, WireMessage
from sterna.migration.messages import (
    AbortDrained,
    AbortRequest,
    Adopt,
    Adopted,
    AdoptFailed,
    Commit,
    Drain,
    Drained,
    DrainRefused,
    FreeReservation,
    Inspected,
    Outcome,
    Release,
    Resume,
    Send,
)
from sterna.supervisor.lease import GrantedLeases, HeldLease
from sterna.types import FrontendId, RequestId


class _Without(InstanceCore):
    """Does not carry out some effects."""

    left_out: tuple[type, ...] = ()

    def _on_llumlet(self, effects: Iterable[LlumletEffect], now_s: float) -> list[InstanceEffect]:
        kept = [each for each in effects if not isinstance(each, self.left_out)]
        return super()._on_llumlet(kept, now_s)


class FreesFirst(InstanceCore):
    """Frees the source's blocks before the last stage was sent."""

    def _on_llumlet(self, effects: Iterable[LlumletEffect], now_s: float) -> list[InstanceEffect]:
        changed: list[LlumletEffect] = []
        for effect in effects:
            match effect:
                case Send(_, Commit(migration_id=migration_id, request_id=request_id)):
                    changed += [Release(migration_id, request_id), effect]
                case Release() | Resume() | AbortDrained():
                    pass
                case _:
                    changed.append(effect)
        return super()._on_llumlet(changed, now_s)


class NeverFreesReservations(_Without):
    left_out = (FreeReservation,)


class NeverResumes(_Without):
    left_out = (Resume,)


class NeverReleases(_Without):
    left_out = (Release,)


class StepsForTheDead(InstanceCore):
    """Does not end the requests of a front end that has died."""

    def _abort(self, request_ids: Iterable[RequestId], now_s: float) -> list[InstanceEffect]:
        wanted = [
            each for each in request_ids if self._requests.get(each) not in self._gone_frontends
        ]
        return super()._abort(wanted, now_s)


class StepsWhatItWasToldToEnd(InstanceCore):
    """Continues requests that it was told to end."""

    def on_message(self, message: WireMessage, *args: Any) -> list[InstanceEffect]:
        return [] if isinstance(message, AbortRequests) else super().on_message(message, *args)


class SaysEmptiedTooSoon(InstanceCore):
    """Does not wait for the front ends' FinalAcks."""

    def _notify_if_emptied(self) -> list[InstanceEffect]:
        for frontend_id in self._frontends:
            self._termination.on_final_ack(
                frontend_id, self._own_emptying(), self._termination._num_sent[frontend_id]
            )
        return super()._notify_if_emptied()

    def _own_emptying(self) -> int:
        for each in self._membership.instances:
            if each.instance_id == self._instance_id:
                return each.emptied_since
        return 0


class AcceptsOldAcks(InstanceCore):
    """Accepts the FinalAck of a front end that has not heard everything yet."""

    def _notify_if_emptied(self) -> list[InstanceEffect]:
        for frontend_id, (emptied_since, _) in self._termination._final_acks.items():
            num_sent = self._termination._num_sent[frontend_id]
            self._termination.on_final_ack(frontend_id, emptied_since, num_sent)
        return super()._notify_if_emptied()


class ForgetsUnknownFrontends(InstanceCore):
    """Drops messages for a front end that it does not know yet."""

    def _to_frontend(
        self, frontend_id: FrontendId, message: WireMessage, frames: Sequence[bytes] = ()
    ) -> list[InstanceEffect]:
        if frontend_id not in self._frontends:
            return []
        return super()._to_frontend(frontend_id, message, frames)


class PartsInSilence(InstanceCore):
    """Ends requests that cannot move while it is emptied, and does not hand them back."""

    def _hand_back(self) -> list[InstanceEffect]:
        return [each for each in super()._hand_back() if isinstance(each, AbortRequest)]


class SaysNothingAgain(InstanceCore):
    """Does not tell again what a full mailbox has refused."""

    def _repeat_news(self, now_s: float) -> list[InstanceEffect]:
        self._refused_news.clear()
        return []


class TellsPresenceOnly(SimulatedEngine):
    """Does not tell that a request was preempted since."""

    def _outcome(self, effect: Any) -> Outcome:
        outcome = super()._outcome(effect)
        if isinstance(outcome, Inspected) and outcome.progress is not None:
            return replace(outcome, progress=replace(outcome.progress, num_preemptions=0))
        return outcome

    def _drain(self, effect: Drain) -> Drained | DrainRefused:
        request = self.request(effect.request_id)
        if request is not None:
            request.num_preemptions = 0
        return super()._drain(effect)


class LosesState(SimulatedEngine):
    """Goes on with a migrated request as if it had said nothing yet (grammar, generator)."""

    def _adopt(self, effect: Adopt) -> Adopted | AdoptFailed:
        outcome = super()._adopt(effect)
        if isinstance(outcome, Adopted):
            self.streams[effect.request_id].digests[-1] = EMPTY
        return outcome


class NeverEnds(HeldLease):
    """Continues to act, though no heartbeat was answered."""

    def has_ended(self, now_s: float) -> bool:
        return False


class DoesNotWait(GrantedLeases):
    """Takes a member that is to end as dead at once, though it could not be killed."""

    def certain_s(self, member: str) -> float:
        return self._granted_s[member] if member in self._ending else super().certain_s(member)


class ExtendsWhatEnds(GrantedLeases):
    """Also answers a member that is to end."""

    def may_answer(self, member: str, now_s: float) -> bool:
        return member in self._granted_s


class ForgetsThePredecessor(GrantedLeases):
    """Assumes that a dead supervisor has not answered a member lately."""

    def grant(self, member: str, now_s: float) -> None:
        super().grant(member, now_s - self._certain_after_s + 0.6)
