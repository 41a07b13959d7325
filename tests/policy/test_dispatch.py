"""Dispatch: the instance that a new request goes to (Section 4.4.3)."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sterna.config import PolicyConfig
from sterna.policy.dispatch import choose
from sterna.policy.presets import (
    INFAAS_PP,
    LLUMNIX,
    LLUMNIX_BASE,
    POWER_OF_TWO,
    PRESETS,
    ROUND_ROBIN,
    SESSION_HASH,
    VLLM_DP,
)
from sterna.policy.virtual_usage import Candidate, NewRequest
from sterna.types import HIGH, InstanceId, InstanceLoad, InstanceView
from tests.policy.builders import (
    candidate,
    clusters,
    evenly_loaded,
    instance,
    new_request,
    priorities,
    queuing,
    report,
    running,
    usages_tokens,
)


def dispatch_all(
    requests: list[NewRequest], candidates: list[Candidate], policy: PolicyConfig = LLUMNIX
) -> list[str]:
    """Where the requests of a burst go, with no load report in between."""
    known = {each.instance_id: each for each in candidates}
    chosen: list[str] = []
    for request in requests:
        target = choose(request, known.values(), policy)
        assert target is not None
        chosen.append(target)
        known[target] = replace(
            known[target],
            in_flight=(*known[target].in_flight, request),
            num_dispatched=known[target].num_dispatched + 1,
        )
    return chosen


def test_a_request_goes_to_the_instance_of_highest_freeness() -> None:
    """Section 4.4.3: "dispatches each incoming request to the instance with the highest
    freeness." By hand: 4,672 / 8 = 584, 2,672 / 2 = 1,336, 6,672 / 12 = 556 steps."""
    candidates = [
        candidate(evenly_loaded("i0", 8_000, 8)),
        candidate(evenly_loaded("i1", 10_000, 2)),
        candidate(evenly_loaded("i2", 6_000, 12)),
    ]
    assert choose(new_request(), candidates, LLUMNIX) == "i1"


def test_an_instance_of_negative_freeness_is_avoided() -> None:
    """Section 4.4.3: "Such negative freeness values help automatically treat such instances as
    overloaded and prefer dispatching requests to other instances." The first has more free
    memory, 2,672 tokens, but a head of the line that needs 3,200."""
    blocked = evenly_loaded("i0", 10_000, 5)
    blocked = replace(blocked, queuing=(queuing("head", 3_200),))
    full = evenly_loaded("i1", 12_600, 36)
    assert choose(new_request(), [candidate(blocked), candidate(full)], LLUMNIX) == "i1"


def test_of_two_overloaded_instances_the_one_that_lacks_less_is_chosen() -> None:
    """Departure from the paper: -2,528 and -3,328 are compared undivided; divided by the batch
    (2 and 5), every request would go to the instance that is worse off."""
    head = (queuing("head", 3_200),)
    few = replace(evenly_loaded("i0", 12_000, 1), queuing=head)
    many = replace(evenly_loaded("i1", 12_800, 4), queuing=head)
    assert choose(new_request(), [candidate(many), candidate(few)], LLUMNIX) == "i0"


def test_a_burst_between_two_reports_does_not_pile_onto_one_instance() -> None:
    """Each request in flight counts on its instance before any report shows it."""
    candidates = [candidate(instance(f"i{k}")) for k in range(4)]
    chosen = dispatch_all([new_request(320)] * 12, candidates)
    assert Counter(chosen) == {"i0": 3, "i1": 3, "i2": 3, "i3": 3}


def test_a_burst_of_unequal_demands_is_balanced_by_memory() -> None:
    """By hand: 6,400 to i0 leaves 6,272 / 1; to i1 go 1,600 (11,072 / 1), 1,600 (9,472 / 2 =
    4,736); the next to i0 (6,272 is the higher)."""
    candidates = [candidate(instance("i0")), candidate(instance("i1"))]
    burst = [new_request(6_400), new_request(1_600), new_request(1_600), new_request(1_600)]
    assert dispatch_all(burst, candidates) == ["i0", "i1", "i1", "i0"]


