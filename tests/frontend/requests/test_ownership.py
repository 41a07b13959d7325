"""After a death no live request is given up, and no dead one is waited for forever: examples."""

from sterna.frontend.requests.ownership import Ownership
from sterna.frontend.requests.request_effects import Fail, Failure, ToInstance
from sterna.messages.actors import AbortRequests, OwnerQuery, OwnerReply
from sterna.types import InstanceId, RequestId
from tests.frontend.requests.ownership_news import I0, I1, I2, ME, R1, R2, moved, span

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
    under_test.on_owner_reply(OwnerReply(I0, 1, (R1,)), 2.0)
    assert under_test.owner(R1) == I0
    assert under_test.on_moved(moved(I2, 2, R1), 3.0) == []
    assert under_test.owner(R1) == I2


def test_a_token_from_before_a_move_says_nothing_after_a_death_either():
    under_test = ownership(I0, I1, I2)
    under_test.on_moved(moved(I1, 5, R1), 1.0)
    under_test.on_instances([I0, I1], 2.0)
    under_test.on_owner_reply(OwnerReply(I1, 2, (R1,)), 2.1)
    under_test.on_tokens(I0, [span(R1, 4)])
    assert under_test.owner(R1) == I1


def test_news_is_waited_for_as_long_after_the_last_denial():
    """Who has passed the request on may deny it just before the deadline."""
    under_test = ownership(I0, I1, I2)
    under_test.on_instances([I1, I2], 5.0)
    assert under_test.on_owner_reply(OwnerReply(I2, 2, ()), 5.1) == []
    assert under_test.on_owner_reply(OwnerReply(I1, 1, ()), 5.9) == []
    assert under_test.on_time(6.0) == []
    assert under_test.on_moved(moved(I2, 1, R1), 6.5) == [query(I1, 3), query(I2, 4)]
    assert under_test.on_owner_reply(OwnerReply(I2, 4, (R1,)), 6.6) == []
    assert under_test.next_deadline_s is None


def test_what_its_owner_denies_has_been_passed_on_and_all_are_asked_once_more():
    """Whoever has got it may have denied it before."""
    under_test = ownership(I0, I1, I2, decides_at_once=True)
    under_test.on_instances([I0, I1], 5.0)
    assert under_test.on_owner_reply(OwnerReply(I1, 2, ()), 5.0) == []
    # It moves from I0 to I1, whose news is under way.
    assert under_test.on_owner_reply(OwnerReply(I0, 1, ()), 5.3) == [query(I0, 3), query(I1, 4)]
    assert under_test.on_owner_reply(OwnerReply(I1, 4, (R1,)), 5.4) == []
    assert under_test.owner(R1) == I1
    assert under_test.next_deadline_s is None


def test_what_all_deny_twice_has_died():
    """It was passed on to the dead."""
    under_test = ownership(I0, I1, I2, decides_at_once=True)
    under_test.on_instances([I0, I1], 5.0)
    under_test.on_owner_reply(OwnerReply(I0, 1, ()), 5.0)
    assert under_test.on_owner_reply(OwnerReply(I1, 2, ()), 5.0) == [query(I0, 3), query(I1, 4)]
    assert under_test.owner(R1) is None
    under_test.on_owner_reply(OwnerReply(I0, 3, ()), 5.0)
    assert under_test.on_owner_reply(OwnerReply(I1, 4, ()), 5.0) == [DIED]


def test_what_the_last_one_denies_has_died():
    """There is nobody to whom it could have passed it on, but the dead."""
    under_test = ownership(I0, I1, decides_at_once=True)
    under_test.on_instances([I0], 5.0)
    assert under_test.on_owner_reply(OwnerReply(I0, 1, ()), 5.0) == [DIED]


def test_a_death_puts_every_request_in_doubt_and_every_instance_is_asked():
    under_test = ownership(I0, I1, I2)
    under_test.on_sent(R2, I1)
    assert under_test.on_instances([I1, I2], 5.0) == [query(I1, 1, R1, R2), query(I2, 2, R1, R2)]
    assert under_test.owner(R1) is None
    assert under_test.owner(R2) == I1
    assert under_test.next_deadline_s == 6.0


def test_a_membership_that_was_missed_puts_every_request_in_doubt():
    """A dead supervisor has told others of an instance. It got the request, and has died before its
    news came; the successor tells that it is not there."""
    under_test = ownership(I0)
    assert under_test.on_instances([I0], 4.0, version=1) == []
    assert under_test.on_instances([I0], 5.0, version=1002) == [query(I0, 1)]
    assert under_test.on_owner_reply(OwnerReply(I0, 1, ()), 5.0) == []
    assert under_test.on_time(6.0) == [DIED]


