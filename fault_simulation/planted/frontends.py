"""Mistakes of front ends and of the supervisor."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from sterna.frontend.requests.attempts import Attempt, Attempts
from sterna.frontend.requests.core import FrontendCore
from sterna.frontend.requests.dispatcher import Dispatcher
from sterna.frontend.requests.ownership import Ownership
from sterna.frontend.requests.request_effects import Deliver
from sterna.frontend.requests.request_effects import Effect as FrontendEffect
from sterna.frontend.requests.token_streams import Outcome, TokenStreams
from sterna.frontend.resumable.pacing import Begun, Pacing
from sterna.frontend.resumable.replica_link import ReplicaLink
from sterna.frontend.resumable.replicas import Record, Replicas
from sterna.messages.actors import Emptied, HandedBack, Membership, WireMessage
from sterna.supervisor.core import SupervisorCore, SupervisorEffect
from sterna.types import FrontendId, InstanceId, RequestId


class _NeverBypasses(Dispatcher):
    @property
    def next_deadline_s(self) -> float | None:
        return self._ownership.next_deadline_s

    def _ask_again(self, now_s: float) -> list[FrontendEffect]:
        return []


class WaitsForTheScheduler(FrontendCore):
    """Waits for an answer of the scheduler that it asked, though this may have died."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._dispatcher.__class__ = _NeverBypasses


class _TrustsForever(Dispatcher):
    @property
    def next_deadline_s(self) -> float | None:
        waiting, self._waiting = self._waiting, {}
        deadline_s = super().next_deadline_s
        self._waiting = waiting
        return deadline_s

    def _on_sign_of_life(self, now_s: float) -> None:
        self._silent_until_s = None
        self._waiting_until_s = math.inf

    def _ask_again(self, now_s: float) -> list[FrontendEffect]:
        waiting, self._waiting = self._waiting, {}
        effects = super()._ask_again(now_s)
        self._waiting = waiting
        return effects


class TrustsTheHolder(FrontendCore):
    """Waits for a scheduler that held its requests, though this may have died."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._dispatcher.__class__ = _TrustsForever


class TakesNothingBack(FrontendCore):
    """Takes no notice of what an instance hands back."""

    def _on_handed_back(self, message: HandedBack, now_s: float) -> list[FrontendEffect]:
        return []


class _Repeating(TokenStreams):
    @staticmethod
    def _deliver(stream: Any, request_id: RequestId, span: Any, outcome: Any) -> bool:
        _, end, is_finished, payload, _ = span
        outcome.deliveries.append(Deliver(request_id, payload, 0, is_finished))
        stream.next_index = max(stream.next_index, end)
        return not is_finished


class DeliversRepeats(FrontendCore):
    """Delivers tokens that the client has already."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._streams.__class__ = _Repeating


class _Unordered(TokenStreams):
    def _take(self, stream: Any, instance_id: InstanceId, span: Any, *args: Any) -> None:
        stream.next_index = max(stream.next_index, span.first_index)
        super()._take(stream, instance_id, span, *args)


class DeliversOutOfOrder(FrontendCore):
    """Does not wait for missing tokens."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._streams.__class__ = _Unordered


class _AsksOnce(Ownership):
    def _repeat_queries(self, request_ids: Sequence[RequestId]) -> list[FrontendEffect]:
        return []


class AsksOnceForOwners(FrontendCore):
    """Asks an instance once whether it has a request, though question or answer may be lost."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._dispatcher._ownership.__class__ = _AsksOnce


class _AwaitsNoAnswer(Ownership):
    def on_time(self, now_s: float) -> list[FrontendEffect]:
        for doubt in self._doubts.values():
            if doubt.deadline_s <= now_s:
                doubt.unanswered.clear()
        return super().on_time(now_s)


class TakesSilenceForDenials(FrontendCore):
    """Sends a request again when an instance has not answered in time that may have it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._dispatcher._ownership.__class__ = _AwaitsNoAnswer


class AcknowledgesTooSoon(FrontendCore):
    """Sends its FinalAck to an instance that has requests of it, and must not accept it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._dispatcher.__class__ = _Hurried


class _Hurried(Dispatcher):
    def final_acks(self) -> list[FrontendEffect]:
        num_owned = self._ownership.num_owned
        self._ownership.num_owned = _none  # type: ignore[method-assign]
        effects = super().final_acks()
        self._ownership.num_owned = num_owned  # type: ignore[method-assign]
        return effects


def _none(instance_id: InstanceId) -> int:
    return 0


class SendsToTerminating(FrontendCore):
    """Sends new requests to an instance that has its FinalAck."""

    def on_message(self, message: Any, *args: Any) -> list[FrontendEffect]:
        effects = super().on_message(message, *args)
        if isinstance(message, Membership):
            for each in self._dispatcher._instances:
                self._dispatcher._instances[each] = False
        return effects


