"""After a death no live request is given up, and no dead one is waited for forever."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sterna.frontend.effects import Effect, Fail, Failure, ToInstance
from sterna.frontend.ownership import Ownership
from sterna.messages import AbortRequests, OwnerQuery, OwnerReply, RequestsMoved, TokenSpan
from sterna.types import FrontendId, InstanceId, RequestId

ME = FrontendId(7)
I0, I1, I2, I3 = (InstanceId(f"i{number}") for number in range(4))
R1, R2 = RequestId("r1"), RequestId("r2")
DIED = Fail(R1, Failure.OWNER_DIED)


def ownership(
    *instances: InstanceId, owner: InstanceId = I0, decides_at_once: bool = False
) -> Ownership:
    """One request, R1, sent to `owner`."""
    result = Ownership(ME, owner_timeout_s=1.0, decides_at_once=decides_at_once)
    assert result.on_instances(instances, 0.0) == []
    result.on_sent(R1, owner)
    return result


def query(instance_id: InstanceId, query_id: int, *request_ids: RequestId) -> ToInstance:
    return ToInstance(instance_id, OwnerQuery(ME, query_id, request_ids or (R1,)))


def abort(instance_id: InstanceId) -> ToInstance:
    return ToInstance(instance_id, AbortRequests((R1,)))


def moved(
    instance_id: InstanceId, first_index: int, *request_ids: RequestId, version: int = 0
) -> RequestsMoved:
    return RequestsMoved(instance_id, request_ids, (first_index,) * len(request_ids), version)


def span(request_id: RequestId, first_index: int) -> TokenSpan:
    return TokenSpan(request_id, first_index, 1, False)


def test_a_token_from_before_a_move_says_nothing_about_who_has_the_request():
    """It came over another connection than the news of the move, and later."""
    under_test = ownership(I0, I1)
    under_test.on_tokens(I0, [span(R1, 0)])
    assert under_test.on_moved(moved(I1, 2, R1), 1.0) == []
    under_test.on_tokens(I0, [span(R1, 1)])
    assert under_test.owner(R1) == I1


def test_the_news_of_a_move_that_another_has_followed_is_ignored():
    under_test = ownership(I0, I1, I2)
    assert under_test.on_moved(moved(I2, 5, R1), 1.0) == []
    assert under_test.on_moved(moved(I1, 2, R1), 1.5) == []
    assert under_test.owner(R1) == I2
    assert under_test.num_owned(I1) == 0


def test_tokens_from_behind_a_move_show_where_the_request_is_before_its_news_comes():
    under_test = ownership(I0, I1)
    under_test.on_tokens(I1, [span(R1, 3)])
    assert under_test.on_moved(moved(I0, 2, R1), 1.0) == []
    assert under_test.owner(R1) == I1
    assert under_test.on_moved(moved(I0, 4, R1), 1.0) == []
    assert under_test.owner(R1) == I0


def test_who_is_said_to_have_it_after_a_death_may_have_it_from_an_earlier_token_on():
    """The dead had produced tokens that its source, which goes on, does not know."""
    under_test = ownership(I0, I1, I2)
    under_test.on_moved(moved(I1, 2, R1), 1.0)
    under_test.on_tokens(I1, [span(R1, 2)])
    under_test.on_instances([I0, I2], 2.0)
    under_test.on_owner_reply(OwnerReply(I0, 1, (R1,)))
    assert under_test.owner(R1) == I0
    assert under_test.on_moved(moved(I2, 2, R1), 3.0) == []
    assert under_test.owner(R1) == I2


def test_a_death_puts_every_request_in_doubt_and_every_instance_is_asked():
    under_test = ownership(I0, I1, I2)
    under_test.on_sent(R2, I1)
    assert under_test.on_instances([I1, I2], 5.0) == [query(I1, 1, R1, R2), query(I2, 2, R1, R2)]
    assert under_test.owner(R1) is None
    assert under_test.owner(R2) == I1
    assert under_test.next_deadline_s == 6.0


def test_a_request_that_nobody_claims_fails_at_the_deadline():
    under_test = ownership(I0, I1)
    under_test.on_instances([I1], 5.0)
    assert under_test.on_owner_reply(OwnerReply(I1, 1, ())) == []
    assert under_test.on_time(5.9) == []
    assert under_test.on_time(6.0) == [DIED]
    assert under_test.next_deadline_s is None


def test_the_requests_of_the_last_instance_fail():
    under_test = ownership(I0)
    assert under_test.on_instances([], 5.0) == []
    assert under_test.on_time(6.0) == [DIED]


def test_a_slow_instance_is_waited_for():
    under_test = ownership(I0, I1)
    under_test.on_instances([I1], 5.0)
    assert under_test.on_time(6.0) == [query(I1, 1)]
    assert under_test.next_deadline_s == 7.0
    under_test.on_owner_reply(OwnerReply(I1, 1, ()))
    assert under_test.on_time(7.0) == [DIED]


def test_whoever_does_not_answer_is_asked_the_same_again():
    """A query or an answer may be lost. The answer that comes at last counts, to whichever of them:
    under another number each would void the one that is under way."""
    under_test = ownership(I0, I1, I2)
    under_test.on_sent(R2, I0)
    under_test.on_instances([I1, I2], 5.0)
    under_test.on_owner_reply(OwnerReply(I2, 2, ()))
    assert under_test.on_time(6.0) == [query(I1, 1, R1, R2)]
    under_test.on_ended(R2)
    assert under_test.on_time(7.0) == [query(I1, 1, R1, R2)]
    assert under_test.on_owner_reply(OwnerReply(I1, 1, (R1,))) == []
    assert under_test.owner(R1) == I1
    # The answer to the question that was repeated.
    assert under_test.on_owner_reply(OwnerReply(I1, 1, ())) == []
    assert under_test.owner(R1) == I1
    assert under_test.next_deadline_s is None


def test_an_instance_that_dies_unanswering_is_not_waited_for():
    under_test = ownership(I0, I1)
    under_test.on_instances([I1], 5.0)
    assert under_test.on_instances([], 5.5) == []
    assert under_test.on_time(6.5) == [DIED]


def test_a_claimed_request_that_is_seen_to_run_is_out_of_doubt():
    under_test = ownership(I0, I1)
    under_test.on_instances([I1], 5.0)
    under_test.on_owner_reply(OwnerReply(I1, 1, (), (R1,)))
    under_test.on_tokens(I1, [span(R1, 0)])
    assert under_test.owner(R1) == I1
    assert under_test.next_deadline_s is None


def test_a_request_that_an_instance_has_is_out_of_doubt_at_once():
    under_test = ownership(I0, I1, I2)
    under_test.on_instances([I1, I2], 5.0)
    under_test.on_owner_reply(OwnerReply(I1, 1, (R1,)))
    assert under_test.owner(R1) == I1
    assert under_test.next_deadline_s is None
    assert under_test.on_owner_reply(OwnerReply(I2, 2, ())) == []


def test_who_sends_again_does_not_wait_when_all_have_denied_a_request():
    under_test = ownership(I0, I1, I2, decides_at_once=True)
    under_test.on_instances([I1, I2], 5.0)
    assert under_test.on_owner_reply(OwnerReply(I1, 1, ())) == []
    assert under_test.on_owner_reply(OwnerReply(I2, 2, ())) == [DIED]
    assert under_test.next_deadline_s is None


def test_who_sends_again_does_not_wait_where_there_is_nobody_to_ask():
    under_test = ownership(I0, decides_at_once=True)
    assert under_test.on_instances([], 5.0) == [DIED]


def test_who_sends_again_waits_for_a_request_that_may_be_arriving():
    under_test = ownership(I0, I1, I2, decides_at_once=True)
    under_test.on_instances([I1, I2], 5.0)
    assert under_test.on_owner_reply(OwnerReply(I1, 1, (), (R1,))) == []
    assert under_test.on_owner_reply(OwnerReply(I2, 2, ())) == []
    assert under_test.on_time(6.0) == [query(I1, 3), query(I2, 4)]
    assert under_test.on_owner_reply(OwnerReply(I1, 3, ())) == []
    assert under_test.on_owner_reply(OwnerReply(I2, 4, ())) == [DIED]


def test_a_request_that_is_only_arriving_is_asked_for_again_for_it_may_never_get_there():
    under_test = ownership(I0, I1)
    under_test.on_instances([I1], 5.0)
    under_test.on_owner_reply(OwnerReply(I1, 1, (), (R1,)))
    assert under_test.on_time(6.0) == [query(I1, 2)]
    under_test.on_owner_reply(OwnerReply(I1, 2, ()))
    assert under_test.on_time(7.0) == [DIED]


def test_late_tokens_of_a_former_owner_do_not_settle_a_doubt():
    under_test = ownership(I0, I1)
    under_test.on_instances([I1], 5.0)
    under_test.on_tokens(I1, [span(R1, 0)])
    under_test.on_owner_reply(OwnerReply(I1, 1, ()))
    assert under_test.on_time(6.0) == [DIED]


def test_a_move_during_the_query_voids_the_answers_so_far():
    under_test = ownership(I0, I1, I2, owner=I1)
    under_test.on_instances([I1, I2], 5.0)
    under_test.on_owner_reply(OwnerReply(I2, 2, ()))
    assert under_test.on_moved(moved(I2, 0, R1), 5.5) == [query(I1, 3), query(I2, 4)]
    under_test.on_owner_reply(OwnerReply(I1, 1, ()))
    under_test.on_owner_reply(OwnerReply(I1, 3, ()))
    under_test.on_owner_reply(OwnerReply(I2, 4, (R1,)))
    under_test.on_tokens(I2, [span(R1, 0)])
    assert under_test.on_time(9.0) == []
    assert under_test.owner(R1) == I2


def test_an_answer_to_a_voided_query_does_not_count():
    under_test = ownership(I0, I1)
    under_test.on_sent(R2, I1)
    under_test.on_instances([I1], 5.0)
    under_test.on_moved(moved(I1, 0, R1), 5.5)
    under_test.on_owner_reply(OwnerReply(I1, 1, ()))
    assert under_test.on_time(6.5) == [Fail(R2, Failure.OWNER_DIED), query(I1, 2)]


def test_a_second_death_voids_the_answers_so_far():
    under_test = ownership(I0, I1, I2)
    under_test.on_instances([I1, I2], 5.0)
    under_test.on_owner_reply(OwnerReply(I1, 1, ()))
    assert under_test.on_instances([I1], 5.5) == [query(I1, 3)]
    assert under_test.on_time(6.0) == []
    under_test.on_owner_reply(OwnerReply(I1, 3, ()))
    assert under_test.on_time(6.5) == [DIED]


def test_a_newcomer_is_asked_too():
    under_test = ownership(I0, I1)
    under_test.on_instances([I1], 5.0)
    assert under_test.on_instances([I1, I2], 5.5) == [query(I2, 2)]


def test_an_instance_of_whose_start_others_heard_first_may_have_a_request():
    """The news of its birth is late; that it has got a request is known already."""
    under_test = ownership(I0, I1)
    assert under_test.on_moved(moved(I2, 3, R1, version=5), 2.0) == []
    under_test.on_tokens(I2, [span(R1, 3)])
    assert under_test.owner(R1) == I2
    assert under_test.on_instances([I1], 5.0, version=4) == [query(I1, 1)]
    assert under_test.on_owner_reply(OwnerReply(I1, 1, ())) == []
    assert under_test.on_time(6.0) == []
    assert under_test.on_instances([I1, I2], 6.5, version=5) == [query(I2, 2)]
    assert under_test.on_owner_reply(OwnerReply(I2, 2, (R1,))) == []
    assert under_test.owner(R1) == I2
    assert under_test.next_deadline_s is None


def test_a_newcomer_may_have_what_was_arriving_elsewhere_when_that_is_asked_again():
    """The move to it has ended meanwhile, so its source has parted from the request."""
    under_test = ownership(I0, I1, owner=I1, decides_at_once=True)
    under_test.on_moved(moved(I2, 3, R1, version=5), 2.0)
    assert under_test.on_instances([I1], 5.0, version=4) == [query(I1, 1)]
    assert under_test.on_owner_reply(OwnerReply(I1, 1, (), (R1,))) == []
    assert under_test.on_time(6.0) == [query(I1, 2)]
    assert under_test.on_owner_reply(OwnerReply(I1, 2, ())) == []
    assert under_test.on_time(7.0) == []
    assert under_test.owner(R1) == I2
    assert under_test.on_instances([I1, I2], 7.5, version=5) == [query(I2, 3)]
    assert under_test.on_owner_reply(OwnerReply(I2, 3, (R1,))) == []
    assert under_test.next_deadline_s is None


def test_a_newcomer_that_says_so_during_a_doubt_may_have_the_request():
    """Who died had passed it on, and so did that one."""
    under_test = ownership(I0, I1, decides_at_once=True)
    assert under_test.on_instances([I1], 5.0, version=4) == [query(I1, 1)]
    assert under_test.on_moved(moved(I2, 3, R1, version=5), 5.1) == [query(I1, 2)]
    assert under_test.on_owner_reply(OwnerReply(I1, 1, ())) == []
    assert under_test.on_owner_reply(OwnerReply(I1, 2, ())) == []
    assert under_test.on_instances([I1], 6.0, version=6) == [query(I1, 3)]
    assert under_test.on_owner_reply(OwnerReply(I1, 3, ())) == [DIED]


def test_a_newcomer_may_have_the_request_from_an_earlier_token_on_than_the_dead():
    """The source of a move to one that died went on from there, and moved it to another one."""
    under_test = ownership(I0, I1, decides_at_once=True)
    under_test.on_moved(moved(I1, 2, R1), 1.0)
    under_test.on_tokens(I1, [span(R1, 2), span(R1, 3)])
    assert under_test.on_moved(moved(I2, 3, R1, version=5), 2.0) == []
    assert under_test.on_instances([I0], 3.0, version=4) == [query(I0, 1)]
    assert under_test.on_owner_reply(OwnerReply(I0, 1, ())) == []
    assert under_test.on_instances([I0, I2], 4.0, version=5) == [query(I2, 2)]
    assert under_test.on_owner_reply(OwnerReply(I2, 2, (R1,))) == []
    assert under_test.owner(R1) == I2


def test_an_instance_that_died_before_its_start_was_known_is_not_waited_for():
    under_test = ownership(I0, I1, decides_at_once=True)
    under_test.on_moved(moved(I2, 3, R1, version=5), 2.0)
    assert under_test.on_instances([I0, I1], 5.0, version=6) == [query(I0, 1), query(I1, 2)]
    assert under_test.owner(R1) is None
    assert under_test.on_owner_reply(OwnerReply(I0, 1, ())) == []
    assert under_test.on_owner_reply(OwnerReply(I1, 2, ())) == [DIED]


def test_the_last_words_of_a_dead_instance_do_not_make_it_a_newcomer():
    under_test = ownership(I0, I1, I2)
    under_test.on_instances([I0, I1], 2.0, version=6)
    for number in (1, 2):
        under_test.on_owner_reply(OwnerReply((I0, I1)[number - 1], number, (R1,) * (number == 1)))
    assert under_test.on_moved(moved(I2, 3, R1, version=5), 2.5) == []
    under_test.on_tokens(I2, [span(R1, 3)])
    assert under_test.owner(R1) == I0


def test_what_a_dead_instance_said_is_ignored():
    under_test = ownership(I0, I1)
    under_test.on_instances([I1], 5.0)
    assert under_test.on_moved(moved(I0, 0, R1), 5.1) == []
    under_test.on_tokens(I0, [span(R1, 0)])
    assert under_test.owner(R1) is None


def test_an_abort_in_doubt_reaches_whoever_claims_the_request():
    under_test = ownership(I0, I1)
    under_test.on_instances([I1], 5.0)
    assert under_test.on_abort([R1]) == []
    assert under_test.on_owner_reply(OwnerReply(I1, 1, (R1,))) == [abort(I1)]
    assert under_test.on_time(6.0) == []
    assert under_test.next_deadline_s is None


def test_an_abort_in_doubt_of_a_request_that_nobody_has_is_no_failure():
    under_test = ownership(I0, I1)
    under_test.on_instances([I1], 5.0)
    under_test.on_abort([R1])
    under_test.on_owner_reply(OwnerReply(I1, 1, ()))
    assert under_test.on_time(6.0) == []
    assert under_test.next_deadline_s is None


def test_an_abort_after_a_claim_goes_to_the_claimant():
    under_test = ownership(I0, I1)
    under_test.on_instances([I1], 5.0)
    under_test.on_owner_reply(OwnerReply(I1, 1, (R1,)))
    assert under_test.on_abort([R1]) == [abort(I1)]


def test_a_stream_that_ends_in_doubt_is_forgotten():
    under_test = ownership(I0, I1)
    under_test.on_instances([I1], 5.0)
    under_test.on_ended(R1)
    assert under_test.on_owner_reply(OwnerReply(I1, 1, ())) == []
    assert under_test.next_deadline_s is None


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
        self.to_front: dict[InstanceId, list[OwnerReply | TokenSpan | RequestsMoved]] = {
            each: [] for each in (*self.live, I3)
        }
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
        self.to_front[self.stepping].append(span(R1, self.holders[self.stepping]))
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
        news = moved(self.stepping, num_tokens, R1, version=self.version)
        self.to_front[self.stepping].append(news)
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
        message = self.to_front[instance_id].pop(0)
        if isinstance(message, OwnerReply):
            self.carry_out(self.under_test.on_owner_reply(message))
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
        reply = OwnerReply(instance_id, query.query_id, here, arriving)
        self.to_front[instance_id].append(reply)

    @rule()
    def everybody_answers(self) -> None:
        for instance_id in self.live:
            while self.to_instance[instance_id]:
                self.instance_receives(instance_id)
        self.deliver_news()

    @rule()
    def deadline_comes(self) -> None:
        """News that is under way arrives within a deadline; an answer may take longer."""
        self.deliver_news()
        self.now_s += 1.0
        self.carry_out(self.under_test.on_time(self.now_s))

    def deliver_news(self) -> None:
        for instance_id, messages in self.to_front.items():
            while messages:
                self.front_end_receives(instance_id)

    def teardown(self) -> None:
        """With everybody told and answering, no request is in limbo."""
        self.reserved = None
        if self.stepping is None:
            self.holders = {}
        while self.unheard:
            self.hear_of_births_and_deaths()
        for _ in range(4):
            self.everybody_answers()
            self.deadline_comes()
        assert self.has_failed == (not self.holders)
        if self.holders:
            self.step()
            self.deliver_news()
            owner = self.under_test.owner(R1)
            assert owner in self.holders or self.under_test.next_deadline_s is not None


TestWorld = World.TestCase
TestWorld.settings = settings(max_examples=400, stateful_step_count=40, deadline=None)