def test_a_request_that_nobody_claims_fails_at_the_deadline():
    under_test = ownership(I0, I1)
    under_test.on_instances([I1], 5.0)
    assert under_test.on_owner_reply(OwnerReply(I1, 1, ()), 5.0) == []
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
    under_test.on_owner_reply(OwnerReply(I1, 1, ()), 6.0)
    assert under_test.on_time(7.0) == [DIED]


def test_whoever_does_not_answer_is_asked_the_same_again():
    """A query or an answer may be lost. The answer that comes at last counts, to whichever of them:
    under another number each would void the one that is under way."""
    under_test = ownership(I0, I1, I2)
    under_test.on_sent(R2, I0)
    under_test.on_instances([I1, I2], 5.0)
    under_test.on_owner_reply(OwnerReply(I2, 2, ()), 5.0)
    assert under_test.on_time(6.0) == [query(I1, 1, R1, R2)]
    under_test.on_ended(R2)
    assert under_test.on_time(7.0) == [query(I1, 1, R1, R2)]
    assert under_test.on_owner_reply(OwnerReply(I1, 1, (R1,)), 7.0) == []
    assert under_test.owner(R1) == I1
    # The answer to the question that was repeated.
    assert under_test.on_owner_reply(OwnerReply(I1, 1, ()), 7.0) == []
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
    under_test.on_owner_reply(OwnerReply(I1, 1, (), (R1,)), 5.0)
    under_test.on_tokens(I1, [span(R1, 0)])
    assert under_test.owner(R1) == I1
    assert under_test.next_deadline_s is None


def test_a_request_that_an_instance_has_is_out_of_doubt_at_once():
    under_test = ownership(I0, I1, I2)
    under_test.on_instances([I1, I2], 5.0)
    under_test.on_owner_reply(OwnerReply(I1, 1, (R1,)), 5.0)
    assert under_test.owner(R1) == I1
    assert under_test.next_deadline_s is None
    assert under_test.on_owner_reply(OwnerReply(I2, 2, ()), 5.0) == []


def test_who_sends_again_does_not_wait_when_all_have_denied_a_request():
    under_test = ownership(I0, I1, I2, decides_at_once=True)
    under_test.on_instances([I1, I2], 5.0)
    assert under_test.on_owner_reply(OwnerReply(I1, 1, ()), 5.0) == []
    assert under_test.on_owner_reply(OwnerReply(I2, 2, ()), 5.0) == [DIED]
    assert under_test.next_deadline_s is None


def test_who_sends_again_does_not_wait_where_there_is_nobody_to_ask():
    under_test = ownership(I0, decides_at_once=True)
    assert under_test.on_instances([], 5.0) == [DIED]


def test_who_sends_again_waits_for_a_request_that_may_be_arriving():
    under_test = ownership(I0, I1, I2, decides_at_once=True)
    under_test.on_instances([I1, I2], 5.0)
    assert under_test.on_owner_reply(OwnerReply(I1, 1, (), (R1,)), 5.0) == []
    assert under_test.on_owner_reply(OwnerReply(I2, 2, ()), 5.0) == []
    assert under_test.on_time(6.0) == [query(I1, 3), query(I2, 4)]
    assert under_test.on_owner_reply(OwnerReply(I1, 3, ()), 6.0) == []
    assert under_test.on_owner_reply(OwnerReply(I2, 4, ()), 6.0) == [DIED]


def test_a_request_that_is_only_arriving_is_asked_for_again_for_it_may_never_get_there():
    under_test = ownership(I0, I1)
    under_test.on_instances([I1], 5.0)
    under_test.on_owner_reply(OwnerReply(I1, 1, (), (R1,)), 5.0)
    assert under_test.on_time(6.0) == [query(I1, 2)]
    under_test.on_owner_reply(OwnerReply(I1, 2, ()), 6.0)
    assert under_test.on_time(7.0) == [DIED]


def test_late_tokens_of_a_former_owner_do_not_settle_a_doubt():
    under_test = ownership(I0, I1)
    under_test.on_instances([I1], 5.0)
    under_test.on_tokens(I1, [span(R1, 0)])
    under_test.on_owner_reply(OwnerReply(I1, 1, ()), 5.0)
    assert under_test.on_time(6.0) == [DIED]


def test_a_move_during_the_query_voids_the_answers_so_far():
    under_test = ownership(I0, I1, I2, owner=I1)
    under_test.on_instances([I1, I2], 5.0)
    under_test.on_owner_reply(OwnerReply(I2, 2, ()), 5.0)
    assert under_test.on_moved(moved(I2, 0, R1), 5.5) == [query(I1, 3), query(I2, 4)]
    under_test.on_owner_reply(OwnerReply(I1, 1, ()), 5.5)
    under_test.on_owner_reply(OwnerReply(I1, 3, ()), 5.5)
    under_test.on_owner_reply(OwnerReply(I2, 4, (R1,)), 5.5)
    under_test.on_tokens(I2, [span(R1, 0)])
    assert under_test.on_time(9.0) == []
    assert under_test.owner(R1) == I2