class BelievesOldEmptyings(SupervisorCore):
    """Ends an instance that was empty once, before it was told to serve on."""

    def on_message(self, message: WireMessage, now_s: float) -> list[SupervisorEffect]:
        if isinstance(message, Emptied):
            return [*self.fleet.on_emptied(message.instance_id, now_s)]
        return super().on_message(message, now_s)


class _Waiting(TokenStreams):
    def expired(self, now_s: float) -> list[RequestId]:
        return []

    def next_deadline_s(self) -> float | None:
        return None


class WaitsForLostTokens(FrontendCore):
    """Waits on, however long a token is missing that others follow."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._streams.__class__ = _Waiting


class DropsWhatIsUnsent(FrontendCore):
    """Says nothing of a request that its mailbox has refused to send."""

    def on_unsent(self, *args: Any) -> list[FrontendEffect]:
        return []


class _NeverAwaited(ReplicaLink):
    def is_waited_for(self, number: int) -> bool:
        return False


class HandsBeforeItIsKept(Pacing):
    """Gives outputs out before the buddy has confirmed them."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._link.__class__ = _NeverAwaited


class BeginsAnew(Pacing):
    """Lets the engine begin a stream that was taken over at its first token."""

    def on_begun(self, request_id: RequestId) -> Begun | None:
        begun = super().on_begun(request_id)
        return begun and replace(begun, output_token_ids=())


class TellsOfNewStreamsOnly(Pacing):
    """Does not send the existing records when another front end becomes the buddy."""

    def on_buddy(self, buddy: FrontendId | None, now_s: float) -> None:
        if buddy != self._link.buddy:
            self._link.on_buddy(buddy)
            self._touch_held()


class TakesNothingOver(Replicas):
    """Forgets the replicas of a front end that has died."""

    def on_frontends(self, live: Sequence[FrontendId]) -> list[Record]:
        super().on_frontends(live)
        return []


class _NeverCleared(Attempts):
    def extend(self, request_id: RequestId, token_ids: Iterable[int]) -> None:
        self._open_requests[request_id].token_ids.extend(token_ids)


class NeverClearsSuspects(FrontendCore):
    """Forgets no death that found a request, however many tokens it has generated since."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._attempts.__class__ = _NeverCleared


class _Distrustful(Attempts):
    def on_death(self, attempt_ids: Sequence[RequestId]) -> tuple[list[Attempt], list[RequestId]]:
        for each in map(self.request_of, attempt_ids):
            if self.has(each):
                self._open_requests[each].num_at_death = 0
        return super().on_death(attempt_ids)


class HoldsFirstDeathsAgainst(FrontendCore):
    """Takes the first death that finds a request as the second one."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._attempts.__class__ = _Distrustful


class _Elsewhere(Attempts):
    def _suspects_elsewhere(self, attempt_ids: Sequence[RequestId]) -> list[RequestId]:
        """Those that this death has not found, if it has found any request."""
        here = {*map(self.request_of, attempt_ids), *self._suspects}
        suspects = [each for each, it in self._open_requests.items() if it.num_at_death is not None]
        return [each for each in suspects if each not in here] if attempt_ids else []


class _Unjust(_Elsewhere):
    def on_death(self, attempt_ids: Sequence[RequestId]) -> tuple[list[Attempt], list[RequestId]]:
        elsewhere = self._suspects_elsewhere(attempt_ids)[:1]
        again, guilty = super().on_death(attempt_ids)
        return again, guilty or elsewhere


class JudgesByOthersDeaths(FrontendCore):
    """Judges a suspect guilty when an instance dies that does not have it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._attempts.__class__ = _Unjust


class _Anxious(_Elsewhere):
    def on_death(self, attempt_ids: Sequence[RequestId]) -> tuple[list[Attempt], list[RequestId]]:
        elsewhere = self._suspects_elsewhere(attempt_ids)
        again, guilty = super().on_death(attempt_ids)
        return [*again, *(self._again(self._open_requests[each]) for each in elsewhere)], guilty


class SendsSuspectsAgain(FrontendCore):
    """Sends suspects again when an instance dies that does not have them."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._attempts.__class__ = _Anxious


class _Severe(Attempts):
    def on_death(self, attempt_ids: Sequence[RequestId]) -> tuple[list[Attempt], list[RequestId]]:
        found = [each for each in map(self.request_of, attempt_ids) if self.has(each)]
        guilty = [each for each in found if self._open_requests[each].num_at_death is not None]
        for each in guilty:
            self.close(each)
        return super().on_death(attempt_ids)[0], guilty


class JudgesAllSuspects(FrontendCore):
    """Judges all suspects that a second death finds guilty."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._attempts.__class__ = _Severe


class _Unanswering(TokenStreams):
    def on_batch(self, *args: Any) -> Outcome:
        return replace(super().on_batch(*args), strays=[])


class NeverStopsTheUnawaited(FrontendCore):
    """Does not tell an instance that no client waits for the request that it steps."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._streams.__class__ = _Unanswering
