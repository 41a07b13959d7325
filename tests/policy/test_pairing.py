"""The destination of each source of migrations (Section 4.4.3, migration).

Every load here is one that a llumlet would report of a view, so that pairing is shown on the
values that it meets in production.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec import structs

from sterna.config import PolicyConfig, Victim
from sterna.policy.own import Policy
from sterna.policy.pairing import move_helps, pair
from sterna.policy.presets import LLUMNIX, LLUMNIX_BASE
from sterna.policy.selection import candidates_to_move
from sterna.policy.virtual_usage import Candidate
from sterna.types import (
    HIGH,
    OUTPUT_LENGTHS,
    Immovable,
    InstanceId,
    InstanceView,
    RequestStatus,
    RequestView,
)
from tests.policy.builders import (
    M,
    candidate,
    clusters,
    clusters_with_moves,
    crowded,
    evenly_loaded,
    first_to_move,
    freeness,
    instance,
    new_request,
    priorities,
    queuing,
    roomy,
    running,
    usages_tokens,
    views,
)


def pairs_of(
    *cluster: InstanceView, policy: PolicyConfig = LLUMNIX
) -> dict[InstanceId, InstanceId]:
    return pair([candidate(each, policy) for each in cluster], policy)


def moved(cluster: dict[InstanceId, InstanceView], pairs: dict[InstanceId, InstanceId]) -> None:
    """Carries out one move of each pair, in place."""
    for source, destination in pairs.items():
        request = first_to_move(cluster[source], LLUMNIX)
        assert request is not None
        left, arrived = cluster[source], cluster[destination]
        cluster[source] = replace(
            left,
            running=tuple(each for each in left.running if each is not request),
            queuing=tuple(each for each in left.queuing if each is not request),
        )
        if request.status is RequestStatus.QUEUING:
            cluster[destination] = replace(arrived, queuing=(*arrived.queuing, request))
        else:
            cluster[destination] = replace(arrived, running=(*arrived.running, request))


def with_all_movable(cluster: list[InstanceView]) -> dict[InstanceId, InstanceView]:
    return {
        view.instance_id: replace(
            view, running=tuple(structs.replace(each, immovable=None) for each in view.running)
        )
        for view in cluster
    }


def test_sources_are_below_their_threshold_and_destinations_above_theirs() -> None:
    """Section 4.4.3: "In each round, selects the candidate sets of source and destination
    instances by choosing those with freeness values smaller or greater than given thresholds,
    respectively." By hand: 352 / 8 = 44, 384 / 8 = 48 and 512 / 8 = 64 steps."""
    below, at, above = (
        instance(
            f"i{k}",
            running=[running(f"r{k}-{n}", 16) for n in range(8)],
            reserved_tokens=M - 8 * 16 - free_tokens,
        )
        for k, free_tokens in enumerate((352, 384, 512))
    )
    assert [freeness(each, LLUMNIX) for each in (below, at, above)] == [44, 48, 64]
    assert pairs_of(below, at, above) == {"i0": "i2"}
    assert pairs_of(below, at) == {}
    assert pairs_of(at, above) == {}
    far_below = replace(below, queuing=(queuing("head", 3_200),))
    assert pairs_of(far_below, at) == {}
    assert pairs_of(far_below, above) == {"i0": "i2"}


def test_between_two_thresholds_an_instance_is_neither_source_nor_destination() -> None:
    policy = replace(LLUMNIX, source_freeness_steps=40, destination_freeness_steps=2_000)
    loaded = evenly_loaded("i0", 12_640, 10)
    between = evenly_loaded("i1", 8_000, 8)
    assert pairs_of(loaded, between, policy=policy) == {}
    assert pairs_of(loaded, between) == {"i0": "i1"}


def test_the_lowest_source_is_paired_with_the_highest_destination_repeatedly() -> None:
    """Section 4.4.3: "pairs the instances from both sets by picking the two with the lowest and
    the highest freeness values repeatedly"."""
    sources = [evenly_loaded(f"s{k}", used, 20) for k, used in enumerate((12_480, 12_640, 12_320))]
    destinations = [evenly_loaded(f"d{k}", used, 5) for k, used in enumerate((6_400, 160, 3_200))]
    assert pairs_of(*sources, *destinations) == {"s1": "d1", "s0": "d2", "s2": "d0"}


def test_a_source_without_a_destination_left_is_not_paired() -> None:
    """Each instance is in at most one pair, also where it may migrate several requests at once."""
    policy = replace(LLUMNIX, num_concurrent_migrations=4)
    sources = [evenly_loaded("s0", 12_640, 20), evenly_loaded("s1", 12_480, 20)]
    assert pairs_of(*sources, instance("d0"), policy=policy) == {"s0": "d0"}


