"""All that a front end decides about its requests: one state machine without a clock. Pure.

Joins the three parts: `dispatch` finds an instance for each request, `ownership` knows which
instance has it, also after deaths, and `streams` puts its tokens in order. What comes from a
client or from the cluster goes in, with the time; what is to be done comes out as effects, in
order. An interpreter carries them out: `router` under vLLM's own server, a simulation in virtual
time.

Payloads pass through unread.
"""

from collections.abc import Iterable, Sequence

from sterna.config import FrontendConfig
from sterna.frontend.dispatch import Dispatcher
from sterna.frontend.effects import Effect, Fail, Failure, ToInstance
from sterna.frontend.streams import Streams
from sterna.messages import (
    AbortRequests,
    Dispatched,
    DispatchRequest,
    Membership,
    OwnerReply,
    RequestsMoved,
    TokenBatch,
)
from sterna.types import FrontendId, InstanceId, RequestId

RequestMessage = TokenBatch | Dispatched | RequestsMoved | OwnerReply | Membership
"""What the cluster says to a front end about its requests."""


class FrontendCore:
    """The requests of one front end, from their arrival to the end of their streams.

    Every method that takes `now_s` returns effects, in order; `on_time` is to be called when
    `next_deadline_s` has come. A request has ended, and is forgotten here, with the Deliver that
    is finished, with Fail, or with its abort.
    """

    def __init__(self, frontend_id: FrontendId, config: FrontendConfig) -> None:
        self._dispatcher = Dispatcher(frontend_id, config)
        self._streams = Streams(config.gap_timeout_s)

    # ------------------------------------------------------------------------ what is asked

    @property
    def next_deadline_s(self) -> float | None:
        """When `on_time` is due, or None when nothing waits."""
        deadlines_s = (self._dispatcher.next_deadline_s, self._streams.next_deadline_s())
        return min((each for each in deadlines_s if each is not None), default=None)

    @property
    def instances(self) -> tuple[InstanceId, ...]:
        """The live instances, in the order of the membership."""
        return self._dispatcher.instances

    def owner(self, request_id: RequestId) -> InstanceId | None:
        """Return the instance that has the request, or None while it has none."""
        return self._dispatcher.owner(request_id)

    def num_delivered(self, request_id: RequestId) -> int | None:
        """Return how many tokens the client has, or None when there is no such open stream."""
        return self._streams.num_delivered(request_id)

    # ------------------------------------------------------------------------ what happens

    def on_request(self, ask: DispatchRequest, payload: bytes, now_s: float) -> list[Effect]:
        """A client's request came; `payload` goes to its instance as it is."""
        self._streams.open(ask.request_id)
        return self._conclude(self._dispatcher.on_request(ask, payload, now_s))

    def on_abort(self, request_ids: Sequence[RequestId], now_s: float) -> list[Effect]:
        """The clients of these requests have gone; unknown ones have ended already."""
        for request_id in request_ids:
            self._streams.close(request_id)
        return self._conclude(self._dispatcher.on_abort(request_ids))

    def on_message(
        self, message: RequestMessage, frames: Sequence[bytes], now_s: float
    ) -> list[Effect]:
        """The cluster said this; `frames` are the message's payloads."""
        match message:
            case TokenBatch():
                effects = self._on_tokens(message, frames, now_s)
            case Dispatched():
                effects = self._dispatcher.on_dispatched(message, now_s)
            case RequestsMoved(instance_id, request_ids):
                effects = self._dispatcher.on_moved(instance_id, request_ids, now_s)
            case OwnerReply():
                effects = self._dispatcher.on_owner_reply(message)
            case Membership():
                effects = self._dispatcher.on_membership(message, now_s)
        return self._conclude(effects)

    def on_time(self, now_s: float) -> list[Effect]:
        """Deal with everything whose deadline has come."""
        effects = self._dispatcher.on_time(now_s)
        for request_id in self._streams.expired(now_s):
            effects += self._dispatcher.on_abort([request_id])
            effects.append(Fail(request_id, Failure.TOKENS_LOST))
        return self._conclude(effects)

    # --------------------------------------------------------------------------- internals

    def _on_tokens(
        self, batch: TokenBatch, payloads: Sequence[bytes], now_s: float
    ) -> list[Effect]:
        outcome = self._streams.on_batch(batch.spans, payloads, now_s)
        self._dispatcher.on_tokens(batch.instance_id, outcome.advanced)
        effects: list[Effect] = [*outcome.deliveries]
        for delivery in outcome.deliveries:
            if delivery.is_finished:
                self._dispatcher.on_ended(delivery.request_id)
        if outcome.strays:
            # Their abort came too early for the instance, or was lost with another one.
            strays = AbortRequests(tuple(outcome.strays))
            effects.append(ToInstance(batch.instance_id, strays))
        return effects

    def _conclude(self, effects: Iterable[Effect]) -> list[Effect]:
        """Close the streams that fail, and say the farewells that are due."""
        concluded = [*effects, *self._dispatcher.farewells()]
        for effect in concluded:
            if isinstance(effect, Fail):
                self._streams.close(effect.request_id)
        return concluded