def test_an_answer_to_a_voided_query_does_not_count():
    under_test = ownership(I0, I1)
    under_test.on_sent(R2, I1)
    under_test.on_instances([I1], 5.0)
    under_test.on_moved(moved(I1, 0, R1), 5.5)
    under_test.on_owner_reply(OwnerReply(I1, 1, ()), 5.5)
    assert under_test.on_time(6.5) == [Fail(R2, Failure.OWNER_DIED), query(I1, 2)]


def test_a_second_death_voids_the_answers_so_far():
    under_test = ownership(I0, I1, I2)
    under_test.on_instances([I1, I2], 5.0)
    under_test.on_owner_reply(OwnerReply(I1, 1, ()), 5.0)
    assert under_test.on_instances([I1], 5.5) == [query(I1, 3)]
    assert under_test.on_time(6.0) == []
    under_test.on_owner_reply(OwnerReply(I1, 3, ()), 6.0)
    assert under_test.on_time(7.0) == [DIED]


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
    assert under_test.on_owner_reply(OwnerReply(I1, 1, ()), 5.0) == []
    assert under_test.on_time(6.0) == []
    assert under_test.on_instances([I1, I2], 6.5, version=5) == [query(I2, 2)]
    assert under_test.on_owner_reply(OwnerReply(I2, 2, (R1,)), 6.5) == []
    assert under_test.owner(R1) == I2
    assert under_test.next_deadline_s is None


def test_a_newcomer_may_have_what_was_arriving_elsewhere_when_that_is_asked_again():
    """The move to it has ended meanwhile, so its source has parted from the request."""
    under_test = ownership(I0, I1, owner=I1, decides_at_once=True)
    under_test.on_moved(moved(I2, 3, R1, version=5), 2.0)
    assert under_test.on_instances([I1], 5.0, version=4) == [query(I1, 1)]
    assert under_test.on_owner_reply(OwnerReply(I1, 1, (), (R1,)), 5.0) == []
    assert under_test.on_time(6.0) == [query(I1, 2)]
    assert under_test.on_owner_reply(OwnerReply(I1, 2, ()), 6.0) == []
    assert under_test.on_time(7.0) == []
    assert under_test.owner(R1) == I2
    assert under_test.on_instances([I1, I2], 7.5, version=5) == [query(I2, 3)]
    assert under_test.on_owner_reply(OwnerReply(I2, 3, (R1,)), 7.5) == []
    assert under_test.next_deadline_s is None


def test_a_newcomer_that_says_so_during_a_doubt_may_have_the_request():
    """Who died had passed it on, and so did that one."""
    under_test = ownership(I0, I1, decides_at_once=True)
    assert under_test.on_instances([I1], 5.0, version=4) == [query(I1, 1)]
    assert under_test.on_moved(moved(I2, 3, R1, version=5), 5.1) == [query(I1, 2)]
    assert under_test.on_owner_reply(OwnerReply(I1, 1, ()), 5.1) == []
    assert under_test.on_owner_reply(OwnerReply(I1, 2, ()), 5.1) == []
    assert under_test.on_instances([I1], 6.0, version=6) == [query(I1, 3)]
    assert under_test.on_owner_reply(OwnerReply(I1, 3, ()), 6.0) == [DIED]


def test_a_newcomer_may_have_the_request_from_an_earlier_token_on_than_the_dead():
    """The source of a move to one that died went on from there, and moved it to another one."""
    under_test = ownership(I0, I1, decides_at_once=True)
    under_test.on_moved(moved(I1, 2, R1), 1.0)
    under_test.on_tokens(I1, [span(R1, 2), span(R1, 3)])
    assert under_test.on_moved(moved(I2, 3, R1, version=5), 2.0) == []
    assert under_test.on_instances([I0], 3.0, version=4) == [query(I0, 1)]
    assert under_test.on_owner_reply(OwnerReply(I0, 1, ()), 3.0) == []
    assert under_test.on_instances([I0, I2], 4.0, version=5) == [query(I2, 2)]
    assert under_test.on_owner_reply(OwnerReply(I2, 2, (R1,)), 4.0) == []
    assert under_test.owner(R1) == I2


