"""Algorithm 1, line by line, with examples computed by hand (Section 4.4.2)."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sterna.config import PolicyConfig
from sterna.policy.load_report import load
from sterna.policy.pairing import move_helps
from sterna.policy.presets import INFAAS_PP, LLUMNIX, LLUMNIX_BASE
from sterna.policy.virtual_usage import (
    freeness_of,
    headroom_tokens,
    normal_freeness_of,
)
from sterna.types import (
    HIGH,
    NORMAL,
    Immovable,
    InstanceId,
    InstanceLoad,
    InstanceView,
    Priority,
    RequestView,
)
from tests.policy import algorithm1
from tests.policy.algorithm1 import headroom
from tests.policy.builders import (
    M,
    candidate,
    freeness,
    instance,
    new_request,
    priorities,
    queuing,
    report,
    running,
    usages_tokens,
    views,
)


def virtual_usage(request: RequestView, view: InstanceView, policy: PolicyConfig) -> float:
    """Of a request by the paper's pseudo-code, whose sum is what the report takes off."""
    usages = [
        algorithm1.virtual_usage(each, view, policy) for each in (*view.running, *view.queuing)
    ]
    assert report(view, policy).free_tokens == pytest.approx(view.total_tokens - sum(usages))
    return algorithm1.virtual_usage(request, view, policy)


# ------------------------------------------------------------------- CalcVirtualUsage, lines 1-8


def test_head_of_line_queuing_request_has_its_demand_as_virtual_usage() -> None:
    """Section 4.4.2: "For the head-of-line queuing request on an instance, we assign a positive
    virtual usage to it to reflect its resource demand in terms of the required memory, although
    the physical usage is 0." (Algorithm 1, lines 2-4)"""
    head = queuing("head", 3_200)
    assert virtual_usage(head, instance(queuing=[head]), LLUMNIX) == 3_200


def test_queuing_request_behind_the_head_of_line_has_no_virtual_usage() -> None:
    """Algorithm 1, line 5: a queuing request that is not the head of the line returns 0."""
    head, second = queuing("head", 3_200), queuing("second", 160)
    assert virtual_usage(second, instance(queuing=[head, second]), LLUMNIX) == 0


def test_every_queuing_request_has_its_demand_where_the_policy_counts_the_whole_queue() -> None:
    """Section 6.1, INFaaS++: "This load also counts in the memory required by queuing requests
    on each instance to reflect the queue pressure." """
    queue = [queuing("head", 3_200), queuing("second", 160), queuing("third", 48)]
    view = instance(queuing=queue)
    assert [virtual_usage(each, view, INFAAS_PP) for each in queue] == [3_200, 160, 48]
    assert freeness(view, INFAAS_PP) == M - 3_408


def test_queuing_high_priority_request_has_no_headroom() -> None:
    """Algorithm 1, line 4 comes before line 8: a queuing request returns its demand alone."""
    head = queuing("head", 320, priority=HIGH)
    assert virtual_usage(head, instance(queuing=[head]), LLUMNIX) == 320


def test_terminating_instance_is_infinitely_overloaded() -> None:
    """Section 4.4.2: "When an instance is terminating, we artificially add a fake request with a
    virtual usage of infinity on it, then the remaining requests will be migrated to other
    instances." (Algorithm 1, lines 6, 7, 12 and 13)"""
    assert freeness(instance(is_terminating=True), LLUMNIX) == -math.inf
    assert candidate(instance(is_terminating=True)).freeness == -math.inf
    assert normal_freeness_of(candidate(instance(is_terminating=True)).load) == -math.inf


def test_normal_running_request_has_its_physical_usage() -> None:
    """Section 4.4.2: "In normal cases, the virtual usage of a request is just its physical memory
    usage to enable routine load balancing"; "The headroom for normal requests is 0."
    (Algorithm 1, line 8)"""
    request = running("r", 400)
    assert virtual_usage(request, instance(running=[request]), LLUMNIX) == 400


def test_high_priority_running_request_has_a_headroom_on_top() -> None:
    """Section 4.4.2: "This is achieved by adding such a headroom on the physical usage of a
    high-priority request to get the virtual usage"; with the target load of Section 6.4 (1,600
    tokens) the headroom is 12,672 - 1,600 = 11,072. (Algorithm 1, line 8)"""
    request = running("r", 400, priority=HIGH)
    assert virtual_usage(request, instance(running=[request]), LLUMNIX) == 11_472


# ------------------------------------------------------------------------ GetHeadroom, lines 9-10