@pytest.mark.parametrize("policy", PRESETS.values(), ids=lambda policy: policy.name)
def test_a_terminating_instance_gets_nothing_while_another_exists(policy: PolicyConfig) -> None:
    """Section 4.4.2: a terminating instance has an infinite virtual usage; design: it gets no new
    requests. Here the one that stays is overloaded and the terminating one idle."""
    staying = replace(evenly_loaded("i1", 12_600, 5), queuing=(queuing("head", 3_200),))
    candidates = [
        candidate(instance("i0", is_terminating=True), policy),
        candidate(staying, policy, num_dispatched=100),
    ]
    assert choose(new_request(), candidates, policy) == "i1"
    assert choose(new_request(priority=HIGH), candidates, policy) == "i1"


@pytest.mark.parametrize("policy", PRESETS.values(), ids=lambda policy: policy.name)
def test_a_lone_terminating_instance_still_serves(policy: PolicyConfig) -> None:
    candidates = [candidate(instance("i0", is_terminating=True), policy)]
    assert choose(new_request(), candidates, policy) == "i0"


@pytest.mark.parametrize("policy", PRESETS.values(), ids=lambda policy: policy.name)
def test_without_any_instance_there_is_no_choice(policy: PolicyConfig) -> None:
    assert choose(new_request(), [], policy) is None


def test_ties_go_to_fewer_requests_then_to_the_smaller_id() -> None:
    """All of i0 and i1 have 6,000 free steps: one request of 6,672, or two of 336, running, in
    flight or at the head of a queue."""
    one, two = evenly_loaded("i1", 6_672, 1), evenly_loaded("i0", 672, 2)
    assert choose(new_request(), [candidate(two), candidate(one)], LLUMNIX) == "i1"
    on_its_way = candidate(evenly_loaded("i0", 336, 1), in_flight=[new_request(336)])
    assert choose(new_request(), [on_its_way, candidate(one)], LLUMNIX) == "i1"
    queue = tuple(queuing(f"q{k}", 336) for k in range(3))
    waiting = replace(evenly_loaded("i0", 336, 1), queuing=queue)
    two_running = evenly_loaded("i1", 672, 2)
    assert choose(new_request(), [candidate(waiting), candidate(two_running)], LLUMNIX) == "i1"
    idle = [candidate(instance("i8")), candidate(instance("i7"))]
    assert choose(new_request(), idle, LLUMNIX) == "i7"


def test_every_queuing_request_is_of_the_batch_where_the_policy_says_so() -> None:
    """As in the paper's runs. By hand: 12,000 / (1 + 5) = 2,000 steps against 9,000 / 3 = 3,000;
    with one for the whole queue, 12,000 / 2 = 6,000. One on its way counts besides."""
    queue = [queuing(f"q{k}", 272) for k in range(5)]
    waiting = instance("i0", running=[running("r", 400)], queuing=queue)
    steady = evenly_loaded("i1", 3_672, 3)
    for policy, expected in (
        (LLUMNIX, ("i0", 6_000.0)),
        (replace(LLUMNIX, batch_counts_queue=True), ("i1", 2_000.0)),
    ):
        known = [Candidate(report(each, policy), policy=policy) for each in (waiting, steady)]
        chosen = choose(new_request(), known, policy)
        assert (chosen, known[0].dispatch_freeness) == expected
        # What makes a source or a destination is the same.
        assert known[0].freeness == 6_000
        more = replace(known[0], in_flight=(new_request(5_000),))
        assert more.dispatch_freeness == (7_000 / 3 if expected[0] == "i0" else 1_000)


# ------------------------------------------------------------------------------ high priority


def test_a_high_priority_request_joins_an_instance_that_hosts_high_priority() -> None:
    """Design, section 3: it "joins an instance that already hosts high priority while its real
    load stays under the target load". The host's freeness is the lowest of all."""
    host = instance("i1", running=[running("h", 800, priority=HIGH)])
    candidates = [candidate(instance("i0")), candidate(host)]
    assert choose(new_request(800, HIGH), candidates, LLUMNIX) == "i1"


