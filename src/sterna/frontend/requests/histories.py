"""Histories: what happened to each request of this front end, and why, for `sterna explain`. Pure.

The router enters what it sends and gets; nothing is decided here. Each request has its events in
order, with the seconds since it arrived; `described` gives them to operators, in fields that are
stable (docs/operations/explain.md). Live requests are kept, and the last `MAX_ENDED` others.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from sterna.engine.payload_parts import Annotations, EventType
from sterna.frontend.requests.request_ids import client_id, names_of, without_attempt
from sterna.messages.actors import COMMITTED, Dispatched, DispatchRequest, MoveEnded
from sterna.messages.reasons import DispatchReason, InstanceSeen, MoveReason
from sterna.types import InstanceId, RequestId

MAX_ENDED = 2_000
"""Ended requests that are remembered."""

MAX_OF_A_NAME = 64
"""Requests of one name that are timed: clients may use an id again and again."""

MAX_EVENTS = 200
"""Events kept of one request: its first and last ones."""

Described = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Timing:
    """Where the time until a request's first token went; None: that is not over, or unknown.

    Attributes:
        scheduler_s: until it was sent to an instance, most of it at the scheduler.
        queue_s: in the instance's queue.
        prefill_s: from then on, until its first token arrived.
        instance_id: the instance that it was sent to last.
    """

    scheduler_s: float | None
    queue_s: float | None
    prefill_s: float | None
    instance_id: InstanceId | None


@dataclass(slots=True, eq=False)
class _History:
    class_name: str
    arrived_s: float
    begun_s: float
    prompt_tokens: int
    demand_tokens: int
    state: str = "waiting"
    instance_id: InstanceId | None = None
    # The attempt that was sent last, and what the scheduler says of one that is not sent yet.
    attempt_id: RequestId | None = None
    reason: tuple[RequestId, DispatchReason] | None = None
    output_tokens: int | None = None
    # The event that the next output is, if it is one.
    next_output: str | None = "first token"
    num_dropped: int = 0
    events: list[Described] = field(default_factory=list)
    # The engine's last event that waits for its counterpart: a kind, and when it was.
    since: tuple[int, float] | None = None


class Histories:
    """The histories of one front end's requests. Every method with `now_s` enters an event; those
    about a request that is not known have no effect."""

    def __init__(self) -> None:
        self._live: dict[RequestId, _History] = {}
        self._ended: OrderedDict[RequestId, _History] = OrderedDict()
        self._by_client_id: dict[str, deque[_History]] = {}

    # -------------------------------------------------------------------------------- events

    def begin(
        self, ask: DispatchRequest, class_name: str, now_s: float, *, arrived_s: float
    ) -> None:
        """A request has arrived.

        Args:
            arrived_s: the time by the wall clock; `now_s` may have any other.
        """
        request_id = ask.request_id
        # vLLM draws unique ids, unless it is told not to.
        earlier = self._live.pop(request_id, None) or self._ended.pop(request_id, None)
        if earlier is not None:
            self._forget(request_id, earlier)
        history = _History(class_name, arrived_s, now_s, ask.prompt_tokens, ask.demand_tokens)
        self._live[request_id] = history
        same = self._by_client_id.setdefault(client_id(request_id), deque(maxlen=MAX_OF_A_NAME))
        same.append(history)
        _enter(history, now_s, "arrived")

    def on_held(self, request_ids: Iterable[RequestId], room_tokens: float, now_s: float) -> None:
        """These wait at the scheduler; no instance has more room than that."""
        for request_id in request_ids:
            if (history := self._of(request_id)) is not None:
                _enter(history, now_s, "held", room_tokens=_finite(room_tokens))

    def on_dispatched(self, message: Dispatched) -> None:
        """The scheduler has named an instance; `on_sent` follows if the request goes there."""
        history = self._of(message.request_id)
        if history is not None and message.reason is not None:
            history.reason = message.request_id, message.reason

    def on_sent(
        self, attempt_id: RequestId, instance_id: InstanceId, dispatch_number: int, now_s: float
    ) -> None:
        """The request has been sent to an instance."""
        if (history := self._of(attempt_id)) is None:
            return
        history.state, history.instance_id, history.since = "queuing", instance_id, None
        history.attempt_id = attempt_id
        (of_attempt, reason), history.reason = history.reason or (None, None), None
        # Without the scheduler the front end has chosen, whatever the scheduler said last.
        is_by_scheduler = dispatch_number > 0 and of_attempt == attempt_id
        why = _dispatch_reason(reason) if is_by_scheduler and reason is not None else None
        _enter(history, now_s, "dispatched", instance=instance_id, why=why)

    def on_output(
        self, request_id: RequestId, annotations: Annotations | None, now_s: float
    ) -> None:
        """Tokens have come, with what their output says besides."""
        if (history := self._live.get(request_id)) is None:
            return
        if annotations is not None:
            for kind, ago_s in annotations.events:
                _enter_engines(history, kind, now_s - ago_s)
        if history.next_output is not None:
            cached_tokens = None if annotations is None else annotations.cached_tokens
            _enter(history, now_s, history.next_output, cached_tokens=cached_tokens)
            history.next_output = None
        history.state = "running"

    def on_last_token(self, attempt_id: RequestId, output_tokens: int) -> None:
        """The request has ended on its instance, with this number of tokens."""
        history = self._of(attempt_id)
        if history is not None and history.attempt_id == attempt_id:
            history.output_tokens = output_tokens

    def on_move_ended(self, message: MoveEnded, now_s: float) -> None:
        """A migration of the request has ended. The request may have, too: its tokens come from
        the destination, and this comes from the source."""
        request_id = without_attempt(message.request_id)
        history = self._live.get(request_id) or self._ended.get(request_id)
        if history is None:
            return
        known = {
            "from": message.instance_id,
            "to": message.destination,
            "stages": message.stages,
            "suspended_s": message.suspended_s,
            "why": None if message.reason is None else _move_reason(message.reason),
        }
        if message.outcome == COMMITTED:
            if history.attempt_id == message.request_id:
                history.instance_id = message.destination
            _enter(history, now_s, "moved", **known)
        else:
            _enter(history, now_s, "did not move", outcome=message.outcome, **known)

    def on_sent_again(self, request_id: RequestId, num_tokens: int, now_s: float) -> None:
        """The request was lost on its instance, and goes on behind these tokens."""
        if (history := self._live.get(request_id)) is not None:
            history.state, history.instance_id, history.attempt_id = "waiting", None, None
            history.next_output = "goes on" if num_tokens else "first token"
            _enter(history, now_s, "lost", output_tokens=num_tokens)

    def on_ended(
        self, request_id: RequestId, state: str, now_s: float, *, reason: str | None = None
    ) -> None:
        """The request has ended.

        Args:
            state: "finished", "failed" or "aborted".
            reason: of a failure.
        """
        if (history := self._live.pop(request_id, None)) is None:
            return
        history.state = state
        _enter(history, now_s, state, reason=reason)
        self._ended[request_id] = history
        if len(self._ended) > MAX_ENDED:
            self._forget(*self._ended.popitem(last=False))

    def _forget(self, request_id: RequestId, history: _History) -> None:
        name = client_id(request_id)
        same = self._by_client_id.get(name)
        if same is not None and history in same:
            same.remove(history)
            if not same:
                del self._by_client_id[name]

    # ------------------------------------------------------------------------------- queries

    def of(self, request_id: RequestId) -> Described | None:
        """The history of one engine request, if it is known."""
        history = self._live.get(request_id) or self._ended.get(request_id)
        return None if history is None else _described(request_id, history)

    def described(self, name: str) -> list[Described]:
        """The histories of all requests that a client or operator may call so, oldest first."""
        every = [*self._ended.items(), *self._live.items()]
        exact = [each for each in every if each[0] == name]
        found = exact or [each for each in every if name in names_of(each[0])]
        return [_described(request_id, history) for request_id, history in found]

    def timing(self, client_ids: Iterable[str], since_s: float) -> Timing | None:
        """Of the requests by which vLLM's server has asked its engine so since then, the timing of
        the one that was dispatched last; None if none of them is known."""
        every = [each for name in client_ids for each in self._by_client_id.get(name, ())]
        known = [each for each in every if each.begun_s >= since_s]
        if not known:
            return None
        return max(map(_timing, known), key=lambda each: each.scheduler_s or 0.0)

    def _of(self, attempt_id: RequestId) -> _History | None:
        return self._live.get(without_attempt(attempt_id))


def _timing(history: _History) -> Timing:
    first: dict[str, Described] = {}
    for event in history.events:
        first.setdefault(event["event"], event)
    sent, scheduled, token = map(first.get, ("dispatched", "scheduled", "first token"))
    begun = scheduled or sent
    return Timing(
        None if sent is None else sent["at_s"],
        None if scheduled is None else scheduled["waited_s"],
        None if token is None or begun is None else token["at_s"] - begun["at_s"],
        history.instance_id,
    )


def _enter(history: _History, now_s: float, event: str, **facts: object) -> None:
    at_s = round(now_s - history.begun_s, 6)
    history.events.append({"at_s": at_s, "event": event, **facts})
    if len(history.events) > MAX_EVENTS:
        del history.events[MAX_EVENTS // 2]
        history.num_dropped += 1


def _enter_engines(history: _History, kind: int, at_s: float) -> None:
    """Enter an event of the engine; a wait is entered when it is over."""
    at_s = max(at_s, history.begun_s)
    if kind == EventType.SCHEDULED:
        since, history.since = history.since, None
        instance = history.instance_id
        if since is None:
            return
        event = "resumed" if since[0] == EventType.PREEMPTED else "scheduled"
        _enter(history, at_s, event, instance=instance, waited_s=round(at_s - since[1], 6))
        return
    if kind == EventType.PREEMPTED:
        _enter(history, at_s, "preempted", instance=history.instance_id)
    history.since = kind, at_s


def _described(request_id: RequestId, history: _History) -> Described:
    return {
        "id": request_id,
        "state": history.state,
        "instance": history.instance_id,
        "class": history.class_name,
        "arrived_s": history.arrived_s,
        "prompt_tokens": history.prompt_tokens,
        "demand_tokens": history.demand_tokens,
        "output_tokens": history.output_tokens,
        "events": sorted(history.events, key=lambda each: each["at_s"]),
        "events_dropped": history.num_dropped,
    }


def _dispatch_reason(reason: DispatchReason) -> Described:
    return {
        "rule": reason.rule,
        "num_eligible": reason.num_eligible,
        "num_instances": reason.num_instances,
        "held_s": round(reason.held_s, 6),
        "prefix_from": reason.prefix_from,
        "chosen": _seen(reason.chosen),
        "next_best": None if reason.other is None else _seen(reason.other),
    }


def _seen(seen: InstanceSeen) -> Described:
    facts = structs.asdict(seen)
    facts["instance"] = facts.pop("instance_id")
    return {name: _finite(each) for name, each in facts.items()}


def _move_reason(reason: MoveReason) -> Described:
    facts = structs.asdict(reason)
    facts["cause"] = reason.cause.value
    return {name: _finite(each) for name, each in facts.items()}


def _finite(value: Any) -> Any:
    """JSON has no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
