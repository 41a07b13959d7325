"""Streams that are replicated, and go on elsewhere: whatever happens when, their events are those
that the client has."""

import json
import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sterna.frontend.names import client_id, slot_of
from sterna.frontend.resumable.paced_stream import MAX_WAITING
from sterna.frontend.resumable.pacing import Pacing
from sterna.frontend.resumable.pacing_effects import Begun, CaughtUp, Hand, Parted, RunAgain
from sterna.frontend.resumable.records import Record
from sterna.frontend.resumable.replicas import Replicas, buddy_of
from sterna.frontend.resumable.telling import ToBuddy
from sterna.stream_messages import DropStream, ExtendStreams, KeepStream, StreamHead, StreamOver
from sterna.types import FrontendId, RequestId

HOLDER, BUDDY, THIRD = FrontendId(1), FrontendId(2), FrontendId(3)
PATIENCE_S = 0.5
STOP = 0
"""The token at which vLLM's code ends a choice by itself."""


class TestPayloads:
    """Outputs in JSON: the request, its tokens, and whether it ends."""

    __test__ = False

    def token_ids_of(self, payload: bytes) -> list[int]:
        return list(json.loads(payload)["tokens"])

    def joined_outputs(self, first: bytes, second: bytes) -> bytes | None:
        one, other = json.loads(first), json.loads(second)
        assert one["request"] == other["request"]
        assert not one["is_finished"]
        tokens = [*one["tokens"], *other["tokens"]]
        return None if 9 in tokens else output(one["request"], tokens, other["is_finished"])

    def renamed_output(self, payload: bytes, request_id: str) -> bytes:
        return output(request_id, **{**json.loads(payload), "request": None})


def output(
    request_id: str, tokens: list[int], is_finished: bool = False, request: None = None
) -> bytes:
    content = {"request": request_id, "tokens": tokens, "is_finished": is_finished}
    return json.dumps(content).encode()


def head(stream_id: str = "tern") -> StreamHead:
    return StreamHead(stream_id, b"owner", "/v1/completions", b"", (), 7)


def pacing(
    frontend_id: FrontendId = HOLDER, buddy: FrontendId | None = BUDDY, max_bytes: int = 1 << 20
) -> Pacing:
    it = Pacing(frontend_id, max_bytes, PATIENCE_S, TestPayloads())
    it.on_buddy(buddy, 0.0)
    return it


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
            case CaughtUp(stream_id) | Parted(stream_id):
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


# ------------------------------------------------------------------------------- single steps


NAME, REQUEST = "cmpl-tern-0", RequestId("cmpl-tern-0-0123abcd")


def begun(it: Pacing, now_s: float = 0.0) -> None:
    it.begin(head(), b"body", now_s)
    it.expect("tern", NAME, now_s, is_repeatable=True)
    assert it.on_begun(REQUEST) == Begun((), False)
    it.on_asked(NAME, 1)


def brings(it: Pacing, *tokens: int, is_finished: bool = False) -> bytes:
    payload = output(REQUEST, list(tokens), is_finished)
    assert it.on_output(REQUEST, payload, is_finished=is_finished)
    return payload


def test_an_output_waits_until_the_buddy_has_it() -> None:
    it = pacing()
    begun(it)
    kept, *_ = it.flush(0.0)
    payload = brings(it, 5)
    (extended,) = it.flush(0.0)
    assert isinstance(kept, ToBuddy)
    assert isinstance(kept.message, KeepStream)
    assert isinstance(extended, ToBuddy)
    assert isinstance(extended.message, ExtendStreams)
    assert extended.frames == [payload]
    it.on_kept(BUDDY, kept.message.number, 0.0)
    assert it.flush(0.0) == []
    it.on_kept(THIRD, extended.message.number, 0.0)
    assert it.flush(0.0) == []
    it.on_kept(BUDDY, extended.message.number, 0.0)
    assert it.flush(0.0) == [Hand(payload)]


