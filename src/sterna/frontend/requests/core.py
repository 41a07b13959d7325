"""Front-end core: all decisions about the requests of a front end. No clock. Pure.

One state machine of four parts: `dispatcher` finds an instance for each request, `ownership` knows
which instance has it, also after deaths, `token_streams` puts its tokens in order, and `attempts`
keeps what is needed to send it again. Events of clients and the cluster go in, with the time;
effects come out, in order. An interpreter carries them out: `router` under vLLM's own server, a
simulation in virtual time.

**A lost request is sent again**, under another id and after the tokens that its client has
(`attempts`), when

- it died with its instance, and no other instance has it;
- some of its tokens were lost: it moved away from an instance that died before sending them;
- its instance has handed it back: the request could not move, and the instance is to end;
- an instance goes on from other tokens than the client has: it took the request back from a
  destination that died, whose tokens had already reached the client. Seeded and greedy requests
  produce the same tokens again; a stream of another request would become a mixture of two. It does
  not move from there again, so no later tokens overtake those that show the contradiction.

To clients and operators a request has one id, the one with which it arrived.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from sterna.config import FrontendConfig, OnInstanceFailure
from sterna.engine import payload_parts
from sterna.frontend.requests.attempts import Attempt, Attempts, DemandOf, going_on
from sterna.frontend.requests.dispatcher import Dispatcher
from sterna.frontend.requests.request_effects import (
    Deliver,
    Effect,
    Fail,
    Failure,
    SendAgain,
    ToInstance,
)
from sterna.frontend.requests.token_streams import Outcome, Repeat, TokenStreams
from sterna.messages.actors import (
    AbortRequests,
    Dispatched,
    DispatchRequest,
    HandedBack,
    Held,
    Membership,
    OwnerReply,
    RequestNews,
    RequestsMoved,
    TokenBatch,
)
from sterna.types import FrontendId, InstanceId, RequestId, earliest

RequestMessage = (
    TokenBatch | Dispatched | Held | RequestsMoved | HandedBack | OwnerReply | Membership
)
"""The messages of the cluster to a front end about its requests."""


class Payloads(Protocol):
    """Access to the contents of payloads; `engine.payload_parts` gives it for vLLM's."""

    def token_ids_of(self, payload: bytes) -> list[int]:
        """Return the tokens of an output."""

    def renamed_output(self, payload: bytes, request_id: str) -> bytes:
        """Return the output as one of that request."""

    def renamed_request(self, payload: bytes, request_id: str) -> bytes:
        """Return the request under that id."""


