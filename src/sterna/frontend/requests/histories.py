"""Histories: what happened to each request of this front end, and why, for `sterna explain`. Pure.

The router enters what it sends and gets; nothing is decided here. Each request has its events in
order, with the seconds since it arrived; `described` gives them to operators, in fields that are
stable (docs/operations/explain.md). Live requests are kept, and the last `MAX_ENDED` others. The
last events of all requests together are what `sterna top` and the dashboard show (`recent`).
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from sterna.dashboard.decisions import DISPATCHED, newest
from sterna.engine.payload_parts import Annotations, EventType
from sterna.frontend.requests.request_ids import client_id, meant, without_attempt
from sterna.messages.actors import COMMITTED, Dispatched, DispatchRequest, Held, MoveEnded
from sterna.messages.reasons import DispatchReason, described_dispatch, described_move, finite
from sterna.types import InstanceId, RequestId

MAX_ENDED = 2_000
"""Ended requests that are remembered."""

MAX_OF_A_NAME = 64
"""Requests of one name that are timed: clients may use an id again and again."""

MAX_EVENTS = 200
"""Events kept of one request: its first and last ones."""

MAX_RECENT = 4_000
"""Decisions of all requests together that are remembered, dispatches and others apart."""

MAX_LATENCIES = 20_000
"""Times of a kind that are remembered, of all requests together."""

MAX_DECISIONS = 100
"""The newest decisions that an answer to `recent` has, dispatches only beside all others."""

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
    # The id by which vLLM's server asked for it.
    name: str
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
    # The event that the next output is, if it is one, and what the prefix cache had for it.
    next_output: str | None = "first token"
    cached_tokens: int | None = None
    num_dropped: int = 0
    events: list[Described] = field(default_factory=list)
    # The engine's last event that waits for its counterpart: a kind, and when it was.
    since: tuple[int, float] | None = None
    # Seconds since its arrival, each of the first such event.
    sent_s: float | None = None
    scheduled_s: float | None = None
    queue_s: float | None = None
    first_token_s: float | None = None
    was_lost: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Recent:
    entered_s: float
    time_s: float
    request_id: RequestId
    event: Described


class Histories:
    """The histories of one front end's requests. Every method with `now_s` enters an event; those
    about a request that is not known have no effect."""

    def __init__(self) -> None:
        self._live: dict[RequestId, _History] = {}
        self.awaited: set[RequestId] = set()
        """Live requests whose next output changes what is known of them. That of others need not be
        reported."""
        self._ended: OrderedDict[RequestId, _History] = OrderedDict()
        self._by_client_id: dict[str, deque[_History]] = {}
        self._dispatches: deque[_Recent] = deque(maxlen=MAX_RECENT)
        self._others: deque[_Recent] = deque(maxlen=MAX_RECENT)
        # When each was entered, and the time.
        self._ttfts_s: deque[tuple[float, float]] = deque(maxlen=MAX_LATENCIES)
        self._tpots_s: deque[tuple[float, float]] = deque(maxlen=MAX_LATENCIES)

    # -------------------------------------------------------------------------------- events

    def begin(
        self,
        ask: DispatchRequest,
        class_name: str,
        now_s: float,
        *,
        arrived_s: float,
        goes_on: bool = False,
    ) -> None:
        """A request has arrived.

        Args:
            arrived_s: the time by the wall clock; `now_s` may have any other.
            goes_on: it had tokens at another front end, which is gone.
        """
        request_id = ask.request_id
        # vLLM draws unique ids, unless it is told not to.
        earlier = self._live.pop(request_id, None) or self._ended.pop(request_id, None)
        if earlier is not None:
            self._forget(earlier)
        name = client_id(request_id)
        history = _History(name, class_name, arrived_s, now_s, ask.prompt_tokens, ask.demand_tokens)
        if goes_on:
            history.next_output = "goes on"
        self._live[request_id] = history
        self.awaited.add(request_id)
        same = self._by_client_id.get(name)
        if same is None:
            same = self._by_client_id[name] = deque(maxlen=MAX_OF_A_NAME)
        same.append(history)
        _enter(history, now_s, "arrived")

    def on_held(self, message: Held, now_s: float) -> None:
        """These wait at the scheduler."""
        room_tokens = finite(message.room_tokens)
        for request_id, cause in zip(message.request_ids, message.causes, strict=True):
            if (history := self._of(request_id)) is not None:
                _enter(history, now_s, "held", cause=cause.value, room_tokens=room_tokens)

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
        self.awaited.add(without_attempt(attempt_id))
        history.state, history.instance_id, history.since = "queuing", instance_id, None
        history.attempt_id, history.cached_tokens = attempt_id, None
        (of_attempt, reason), history.reason = history.reason or (None, None), None
        # Without the scheduler the front end has chosen, whatever the scheduler said last.
        is_by_scheduler = dispatch_number > 0 and of_attempt == attempt_id
        why = reason if is_by_scheduler else None
        event = _enter(history, now_s, "dispatched", instance=instance_id, why=why)
        if history.sent_s is None:
            history.sent_s = event["at_s"]
        self._note(attempt_id, history, event, now_s)

    def on_engine_events(
        self, attempt_id: RequestId, annotations: Annotations, now_s: float
    ) -> bool:
        """An output of this attempt has come with events of its engine. Returns whether they count:
        those of an attempt that has been given up do not."""
        history = self._of(attempt_id)
        if history is None or history.attempt_id != attempt_id:
            return False
        history.cached_tokens = annotations.cached_tokens
        for kind, ago_s in annotations.events:
            preempted = _enter_engines(history, kind, now_s - ago_s)
            if preempted is not None:
                self._note(attempt_id, history, preempted, now_s)
        return True

    def on_output(self, request_id: RequestId, now_s: float) -> None:
        """Tokens of a request in `awaited` have come, after the events of their output."""
        self.awaited.discard(request_id)
        if (history := self._live.get(request_id)) is None:
            return
        history.state = "running"
        if history.next_output is not None:
            cached_tokens = history.cached_tokens
            event = _enter(history, now_s, history.next_output, cached_tokens=cached_tokens)
            if history.next_output == "first token":
                self._ttfts_s.append((now_s, event["at_s"]))
                if history.first_token_s is None:
                    history.first_token_s = event["at_s"]
            history.next_output = None

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
            "why": None if message.reason is None else described_move(message.reason),
        }
        if message.outcome == COMMITTED:
            if history.attempt_id == message.request_id:
                history.instance_id = message.destination
            event = _enter(history, now_s, "moved", **known)
        else:
            event = _enter(history, now_s, "did not move", outcome=message.outcome, **known)
        self._note(request_id, history, event, now_s)

    def on_sent_again(self, request_id: RequestId, num_tokens: int, now_s: float) -> None:
        """The request is sent again, behind these tokens: its instance died or handed it back, or
        tokens were lost on their way or contradicted those that its client has."""
        if (history := self._live.get(request_id)) is not None:
            self.awaited.add(request_id)
            history.state, history.instance_id, history.attempt_id = "waiting", None, None
            history.next_output = "goes on" if num_tokens else "first token"
            history.was_lost = True
            event = _enter(history, now_s, "lost", output_tokens=num_tokens)
            self._note(request_id, history, event, now_s)

    def on_ended(
        self,
        request_id: RequestId,
        state: str,
        now_s: float,
        *,
        reason: str | None = None,
        output_tokens: int | None = None,
    ) -> None:
        """The request has ended.

        Args:
            state: "finished", "failed" or "aborted".
            reason: of a failure.
            output_tokens: its number of tokens, if it has not ended on its instance
                (`on_last_token`).
        """
        if (history := self._live.pop(request_id, None)) is None:
            return
        self.awaited.discard(request_id)
        history.state = state
        if output_tokens is not None:
            history.output_tokens = output_tokens
        event = _enter(history, now_s, state, reason=reason)
        if state == "failed":
            self._note(request_id, history, event, now_s)
        elif state == "finished" and (tpot_s := _tpot_s(history, event["at_s"])) is not None:
            self._tpots_s.append((now_s, tpot_s))
        self._ended[request_id] = history
        if len(self._ended) > MAX_ENDED:
            self._forget(self._ended.popitem(last=False)[1])

    def _note(
        self, request_id: RequestId, history: _History, event: Described, now_s: float
    ) -> None:
        time_s = round(history.arrived_s + event["at_s"], 3)
        entry = _Recent(now_s, time_s, without_attempt(request_id), event)
        (self._dispatches if event["event"] == DISPATCHED else self._others).append(entry)

    def _forget(self, history: _History) -> None:
        same = self._by_client_id.get(history.name)
        if same is not None and history in same:
            same.remove(history)
            if not same:
                del self._by_client_id[history.name]

    # ------------------------------------------------------------------------------- queries

    def of(self, request_id: RequestId) -> Described | None:
        """The history of one engine request, if it is known."""
        history = self._live.get(request_id) or self._ended.get(request_id)
        return None if history is None else _described(request_id, history)

    def described(self, name: str) -> list[Described]:
        """The histories of all requests that a client or operator may call so, oldest first."""
        every = [*self._ended.items(), *self._live.items()]
        engine_id = without_attempt(RequestId(name))
        exact = [each for each in every if each[0] == engine_id]
        request_ids = set(meant(name, [request_id for request_id, _ in every]))
        found = exact or [each for each in every if each[0] in request_ids]
        return [_described(request_id, history) for request_id, history in found]

    def recent(self, last_s: float, now_s: float) -> Described:
        """What has happened to all requests in the last seconds: the newest decisions, oldest
        first, the times to the first token and per output token of requests that got their first
        or last one, in seconds, and the number of requests that no instance has yet."""
        since_s = now_s - last_s
        both = (*self._dispatches, *self._others)
        entries = sorted(
            (each for each in both if each.entered_s > since_s), key=lambda each: each.entered_s
        )
        return {
            "decisions": [
                {
                    "time_s": each.time_s,
                    "request": each.request_id,
                    **{name: fact for name, fact in _shown(each.event).items() if name != "at_s"},
                }
                for each in newest(entries, MAX_DECISIONS, lambda each: each.event["event"])
            ],
            "ttft_s": [value_s for at_s, value_s in self._ttfts_s if at_s > since_s],
            "tpot_s": [value_s for at_s, value_s in self._tpots_s if at_s > since_s],
            "waiting": sum(each.state == "waiting" for each in self._live.values()),
        }

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
    begun_s = history.sent_s if history.scheduled_s is None else history.scheduled_s
    token_s = history.first_token_s
    prefill_s = None if token_s is None or begun_s is None else token_s - begun_s
    return Timing(history.sent_s, history.queue_s, prefill_s, history.instance_id)


def _tpot_s(history: _History, finished_s: float) -> float | None:
    """Of a request that has finished; None with fewer than two tokens, or if it was lost between
    them."""
    num_tokens = history.output_tokens or 0
    if history.first_token_s is None or history.was_lost or num_tokens < 2:
        return None
    return round((finished_s - history.first_token_s) / (num_tokens - 1), 6)


def _enter(history: _History, now_s: float, event: str, **facts: object) -> Described:
    entered = {"at_s": round(now_s - history.begun_s, 6), "event": event, **facts}
    history.events.append(entered)
    if len(history.events) > MAX_EVENTS:
        del history.events[MAX_EVENTS // 2]
        history.num_dropped += 1
    return entered


def _enter_engines(history: _History, kind: int, at_s: float) -> Described | None:
    """Enter an event of the engine; a wait is entered when it is over. Returns the event of a
    preemption."""
    at_s = max(at_s, history.begun_s)
    if kind == EventType.SCHEDULED:
        since, history.since = history.since, None
        instance = history.instance_id
        if since is None:
            return None
        waited_s = round(at_s - since[1], 6)
        if since[0] == EventType.PREEMPTED:
            _enter(history, at_s, "resumed", instance=instance, waited_s=waited_s)
            return None
        event = _enter(history, at_s, "scheduled", instance=instance, waited_s=waited_s)
        if history.scheduled_s is None:
            history.scheduled_s, history.queue_s = event["at_s"], waited_s
        return None
    history.since = kind, at_s
    if kind == EventType.PREEMPTED:
        return _enter(history, at_s, "preempted", instance=_instance_at(history, at_s))
    return None


def _instance_at(history: _History, at_s: float) -> InstanceId | None:
    """The instance that the attempt was on then: the engine's events move with a request that
    queues."""
    later = (
        each["from"]
        for each in history.events
        if each["event"] == "moved" and each["at_s"] > at_s - history.begun_s
    )
    return next(later, history.instance_id)


def _shown(event: Described) -> Described:
    """The event as operators see it: the reason of a dispatch is described when it is looked at."""
    why = event.get("why")
    return {**event, "why": described_dispatch(why)} if isinstance(why, DispatchReason) else event


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
        "events": sorted(map(_shown, history.events), key=lambda each: each["at_s"]),
        "events_dropped": history.num_dropped,
    }