def test_a_high_priority_request_does_not_lift_a_host_above_the_target_load() -> None:
    """1,600 tokens in all are allowed: 816 + 800 are too many."""
    host = instance("i1", running=[running("h", 816, priority=HIGH)])
    candidates = [candidate(instance("i0")), candidate(host)]
    assert choose(new_request(800, HIGH), candidates, LLUMNIX) == "i0"


def test_real_load_counts_whoever_will_run_there() -> None:
    """Reserved, queuing and in-flight memory are load for the newcomer: 400 + 96 + 48 + 32 + 16;
    the headroom is not."""
    host = instance(
        "i1",
        running=[running("h", 400, priority=HIGH)],
        queuing=[queuing("q", 48), queuing("p", 32)],
        reserved_tokens=96,
    )
    assert candidate(host, in_flight=[new_request(16)]).real_load_tokens == 592


def test_without_a_joinable_host_a_high_priority_request_goes_to_the_least_loaded() -> None:
    """Design, section 3: "else the least loaded one". By freeness it would be i1 (9,472 / 2
    against 11,072 / 16 steps)."""
    candidates = [
        candidate(evenly_loaded("i0", 1_600, 16)),
        candidate(evenly_loaded("i1", 3_200, 2)),
    ]
    assert choose(new_request(160), candidates, LLUMNIX) == "i1"
    assert choose(new_request(160, HIGH), candidates, LLUMNIX) == "i0"


def test_of_equally_loaded_instances_a_high_priority_request_takes_that_of_fewer_requests() -> None:
    """Then that of the smaller id."""
    one, two = evenly_loaded("i9", 3_200, 1), evenly_loaded("i0", 3_200, 2)
    assert choose(new_request(160, HIGH), [candidate(two), candidate(one)], LLUMNIX) == "i9"
    idle = [candidate(instance("i8")), candidate(instance("i7"))]
    assert choose(new_request(160, HIGH), idle, LLUMNIX) == "i7"


def test_a_burst_of_high_priority_requests_gathers_on_few_instances() -> None:
    """Plain freeness would spread them until every instance is virtually overloaded. By hand:
    four of 400 fill one target load of 1,600; the fifth opens the next host."""
    candidates = [candidate(instance(f"i{k}")) for k in range(4)]
    chosen = dispatch_all([new_request(400, HIGH)] * 6, candidates)
    assert chosen == ["i0", "i0", "i0", "i0", "i1", "i1"]


def test_without_priorities_high_counts_as_normal_in_dispatching() -> None:
    """Section 6.1: Llumnix-base "treats all requests as the same priority"."""
    host = instance("i1", running=[running("h", 800, priority=HIGH)])
    candidates = [candidate(each, LLUMNIX_BASE) for each in (instance("i0"), host)]
    assert choose(new_request(800, HIGH), candidates, LLUMNIX_BASE) == "i0"


# ---------------------------------------------------------------------------------- baselines


def test_round_robin_sends_to_the_instance_with_the_fewest_dispatches() -> None:
    """Section 6.1: round robin is "a simple dispatching policy to distribute requests across
    instances evenly", whatever their load."""
    candidates = [
        candidate(instance("i0"), ROUND_ROBIN, num_dispatched=4),
        candidate(evenly_loaded("i1", 12_600, 9), ROUND_ROBIN, num_dispatched=3),
        candidate(instance("i2"), ROUND_ROBIN, num_dispatched=4),
    ]
    assert dispatch_all([new_request()] * 4, candidates, ROUND_ROBIN) == ["i1", "i0", "i1", "i2"]


def test_an_instance_to_which_nothing_was_dispatched_has_its_turn_first() -> None:
    served = candidate(instance("i0"), ROUND_ROBIN, num_dispatched=1)
    unserved = Candidate(report(instance("i1"), ROUND_ROBIN))
    assert choose(new_request(), [served, unserved], ROUND_ROBIN) == "i1"