def test_headroom_is_divided_among_the_requests_of_its_priority() -> None:
    """Section 4.4.2: "When there are multiple high-priority requests on an instance, this headroom
    is divided among them." (Algorithm 1, line 10)"""
    requests = [running("a", 400, priority=HIGH), running("b", 96, priority=HIGH)]
    view = instance(running=[*requests, running("c", 48)])
    assert headroom(HIGH, view, LLUMNIX) == 5_536
    assert [virtual_usage(each, view, LLUMNIX) for each in requests] == [5_936, 5_632]


def test_queuing_requests_take_no_share_of_the_headroom() -> None:
    """Only running requests have a headroom to add: were it shared with queuing ones, less than
    the whole would be kept free for the one that runs."""
    request = running("a", 400, priority=HIGH)
    view = instance(running=[request], queuing=[queuing("b", 16, priority=HIGH)])
    assert virtual_usage(request, view, LLUMNIX) == 400 + 11_072


def test_a_further_execution_priority_needs_only_its_headroom() -> None:
    """Section 4.4.2: "can also support more execution priorities by specifying the sizes for the
    headroom." """
    urgent = Priority(2)
    policy = replace(LLUMNIX, target_load_tokens={HIGH: 1_600, urgent: 800})
    view = instance(running=[running("a", 96, priority=HIGH), running("b", 96, priority=urgent)])
    assert headroom(HIGH, view, policy) == 11_072
    assert headroom(urgent, view, policy) == 11_872
    assert freeness(view, policy) == M - 192 - 11_072 - 11_872


def test_a_target_load_above_the_memory_leaves_no_headroom() -> None:
    """A negative headroom would make a high-priority request look like free memory."""
    assert headroom_tokens(HIGH, 1_280, LLUMNIX) == 0


def test_a_priority_without_a_target_load_has_no_headroom() -> None:
    """Section 4.4.2: "The headroom for normal requests is 0." """
    urgent = Priority(2)
    assert headroom_tokens(NORMAL, M, LLUMNIX) == headroom_tokens(urgent, M, LLUMNIX) == 0
    assert freeness(instance(running=[running("r", 400, priority=urgent)]), LLUMNIX) == M - 400


def test_without_priorities_every_request_counts_as_normal() -> None:
    """Section 6.1: Llumnix-base "is priority-agnostic (i.e., treats all requests as the same
    priority)"."""
    request = running("r", 400, priority=HIGH)
    view = instance(running=[request])
    assert virtual_usage(request, view, LLUMNIX_BASE) == 400
    assert candidate(view, LLUMNIX_BASE).load.num_by_priority == ((NORMAL, 1),)


# ---------------------------------------------------------------------- CalcFreeness, lines 11-18


def test_freeness_is_the_free_memory_over_the_batch_size() -> None:
    """Section 4.4.3: "F = (M - sum V) / B, where M is the total memory, V is the virtual usage of
    each request, and B is the batch size." (Algorithm 1, lines 14-17). By hand:
    (12,672 - 400 - 96 - 176) / 3 = 12,000 / 3 = 4,000 steps."""
    view = instance(running=[running("a", 400), running("b", 96), running("c", 176)])
    assert freeness(view, LLUMNIX) == 4_000


def test_a_queue_counts_as_one_request_of_the_batch() -> None:
    """B is the batch that will run: the running requests and the head of the line. By hand:
    (12,672 - 400 - 272) / (1 + 1) = 6,000 steps; the second in line changes nothing."""
    head, second = queuing("head", 272), queuing("second", 272)
    assert freeness(instance(running=[running("a", 400)], queuing=[head]), LLUMNIX) == 6_000
    assert freeness(instance(running=[running("a", 400)], queuing=[head, second]), LLUMNIX) == 6_000


def test_an_idle_instance_counts_as_one_request() -> None:
    """Freeness stays finite: an idle instance could run one request for M steps."""
    assert freeness(instance(), LLUMNIX) == M


def test_a_queuing_request_that_does_not_fit_makes_freeness_negative() -> None:
    """Section 4.4.3: "Because the virtual usage of a request can be larger than the physical, it
    is possible that F is a negative value, e.g., when there are queuing requests or high-priority
    requests." By hand: 12,672 - 12,000 - 3,200 = -2,528, undivided."""
    view = instance(running=[running("a", 12_000)], queuing=[queuing("head", 3_200)])
    assert freeness(view, LLUMNIX) == -2_528