def test_without_a_buddy_nothing_waits_and_the_next_one_gets_it_all() -> None:
    it = pacing(buddy=None)
    begun(it)
    payload = brings(it, 5)
    assert it.flush(0.0) == [Hand(payload)]
    it.on_buddy(THIRD, 1.0)
    (effect,) = it.flush(1.0)
    assert isinstance(effect, ToBuddy)
    assert effect.buddy == THIRD
    assert effect.frames == [b"body", payload]


def test_what_waits_for_a_buddy_that_dies_goes_out_or_waits_for_the_next() -> None:
    for buddy, num_handed in ((None, 1), (THIRD, 0)):
        it = pacing()
        begun(it)
        payload = brings(it, 5)
        it.flush(0.0)
        it.on_buddy(buddy, 0.1)
        effects = it.flush(0.1)
        assert [each for each in effects if isinstance(each, Hand)] == [Hand(payload)] * num_handed


def test_a_buddy_that_says_nothing_is_not_waited_for_until_it_has_caught_up() -> None:
    it = pacing()
    begun(it)
    first = brings(it, 5)
    assert all(isinstance(each, ToBuddy) for each in it.flush(0.0))
    assert it.next_deadline_s == PATIENCE_S
    assert it.flush(PATIENCE_S) == [Hand(first)]
    assert it.next_deadline_s is None
    it.on_taken(NAME, 1)
    it.on_asked(NAME, 1)
    second = brings(it, 6)
    (extended, handed) = it.flush(1.0)
    assert handed == Hand(second)
    assert isinstance(extended, ToBuddy)
    it.on_kept(BUDDY, extended.message.number, 1.1)
    it.on_taken(NAME, 1)
    it.on_asked(NAME, 1)
    brings(it, 7)
    assert all(isinstance(each, ToBuddy) for each in it.flush(1.1))


def test_an_output_waits_until_the_one_before_has_become_events() -> None:
    it = pacing(buddy=None)
    begun(it)
    brings(it, 5)
    second = brings(it, 6)
    assert len(it.flush(0.0)) == 1
    it.on_taken(NAME, 1)
    assert it.flush(0.0) == []
    it.on_asked(NAME, 1)
    assert it.flush(0.0) == [Hand(second)]


def test_outputs_that_come_much_faster_than_they_are_taken_are_joined() -> None:
    it = pacing(buddy=None)
    begun(it)
    payloads = [brings(it, token) for token in range(10, 30)]
    brings(it, 30, is_finished=True)
    handed = []
    for _ in range(20):
        handed += it.flush(0.0)
        it.on_taken(NAME, 1)
        it.on_asked(NAME, 1)
    joined = output(REQUEST, [*range(10 + MAX_WAITING, 31)], True)
    assert handed == [*map(Hand, payloads[:MAX_WAITING]), Hand(joined)]


def test_what_cannot_be_joined_stays_as_it_is_and_in_order() -> None:
    it = pacing(buddy=None)
    begun(it)
    payloads = [brings(it, 9) for _ in range(20)]
    handed = []
    for _ in range(30):
        handed += it.flush(0.0)
        it.on_taken(NAME, 1)
        it.on_asked(NAME, 1)
    assert handed == [*map(Hand, payloads)]


def test_a_stream_that_is_over_stays_until_it_is_dropped() -> None:
    it = pacing()
    begun(it)
    brings(it, 5, is_finished=True)
    it.flush(0.0)
    it.over("tern", 0.0)
    it.over("tern", 0.0)
    it.drop("tern", 0.0)
    it.drop("tern", 0.0)
    kinds = [type(each.message) for each in it.flush(0.0) if isinstance(each, ToBuddy)]
    assert kinds == [StreamOver, DropStream]
    assert it.num_bytes == 0
    assert not it.on_output(REQUEST, b"", is_finished=True)


def test_a_record_for_which_there_is_no_room_is_given_up_and_the_stream_goes_on() -> None:
    it = pacing(max_bytes=1000)
    begun(it)
    payloads = []
    effects = []
    for token in range(20):
        payloads.append(brings(it, token))
        for _ in range(2):
            due = it.flush(0.0)
            effects += due
            for each in due:
                if isinstance(each, ToBuddy):
                    it.on_kept(BUDDY, each.message.number, 0.0)
        it.on_taken(NAME, 1)
        it.on_asked(NAME, 1)
    assert [each.payload for each in effects if isinstance(each, Hand)] == payloads
    assert [each for each in effects if isinstance(each, Parted)] == [
        Parted("tern", "its record takes too much memory")
    ]
    assert it.num_bytes == 0
    last = [each for each in effects if isinstance(each, ToBuddy)][-1]
    assert isinstance(last.message, DropStream)