def test_ties_go_to_the_smaller_ids() -> None:
    sources = [evenly_loaded(f"s{k}", 12_480, 20) for k in (1, 0)]
    assert pairs_of(*sources, instance("d1"), instance("d0")) == {"s0": "d0", "s1": "d1"}


def test_a_queuing_request_makes_its_instance_a_source() -> None:
    """Section 4.4.2: "queuing requests will increase the total virtual usage of the instance, then
    the policy will trigger migration for load balancing (which in effect is de-fragmentation for
    the queuing request)". Each has 2,272 tokens free; only i0's head of the line needs more."""
    blocked = replace(evenly_loaded("i0", 10_400, 10), queuing=(queuing("head", 3_200),))
    assert pairs_of(blocked, evenly_loaded("i1", 10_400, 10)) == {"i0": "i1"}


def test_normal_requests_are_moved_off_when_the_headroom_runs_out() -> None:
    """Section 4.4.2: "When the headroom for a high-priority request is running up, the other normal
    requests will be migrated away by the load balancing policy because the instance is overloaded
    in terms of the total virtual usage." """
    crowded = instance(
        "i0", running=[running("h", 400, priority=HIGH), *evenly_loaded("i0", 1_280, 4).running]
    )
    busier = evenly_loaded("i1", 6_400, 10)
    assert pairs_of(crowded, busier) == {"i0": "i1"}
    assert pairs_of(crowded, busier, policy=LLUMNIX_BASE) == {}


def test_an_instance_that_a_high_priority_request_has_to_itself_is_no_source() -> None:
    """Also where any price is paid for a pair, as in the paper's runs."""
    policy = replace(LLUMNIX, pairs_only_to_gain=False)
    alone = instance("i0", running=[running("h", 1_680, priority=HIGH)])
    assert freeness(alone, policy) < policy.source_freeness_steps
    assert pairs_of(alone, instance("i1"), policy=policy) == {}


def test_a_terminating_instance_is_always_a_source_and_comes_first() -> None:
    """Section 4.4.2: when an instance is terminating, "the remaining requests will be migrated to
    other instances". It is nearly idle, and there is only one destination."""
    terminating = evenly_loaded("i1", 160, 1, is_terminating=True)
    overloaded = evenly_loaded("i0", 12_640, 20)
    assert pairs_of(terminating, overloaded, instance("i2")) == {"i1": "i2"}


def test_a_terminating_instance_is_never_a_destination() -> None:
    overloaded = evenly_loaded("i0", 12_640, 20)
    assert pairs_of(overloaded, instance("i1", is_terminating=True)) == {}


def test_a_terminating_instance_gives_its_queuing_requests_away() -> None:
    emptied = instance("i0", queuing=[queuing("q", 320)], is_terminating=True)
    assert pairs_of(emptied, instance("i1")) == {"i0": "i1"}


def test_an_instance_without_anything_to_move_is_no_source() -> None:
    """Else it would take the best destination from a source that has."""
    prefilling = instance("i0", running=[running("r", 12_640, immovable=Immovable.PREFILLING)])
    overloaded = evenly_loaded("i1", 12_480, 20)
    assert pairs_of(prefilling, overloaded, instance("i2")) == {"i1": "i2"}
    assert pairs_of(instance("i0", is_terminating=True), instance("i2")) == {}


def test_a_pairing_sees_the_requests_in_flight() -> None:
    """A destination to which a burst is under way is not free any more: 12,672 - 12,640 = 32."""
    overloaded = candidate(evenly_loaded("i0", 12_640, 20))
    idle = instance("i1")
    assert pair([overloaded, candidate(idle)], LLUMNIX) == {"i0": "i1"}
    in_flight = [new_request(12_640)]
    assert pair([overloaded, candidate(idle, in_flight=in_flight)], LLUMNIX) == {}


def test_where_requests_have_lost_their_memory_an_instance_is_a_source_and_no_destination() -> None:
    """As in the paper's runs, where the policy says so, whatever its freeness."""
    policy = replace(LLUMNIX, preempted_make_source=True, pairs_only_to_gain=False)
    lost = structs.replace(queuing("lost", 160), num_preemptions=1)
    thrashing = replace(evenly_loaded("i0", 1_600, 4), queuing=(lost,))
    idle, overloaded = instance("i1"), evenly_loaded("i2", 12_640, 20)
    assert freeness(thrashing, policy) > policy.destination_freeness_steps
    assert pairs_of(thrashing, idle, policy=policy) == {"i0": "i1"}
    assert pairs_of(thrashing, overloaded, policy=policy) == {}
    never_lost = replace(evenly_loaded("i0", 1_600, 4), queuing=(queuing("new", 160),))
    for queue, rule in ((never_lost, policy), (thrashing, LLUMNIX)):
        assert pairs_of(queue, idle, policy=rule) == {}
        assert pairs_of(queue, overloaded, policy=rule) == {"i2": "i0"}