def test_infaas_counts_the_whole_queue_where_llumnix_counts_its_head() -> None:
    """Section 6.1: INFaaS++'s load "also counts in the memory required by queuing requests on
    each instance to reflect the queue pressure". i0 lacks 560 tokens for its head and 6,960 for
    its queue, i1 lacks 1,360 for both."""
    short_head = instance(
        "i0",
        running=[running("a", 12_592)],
        queuing=[queuing("b", 640), queuing("c", 6_400)],
    )
    long_head = instance("i1", running=[running("d", 12_592)], queuing=[queuing("e", 1_440)])
    for policy, expected in ((LLUMNIX, "i0"), (INFAAS_PP, "i1")):
        candidates = [candidate(each, policy) for each in (short_head, long_head)]
        assert choose(new_request(), candidates, policy) == expected


# --------------------------------------------------------------------------------- properties

new_requests = st.builds(NewRequest, usages_tokens, priorities)


@settings(max_examples=30)
@given(clusters(), st.lists(new_requests, min_size=1, max_size=8), st.sampled_from([*PRESETS]))
def test_dispatch_never_picks_a_terminating_instance_while_another_exists(
    cluster: list[InstanceView], requests: list[NewRequest], name: str
) -> None:
    policy = PRESETS[name]
    chosen = dispatch_all(requests, [candidate(each, policy) for each in cluster], policy)
    staying = {each.instance_id for each in cluster if not each.is_terminating}
    assert set(chosen) <= (staying or {each.instance_id for each in cluster})


@settings(max_examples=30)
@given(clusters(), new_requests, st.sampled_from([*PRESETS]), st.randoms(use_true_random=False))
def test_the_choice_does_not_depend_on_the_order_of_the_candidates(
    cluster: list[InstanceView], request_: NewRequest, name: str, rng: random.Random
) -> None:
    policy = PRESETS[name]
    candidates = [candidate(each, policy) for each in cluster]
    shuffled = list(candidates)
    rng.shuffle(shuffled)
    assert choose(request_, shuffled, policy) == choose(request_, candidates, policy)


@settings(max_examples=30)
@given(clusters(), new_requests)
def test_a_normal_request_never_goes_to_an_instance_when_another_is_freer(
    cluster: list[InstanceView], request_: NewRequest
) -> None:
    candidates = [candidate(each, LLUMNIX_BASE) for each in cluster]
    chosen = choose(request_, candidates, LLUMNIX_BASE)
    freeness = {each.instance_id: each.freeness for each in candidates}
    assert chosen is not None
    assert freeness[chosen] == max(freeness.values())


# ------------------------------------------------------------------------- other systems' rules


def with_requests(*numbers: int) -> list[Candidate]:
    """Instances with these numbers of running requests."""
    return [
        candidate(evenly_loaded(f"i{place}", 1_000, number)) for place, number in enumerate(numbers)
    ]


def test_of_two_that_are_drawn_the_one_with_fewer_requests_is_chosen() -> None:
    """Never the most loaded one, and the least loaded one whenever it is drawn: in a half of all
    pairs of four."""
    chosen = Counter(
        choose(
            new_request(),
            [replace(each, num_dispatched=number) for each in with_requests(9, 3, 5, 7)],
            POWER_OF_TWO,
        )
        for number in range(600)
    )
    assert chosen["i0"] == 0
    assert 240 < chosen["i1"] < 360
    assert 140 < chosen["i2"] < 260
    assert 50 < chosen["i3"] < 150


@pytest.mark.parametrize("policy", [POWER_OF_TWO, VLLM_DP], ids=lambda each: each.name)
def test_what_no_report_shows_counts(policy: PolicyConfig) -> None:
    chosen = dispatch_all([new_request()] * 6, with_requests(1, 1), policy)
    assert Counter(chosen) == {"i0": 3, "i1": 3}


