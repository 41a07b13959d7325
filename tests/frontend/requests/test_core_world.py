"""Whatever dies, and in whatever order the news comes: a stream is one that could have been.

Every token is a number of its own, and the world remembers which tokens its instance had when it
came to it. A stream is right when each token was said behind exactly those that the client had
before: no token is missing, repeated or of another continuation. At the end, when all is told,
every request has ended once, and no instance holds any. A request fails only by a death that
found it before it had brought enough tokens since another one had, and alone; or because tokens of
it were lost, and those of several attempts behind them, which had brought none.

Everybody hears of every membership, in order, the front end maybe later than the instances. Nobody
sends anything to an instance of which no membership has told.

Instances are emptied, too: one that ends in good order takes nothing along that the front end has
not heard, and when all is told each of them may end.
"""

import itertools
from collections import deque
from dataclasses import dataclass, field

import hypothesis.strategies as st
import msgspec
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from sterna.config import FrontendConfig
from sterna.engine.payload_parts import token_ids_of
from sterna.frontend.requests.attempts import PROGRESS_TOKENS
from sterna.frontend.requests.core import FrontendCore
from sterna.frontend.requests.request_effects import (
    Deliver,
    Effect,
    Fail,
    Failure,
    SendAgain,
    ToInstance,
)
from sterna.instance.termination import Termination
from sterna.messages.actors import (
    AbortRequests,
    AddRequest,
    DispatchRequest,
    FinalAck,
    InstanceMember,
    Membership,
    OwnerQuery,
    OwnerReply,
    RequestNews,
    RequestsMoved,
    TokenBatch,
    TokenSpan,
)
from sterna.types import NORMAL, FrontendId, InstanceId, RequestId

ME = FrontendId(7)
NUM_TOKENS = 24
"""Of every answer: three times what puts a request above suspicion."""
MAX_INSTANCES = 8
MAX_REQUESTS = 4


@dataclass
class Running:
    """An attempt on an instance.

    Attributes:
        token_ids: what it has said, its history first.
        is_suspended: it has gone to `heir`, and comes back if that dies before it has answered.
        is_taken_back: it has come back, and moves no more.
    """

    token_ids: list[int]
    is_suspended: bool = False
    heir: InstanceId | None = None
    is_taken_back: bool = False


@dataclass
class Simulated:
    """An instance, and its two connections with the front end, each of which keeps its order."""

    held: dict[RequestId, Running] = field(default_factory=dict)
    arriving: dict[RequestId, InstanceId] = field(default_factory=dict)
    inbox: list[AddRequest | AbortRequests | OwnerQuery | FinalAck] = field(default_factory=list)
    outbox: list[tuple[object, list[bytes]]] = field(default_factory=list)
    emptying: Termination = field(default_factory=Termination)