# ---------------------------------------------------------------- the move must narrow the gap


def test_at_any_price_a_pair_is_made_that_gains_nothing() -> None:
    """The paper knows thresholds alone (Section 4.4.3), and its runs are to be compared with."""
    policy = replace(LLUMNIX, pairs_only_to_gain=False)
    lone = evenly_loaded("i0", 12_640, 1)
    assert pairs_of(lone, instance("i1"), policy=policy) == {"i0": "i1"}


def test_a_lone_request_that_fills_the_memory_does_not_go_back_and_forth() -> None:
    """Design, section 3: "A pair is made only if the move narrows their gap." Moved, it would leave
    the two instances with each other's freeness, 32 and 12,672."""
    assert pairs_of(evenly_loaded("i0", 12_640, 1), instance("i1")) == {}


def test_a_lone_high_priority_request_above_its_target_load_stays() -> None:
    """It takes its headroom along: 12,672 - 2,000 - 11,072 = -400 wherever it runs."""
    alone = instance("i0", running=[running("h", 2_000, priority=HIGH)])
    assert freeness(alone, LLUMNIX) == -400
    assert pairs_of(alone, instance("i1")) == {}


def test_high_priority_requests_stay_together_while_memory_suffices() -> None:
    """By hand: 1,600 - 1,920 = -320 with both headrooms; 12,672 - 1,920 = 10,752 without. Where
    others hold all of the memory but 64 tokens, 64 / 2 = 32 is below the threshold of 48."""
    highs = [running("a", 960, priority=HIGH), running("b", 960, priority=HIGH)]
    crowded = instance("i0", running=highs)
    assert freeness(crowded, LLUMNIX) == pytest.approx(-320)
    assert pairs_of(crowded, instance("i1")) == {}
    full = instance("i0", running=highs, reserved_tokens=M - 1_920 - 64)
    assert pairs_of(full, instance("i1")) == {"i0": "i1"}


def test_a_move_that_would_swap_the_two_loads_is_not_made() -> None:
    """Two requests of 6,304 here and one there: 32 and 6,368 would change places."""
    two, one = evenly_loaded("i0", 12_608, 2), evenly_loaded("i1", 6_304, 1)
    assert pairs_of(two, one) == {}


def test_a_move_does_not_leave_the_destination_worse_than_the_source_was() -> None:
    """By hand: 400 / 20 = 20 and 400 / 7 = 57 steps would become 736 / 19 = 39 and 64 / 8 = 8: a
    narrower gap, but a source again, and a lower one than before."""
    others = [running(f"r{k}", 592) for k in range(19)]
    source = instance("i0", running=[running("short", 336), *others], reserved_tokens=688)
    destination = instance(
        "i1", running=[running(f"d{k}", 1_744) for k in range(7)], reserved_tokens=64
    )
    assert freeness(source, LLUMNIX) == 20
    assert freeness(destination, LLUMNIX) == 400 / 7
    assert pairs_of(source, destination) == {}


@pytest.mark.parametrize(("free_tokens", "expected"), [(496, {}), (497, {"i0": "i1"})])
def test_a_move_leaves_the_destination_better_than_the_source_was(
    free_tokens: int, expected: dict[str, str]
) -> None:
    """Else the pair gains nothing: by hand, 400 / 20 = 20 steps here, and (496 - 336) / 8 = 20
    there after the move, against 161 / 8."""
    others = [running(f"r{k}", 592) for k in range(19)]
    source = instance("i0", running=[running("short", 336), *others], reserved_tokens=688)
    destination = instance(
        "i1",
        running=[running(f"d{k}", 1_600) for k in range(7)],
        reserved_tokens=M - 11_200 - free_tokens,
    )
    assert freeness(source, LLUMNIX) == 20
    assert pairs_of(source, destination) == expected


