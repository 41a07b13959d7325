"""Whatever happens when: a stream that goes on elsewhere has the events that its client has."""

import json
import random
from collections import deque
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from sterna.frontend.requests.request_ids import client_id, slot_of
from sterna.frontend.resumable.pacing import CaughtUp, Hand, Pacing, ReplicaDropped
from sterna.frontend.resumable.replica_link import ToBuddy
from sterna.frontend.resumable.replicas import Record, Replicas
from sterna.messages.streams import KeepStream
from sterna.types import RequestId
from tests.frontend.resumable.outputs import BUDDY, HOLDER, THIRD, head, output, pacing

STOP = 0
"""The token at which vLLM's code ends a choice by itself."""

Event = tuple[str, tuple[tuple[str, tuple[int, ...]], ...]]
"""The engine request, and what was taken of it at once, by slot."""


@dataclass
class Application:
    """vLLM's server and its clients of the engine, as far as they matter here: a collector for
    each engine request in which outputs merge, and code that takes from it when it gets to it.

    Attributes:
        children: the slots of each engine request.
        inbox: outputs that were handed.
        aborts: on their way to the front end.
    """

    pacing: Pacing
    suffix: str
    children: dict[str, list[str]]
    inbox: deque[bytes] = field(default_factory=deque)
    collected: dict[str, list[tuple[str, tuple[int, ...]]]] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    waiting: set[str] = field(default_factory=set)
    working: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)
    aborts: deque[str] = field(default_factory=deque)
    events: list[Event] = field(default_factory=list)

    def request_id(self, slot: str) -> RequestId:
        return RequestId(slot + self.suffix)

    def actions(self) -> list[tuple[str, str]]:
        """What may happen next."""
        found = [("process", "")] if self.inbox else []
        # It takes an iteration of the loop until an abort has come; whoever has got an output has
        # seen it by then.
        if self.aborts and not self.collected.get(client_id(RequestId(self.aborts[0]))):
            found.append(("abort", ""))
        found += [("take", each) for each in sorted(self.waiting) if self.collected.get(each)]
        return found + [("ask", each) for each in sorted(self.working)]

    def act(self, action: str, name: str) -> None:
        match action:
            case "process":
                self._process(json.loads(self.inbox.popleft()))
            case "abort":
                self.pacing.on_abort([RequestId(self.aborts.popleft())])
            case "take":
                self.waiting.discard(name)
                self.working.add(name)
                self.pacing.on_taken(name, 1)
                self.events.append((name, tuple(self.collected.pop(name))))
            case "ask":
                self.working.discard(name)
                self.pacing.on_asked(name, 1)
                if set(self.children[name]) <= self.ended:
                    self.left.add(name)
                    self.pacing.on_left(name, 1)
                else:
                    self.waiting.add(name)

    def _process(self, content: dict[str, object]) -> None:
        request_id, tokens = RequestId(str(content["request"])), content["tokens"]
        assert isinstance(tokens, list)
        slot, name = slot_of(request_id), client_id(request_id)
        if slot in self.ended:
            return
        if STOP in tokens:
            tokens = tokens[: tokens.index(STOP) + 1]
            self.aborts.append(request_id)
        if STOP in tokens or content["is_finished"]:
            self.ended.add(slot)
        self.collected.setdefault(name, []).append((slot, tuple(tokens)))

    @property
    def is_over(self) -> bool:
        return self.left == set(self.children)


@dataclass
class Engine:
    """Brings outputs of slots, some tokens at once; says what `answers` hold from where it is."""

    application: Application
    answers: dict[str, list[int]]
    at: dict[str, int]

    def open(self) -> list[str]:
        return [
            slot
            for slot, at in sorted(self.at.items())
            if at < len(self.answers[slot]) and slot not in self.application.ended
        ]

    def bring(self, slot: str, count: int) -> None:
        at = self.at[slot]
        tokens = self.answers[slot][at : at + count]
        self.at[slot] = at + len(tokens)
        request_id = self.application.request_id(slot)
        is_finished = self.at[slot] == len(self.answers[slot])
        payload = output(request_id, tokens, is_finished)
        self.application.pacing.on_output(request_id, payload, is_finished=is_finished)


def started(
    it: Pacing, suffix: str, children: dict[str, list[str]], answers: dict[str, list[int]]
) -> tuple[Application, Engine]:
    application = Application(it, suffix, children)
    at = {}
    for name, slots in children.items():
        assert it.expect("tern", name, 0.0, is_repeatable=True)
        application.working.add(name)
        for slot in slots:
            it.on_sent("tern", application.request_id(slot))
            begun = it.on_begun(application.request_id(slot))
            assert begun is not None
            at[slot] = len(begun.output_token_ids)
            assert list(begun.output_token_ids) == answers[slot][: at[slot]]
            assert not begun.has_ended or at[slot] == len(answers[slot])
    return application, Engine(application, answers, at)


@dataclass
class Wire:
    """The way between the front ends: in order; what has not arrived dies with its sender."""

    replicas: Replicas
    messages: deque[ToBuddy] = field(default_factory=deque)
    receipts: deque[int] = field(default_factory=deque)

    def deliver(self) -> None:
        effect = self.messages.popleft()
        self.receipts.append(self.replicas.on_message(effect.message, effect.frames).number)