def test_a_high_priority_request_over_its_target_load_makes_freeness_negative() -> None:
    """The same sentence. By hand: 1,600 - 1,200 - 640 = -240."""
    view = instance(running=[running("a", 1_200, priority=HIGH), running("b", 640)])
    assert freeness(view, LLUMNIX) == pytest.approx(-240)


def test_negative_freeness_is_not_divided_by_the_batch_size() -> None:
    """Departure from the paper: divided, the second instance, which lacks more and runs more,
    would look freer (-2,528 / 2 against -3,328 / 5)."""
    head = queuing("head", 3_200)
    few = instance(running=[running("a", 12_000)], queuing=[head])
    many = instance(running=[running(f"r{k}", 3_200) for k in range(4)], queuing=[head])
    assert freeness(few, LLUMNIX) == -2_528
    assert freeness(many, LLUMNIX) == -3_328


def test_a_last_free_token_is_divided_by_the_batch_size() -> None:
    """Only what is negative is not: by hand, 1 / 2 steps."""
    view = instance(running=[running("a", M - 401), running("b", 400)])
    assert freeness(view, LLUMNIX) == 0.5


def test_memory_reserved_for_an_incoming_migration_counts_as_used() -> None:
    """By hand: (12,672 - 400 - 272) / 1 = 12,000; the incoming request is not in the batch."""
    view = instance(running=[running("a", 400)], reserved_tokens=272)
    assert freeness(view, LLUMNIX) == 12_000
    assert candidate(view).load.used_tokens == 672


def test_blocks_shared_through_the_prefix_cache_count_once() -> None:
    """Two requests of 400 that share 128 hold 672 in all: (12,672 - 672) / 2 = 6,000."""
    view = instance(running=[running("a", 400), running("b", 400)], shared_tokens=128)
    assert freeness(view, LLUMNIX) == 6_000
    assert candidate(view).load.used_tokens == 672


# ------------------------------------------------------------------------------ what is reported


def test_a_load_report_sums_the_instance_up() -> None:
    """Section 4.3: "it is a sum of the "virtual usages" of the requests"; nothing in it names a
    request."""
    view = InstanceView(
        instance_id=InstanceId("i3"),
        total_tokens=M,
        block_size=16,
        running=(
            running("a", 400, priority=HIGH),
            running("b", 800, immovable=Immovable.PREFILLING),
            running("c", 1_600, num_tokens=1_590),
        ),
        queuing=(queuing("d", 320), queuing("e", 160)),
        reserved_tokens=64,
        shared_tokens=32,
        num_preemptions=5,
    )
    reported = load(
        view, LLUMNIX, sequence=7, last_dispatch=41, num_migrating_out=1, num_migrating_in=2
    )
    assert reported == InstanceLoad(
        instance_id=InstanceId("i3"),
        sequence=7,
        total_tokens=M,
        used_tokens=2_832,
        free_tokens=M - 2_832 - 320 - 11_072,
        normal_free_tokens=M - 2_832 - 320,
        num_running=3,
        num_queuing=2,
        head_demand_tokens=320,
        queued_demand_tokens=480,
        num_by_priority=((NORMAL, 2), (HIGH, 1)),
        last_dispatch=41,
        move_tokens=1_600,
        num_migrating_out=1,
        num_migrating_in=2,
        num_preemptions=5,
        is_terminating=False,
    )


def test_an_idle_instance_reports_that_all_is_free() -> None:
    assert candidate(instance("i4")).load == InstanceLoad(
        instance_id=InstanceId("i4"),
        sequence=1,
        total_tokens=M,
        used_tokens=0,
        free_tokens=M,
        normal_free_tokens=M,
        num_running=0,
        num_queuing=0,
    )


def test_a_request_prefilled_in_chunks_has_the_usage_of_its_whole_prompt() -> None:
    """It had it as the head of the line (Algorithm 1, lines 2-4), and admission has promised it:
    with its first chunk it may not look smaller than before. By hand, for a prompt of 6,000 of
    which 2,048 are in memory: (12,672 - 400 - 6,000) / 2 = 3,136."""
    chunked = running("b", 2_048, demand_tokens=6_000, immovable=Immovable.PREFILLING)
    view = instance(running=[running("a", 400), chunked])
    known = candidate(view)
    assert virtual_usage(chunked, view, LLUMNIX) == 6_000
    assert freeness(view, LLUMNIX) == freeness_of(known.load) == 3_136
    assert (known.load.used_tokens, known.load.prefill_demand_tokens) == (2_448, 3_952)
    # As one that is to decode next to a request of high priority, and as memory that is taken.
    assert known.real_load_tokens == 6_400
    urgent = running("u", 400, priority=HIGH)
    leaving = candidate(instance("i1", running=[urgent], is_terminating=True))
    assert move_helps(leaving, candidate(instance("i0", running=[chunked])), LLUMNIX)
    full = running("b", 2_048, demand_tokens=12_480, immovable=Immovable.PREFILLING)
    assert not move_helps(leaving, candidate(instance("i0", running=[full])), LLUMNIX)