def test_a_move_that_would_widen_the_gap_is_not_made() -> None:
    """By hand: 64 / 4 = 16 and 6,912 / 60 = 115 steps would become 3,216 / 3 = 1,072 and 3,760 / 61
    = 62: the gap of 99 would become 1,010. And 32 and 12,000 / 4 = 3,000 would become 6,368 / 1 and
    5,696 / 5 = 1,139: 2,968 would become 5,229."""
    few_long, many_short = evenly_loaded("i0", 12_608, 4), evenly_loaded("i1", 5_760, 60)
    assert pairs_of(few_long, many_short) == {}
    two, four = evenly_loaded("i0", 12_608, 2), evenly_loaded("i1", 672, 4)
    assert pairs_of(two, four) == {}


@pytest.mark.parametrize(("free_tokens", "expected"), [(9_744, {}), (9_750, {"i0": "i1"})])
def test_a_move_narrows_the_gap_and_does_not_turn_it_around(
    free_tokens: int, expected: dict[str, str]
) -> None:
    """By hand: 80 / 2 = 40 and 9,744 / 2 = 4,872 steps would become 6,080 / 1 and 3,744 / 3 =
    1,248: the gap of 4,832 would be one of 4,832 again, the other way round."""
    source = instance("i0", running=[running("long", 6_592), running("short", 6_000)])
    destination = instance(
        "i1",
        running=[running(f"d{k}", 1_280) for k in range(2)],
        reserved_tokens=M - 2_560 - free_tokens,
    )
    assert freeness(source, LLUMNIX) == 40
    assert pairs_of(source, destination) == expected


def test_without_a_request_that_can_move_no_move_helps() -> None:
    emptied = candidate(instance("i0", is_terminating=True))
    assert not move_helps(emptied, candidate(instance("i1")), LLUMNIX)


def test_the_last_high_priority_request_takes_the_headroom_along() -> None:
    """By hand: of 1,700 tokens, the headroom is 100. -80 and 400 / 2 = 200 would become 20 + 300 =
    320 and (400 - 300 - 100) / 3 = 0: a wider gap. With a second one, the headroom stays with it,
    and -80 becomes 220: a narrower one."""
    normal = [running("c", 650), running("d", 650)]
    host = instance("i1", running=normal, total_tokens=1_700)
    highs = [running("a", 300, priority=HIGH), running("b", 300, priority=HIGH)]
    last = instance("i0", running=highs[:1], reserved_tokens=1_380, total_tokens=1_700)
    two = instance("i0", running=highs, reserved_tokens=1_080, total_tokens=1_700)
    assert freeness(last, LLUMNIX) == pytest.approx(freeness(two, LLUMNIX)) == -80
    assert pairs_of(last, host) == {}
    assert pairs_of(two, host) == {"i0": "i1"}


def test_a_short_request_may_leave_a_long_one_behind() -> None:
    """What moves decides, not the average: (12,672 - 12,624) / 2 = 24 becomes 672 here, and
    6,272 / 4 = 1,568 becomes 5,648 / 5 = 1,129 there."""
    uneven = instance("i0", running=[running("long", 12_000), running("short", 624)])
    assert pairs_of(uneven, evenly_loaded("i1", 6_400, 4)) == {"i0": "i1"}


def test_a_move_must_fit_the_destination() -> None:
    """A destination would refuse it, and the next source would have gone without."""
    blocked = replace(evenly_loaded("s0", 9_600, 3), queuing=(queuing("head", 6_400),))
    small = replace(evenly_loaded("s1", 12_480, 39), queuing=(queuing("head2", 640),))
    destination = evenly_loaded("d0", 11_200, 10)
    assert first_to_move(blocked, LLUMNIX).physical_usage_tokens == 3_200  # type: ignore[union-attr]
    assert pairs_of(blocked, destination) == {}
    assert pairs_of(blocked, small, destination) == {"s1": "d0"}


def test_requests_in_flight_take_room_at_the_destination() -> None:
    """Of 12,672 tokens, 12,000 are spoken for: 672 fit, 688 do not."""
    destination = candidate(instance("i1"), in_flight=[new_request(12_000)])
    for tokens, expected in ((672, {"i0": "i1"}), (688, {})):
        emptied = instance("i0", running=[running("r", tokens)], is_terminating=True)
        assert pair([candidate(emptied), destination], LLUMNIX) == expected


def test_a_source_that_is_passed_over_leaves_its_destination_to_the_next() -> None:
    """The source of lowest freeness, with 0 steps before 192 / 20 = 9.6, has a request that fills
    any instance."""
    lone = evenly_loaded("s0", 12_672, 1)
    crowded = evenly_loaded("s1", 12_480, 20)
    assert pairs_of(lone, instance("d0")) == {}
    assert pairs_of(lone, crowded, instance("d0")) == {"s1": "d0"}


class RunningFirst(Policy):
    """A class that does not look at what queues."""

    base = "llumnix"

    def victims(self, instance: InstanceView) -> Sequence[RequestView]:
        return instance.running


