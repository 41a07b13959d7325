"""Dispatcher: finds an instance for each request, with the scheduler or without it. Pure.

A request is *asked* for at the scheduler until the scheduler names an instance. It *waits* there
when the scheduler says so: no instance has the memory for it yet. It is *held* here while there is
no instance. Once it is sent, `ownership` keeps track of it.

"When the global scheduler fails, [the system] temporarily falls back to a scheduler-bypassing
mode [...]: the request frontends directly dispatch requests to certain instances using simple
rules" (Section 5, Fault tolerance). The rule here is the instance with the fewest requests of
this front end. A scheduler that did not answer in time is not asked for a while, so that not
every request waits for it; any answer of it, or another scheduler in its place, ends that.

Events are the `on_...` methods; each returns effects, in order. Time comes in as `now_s`; call
`on_time` when `next_deadline_s` has come.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from msgspec import structs

from sterna.config import FrontendConfig, OnInstanceFailure
from sterna.frontend.requests.ownership import Ownership
from sterna.frontend.requests.request_effects import Effect, Fail, Failure, ToInstance, ToScheduler
from sterna.messages.actors import (
    AddRequest,
    CancelDispatch,
    Dispatched,
    DispatchRequest,
    FinalAck,
    Held,
    Membership,
    OwnerReply,
    RequestsMoved,
    TokenSpan,
)
from sterna.types import FrontendId, InstanceId, RequestId

FINAL_ACK_RETRY_S = 1.0
"""Time until a FinalAck that could not be sent is tried again: without it the instance would not
end."""


@dataclass(frozen=True, slots=True)
class _Unsent:
    """A request without an instance; `payload` goes to its instance unchanged."""

    ask: DispatchRequest
    payload: bytes
    output_token_ids: tuple[int, ...]
    deadline_s: float
    asked_s: float


class Dispatcher:
    """The requests of one front end and the instances that it knows of."""

    def __init__(self, frontend_id: FrontendId, config: FrontendConfig) -> None:
        self._frontend_id = frontend_id
        self._config = config
        self._version = -1
        self._scheduler: str | None = None
        self._silent_until_s: float | None = None
        # By id: whether the instance is terminating.
        self._instances: dict[InstanceId, bool] = {}
        # Terminating instances without and with a FinalAck of this front end; the version that
        # identifies each termination (`emptied_since`).
        self._not_left: dict[InstanceId, int] = {}
        self._left: dict[InstanceId, int] = {}
        # Those whose FinalAck could not be sent, and when it is tried again.
        self._retry_acks_s: dict[InstanceId, float] = {}
        # The number of all messages about requests that each instance has sent.
        self._num_heard: Counter[InstanceId] = Counter()
        # In the order of their deadlines: each is entered with the same time-out.
        self._asked: dict[RequestId, _Unsent] = {}
        self._held: dict[RequestId, _Unsent] = {}
        # Those that wait at the scheduler, and until when it is to say so again.
        self._waiting: dict[RequestId, _Unsent] = {}
        self._waiting_until_s = 0.0
        is_continued = config.on_instance_failure is OnInstanceFailure.CONTINUE
        self._ownership = Ownership(
            frontend_id,
            config.owner_retry_s if is_continued else config.owner_timeout_s,
            decides_at_once=is_continued,
        )

    @property
    def instances(self) -> tuple[InstanceId, ...]:
        """The live instances, in the order of the membership."""
        return tuple(self._instances)

    @property
    def next_deadline_s(self) -> float | None:
        """When `on_time` is due, or None when nothing waits."""
        unsent = (next(iter(each.values()), None) for each in (self._asked, self._held))
        deadlines_s = [each.deadline_s for each in unsent if each is not None]
        if (doubt_deadline_s := self._ownership.next_deadline_s) is not None:
            deadlines_s.append(doubt_deadline_s)
        if self._waiting:
            deadlines_s.append(self._waiting_until_s)
        if self._retry_acks_s:
            deadlines_s.append(min(self._retry_acks_s.values()))
        return min(deadlines_s, default=None)

    def owner(self, request_id: RequestId) -> InstanceId | None:
        """Return the instance that has the request, or None while it has none."""
        return self._ownership.owner(request_id)

    def on_request(
        self,
        ask: DispatchRequest,
        payload: bytes,
        now_s: float,
        output_token_ids: tuple[int, ...] = (),
    ) -> list[Effect]:
        """A client's request has arrived; `payload` goes to its instance unchanged.

        Args:
            output_token_ids: the tokens that the client has already (`AddRequest`).
        """
        deadline_s = now_s + self._config.scheduler_timeout_s
        request = _Unsent(ask, payload, output_token_ids, deadline_s, now_s)
        if self._scheduler is None or self._is_silent(now_s):
            return self._place(request, now_s)
        self._asked[ask.request_id] = request
        return [ToScheduler(ask)]

    def on_dispatched(self, answer: Dispatched, now_s: float) -> list[Effect]:
        """The scheduler named an instance. A late answer is cancelled, once more: the scheduler
        has not had the first cancellation, or it was lost with a full mailbox."""
        self._on_sign_of_life(now_s)
        request = self._asked.pop(answer.request_id, None)
        if request is None:
            request = self._waiting.pop(answer.request_id, None)
        if request is None:
            return [ToScheduler(CancelDispatch(answer.request_id))]
        if self._instances.get(answer.instance_id, True):
            # The scheduler or this front end does not know yet of a start, an end, or a
            # termination of the instance.
            cancel = ToScheduler(CancelDispatch(answer.request_id))
            return [cancel, *self._place(request, now_s)]
        return [self._send(request, answer.instance_id, answer.dispatch_number)]

    def on_held(self, held: Held, now_s: float) -> list[Effect]:
        """The scheduler holds these requests until an instance has memory for them, and those of
        which it has said so before."""
        self._on_sign_of_life(now_s)
        for request_id in held.request_ids:
            request = self._asked.pop(request_id, None)
            if request is not None:
                self._waiting[request_id] = request
        return []

    def _on_sign_of_life(self, now_s: float) -> None:
        self._silent_until_s = None
        self._waiting_until_s = now_s + self._config.scheduler_timeout_s

    def on_abort(self, request_ids: Iterable[RequestId]) -> list[Effect]:
        """The clients of these requests have gone; unknown requests have ended already."""
        effects: list[Effect] = []
        sent = []
        for request_id in request_ids:
            asked = self._asked.pop(request_id, None) or self._waiting.pop(request_id, None)
            is_sent = self._ownership.owner(request_id) is not None
            if asked is not None or (is_sent and self._scheduler is not None):
                # Once it is sent, the scheduler counts on its prompt until that is computed.
                effects.append(ToScheduler(CancelDispatch(request_id)))
            if asked is None and self._held.pop(request_id, None) is None:
                sent.append(request_id)
        return effects + self._ownership.on_abort(sent)

    def on_ended(self, request_id: RequestId) -> None:
        """The request's stream has ended."""
        self._ownership.on_ended(request_id)

    def on_ended_empty(self, request_ids: Iterable[RequestId]) -> list[Effect]:
        """These requests were sent, and have ended without a token: their prompts may not have been
        computed, and the scheduler counts on them. Pooling requests have none either: the blocks of
        theirs, which the engine has computed, it reports."""
        if self._scheduler is None:
            return []
        return [ToScheduler(CancelDispatch(each)) for each in request_ids]

    def on_news(self, instance_id: InstanceId) -> None:
        """The instance has sent news of requests: tokens, or which instance has them."""
        self._num_heard[instance_id] += 1
        if instance_id in self._left:
            # The news was under way when the FinalAck was sent, and voids it.
            self._not_left[instance_id] = self._left.pop(instance_id)

    def on_moved(self, moved: RequestsMoved, now_s: float) -> list[Effect]:
        """An instance says that it has adopted requests."""
        return self._ownership.on_moved(moved, now_s)

    def on_tokens(self, instance_id: InstanceId, spans: Iterable[TokenSpan]) -> None:
        """The instance sent these tokens, each span later than all before of its request."""
        self._ownership.on_tokens(instance_id, spans)

    def on_owner_reply(self, reply: OwnerReply, now_s: float) -> list[Effect]:
        """An instance claims these requests, of those about which it was asked."""
        return self._ownership.on_owner_reply(reply, now_s)

    def on_membership(self, membership: Membership, now_s: float) -> list[Effect]:
        """Members have changed; a version that is not newer than the last one is ignored."""
        if membership.version <= self._version:
            return []
        self._version = membership.version
        for instance_id in self._instances.keys() - {i.instance_id for i in membership.instances}:
            self._num_heard.pop(instance_id, None)
        self._instances = {each.instance_id: each.is_terminating for each in membership.instances}
        emptied = {
            each.instance_id: each.emptied_since
            for each in membership.instances
            if each.is_terminating
        }
        self._left = {each: since for each, since in self._left.items() if each in emptied}
        self._not_left = {
            each: since for each, since in emptied.items() if self._left.get(each) != since
        }
        effects = self._ownership.on_instances(tuple(self._instances), now_s, self._version)
        if membership.scheduler != self._scheduler:
            self._scheduler = membership.scheduler
            self._silent_until_s = None
            effects += self._ask_again(now_s)
        held, self._held = self._held, {}
        for request in held.values():
            effects += self._send_or_hold(request)
        return effects

    def on_time(self, now_s: float) -> list[Effect]:
        """Deal with everything whose deadline has come."""
        effects: list[Effect] = []
        unanswered = [self._asked.pop(each) for each in _due(self._asked, now_s)]
        if self._waiting and self._waiting_until_s <= now_s:
            unanswered += self._waiting.values()
            self._waiting = {}
        for request in unanswered:
            self._silent_until_s = now_s + self._config.scheduler_retry_s
            effects.append(ToScheduler(CancelDispatch(request.ask.request_id)))
            effects += self._place(request, now_s)
        for instance_id in [each for each, at_s in self._retry_acks_s.items() if at_s <= now_s]:
            del self._retry_acks_s[instance_id]
            if instance_id in self._left:
                self._not_left[instance_id] = self._left.pop(instance_id)
        for request_id in _due(self._held, now_s):
            del self._held[request_id]
            effects.append(Fail(request_id, Failure.NO_INSTANCE))
        return effects + self._ownership.on_time(now_s)

    def final_acks(self) -> list[Effect]:
        """Return a FinalAck for each terminating instance that has no request of this front end.

        Call this after every event. An instance ends only after the FinalAcks of all front ends,
        when no request is under way to it. News that is under way from the instance voids its
        FinalAck; another one follows.
        """
        if not self._not_left:
            return []
        left = [each for each in sorted(self._not_left) if not self._ownership.num_owned(each)]
        effects: list[Effect] = []
        for instance_id in left:
            since = self._left[instance_id] = self._not_left.pop(instance_id)
            self._retry_acks_s.pop(instance_id, None)
            final_ack = FinalAck(self._frontend_id, since, self._num_heard[instance_id])
            effects.append(ToInstance(instance_id, final_ack, None))
        return effects

    def on_final_ack_unsent(self, instance_id: InstanceId, now_s: float) -> None:
        """The FinalAck for this instance could not be sent; another one follows."""
        if instance_id in self._left:
            self._retry_acks_s[instance_id] = now_s + FINAL_ACK_RETRY_S

    def _is_silent(self, now_s: float) -> bool:
        return self._silent_until_s is not None and now_s < self._silent_until_s

    def _place(self, request: _Unsent, now_s: float) -> list[Effect]:
        deadline_s = now_s + self._config.hold_timeout_s
        return self._send_or_hold(replace(request, deadline_s=deadline_s))

    def _send_or_hold(self, request: _Unsent) -> list[Effect]:
        """Send by the local rule; a terminating instance gets nothing."""
        candidates = [
            each for each, is_terminating in self._instances.items() if not is_terminating
        ]
        if not candidates:
            self._held[request.ask.request_id] = request
            return []
        return [self._send(request, min(candidates, key=self._ownership.num_owned), 0)]

    def _send(self, request: _Unsent, instance_id: InstanceId, dispatch_number: int) -> Effect:
        request_id = request.ask.request_id
        self._ownership.on_sent(request_id, instance_id)
        message = AddRequest(
            self._frontend_id, request_id, dispatch_number, request.output_token_ids
        )
        return ToInstance(instance_id, message, request.payload)

    def _ask_again(self, now_s: float) -> list[Effect]:
        """Ask the new scheduler again for the requests that its predecessor has not placed."""
        deadline_s = now_s + self._config.scheduler_timeout_s
        for request_id, request in self._waiting.items():
            self._asked[request_id] = replace(request, deadline_s=deadline_s)
        self._waiting = {}
        if self._scheduler is not None:
            return [
                ToScheduler(structs.replace(each.ask, waited_s=now_s - each.asked_s))
                for each in self._asked.values()
            ]
        asked, self._asked = self._asked, {}
        return [effect for request in asked.values() for effect in self._place(request, now_s)]


def _due(unsent: dict[RequestId, _Unsent], now_s: float) -> list[RequestId]:
    return [request_id for request_id, each in unsent.items() if each.deadline_s <= now_s]