class FrontendCore:
    """The requests of one front end, from their arrival to the end of their streams.

    Every method that takes `now_s` returns effects, in order; call `on_time` when
    `next_deadline_s` has come. A request ends, and is forgotten here, with the Deliver that is
    finished, with Fail, or with its abort.
    """

    def __init__(
        self,
        frontend_id: FrontendId,
        config: FrontendConfig,
        payloads: Payloads = payload_parts,
        demand_of: DemandOf | None = None,
    ) -> None:
        self._payloads = payloads
        self._demand_of = demand_of
        self._dispatcher = Dispatcher(frontend_id, config)
        self._streams = TokenStreams(config.gap_timeout_s)
        is_continued = config.on_instance_failure is OnInstanceFailure.CONTINUE
        self._attempts = Attempts(config.trial_timeout_s, demand_of) if is_continued else None

    # ------------------------------------------------------------------------------ queries

    @property
    def next_deadline_s(self) -> float | None:
        """When `on_time` is due, or None when nothing waits."""
        deadlines_s = [self._dispatcher.next_deadline_s, self._streams.next_deadline_s()]
        if self._attempts is not None:
            deadlines_s.append(self._attempts.next_deadline_s)
        return earliest(deadlines_s)

    @property
    def instances(self) -> tuple[InstanceId, ...]:
        """The live instances, in the order of the membership."""
        return self._dispatcher.instances

    def owner(self, request_id: RequestId) -> InstanceId | None:
        """Return the instance that has the request, or None while it has none."""
        return self._dispatcher.owner(self._attempt_of(request_id))

    def num_delivered(self, request_id: RequestId) -> int | None:
        """Return the number of tokens that the client has, or None without an open stream."""
        if self._attempts is None:
            return self._streams.num_delivered(request_id)
        return self._attempts.num_tokens(request_id) if self._attempts.has(request_id) else None

    # ------------------------------------------------------------------------------- events

    def on_request(
        self,
        ask: DispatchRequest,
        payload: bytes,
        now_s: float,
        output_token_ids: tuple[int, ...] = (),
    ) -> list[Effect]:
        """A client's request has arrived; `payload` goes to its instance unchanged.

        Args:
            output_token_ids: the tokens that the client has already, from another front end.
        """
        self._streams.open(ask.request_id, len(output_token_ids))
        if self._attempts is not None:
            self._attempts.open(ask, payload, output_token_ids)
        # Later attempts add the number of tokens themselves, so `attempts` has `ask` without it.
        ask = going_on(ask, len(output_token_ids), self._demand_of)
        effects = self._dispatcher.on_request(ask, payload, now_s, output_token_ids)
        return self._resend_and_acknowledge(effects, now_s)

    def on_abort(self, request_ids: Sequence[RequestId], now_s: float) -> list[Effect]:
        """The clients of these requests have gone; unknown requests have ended already."""
        attempt_ids = [self._attempt_of(each) for each in request_ids]
        for request_id, attempt_id in zip(request_ids, attempt_ids, strict=True):
            self._streams.close(attempt_id)
            if self._attempts is not None:
                self._attempts.close(request_id)
        return self._resend_and_acknowledge(self._dispatcher.on_abort(attempt_ids), now_s)

    def on_message(
        self, message: RequestMessage, frames: Sequence[bytes], now_s: float
    ) -> list[Effect]:
        """The cluster has sent this message; `frames` are its payloads."""
        if isinstance(message, RequestNews):
            self._dispatcher.on_news(message.instance_id)
        match message:
            case TokenBatch():
                effects = self._on_tokens(message, frames, now_s)
            case Dispatched():
                effects = self._dispatcher.on_dispatched(message, now_s)
            case Held():
                effects = self._dispatcher.on_held(message, now_s)
            case RequestsMoved():
                self._streams.on_moved(message)
                effects = self._dispatcher.on_moved(message, now_s)
            case HandedBack():
                effects = self._on_handed_back(message, now_s)
            case OwnerReply():
                effects = self._dispatcher.on_owner_reply(message, now_s)
            case Membership():
                effects = self._dispatcher.on_membership(message, now_s)
        return self._resend_and_acknowledge(effects, now_s)

    def on_time(self, now_s: float) -> list[Effect]:
        """Deal with everything whose deadline has come."""
        effects = self._dispatcher.on_time(now_s)
        for attempt_id in self._streams.expired(now_s):
            self._streams.close(attempt_id)
            effects += self._dispatcher.on_abort([attempt_id])
            again = None if self._attempts is None else self._attempts.on_gap(attempt_id)
            if again is None:
                effects.append(Fail(attempt_id, Failure.TOKENS_LOST))
            else:
                effects += self._send_again(again, now_s)
        return self._resend_and_acknowledge(effects, now_s)

    def on_unsent(self, attempt_ids: Iterable[RequestId], now_s: float) -> list[Effect]:
        """These could not be sent to their instance, which does not read its messages."""
        effects: list[Effect] = []
        for attempt_id in attempt_ids:
            effects += self._dispatcher.on_abort([attempt_id])
            effects.append(Fail(attempt_id, Failure.UNSENT))
        return self._resend_and_acknowledge(effects, now_s)

    def on_final_ack_unsent(self, instance_id: InstanceId, now_s: float) -> None:
        """The FinalAck for this instance could not be sent; `on_time` has another one."""
        self._dispatcher.on_final_ack_unsent(instance_id, now_s)

    # ------------------------------------------------------------------------------- tokens

    def _on_tokens(
        self, batch: TokenBatch, payloads: Sequence[bytes], now_s: float
    ) -> list[Effect]:
        outcome = self._streams.on_batch(batch.instance_id, batch.spans, payloads, now_s)
        self._dispatcher.on_tokens(batch.instance_id, outcome.advanced)
        for attempt_id in outcome.ended:
            # The request has ended on its instance, so no instance has it. Its missing tokens are
            # under way; if they were lost, the gap's time-out shows it.
            self._dispatcher.on_ended(attempt_id)
        if self._attempts is None:
            effects: list[Effect] = [*outcome.deliveries]
            for delivery in outcome.deliveries:
                if delivery.is_finished:
                    self._dispatcher.on_ended(delivery.request_id)
            for attempt_id in outcome.ended_behind:
                self._streams.close(attempt_id)
                self._dispatcher.on_ended(attempt_id)
                effects.append(Fail(attempt_id, Failure.TOKENS_LOST))
        else:
            effects = self._deliver(outcome, self._attempts, now_s)
        effects += self._dispatcher.on_ended_empty(outcome.ended_empty)
        if outcome.strays:
            # Their abort reached the instance before the request, or was lost with another
            # instance, or the request goes on elsewhere.
            strays = AbortRequests(tuple(outcome.strays))
            effects.append(ToInstance(batch.instance_id, strays))
        return effects

    def _deliver(self, outcome: Outcome, attempts: Attempts, now_s: float) -> list[Effect]:
        """Deliver, and note the delivered tokens. An attempt whose repeated tokens, or whose end,
        contradict those of the client delivers nothing further, and is sent again."""
        effects: list[Effect] = []
        contradicting: list[RequestId] = []
        for each in _in_order(outcome):
            if each.request_id in contradicting:
                continue
            if isinstance(each, Deliver):
                effects.append(self._note(each, attempts))
                continue
            token_ids = self._payloads.token_ids_of(each.payload)
            if attempts.differs(each.request_id, each.first_index, token_ids):
                contradicting.append(each.request_id)
        for attempt_id in dict.fromkeys([*contradicting, *outcome.ended_behind]):
            if attempts.has(attempts.request_of(attempt_id)):
                self._streams.close(attempt_id)
                effects += self._dispatcher.on_abort([attempt_id])
                effects += self._send_again(attempts.next_attempt(attempt_id), now_s)
        return effects

    def _note(self, delivery: Deliver, attempts: Attempts) -> Deliver:
        """Note the delivered tokens; returns the delivery under the client's id."""
        attempt_id, payload = delivery.request_id, delivery.payload
        request_id = attempts.request_of(attempt_id)
        token_ids = self._payloads.token_ids_of(payload)
        attempts.extend(request_id, token_ids[delivery.num_repeated :])
        if delivery.is_finished:
            self._dispatcher.on_ended(attempt_id)
            attempts.close(request_id)
        if attempt_id == request_id:
            return delivery
        payload = self._payloads.renamed_output(payload, request_id)
        return replace(delivery, request_id=request_id, payload=payload)

    # ----------------------------------------------------------------------- lost requests

    def _on_handed_back(self, message: HandedBack, now_s: float) -> list[Effect]:
        """The instance has given these requests up; what it still sends of them is void."""
        effects: list[Effect] = []
        for attempt_id in message.request_ids:
            if self._streams.num_delivered(attempt_id) is None:
                # Its client has gone, or the request goes on elsewhere already.
                continue
            self._streams.close(attempt_id)
            effects += self._dispatcher.on_abort([attempt_id])
            if self._attempts is None:
                effects.append(Fail(attempt_id, Failure.HANDED_BACK))
            else:
                effects += self._send_again(self._attempts.next_attempt(attempt_id), now_s)
        return effects

    def _send_again(self, again: Attempt, now_s: float) -> list[Effect]:
        """Send the next attempt of a request."""
        ask, token_ids = again.ask, again.output_token_ids
        assert self._attempts is not None
        request_id = self._attempts.request_of(ask.request_id)
        self._streams.open(ask.request_id, len(token_ids))
        payload = self._payloads.renamed_request(again.payload, ask.request_id)
        return [
            SendAgain(request_id, ask.request_id, len(token_ids)),
            *self._dispatcher.on_request(ask, payload, now_s, token_ids),
        ]

    def _resend_and_acknowledge(self, effects: Iterable[Effect], now_s: float) -> list[Effect]:
        """Return the effects, with requests sent again in place of their failures where possible,
        and the FinalAcks that are due."""
        return [*self._resend_or_fail(effects, now_s), *self._dispatcher.final_acks()]

    def _resend_or_fail(self, effects: Iterable[Effect], now_s: float) -> list[Effect]:
        """Close the streams that failed; send again what died with an instance, and what is due
        for another attempt."""
        done: list[Effect] = []
        dead = []
        for effect in effects:
            if not isinstance(effect, Fail):
                done.append(effect)
                continue
            self._streams.close(effect.request_id)
            if self._attempts is None:
                done.append(effect)
            elif effect.failure is Failure.OWNER_DIED:
                dead.append(effect.request_id)
            else:
                request_id = self._attempts.request_of(effect.request_id)
                self._attempts.close(request_id)
                done.append(Fail(request_id, effect.failure))
        if self._attempts is not None:
            again, guilty = self._attempts.on_death(dead)
            done += [Fail(each, Failure.KILLED_INSTANCES) for each in guilty]
            for attempt in (*again, *self._attempts.due(now_s)):
                done += self._send_again(attempt, now_s)
        return done

    def _attempt_of(self, request_id: RequestId) -> RequestId:
        return request_id if self._attempts is None else self._attempts.attempt_of(request_id)


def _in_order(outcome: Outcome) -> Iterator[Repeat | Deliver]:
    """The repeats and deliveries of a batch, in the order in which they arrived."""
    repeats = deque(outcome.repeats)
    for number, delivery in enumerate(outcome.deliveries):
        while repeats and repeats[0].num_before <= number:
            yield repeats.popleft()
        yield delivery
    yield from repeats