def test_an_instance_whose_batch_is_full_is_no_destination() -> None:
    """The move would be refused before its last stage, when all has been copied."""
    emptied = evenly_loaded("i0", 800, 2, is_terminating=True)
    crowded = evenly_loaded("i1", 12_640, 20)
    full = replace(evenly_loaded("i8", 800, 4), num_slots=4)
    roomy = replace(evenly_loaded("i9", 8_000, 8), num_slots=9)
    for source in (emptied, crowded):
        assert pairs_of(source, full) == {}
        assert pairs_of(source, full, roomy) == {source.instance_id: "i9"}
    # A request that queues there needs no place, and leaves first.
    queue = replace(emptied, queuing=(queuing("q", 160),))
    assert pairs_of(queue, full) == {"i0": "i8"}
    assert pairs_of(queue, full, roomy) == {"i0": "i9"}
    # Unless it cannot leave, or a class has others leave first.
    held = replace(emptied, queuing=(queuing("q", 160, immovable=Immovable.MIGRATING),))
    assert pairs_of(held, full) == {}
    running_first = RunningFirst().as_config()
    assert pairs_of(queue, full, policy=running_first) == {}
    assert pairs_of(queue, full, roomy, policy=running_first) == {"i0": "i9"}
    # One that is on its way takes the last place.
    destination = candidate(roomy, in_flight=[new_request(16)])
    assert pair([candidate(emptied), destination], LLUMNIX) == {}


def test_a_terminating_instance_gets_the_freest_destination_with_room() -> None:
    """By hand: i1 has 3,672 free for its one request, i2 7,672 for its twenty."""
    emptied = instance("i0", running=[running("r", 7_000)], is_terminating=True)
    one, many = evenly_loaded("i1", 9_000, 1), evenly_loaded("i2", 5_000, 20)
    assert freeness(one, LLUMNIX) > freeness(many, LLUMNIX) > LLUMNIX.destination_freeness_steps
    assert pairs_of(emptied, one) == {}
    assert pairs_of(emptied, one, many) == {"i0": "i2"}
    # Another one that is emptied gets what it has left.
    second = instance("i3", running=[running("s", 160)], is_terminating=True)
    assert pairs_of(emptied, second, one, many) == {"i0": "i2", "i3": "i1"}


def test_a_destination_that_could_never_hold_what_moves_is_skipped() -> None:
    """Among instances of several sizes, the small idle one is the freest."""
    short = instance("i0", running=[running("r", 9_000), running("s", 3_640)])
    policy = replace(LLUMNIX, victim=Victim.LONGEST)
    small, large = instance("i1", total_tokens=8_192), instance("i2", running=[running("t", 320)])
    assert first_to_move(short, policy) == short.running[0]
    assert freeness(large, policy) > policy.destination_freeness_steps
    assert pairs_of(short, small, policy=policy) == {}
    assert pairs_of(short, small, large, policy=policy) == {"i0": "i2"}


# --------------------------------------------------------------------------------- properties


@settings(max_examples=30)
@given(st.one_of(clusters(), clusters_with_moves()))
def test_a_pairing_is_a_matching_of_sources_with_destinations(cluster: list[InstanceView]) -> None:
    pairs = pairs_of(*cluster)
    views = {each.instance_id: each for each in cluster}
    assert len({*pairs, *pairs.values()}) == 2 * len(pairs)
    for source, destination in pairs.items():
        assert freeness(views[source], LLUMNIX) < LLUMNIX.source_freeness_steps
        assert freeness(views[destination], LLUMNIX) > LLUMNIX.destination_freeness_steps
        assert not views[destination].is_terminating


def pairs_of_views() -> st.SearchStrategy[list[InstanceView]]:
    """A source and a destination, of any state or such that a move mostly helps."""
    any_state, another = (
        views(name, may_terminate=False, all_movable=True) for name in ("i0", "i1")
    )
    more = st.builds(running, st.just("more"), usages_tokens, priority=priorities)
    source = st.builds(
        lambda view, request: replace(view, running=(*view.running, request)), any_state, more
    )
    helping = st.tuples(crowded("i0"), roomy("i1"))
    return st.one_of(helping, st.tuples(source, another), helping).map(list)


