"""After a death no live request is given up, and no dead one is waited for forever: whatever
comes late."""

import math

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sterna.frontend.requests.ownership import Ownership
from sterna.frontend.requests.request_effects import Effect, Fail
from sterna.messages.actors import OwnerQuery, OwnerReply, RequestsMoved, TokenSpan
from sterna.types import InstanceId
from tests.frontend.requests.ownership_news import I0, I1, I2, I3, ME, R1, moved, span

News = OwnerReply | TokenSpan | RequestsMoved

PERIOD_S = 0.4
NEWS_S = 2 * PERIOD_S
"""News takes no longer, which is less than what it is waited for."""


class World(RuleBasedStateMachine):
    """Instances that step, pass on and lose one request, behind connections each of which keeps
    its order; what a dead instance had not sent yet may be lost. One is born later, and who lives
    may be heard of late, too.

    `holders` have the request's state (two while a commit is under way, of which the source does
    not know yet that the other one has it); `reserved` is about to adopt it. All say so when
    asked, as instances must.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.live = [I0, I1, I2]
        self.version = 0
        self.unheard: list[tuple[int, list[InstanceId]]] = []
        self.is_born = self.has_died = False
        self.holders = {I0: 0}
        self.stepping: InstanceId | None = I0
        self.reserved: InstanceId | None = None
        # With the time of each.
        self.to_front: dict[InstanceId, list[tuple[float, News]]]
        self.to_front = {each: [] for each in (*self.live, I3)}
        # Of two moves without a token in between nobody can tell which was later.
        self.moved_at: set[int] = set()
        self.has_moved_idly = False
        self.to_instance: dict[InstanceId, list[OwnerQuery]] = {each: [] for each in self.to_front}
        self.has_failed = False
        self.num_seen = 0
        self.under_test = Ownership(ME, owner_timeout_s=1.0)
        self.under_test.on_instances(self.live, 0.0)
        self.under_test.on_sent(R1, I0)

    @initialize(is_told_first=st.none() | st.booleans())
    def begin_with_a_move_to_a_newcomer(self, is_told_first: bool | None) -> None:
        """The front end knows of the move and of a death before it, but not of the birth."""
        if is_told_first is None:
            return
        self.kill(I2, 0)
        self.be_born()
        self.reserved = I3
        self.adopt()
        if is_told_first:
            self.front_end_receives(I3)
        self.hear_of_births_and_deaths()
        self.everybody_answers()

    def send(
        self, instance_id: InstanceId, message: OwnerReply | TokenSpan | RequestsMoved
    ) -> None:
        self.to_front[instance_id].append((self.now_s, message))

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Fail):
                assert not self.holders, "a request that somebody holds was given up"
                assert not self.has_failed, "a request failed twice"
                self.has_failed = True
            elif effect.instance_id in self.live:
                self.to_instance[effect.instance_id].append(effect.message)

    @precondition(lambda self: self.stepping)
    @rule()
    def step(self) -> None:
        self.send(self.stepping, span(R1, self.holders[self.stepping]))
        self.holders[self.stepping] += 1

    @precondition(lambda self: self.stepping and not self.reserved and len(self.live) > 1)
    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        others = [each for each in self.live if each not in self.holders]
        if others:
            self.reserved = data.draw(st.sampled_from(others))

    @precondition(lambda self: self.reserved and len(self.holders) < 2)
    @rule()
    def adopt(self) -> None:
        """The source, if it still lives, keeps the request suspended until it hears so."""
        num_tokens = next(iter(self.holders.values()), self.num_seen)
        self.holders[self.reserved] = num_tokens
        self.stepping, self.reserved = self.reserved, None
        self.send(self.stepping, moved(self.stepping, num_tokens, R1, version=self.version))
        self.has_moved_idly |= num_tokens in self.moved_at
        self.moved_at.add(num_tokens)

    @precondition(lambda self: len(self.holders) == 2)
    @rule()
    def release(self) -> None:
        self.holders = {self.stepping: self.holders[self.stepping]}

    @precondition(lambda self: self.reserved)
    @rule()
    def give_reservation_back(self) -> None:
        self.reserved = None

    def change_membership(self) -> None:
        self.version += 1
        self.unheard.append((self.version, list(self.live)))

    @precondition(lambda self: self.live and not self.is_born)
    @rule()
    def be_born(self) -> None:
        self.is_born = True
        self.live.append(I3)
        self.change_membership()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        dead = data.draw(st.sampled_from(self.live))
        self.kill(dead, data.draw(st.integers(0, len(self.to_front[dead]))))

    def kill(self, dead: InstanceId, num_sent: int) -> None:
        self.live.remove(dead)
        self.has_died = True
        self.change_membership()
        self.to_instance[dead].clear()
        del self.to_front[dead][num_sent:]
        self.holders.pop(dead, None)
        if self.reserved == dead:
            self.reserved = None
        if self.stepping == dead:
            # The source of an unfinished commit resumes when its peer is confirmed dead.
            self.stepping = next(iter(self.holders), None)

    @precondition(lambda self: self.unheard)
    @rule()
    def hear_of_births_and_deaths(self) -> None:
        version, instances = self.unheard.pop(0)
        self.carry_out(self.under_test.on_instances(instances, self.now_s, version))

    @rule(instance_id=st.sampled_from([I0, I1, I2, I3]))
    def front_end_receives(self, instance_id: InstanceId) -> None:
        if not self.to_front[instance_id]:
            return
        _, message = self.to_front[instance_id].pop(0)
        if isinstance(message, OwnerReply):
            self.carry_out(self.under_test.on_owner_reply(message, self.now_s))
        elif isinstance(message, RequestsMoved):
            self.carry_out(self.under_test.on_moved(message, self.now_s))
        elif message.first_index >= self.num_seen:
            self.num_seen = message.first_index + 1
            self.under_test.on_tokens(instance_id, [message])

    @invariant()
    def who_steps_is_known_when_all_news_is_there(self) -> None:
        is_all_there = not any(self.to_front.values())
        if is_all_there and not self.has_died and not self.has_moved_idly:
            assert self.under_test.owner(R1) == self.stepping

    @rule(instance_id=st.sampled_from([I0, I1, I2, I3]))
    def instance_receives(self, instance_id: InstanceId) -> None:
        if instance_id not in self.live or not self.to_instance[instance_id]:
            return
        query = self.to_instance[instance_id].pop(0)
        here = query.request_ids if instance_id == self.stepping else ()
        may_have_it = instance_id == self.reserved or instance_id in self.holders
        arriving = query.request_ids if may_have_it and not here else ()
        reply = OwnerReply(instance_id, query.query_id, here, arriving, self.version)
        self.send(instance_id, reply)

    @rule()
    def everybody_answers(self) -> None:
        for instance_id in self.live:
            while self.to_instance[instance_id]:
                self.instance_receives(instance_id)
        self.deliver_news()

    @rule()
    def time_passes(self) -> None:
        self.now_s += PERIOD_S
        self.deliver_news(self.now_s - NEWS_S)
        self.carry_out(self.under_test.on_time(self.now_s))

    def deliver_news(self, until_s: float = math.inf) -> None:
        for instance_id, messages in self.to_front.items():
            while messages and messages[0][0] <= until_s:
                self.front_end_receives(instance_id)

    def teardown(self) -> None:
        """With everybody told and answering, no request is in limbo."""
        self.reserved = None
        if self.stepping is None:
            self.holders = {}
        while self.unheard:
            self.hear_of_births_and_deaths()
        for _ in range(16):
            self.everybody_answers()
            self.time_passes()
        assert self.has_failed == (not self.holders)
        if self.holders:
            self.step()
            self.deliver_news()
            owner = self.under_test.owner(R1)
            assert owner in self.holders or self.under_test.next_deadline_s is not None


TestWorld = World.TestCase
TestWorld.settings = settings(max_examples=400, stateful_step_count=40, deadline=None)