@pytest.mark.parametrize("policy", [POWER_OF_TWO, VLLM_DP], ids=lambda each: each.name)
def test_one_instance_gets_all(policy: PolicyConfig) -> None:
    assert dispatch_all([new_request()] * 2, with_requests(3), policy) == ["i0", "i0"]


@pytest.mark.parametrize("policy", PRESETS.values(), ids=lambda each: each.name)
def test_engines_without_a_kv_cache_get_requests(policy: PolicyConfig) -> None:
    """Models that only embed, for example: no memory, and requests that need none."""
    loads = [InstanceLoad(InstanceId(f"i{n}"), 1, 0, 0, 0, 0, n, 0) for n in range(3)]
    request = replace(new_request(), demand_tokens=0)
    assert choose(request, [Candidate(each) for each in loads], policy) in ("i0", "i1", "i2")


def test_vllms_data_parallelism_takes_the_rank_with_the_fewest_requests() -> None:
    assert choose(new_request(), with_requests(5, 3, 4), VLLM_DP) == "i1"


def test_vllms_data_parallelism_shuns_queues_where_memory_is_short() -> None:
    """Three requests each. A queue of two on a full instance counts 2 * 6 * 0.5 more; on a half
    full one it does not count."""

    def with_queue(instance_id: str, used_tokens: int, num_running: int) -> Candidate:
        name = InstanceId(instance_id)
        return Candidate(InstanceLoad(name, 1, 1_000, used_tokens, 0, 0, num_running, 2))

    full, half = with_queue("i0", 1_000, 1), with_queue("i1", 500, 2)
    assert choose(new_request(), [full, half], VLLM_DP) == "i1"
    emptier = with_queue("i1", 500, 8)
    assert choose(new_request(), [full, emptier], VLLM_DP) == "i0"


def test_vllms_data_parallelism_counts_what_queues_on_a_full_rank_four_times() -> None:
    """By hand: one request that runs and 20 that queue count 1 + 20 + 6 * 20 * 0.5 = 81."""

    def with_queue(instance_id: str, used_tokens: int, num_running: int) -> Candidate:
        name = InstanceId(instance_id)
        return Candidate(InstanceLoad(name, 1, 1_000, used_tokens, 0, 0, num_running, 20))

    full = with_queue("i0", 1_000, 1)
    assert choose(new_request(), [full, with_queue("i1", 500, 60)], VLLM_DP) == "i1"
    assert choose(new_request(), [full, with_queue("i1", 500, 62)], VLLM_DP) == "i0"


def test_ties_of_vllms_data_parallelism_go_round() -> None:
    candidates = with_requests(2, 2, 2)
    found = []
    for _ in range(4):
        found.append(choose(new_request(), candidates, VLLM_DP))
        candidates = [
            replace(each, num_dispatched=each.num_dispatched + (each.instance_id == found[-1]))
            for each in candidates
        ]
    assert found == ["i0", "i1", "i2", "i0"]


def in_session(session: str) -> NewRequest:
    return replace(new_request(), session=session)


def test_a_session_stays_on_its_instance_whatever_the_load() -> None:
    sessions = [str(number) for number in range(300)]
    candidates = with_requests(1, 1, 1)
    chosen = {each: choose(in_session(each), candidates, SESSION_HASH) for each in sessions}
    assert all(70 < number < 130 for number in Counter(chosen.values()).values())
    loaded = with_requests(50, 1, 20)
    assert {each: choose(in_session(each), loaded, SESSION_HASH) for each in sessions} == chosen


def test_only_the_sessions_of_an_instance_that_goes_go_elsewhere() -> None:
    candidates = with_requests(1, 1, 1, 1)
    for number in range(100):
        request = in_session(f"session {number}")
        before = choose(request, candidates, SESSION_HASH)
        after = choose(request, candidates[1:], SESSION_HASH)
        assert after == before or before == "i0"


def test_a_request_without_a_session_goes_where_there_are_fewest() -> None:
    assert choose(new_request(), with_requests(4, 2, 3), SESSION_HASH) == "i1"