@pytest.mark.parametrize("is_repeatable", [True, False])
def test_what_cannot_be_repeated_passes_by(is_repeatable: bool) -> None:
    """Two engine requests of one name cannot be told apart."""
    it = pacing()
    it.begin(head(), b"body", 0.0)
    assert (it.expect("tern", NAME, 0.0, is_repeatable=is_repeatable) is not None) is is_repeatable
    assert not it.expect("tern", NAME, 0.0, is_repeatable=True)
    assert Parted("tern", "its events cannot be repeated") in it.flush(0.0)
    assert not it.expect("unknown", "cmpl-unknown-0", 0.0, is_repeatable=True)


def test_the_successor_says_when_its_events_go_beyond_the_record() -> None:
    first = pacing(buddy=None)
    begun(first)
    brings(first, 5)
    record = Record(head(), b"body")
    first.on_buddy(BUDDY, 0.0)
    for effect in first.flush(0.0):
        if isinstance(effect, ToBuddy):
            replicas = Replicas(BUDDY)
            replicas.on_frontends([HOLDER, BUDDY])
            assert replicas.on_message(effect.message, effect.frames).number
            (record,) = replicas.on_frontends([BUDDY])
    it = pacing(BUDDY, None)
    it.take_over(record, 0.0)
    it.expect("tern", NAME, 0.0, is_repeatable=True)
    again = RequestId("cmpl-tern-0-ffffffff")
    assert it.on_begun(again) == Begun((5,), False)
    it.on_asked(NAME, 1)
    fresh = output(again, [6])
    it.on_output(again, fresh, is_finished=False)
    assert it.flush(0.0) == [Hand(output(again, [5])), RunAgain("tern")]
    it.on_taken(NAME, 1)
    it.on_asked(NAME, 1)
    assert it.flush(0.0) == [CaughtUp("tern"), Hand(fresh)]


# ---------------------------------------------------------------------------------- replicas


@pytest.mark.parametrize(
    ("frontends", "current", "buddy"),
    [
        ((1, 2, 3), None, 2),
        ((3, 1), None, 3),
        ((2, 3, 1), None, 2),
        ((1, 2, 3), 3, 3),
        ((1, 2), 3, 2),
        ((1,), 2, None),
        ((2, 3), None, None),
    ],
)
def test_the_buddy_is_the_next_in_the_ring_for_as_long_as_it_lives(
    frontends: tuple[int, ...], current: int | None, buddy: int | None
) -> None:
    ring = [FrontendId(each) for each in frontends]
    now = None if current is None else FrontendId(current)
    assert buddy_of(HOLDER, ring, now) == buddy


def test_what_a_dead_front_end_had_sent_comes_too_late() -> None:
    replicas = Replicas(BUDDY)
    replicas.on_frontends([HOLDER, BUDDY])
    keep = KeepStream(HOLDER, 1, head(), (), False)
    assert replicas.on_message(keep, [b"body"]).number == 1
    assert replicas.holder("tern", b"owner") == HOLDER
    assert replicas.holder("tern", b"thief") is None
    (record,) = replicas.on_frontends([BUDDY])
    assert (record.head, record.body) == (head(), b"body")
    replicas.on_message(keep, [b"body"])
    assert replicas.holder("tern", b"owner") is None


def test_a_stream_that_is_dropped_is_not_taken_over() -> None:
    replicas = Replicas(BUDDY)
    replicas.on_frontends([HOLDER, BUDDY])
    replicas.on_message(KeepStream(HOLDER, 1, head(), (), False), [b"body"])
    replicas.on_message(StreamOver(HOLDER, 2, "tern"), [])
    replicas.on_message(DropStream(HOLDER, 3, "tern"), [])
    assert replicas.on_frontends([BUDDY]) == []