def flush(it: Pacing, application: Application | None, wire: Wire | None) -> list[str]:
    facts = []
    for effect in it.flush(0.0):
        match effect:
            case Hand(payload):
                assert application is not None
                application.inbox.append(payload)
            case ToBuddy():
                assert wire is not None
                wire.messages.append(effect)
            case CaughtUp(stream_id) | ReplicaDropped(stream_id):
                facts.append(stream_id)
    return facts


def run(
    chance: random.Random,
    it: Pacing,
    application: Application,
    engine: Engine,
    wire: Wire | None,
    num_actions: int,
) -> None:
    """Let things happen in any order, so many of them or until nothing can. The way between the
    front ends may be as slow as it likes."""
    slowness = chance.random()
    for _ in range(num_actions):
        flush(it, application, wire)
        choices = application.actions() + [("bring", slot) for slot in engine.open()]
        if wire is not None and (not choices or chance.random() > slowness):
            choices += [("deliver", "")] if wire.messages else []
            choices += [("receipt", "")] if wire.receipts else []
        if not choices:
            return
        action, name = chance.choice(choices)
        match action:
            case "bring":
                for _ in range(chance.choice([1, 1, 1, 4, 9])):
                    if name in engine.open():
                        engine.bring(name, chance.randint(1, 3))
            case "deliver":
                assert wire is not None
                wire.deliver()
            case "receipt":
                assert wire is not None
                it.on_kept(BUDDY, wire.receipts.popleft(), 0.0)
            case _:
                application.act(action, name)
    flush(it, application, wire)


def said(events: list[Event]) -> dict[str, list[int]]:
    """What each slot has said."""
    found: dict[str, list[int]] = {}
    for _, parts in events:
        for slot, tokens in parts:
            found.setdefault(slot, []).extend(tokens)
    return found


def until_stop(answer: list[int]) -> list[int]:
    return answer[: answer.index(STOP) + 1] if STOP in answer else answer


answers = st.lists(st.integers(0, 9), min_size=1, max_size=20)


@given(
    st.integers(1, 2).flatmap(
        lambda prompts: st.lists(
            st.lists(answers, min_size=1, max_size=3), min_size=prompts, max_size=prompts
        )
    ),
    st.integers(0, 80),
    st.integers(0, 2**32),
)
def test_what_a_client_got_before_a_death_and_gets_after_it_is_one_stream(
    said_by_engines: list[list[list[int]]], num_actions: int, seed: int
) -> None:
    """Whatever the order of outputs, receipts and the code's own pace, and the time of the death:
    the successor comes to the same events, one by one, and goes on behind them."""
    chance = random.Random(seed)
    children, all_answers = {}, {}
    for prompt, choices in enumerate(said_by_engines):
        name = f"cmpl-tern-{prompt}"
        slots = [f"{n}_{name}" if len(choices) > 1 else name for n in range(len(choices))]
        children[name] = slots
        all_answers.update(zip(slots, choices, strict=True))
    replicas = Replicas(BUDDY)
    replicas.on_frontends([HOLDER, BUDDY, THIRD])
    wire = Wire(replicas)
    first = pacing()
    first.begin(head(), b"body", 0.0)
    before, engine = started(first, "-00000001", children, all_answers)
    run(chance, first, before, engine, wire, num_actions)

    records = replicas.on_frontends([BUDDY, THIRD])
    if not records:
        assert before.events == []
        return
    (record,) = records
    second = pacing(BUDDY, None)
    second.take_over(record, 0.0)
    after, engine = started(second, "-00000002", children, all_answers)
    run(chance, second, after, engine, None, 10_000)
    assert after.is_over
    assert after.events[: len(before.events)] == before.events
    assert said(after.events) == {slot: until_stop(each) for slot, each in all_answers.items()}
    assert all(len(parts) == 1 for _, parts in after.events)


def whole(record: Record) -> tuple[KeepStream, list[bytes]]:
    message = KeepStream(HOLDER, 0, record.head, tuple(record.groups), record.is_over)
    return message, [record.body, *record.payloads]


@given(answers, st.integers(0, 40), st.integers(0, 40), st.integers(0, 2**32))
def test_a_stream_outlives_one_front_end_after_the_other(
    answer: list[int], num_before: int, num_between: int, seed: int
) -> None:
    chance = random.Random(seed)
    children = {"cmpl-tern-0": ["cmpl-tern-0"]}
    all_answers = {"cmpl-tern-0": answer}
    events: list[Event] = []
    record = Record(head(), b"body")
    for number, num_actions in enumerate((num_before, num_between)):
        replicas = Replicas(BUDDY)
        replicas.on_frontends([HOLDER, BUDDY])
        # Until another replica has arrived, this one holds.
        replicas.on_message(*whole(record))
        it = pacing()
        it.take_over(record, 0.0)
        application, engine = started(it, f"-0000000{number}", children, all_answers)
        run(chance, it, application, engine, Wire(replicas), num_actions)
        shared = min(len(events), len(application.events))
        assert application.events[:shared] == events[:shared]
        events = max(events, application.events, key=len)
        (record,) = replicas.on_frontends([BUDDY])
    it = pacing(buddy=None)
    it.take_over(record, 0.0)
    application, engine = started(it, "-00000009", children, all_answers)
    run(chance, it, application, engine, None, 10_000)
    assert application.events[: len(events)] == events
    assert said(application.events) == {"cmpl-tern-0": until_stop(answer)}