def test_what_may_have_been_passed_on_to_a_newcomer_is_waited_for():
    """Its own news is late, too; the one that denies the request knows a later membership."""
    under_test = ownership(I0, I1, decides_at_once=True)
    assert under_test.on_instances([I0], 5.0, version=4) == [query(I0, 1)]
    assert under_test.on_owner_reply(OwnerReply(I0, 1, (), version=5), 5.0) == []
    assert under_test.on_time(6.0) == []
    assert under_test.on_instances([I0, I2], 6.5, version=5) == [query(I2, 2)]
    assert under_test.on_owner_reply(OwnerReply(I2, 2, (R1,), version=5), 6.5) == []
    assert under_test.owner(R1) == I2
    assert under_test.next_deadline_s is None


def test_a_request_is_sent_again_as_soon_as_the_later_membership_has_no_newcomer():
    under_test = ownership(I0, I1, owner=I1, decides_at_once=True)
    assert under_test.on_instances([I0], 5.0, version=4) == [query(I0, 1)]
    assert under_test.on_owner_reply(OwnerReply(I0, 1, (), version=5), 5.0) == []
    assert under_test.on_instances([I0], 5.1, version=5) == [DIED]


def test_all_are_asked_once_more_when_the_later_membership_has_no_newcomer():
    """The one that was asked first may have got the request after its answer."""
    under_test = ownership(I0, I1, I2, decides_at_once=True)
    under_test.on_instances([I0, I1], 5.0, version=4)
    assert under_test.on_owner_reply(OwnerReply(I1, 2, (), version=5), 5.0) == []
    assert under_test.on_owner_reply(OwnerReply(I0, 1, (), version=5), 5.0) == []
    assert under_test.on_instances([I0, I1], 5.1, version=5) == [query(I0, 3), query(I1, 4)]


def test_a_request_does_not_fail_while_a_later_membership_is_under_way():
    under_test = ownership(I0, I1)
    under_test.on_instances([I0], 5.0, version=4)
    assert under_test.on_owner_reply(OwnerReply(I0, 1, (), version=5), 5.0) == []
    assert under_test.on_time(6.0) == []
    assert under_test.on_instances([I0], 6.5, version=5) == []
    assert under_test.on_time(7.0) == [DIED]


def test_the_death_of_the_instance_that_knew_a_later_membership_ends_the_wait():
    """A membership that no member has any longer never arrives."""
    under_test = ownership(I0, I1, I2, decides_at_once=True)
    under_test.on_instances([I0, I1], 5.0, version=4)
    assert under_test.on_owner_reply(OwnerReply(I1, 2, (), version=9), 5.0) == []
    assert under_test.on_instances([I0], 6.0, version=5) == [query(I0, 3)]
    assert under_test.on_owner_reply(OwnerReply(I0, 3, (), version=5), 6.0) == [DIED]


def test_an_instance_that_died_before_its_start_was_known_is_not_waited_for():
    under_test = ownership(I0, I1, decides_at_once=True)
    under_test.on_moved(moved(I2, 3, R1, version=5), 2.0)
    assert under_test.on_instances([I0, I1], 5.0, version=6) == [query(I0, 1), query(I1, 2)]
    assert under_test.owner(R1) is None
    assert under_test.on_owner_reply(OwnerReply(I0, 1, ()), 5.0) == []
    assert under_test.on_owner_reply(OwnerReply(I1, 2, ()), 5.0) == [DIED]


def test_the_last_line_of_a_dead_instance_do_not_make_it_a_newcomer():
    under_test = ownership(I0, I1, I2)
    under_test.on_instances([I0, I1], 2.0, version=6)
    for number in (1, 2):
        under_test.on_owner_reply(
            OwnerReply((I0, I1)[number - 1], number, (R1,) * (number == 1)), 2.0
        )
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
    assert under_test.on_owner_reply(OwnerReply(I1, 1, (R1,)), 5.0) == [abort(I1)]
    assert under_test.on_time(6.0) == []
    assert under_test.next_deadline_s is None


def test_an_abort_in_doubt_of_a_request_that_nobody_has_is_no_failure():
    under_test = ownership(I0, I1)
    under_test.on_instances([I1], 5.0)
    under_test.on_abort([R1])
    under_test.on_owner_reply(OwnerReply(I1, 1, ()), 5.0)
    assert under_test.on_time(6.0) == []
    assert under_test.next_deadline_s is None


def test_an_abort_after_a_claim_goes_to_the_claimant():
    under_test = ownership(I0, I1)
    under_test.on_instances([I1], 5.0)
    under_test.on_owner_reply(OwnerReply(I1, 1, (R1,)), 5.0)
    assert under_test.on_abort([R1]) == [abort(I1)]


def test_a_stream_that_ends_in_doubt_is_forgotten():
    under_test = ownership(I0, I1)
    under_test.on_instances([I1], 5.0)
    under_test.on_ended(R1)
    assert under_test.on_owner_reply(OwnerReply(I1, 1, ()), 5.0) == []
    assert under_test.next_deadline_s is None