class World(RuleBasedStateMachine):
    """A front end's core, instances, and clients."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.version = 0
        # Those that the front end has not heard of yet.
        self.memberships: deque[Membership] = deque()
        self.died: set[InstanceId] = set()
        # Of each attempt the instances that have had it; of each request its newest attempt, and
        # how many tokens it had when it was last sent again, and when that was behind a dead
        # instance.
        self.hosts: dict[RequestId, set[InstanceId]] = {}
        self.newest: dict[RequestId, RequestId] = {}
        self.num_sent: dict[RequestId, int] = {}
        self.num_at_death: dict[RequestId, int] = {}
        self.numbers = itertools.count(1)
        self.names = (InstanceId(f"i{number}") for number in itertools.count())
        self.live: dict[InstanceId, Simulated] = {}
        self.dead: dict[InstanceId, Simulated] = {}
        self.emptied: dict[InstanceId, int] = {}
        self.said_behind: dict[int, tuple[int, ...]] = {}
        self.streams: dict[RequestId, list[int]] = {}
        self.ended: dict[RequestId, str] = {}
        self.core = FrontendCore(ME, FrontendConfig(hold_timeout_s=1e6, gap_timeout_s=2.0))
        for _ in range(3):
            self.instance_comes()
        self.front_end_hears_of_members()

    # ---------------------------------------------------------------------------- front end

    def carry_out(self, effects: list[Effect]) -> None:
        failures = [each.failure for each in effects if isinstance(each, Fail)]
        assert failures.count(Failure.KILLED_INSTANCES) <= 1, "one death has one culprit"
        for effect in effects:
            match effect:
                case ToInstance(instance_id, message):
                    if isinstance(message, AddRequest):
                        self.hosts.setdefault(message.request_id, set()).add(instance_id)
                    if instance_id in self.live:
                        self.live[instance_id].inbox.append(message)
                case Deliver(request_id, payload, num_repeated, is_finished):
                    assert request_id not in self.ended, "a stream went on after its end"
                    assert payload == output(request_id, token_ids_of(payload))
                    for token_id in token_ids_of(payload)[num_repeated:]:
                        stream = self.streams[request_id]
                        assert self.said_behind[token_id] == tuple(stream)
                        stream.append(token_id)
                    if is_finished:
                        assert len(self.streams[request_id]) == NUM_TOKENS
                        self.ended[request_id] = "finished"
                case Fail(request_id, failure):
                    assert request_id not in self.ended, "a request ended twice"
                    num_tokens = len(self.streams[request_id])
                    if failure is Failure.TOKENS_LOST:
                        assert self.num_sent.get(request_id) == num_tokens, "it was not sent again"
                    else:
                        assert failure is Failure.KILLED_INSTANCES, failure
                        assert self.has_died(request_id), "it is judged by the death of others"
                        num_since = num_tokens - self.num_at_death[request_id]
                        assert num_since < PROGRESS_TOKENS, "it is above suspicion"
                    self.ended[request_id] = "failed"
                case SendAgain(request_id, attempt_id, num_tokens):
                    assert num_tokens == len(self.streams[request_id])
                    if self.has_died(request_id):
                        self.num_at_death[request_id] = num_tokens
                    self.num_sent[request_id] = num_tokens
                    self.newest[request_id] = attempt_id
                case other:
                    raise AssertionError(f"unexpected {other}")

    def has_died(self, request_id: RequestId) -> bool:
        """Whether an instance has died that had the request's newest attempt."""
        attempt_id = self.newest.get(request_id, request_id)
        return not self.hosts.get(attempt_id, set()).isdisjoint(self.died)

    @precondition(lambda self: len(self.streams) < MAX_REQUESTS)
    @rule()
    def client_asks(self) -> None:
        request_id = RequestId(f"r{len(self.streams)}")
        self.streams[request_id] = []
        ask = DispatchRequest(ME, request_id, 64, 0.0, NORMAL, NORMAL)
        payload = msgspec.msgpack.encode([request_id])
        self.carry_out(self.core.on_request(ask, payload, self.now_s))

    @precondition(lambda self: self.streams.keys() - self.ended.keys())
    @rule(data=st.data())
    def client_goes(self, data: st.DataObject) -> None:
        open_ids = sorted(self.streams.keys() - self.ended.keys())
        request_id = data.draw(st.sampled_from(open_ids))
        self.ended[request_id] = "aborted"
        self.carry_out(self.core.on_abort([request_id], self.now_s))

    def announce(self) -> None:
        """The instances hear at once who is there."""
        self.version += 1
        members = tuple(
            InstanceMember(each, "", each in self.emptied, emptied_since=self.emptied.get(each, 0))
            for each in self.live
        )
        self.memberships.append(Membership(self.version, members, (), None))

    @precondition(lambda self: self.memberships)
    @rule()
    def front_end_hears_of_a_membership(self) -> None:
        self.carry_out(self.core.on_message(self.memberships.popleft(), (), self.now_s))

    @rule()
    def front_end_hears_of_members(self) -> None:
        self.announce()
        while self.memberships:
            self.front_end_hears_of_a_membership()

    @precondition(lambda self: any(each.outbox for each in self.all_instances()))
    @rule(data=st.data())
    def front_end_receives(self, data: st.DataObject) -> None:
        instance = data.draw(st.sampled_from([e for e in self.all_instances() if e.outbox]))
        self.receive_from(instance)

    def receive_from(self, instance: Simulated) -> None:
        message, frames = instance.outbox.pop(0)
        self.carry_out(self.core.on_message(message, frames, self.now_s))

    @precondition(lambda self: self.core.next_deadline_s is not None)
    @rule()
    def deadline_comes(self) -> None:
        if self.core.next_deadline_s < 1e5:
            self.now_s = max(self.now_s, self.core.next_deadline_s)
            self.carry_out(self.core.on_time(self.now_s))

    # ---------------------------------------------------------------------------- instances

    def all_instances(self) -> list[Simulated]:
        return [*self.live.values(), *self.dead.values()]

    def attempts(self, *, suspended: bool = False) -> list[tuple[InstanceId, RequestId]]:
        return [
            (instance_id, attempt_id)
            for instance_id, instance in self.live.items()
            for attempt_id, running in instance.held.items()
            if running.is_suspended == suspended
        ]

    def movable(self) -> list[tuple[InstanceId, RequestId]]:
        """Those that are not on their way already, and may move."""
        return [
            (instance_id, attempt_id)
            for instance_id, attempt_id in self.attempts()
            if not self.live[instance_id].held[attempt_id].is_taken_back
            and sum(attempt_id in {*e.held, *e.arriving} for e in self.live.values()) == 1
        ]

    @precondition(lambda self: len(self.live) + len(self.dead) < MAX_INSTANCES)
    @rule()
    def instance_comes(self) -> None:
        self.live[next(self.names)] = Simulated()
        self.announce()

    @precondition(lambda self: any(each.inbox for each in self.live.values()))
    @rule(data=st.data())
    def instance_receives(self, data: st.DataObject) -> None:
        with_news = [each for each, instance in self.live.items() if instance.inbox]
        self.receive_at(data.draw(st.sampled_from(with_news)))

    def receive_at(self, instance_id: InstanceId) -> None:
        instance = self.live[instance_id]
        match instance.inbox.pop(0):
            case AddRequest(_, attempt_id, _, token_ids):
                assert attempt_id not in instance.held, "an id was used twice"
                instance.held[attempt_id] = Running(list(token_ids))
            case AbortRequests(attempt_ids):
                for attempt_id in attempt_ids:
                    self.abort(instance, attempt_id)
            case OwnerQuery(_, query_id, attempt_ids):
                held = instance.held
                sure = {each for each, running in held.items() if not running.is_suspended}
                unsure = (held.keys() | instance.arriving.keys()) - sure
                here = tuple(each for each in attempt_ids if each in sure)
                arriving = tuple(each for each in attempt_ids if each in unsure)
                reply = OwnerReply(instance_id, query_id, here, arriving)
                instance.outbox.append((reply, []))
            case FinalAck(frontend_id, emptied_since, num_heard):
                instance.emptying.on_final_ack(frontend_id, emptied_since, num_heard)

    def abort(self, instance: Simulated, attempt_id: RequestId) -> None:
        """End the attempt; an instance that gave it away tells its heir."""
        running = instance.held.pop(attempt_id, None)
        if running is not None and running.heir in self.live:
            self.abort(self.live[running.heir], attempt_id)
        for other in self.live.values():
            if other.arriving.get(attempt_id) is not None and running is not None:
                del other.arriving[attempt_id]

    @precondition(lambda self: self.attempts())
    @rule(data=st.data(), num_steps=st.integers(1, 12))
    def step(self, data: st.DataObject, num_steps: int) -> None:
        instance_id, attempt_id = data.draw(st.sampled_from(self.attempts()))
        for _ in range(num_steps):
            if attempt_id in self.live[instance_id].held:
                self.say(instance_id, attempt_id)

    def say(self, instance_id: InstanceId, attempt_id: RequestId) -> None:
        instance = self.live[instance_id]
        running = instance.held[attempt_id]
        token_id = next(self.numbers)
        self.said_behind[token_id] = tuple(running.token_ids)
        first = len(running.token_ids)
        running.token_ids.append(token_id)
        is_finished = len(running.token_ids) == NUM_TOKENS
        if is_finished:
            del instance.held[attempt_id]
        span = TokenSpan(attempt_id, first, 1, is_finished)
        batch = TokenBatch(instance_id, (span,))
        instance.outbox.append((batch, [output(attempt_id, [token_id])]))
        instance.emptying.on_sent(ME)

    @precondition(lambda self: self.movable() and len(self.live) > 1)
    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        source, attempt_id = data.draw(st.sampled_from(self.movable()))
        destination = data.draw(st.sampled_from([each for each in self.live if each != source]))
        if destination not in self.emptied:
            self.live[destination].arriving[attempt_id] = source

    @precondition(lambda self: any(each.arriving for each in self.live.values()))
    @rule(data=st.data())
    def commit_or_give_up(self, data: st.DataObject) -> None:
        """A reservation whose source is dead, or has nothing to give any more, is given back."""
        ways = [(i, a, s) for i, e in self.live.items() for a, s in e.arriving.items()]
        destination, attempt_id, source = data.draw(st.sampled_from(ways))
        del self.live[destination].arriving[attempt_id]
        running = self.live[source].held.get(attempt_id) if source in self.live else None
        if running is None or running.is_suspended:
            return
        self.adopt(source, destination, attempt_id)

    def adopt(self, source: InstanceId, destination: InstanceId, attempt_id: RequestId) -> None:
        running = self.live[source].held[attempt_id]
        self.live[destination].held[attempt_id] = Running(list(running.token_ids))
        self.hosts[attempt_id].add(destination)
        moved = RequestsMoved(destination, (attempt_id,), (len(running.token_ids),), self.version)
        self.live[destination].outbox.append((moved, []))
        self.live[destination].emptying.on_sent(ME)
        running.is_suspended, running.heir = True, destination

    @precondition(lambda self: self.movable() and len(self.live) > 1)
    @rule(data=st.data(), num_said=st.integers(0, 3))
    def move_at_once(self, data: st.DataObject, num_said: int) -> None:
        source, attempt_id = data.draw(st.sampled_from(self.movable()))
        destination = data.draw(st.sampled_from([each for each in self.live if each != source]))
        if destination in self.emptied:
            return
        self.adopt(source, destination, attempt_id)
        self.let_go_or_resume(source, attempt_id)
        for _ in range(num_said):
            if attempt_id in self.live[destination].held:
                self.say(destination, attempt_id)

    @precondition(lambda self: self.attempts(suspended=True))
    @rule(data=st.data())
    def verdict_comes(self, data: st.DataObject) -> None:
        """The source lets go, or takes the request back from a destination that is dead."""
        source, attempt_id = data.draw(st.sampled_from(self.attempts(suspended=True)))
        self.let_go_or_resume(source, attempt_id)

    def let_go_or_resume(self, source: InstanceId, attempt_id: RequestId) -> None:
        running = self.live[source].held[attempt_id]
        if running.heir in self.live:
            del self.live[source].held[attempt_id]
        else:
            self.announce()
            self.live[source].held[attempt_id] = Running(running.token_ids, is_taken_back=True)

    @precondition(lambda self: self.movable() and len(self.live) > 1)
    @rule(data=st.data(), num_heard=st.integers(0, 3), num_said=st.integers(1, 4))
    def a_destination_dies_with_its_verdict_unheard(
        self, data: st.DataObject, num_heard: int, num_said: int
    ) -> None:
        """What it said may have reached the client; the source goes on from before that."""
        source, attempt_id = data.draw(st.sampled_from(self.movable()))
        heir = data.draw(st.sampled_from([each for each in self.live if each != source]))
        running = self.live[source].held[attempt_id]
        self.live[heir].held[attempt_id] = Running(list(running.token_ids))
        self.hosts[attempt_id].add(heir)
        running.is_suspended, running.heir = True, heir
        for _ in range(num_said):
            if attempt_id in self.live[heir].held:
                self.say(heir, attempt_id)
        instance = self.dead[heir] = self.live.pop(heir)
        self.died.add(heir)
        for _ in range(num_heard):
            for each in (self.live[source], instance):
                if each.outbox:
                    self.receive_from(each)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        """What it had not sent yet is lost; what it had may still be under way."""
        name = data.draw(st.sampled_from(sorted(self.live)))
        instance = self.dead[name] = self.live.pop(name)
        del instance.outbox[data.draw(st.integers(0, len(instance.outbox))) :]
        self.died.add(name)

    @precondition(lambda self: len(self.live) > 2)
    @rule(data=st.data(), nums_said=st.lists(st.integers(0, 9), min_size=1, max_size=3))
    def instances_die_one_after_another(self, data: st.DataObject, nums_said: list[int]) -> None:
        """Each when all is told, so that deaths find the same requests again and again."""
        while len(self.streams) < MAX_REQUESTS:
            self.client_asks()
        for num_said in nums_said:
            self.tell_all()
            for instance_id, attempt_id in self.attempts():
                for _ in range(num_said):
                    if attempt_id in self.live[instance_id].held:
                        self.say(instance_id, attempt_id)
            self.tell_all()
            if not self.attempts() or len(self.live) < 2:
                return
            name, _ = data.draw(st.sampled_from(self.attempts()))
            self.dead[name] = self.live.pop(name)
            self.died.add(name)
            self.front_end_hears_of_members()
        self.tell_all()

    def tell_all(self) -> None:
        while any(each.inbox or each.outbox for each in self.live.values()):
            for name, instance in self.live.items():
                while instance.inbox:
                    self.receive_at(name)
                while instance.outbox:
                    self.receive_from(instance)

    # ---------------------------------------------------------------------------- emptying

    @precondition(lambda self: self.live.keys() - self.emptied.keys())
    @rule(data=st.data(), is_heard=st.booleans())
    def drain(self, data: st.DataObject, is_heard: bool) -> None:
        """The front end hears of it at once, or with the next membership."""
        name = data.draw(st.sampled_from(sorted(self.live.keys() - self.emptied.keys())))
        self.emptied[name] = self.version + 1
        self.announce()
        self.live[name].emptying.on_membership(self.version)
        if is_heard:
            self.front_end_hears_of_members()

    @precondition(lambda self: self.live.keys() & self.emptied.keys())
    @rule(data=st.data())
    def undo(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live.keys() & self.emptied.keys())))
        del self.emptied[name]
        self.live[name].emptying.on_membership(None)
        self.front_end_hears_of_members()

    def may_end(self, name: InstanceId) -> bool:
        """Whether it is empty, no peer waits for it, and the front end has sent its FinalAck."""
        instance = self.live[name]
        peers = [each for each in self.live.values() if each is not instance]
        is_source = any(name in each.arriving.values() for each in peers)
        is_heir = any(r.is_suspended and r.heir == name for e in peers for r in e.held.values())
        if instance.held or instance.arriving or is_source or is_heir:
            return False
        return instance.emptying.next_notice([ME], next(self.numbers)) is not None

    @precondition(lambda self: self.emptied)
    @rule()
    def emptied_instances_end(self) -> None:
        for name in [each for each in self.live if each in self.emptied]:
            while self.live[name].inbox:
                self.receive_at(name)
            if not self.may_end(name):
                continue
            unheard = [each for each, _ in self.live[name].outbox if isinstance(each, RequestNews)]
            assert not unheard, "it takes along what the front end has not heard"
            ended = self.dead[name] = self.live.pop(name)
            ended.outbox.clear()

    # ---------------------------------------------------------------------------- the end

    def teardown(self) -> None:
        """With everybody told and an instance there, every request ends, and leaves nothing."""
        if not self.live.keys() - self.emptied.keys():
            self.instance_comes()
        self.front_end_hears_of_members()
        for _ in range(NUM_TOKENS * (MAX_REQUESTS + 4) * 4):
            for instance in self.live.values():
                instance.arriving.clear()
            for source, attempt_id in self.attempts(suspended=True):
                self.let_go_or_resume(source, attempt_id)
            for instance_id, attempt_id in self.attempts():
                self.say(instance_id, attempt_id)
            self.tell_all()
            for instance in self.dead.values():
                while instance.outbox:
                    self.receive_from(instance)
            if self.core.next_deadline_s is not None:
                self.deadline_comes()
            has_ended = self.streams.keys() == self.ended.keys() and not self.attempts()
            if has_ended and self.core.next_deadline_s is None:
                break
        assert self.streams.keys() == self.ended.keys(), "a request never ended"
        assert not self.attempts(), "an instance steps what nobody waits for"
        assert self.core.next_deadline_s is None
        assert not any(self.core.num_delivered(each) is not None for each in self.streams)
        self.tell_all()
        for name in self.live.keys() & self.emptied.keys():
            assert self.may_end(name), "an instance is never emptied"


def output(request_id: RequestId, token_ids: list[int]) -> bytes:
    return msgspec.msgpack.encode([0, [[request_id, token_ids]]])


TestWorld = World.TestCase
TestWorld.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