@given(pairs_of_views())
def test_a_move_helps_if_and_only_if_it_fits_and_narrows_the_gap(
    pair_of_views: list[InstanceView],
) -> None:
    """Judged by Algorithm 1 over the views before and after the real move."""
    source, destination = pair_of_views
    candidates = candidates_to_move(source, LLUMNIX)
    assume(candidates)
    request = candidates[0]
    cluster = {view.instance_id: view for view in (source, destination)}
    moved(cluster, {source.instance_id: destination.instance_id})
    before = freeness(source, LLUMNIX), freeness(destination, LLUMNIX)
    after = tuple(freeness(each, LLUMNIX) for each in cluster.values())
    narrowed = before[1] - before[0] - abs(after[1] - after[0])
    improved = after[1] - before[0]
    # The two ways of adding the headroom up differ in the last bits.
    assume(min(abs(narrowed), abs(improved)) > 1e-6)
    used_tokens = sum(each.physical_usage_tokens for each in destination.running)
    free_tokens = destination.total_tokens - used_tokens - destination.reserved_tokens
    fits = request.physical_usage_tokens <= free_tokens
    helps = move_helps(candidate(source), candidate(destination), LLUMNIX)
    assert helps == (fits and narrowed > 0 and improved > 0)


@settings(max_examples=50)
@given(clusters_with_moves())
def test_no_source_goes_without_a_destination_that_would_help_it(
    cluster: list[InstanceView],
) -> None:
    """A source that is left over was passed over for the freest destination left at its turn; so
    the freest of those left at the end helps none of the sources below it."""
    candidates = {each.instance_id: candidate(each) for each in cluster}
    pairs = pair(candidates.values(), LLUMNIX)
    left = [
        each
        for name, each in candidates.items()
        if name not in pairs.values() and each.freeness > LLUMNIX.destination_freeness_steps
    ]
    if not left:
        return
    freest = min(left, key=lambda each: (-each.freeness, each.instance_id))
    last = max((candidates[source].freeness for source in pairs), default=float("-inf"))
    for each in candidates.values():
        is_source = each.freeness < LLUMNIX.source_freeness_steps
        if is_source and each.instance_id not in pairs and each.freeness > last:
            assert not move_helps(each, freest, LLUMNIX)


@settings(max_examples=30)
@given(clusters_with_moves())
def test_moves_among_requests_that_stay_the_same_come_to_an_end(
    cluster: list[InstanceView],
) -> None:
    """No request travels for ever: no placement comes back, so that pairing stops."""
    views = with_all_movable(cluster)
    seen = set()
    while pairs := pairs_of(*views.values()):
        placement = frozenset(
            (name, request.request_id)
            for name, view in views.items()
            for request in (*view.running, *view.queuing)
        )
        assert placement not in seen
        seen.add(placement)
        moved(views, pairs)


# ------------------------------------------------------ instances that are emptied for too long


def overstayed(instance_id: str) -> Candidate:
    """An instance with two requests that has been emptied for too long: its next move needs no
    memory."""
    leaving = candidate(evenly_loaded(instance_id, 800, 2, is_terminating=True))
    return leaving.with_load(structs.replace(leaving.load, move_tokens=0))


FULL = candidate(evenly_loaded("i9", 12_600, 8))
"""72 / 8 = 9 steps."""
FULLER = candidate(evenly_loaded("i8", 12_650, 8))
"""22 / 8 = 2 steps."""


def test_what_moves_without_its_memory_finds_a_destination_where_none_has_room() -> None:
    leaving = candidate(evenly_loaded("i0", 800, 2, is_terminating=True))
    assert pair([leaving, FULL, FULLER], LLUMNIX) == {}
    assert pair([overstayed("i0"), FULL, FULLER], LLUMNIX) == {"i0": "i9"}
    assert pair([overstayed("i0")], LLUMNIX) == {}
    as_full = candidate(evenly_loaded("i7", 12_600, 8))
    assert pair([overstayed("i0"), FULL, as_full], LLUMNIX) == {"i0": "i7"}


def test_an_instance_that_stays_moves_nothing_to_where_there_is_no_room() -> None:
    """It has not overstayed, however little memory its next move needs."""
    crowded = candidate(evenly_loaded("i0", 12_640, 20))
    crowded = crowded.with_load(structs.replace(crowded.load, move_tokens=0))
    assert pair([crowded, FULL], LLUMNIX) == {}


def test_each_instance_that_has_overstayed_gets_a_destination_of_its_own() -> None:
    """Instances above the threshold come first, then the freest of the others."""
    two = [overstayed("i0"), overstayed("i1")]
    assert pair([*two, FULLER, FULL], LLUMNIX) == {"i0": "i9", "i1": "i8"}
    idle = candidate(instance("idle"))
    assert pair([*two, FULL, idle], LLUMNIX) == {"i0": "idle", "i1": "i9"}
    assert pair([*two, FULLER, FULL, idle], LLUMNIX) == {"i0": "idle", "i1": "i9"}