def test_a_report_without_movable_requests_has_nothing_to_move() -> None:
    view = instance(running=[running("a", 400, immovable=Immovable.MIGRATING)])
    assert candidate(view).load.move_tokens is None


def test_a_terminating_instance_reports_the_demand_of_the_queuing_request_it_moves() -> None:
    view = instance(running=[running("a", 400)], queuing=[queuing("b", 96)], is_terminating=True)
    reported = report(view)
    assert (reported.move_tokens, reported.moves_queuing) == (96, True)
    reported = report(replace(view, queuing=()))
    assert (reported.move_tokens, reported.moves_queuing) == (400, False)


def test_a_request_in_flight_counts_with_its_demand_and_as_one_of_the_batch() -> None:
    """A burst between two reports must not pile onto one instance. By hand:
    (12,672 - 400 - 272) / (1 + 1) = 6,000."""
    reported = candidate(instance(running=[running("a", 400)])).load
    assert freeness_of(reported, [new_request(272)]) == 6_000


def test_a_request_in_flight_joins_the_queue_that_is_there() -> None:
    """By hand: (12,672 - 400 - 96 - 176) / (1 + 1 + 1) = 4,000."""
    reported = candidate(instance(running=[running("a", 400)], queuing=[queuing("b", 96)])).load
    assert freeness_of(reported, [new_request(176)]) == 4_000


def test_freeness_for_the_normal_priority_leaves_every_headroom_out() -> None:
    """Section 4.4.3, auto-scaling: "the averages freeness for the normal priority". By hand:
    (12,672 - 400 - 272) / 2 = 6,000, where the freeness itself is (928 - ...) / 2 = 464."""
    reported = candidate(
        instance(running=[running("a", 400, priority=HIGH), running("b", 272)])
    ).load
    assert freeness_of(reported) == 464
    assert normal_freeness_of(reported) == 6_000
    assert normal_freeness_of(reported, [new_request(3_000)]) == 3_000
    with_queue = instance(
        running=[running("a", 400, priority=HIGH)],
        queuing=[queuing("head", 272), queuing("second", 160)],
    )
    assert normal_freeness_of(report(with_queue)) == 6_000


# ---------------------------------------------------------------------------------- properties


@given(views())
def test_the_freeness_of_a_report_is_that_of_algorithm_1_as_printed(view: InstanceView) -> None:
    for policy in (LLUMNIX, LLUMNIX_BASE, INFAAS_PP, replace(LLUMNIX, divides_overload=True)):
        expected = algorithm1.freeness(view, policy)
        found = freeness_of(report(view, policy), (), policy)
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-6)


@given(views(), usages_tokens, priorities)
def test_a_further_request_never_raises_freeness(
    view: InstanceView, tokens: int, priority: Priority
) -> None:
    with_running = replace(
        view, running=(*view.running, running("more", tokens, priority=priority))
    )
    with_queuing = replace(
        view, queuing=(*view.queuing, queuing("more", tokens, priority=priority))
    )
    before = freeness(view, LLUMNIX)
    assert freeness(with_running, LLUMNIX) <= before + 1e-6
    assert freeness(with_queuing, LLUMNIX) <= before
    in_flight = new_request(tokens, priority)
    assert candidate(view, in_flight=[in_flight]).freeness <= candidate(view).freeness


@given(views(may_terminate=False), st.lists(usages_tokens, min_size=1, max_size=5))
def test_an_overloaded_instance_with_more_requests_never_looks_freer(
    view: InstanceView, more_tokens: list[int]
) -> None:
    """Each further request of an overloaded instance lowers its freeness by all that it uses."""
    overloaded = replace(view, reserved_tokens=2 * view.total_tokens)
    fuller = replace(
        overloaded,
        running=(
            *overloaded.running,
            *(running(f"more{k}", each) for k, each in enumerate(more_tokens)),
        ),
    )
    expected = freeness(overloaded, LLUMNIX) - sum(more_tokens)
    assert freeness(fuller, LLUMNIX) == pytest.approx(expected, abs=1e-6)