def test_a_destination_takes_from_one_instance_that_has_overstayed_a_round() -> None:
    """The other one waits until the first is empty."""
    two = [overstayed("i0"), overstayed("i1")]
    for destination in (FULL, candidate(instance("idle"))):
        assert pair([*two, destination], LLUMNIX) == {"i0": destination.instance_id}
    empty = candidate(instance("i0", is_terminating=True))
    assert pair([empty, two[1], FULL], LLUMNIX) == {"i1": "i9"}


class PairsNothing(Policy):
    """A custom class that has no requests move."""

    def pair(self, instances: Sequence[Candidate]) -> dict[InstanceId, InstanceId]:
        return {}


def test_what_has_overstayed_leaves_whatever_a_custom_class_pairs() -> None:
    """The end of the emptying was promised."""
    own = PairsNothing().as_config()
    leaving = candidate(evenly_loaded("i0", 800, 2, is_terminating=True))
    assert pair([leaving, FULL], own) == {}
    assert pair([overstayed("i0"), FULL, FULLER], own) == {"i0": "i9"}


@settings(max_examples=30)
@given(clusters(), st.integers(1, 3))
def test_as_many_that_have_overstayed_are_paired_as_others_are_there(
    cluster: list[InstanceView], num_overstayed: int
) -> None:
    leaving = [overstayed(f"a{k}") for k in range(num_overstayed)]
    pairs = pair([*leaving, *map(candidate, cluster)], LLUMNIX)
    assert len({*pairs, *pairs.values()}) == 2 * len(pairs)
    staying = {each.instance_id for each in cluster if not each.is_terminating}
    assert set(pairs.values()) <= staying
    paired = [each for each in leaving if each.instance_id in pairs]
    assert paired == leaving[: len(staying)]


# ------------------------------------------------------------------------ balance by load

BALANCED = replace(LLUMNIX_BASE, balance_ratio=1.25, balance_after_tokens=0)
BUSY = (("i0", 8), ("i1", 2))


def test_with_memory_to_spare_only_a_ratio_has_requests_move() -> None:
    """By hand: 640 is more than 1.25 times 320 + 160, 600 is not more than 1.25 times 320 + 160."""
    heavy = instance("i0", running=[running(f"a{k}", 160) for k in range(4)])
    light = instance("i1", running=[running("b0", 160), running("b1", 160)])
    nearly = instance("i0", running=[running(f"a{k}", size) for k, size in enumerate((160, 440))])
    assert pairs_of(heavy, light, policy=LLUMNIX_BASE) == {}
    assert pairs_of(heavy, light, policy=BALANCED) == {"i0": "i1"}
    assert pairs_of(nearly, light, policy=BALANCED) == {}


def test_the_most_loaded_one_is_paired_with_the_least_loaded_one() -> None:
    loads = {"i0": 960, "i1": 160, "i2": 1280, "i3": 320}
    cluster = [evenly_loaded(name, tokens, tokens // 80) for name, tokens in loads.items()]
    assert pairs_of(*cluster, policy=BALANCED) == {"i2": "i1", "i0": "i3"}


def test_requests_move_for_balance_only_where_their_kv_can_be_copied() -> None:
    """During a rolling restart with other weights all of a request would be computed again. Where
    memory is short, that is better than a preemption."""
    loads = {"i0": 960, "i1": 160, "i2": 1280, "i3": 320}
    cluster = [evenly_loaded(name, tokens, tokens // 80) for name, tokens in loads.items()]
    formats = {InstanceId(each): ("old" if each in ("i0", "i3") else "new") for each in loads}
    candidates = [candidate(each, BALANCED) for each in cluster]
    assert pair(candidates, BALANCED, kv_formats=formats) == {"i0": "i3", "i2": "i1"}
    formats[InstanceId("i1")] = "newer"
    assert pair(candidates, BALANCED, kv_formats=formats) == {"i0": "i3"}
    short = [
        candidate(evenly_loaded("i0", M - 16, 8), BALANCED),
        candidate(instance("i1"), BALANCED),
    ]
    two = {InstanceId("i0"): "old", InstanceId("i1"): "new"}
    assert pair(short, BALANCED, kv_formats=two) == {"i0": "i1"}


def test_who_lacks_memory_is_paired_first_and_once() -> None:
    short = evenly_loaded("i0", M - 16, 8)
    heavy, light = evenly_loaded("i1", 1280, 16), evenly_loaded("i2", 160, 2)
    free = instance("i3")
    pairs = pairs_of(short, heavy, light, free, policy=BALANCED)
    assert pairs == {"i0": "i3", "i1": "i2"}


def test_an_instance_that_is_emptied_is_no_side_of_a_balance() -> None:
    emptied = evenly_loaded("i1", 160, 1, is_terminating=True)
    busy = evenly_loaded("i0", 1280, 8)
    assert "i0" not in pairs_of(busy, emptied, policy=BALANCED)


def test_balance_leaves_a_full_batch_alone() -> None:
    busy = evenly_loaded("i0", 1280, 8)
    light = evenly_loaded("i1", 160, 2)
    assert pairs_of(busy, replace(light, num_slots=3), policy=BALANCED) == {"i0": "i1"}
    full = replace(light, num_slots=2)
    assert pairs_of(busy, full, policy=BALANCED) == {}
    # Another one has a place.
    assert pairs_of(busy, full, evenly_loaded("i2", 320, 2), policy=BALANCED) == {"i0": "i2"}


def ending(name: str, num_running: int, *, num_tokens: int, num_output_tokens: int) -> InstanceView:
    """An instance of requests that use 160 tokens each; 100 outputs ended with 64 to 95 tokens."""
    requests = [
        running(f"{name}-{k}", 160, num_tokens=num_tokens, num_output_tokens=num_output_tokens)
        for k in range(num_running)
    ]
    num_ended = tuple(100 * (length == 64) for length in OUTPUT_LENGTHS)
    return replace(instance(name, running=requests), num_ended=num_ended)


def test_with_a_horizon_loads_that_are_expected_are_balanced() -> None:
    """By hand, in 32 steps: of eight requests with 64 outputs each goes on with a chance of 8 of
    108, of four with 96 each goes on, as none was longer. Now the first have more memory."""
    policy = replace(BALANCED, balance_horizon_steps=32)
    soon_over = ending("i0", 8, num_tokens=150, num_output_tokens=64)
    long_ones = ending("i1", 4, num_tokens=150, num_output_tokens=96)
    assert pairs_of(soon_over, long_ones, policy=BALANCED) == {"i0": "i1"}
    assert pairs_of(soon_over, long_ones, policy=policy) == {"i1": "i0"}


def test_at_the_horizon_requests_in_flight_and_headrooms_are_loads() -> None:
    policy = replace(BALANCED, balance_horizon_steps=32, has_priorities=True)
    busy, free = (ending(name, num, num_tokens=160, num_output_tokens=96) for name, num in BUSY)
    assert pair([candidate(busy, policy), candidate(free, policy)], policy) == {"i0": "i1"}
    arriving = candidate(free, policy, in_flight=[new_request(800)])
    assert pair([candidate(busy, policy), arriving], policy) == {}
    host = instance("i1", running=[running("high", 160, priority=HIGH)])
    assert pair([candidate(busy, policy), candidate(host, policy)], policy) == {}


def test_balance_leaves_headrooms_free() -> None:
    """i1 has the least load, but for a headroom; i0 is none either, to which a request would go."""
    policy = replace(BALANCED, has_priorities=True)
    busy = evenly_loaded("i0", 1280, 8)
    host = instance("i1", running=[running("high", 160, priority=HIGH)])
    other = evenly_loaded("i2", 320, 2)
    assert pairs_of(busy, host, policy=policy) == {}
    assert pairs_of(busy, host, other, policy=policy) == {"i0": "i2"}


@settings(max_examples=150)
@given(st.lists(usages_tokens, min_size=2, max_size=5), st.integers(1, 12))
def test_balancing_comes_to_an_end_and_leaves_no_pair_that_is_far_apart(
    sizes: list[int], num_requests: int
) -> None:
    """Requests of several sizes, all of them on one instance at first."""
    first = [running(f"r{k}", sizes[k % len(sizes)]) for k in range(num_requests)]
    assume(sum(each.physical_usage_tokens for each in first) < M)
    cluster = {
        InstanceId("i0"): instance("i0", running=first),
        **{InstanceId(f"i{k}"): instance(f"i{k}") for k in (1, 2)},
    }
    for _ in range(4 * num_requests):
        pairs = pairs_of(*cluster.values(), policy=BALANCED)
        if not pairs:
            break
        moved(cluster, pairs)
    assert pairs_of(*cluster.values(), policy=BALANCED) == {}
    views_left = [candidate(each, BALANCED) for each in cluster.values()]
    lightest = min(each.real_load_tokens for each in views_left)
    for each in views_left:
        if each.load.move_tokens is not None:
            assert each.real_load_tokens <= 1.25 * (lightest + each.load.move_tokens)
