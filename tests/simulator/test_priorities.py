"""High-priority requests in the simulated cluster (Sections 4.4.1 to 4.4.3)."""

from dataclasses import replace

import pytest

from sterna.config import PolicyConfig
from sterna.policy.presets import LLUMNIX, LLUMNIX_BASE
from sterna.simulator import simulate
from sterna.types import HIGH
from tests.simulator.builders import (
    ENGINE,
    configuration,
    crowded_trace,
    differences,
    run,
    trace,
)

POLICY = replace(LLUMNIX, target_load_tokens={HIGH: 320})
"""A third of the 960 tokens of an instance."""


def test_a_queuing_request_of_high_priority_is_served_first() -> None:
    """Section 4.4.3: "dispatches new requests with higher scheduling priorities first. [...] On
    each instance, requests are scheduled in the same order." All wait behind a request that
    fills the only instance; the last one to come is of high priority."""
    waiting = trace(
        [0.0, 0.1, 0.2, 0.3], [900, 300, 300, 300], [20, 5, 5, 5], [False, False, False, True]
    )
    engine = replace(ENGINE, max_num_seqs=1)
    records, _ = run(waiting, configuration(POLICY, num_instances=1, engine=engine))
    assert records.first_token_s.argsort().tolist() == [0, 3, 1, 2]


@pytest.mark.parametrize("is_fast", [False, True])
def test_a_policy_without_priorities_serves_in_the_order_of_arrival(is_fast: bool) -> None:
    """Section 6.1: Llumnix-base "is priority-agnostic (i.e., treats all requests as the same
    priority)": on the instances, too. What a request's priority is stays on record."""
    waiting = trace(
        [0.0, 0.1, 0.2, 0.3], [900, 300, 300, 300], [20, 5, 5, 5], [False, False, False, True]
    )
    engine = replace(ENGINE, max_num_seqs=1)
    config = configuration(LLUMNIX_BASE, num_instances=1, engine=engine, is_fast=is_fast)
    records, _ = simulate(waiting, config)
    assert records.first_token_s.argsort().tolist() == [0, 1, 2, 3]
    assert records.priority.tolist() == [0, 0, 0, 1]


def test_normal_requests_are_migrated_away_from_a_high_priority_one() -> None:
    """Section 4.4.2: "When the headroom for a high-priority request is running up, the other
    normal requests will be migrated away by the load balancing policy because the instance is
    overloaded in terms of the total virtual usage." By hand: 160 and 240 tokens are more than the
    target load of 320. The normal one leaves, and the high one decodes alone: a step of 0.0338 s
    and 1.5e-6 s a token."""
    crowd = trace([0.0, 0.001, 0.002], [160, 176, 240], [200, 200, 100], [False, False, True])
    policy = replace(POLICY, migrates_continuously=False)
    records, cluster = run(crowd, configuration(policy, num_instances=2))
    assert cluster.migrations_committed == 1
    num_steps = 99
    alone_s = sum(0.0338 + 1.5e-6 * (241 + k) for k in range(num_steps))
    # Beside the other one only until the first round and the copy of its 11 blocks.
    execution_s = records.decode_execution_s[2]
    assert alone_s < execution_s < alone_s + 0.0008 * 0.3 / 0.0338 + 0.02
    _, cluster = run(crowd, configuration(LLUMNIX_BASE, num_instances=2))
    assert cluster.migrations_committed == 0


def test_a_normal_request_moves_away_for_a_high_one_that_waits_for_memory() -> None:
    """Neither instance has the 500 tokens that the high one needs; either has room for a normal
    one of the other. Nobody loses memory for it, and it need not wait until somebody ends."""
    full = trace(
        [0.0, 0.01, 0.02, 0.03, 1.0],
        [200, 200, 200, 200, 500],
        [110, 110, 110, 110, 20],
        [False, False, False, False, True],
    )

    def outcome(policy: PolicyConfig) -> tuple[float, int, int]:
        records, cluster = run(full, configuration(policy, num_instances=2))
        ttft_s = float(records.first_token_s[4] - records.arrival_s[4])
        return ttft_s, int(records.num_preemptions.sum()), cluster.migrations_committed

    waited_s, _, _ = outcome(replace(POLICY, migrates=False))
    ttft_s, num_preemptions, num_moved = outcome(POLICY)
    assert num_moved >= 1
    assert num_preemptions == 0
    assert ttft_s < 1.0
    assert waited_s > 2.0


def test_high_priority_requests_share_an_instance_while_its_load_allows_it() -> None:
    """Dispatched by freeness alone, the second one would avoid the first one's instance, whose
    freeness is small, and leave two instances overloaded in place of one."""
    pair = trace([0.0, 0.1], [40, 40], [20, 20], [True, True])
    records, _ = run(pair, configuration(POLICY, num_instances=2))
    # The first one's decodes wait for the second one's prefill.
    waited_s = (records.end_s[0] - records.first_token_s[0]) - records.decode_execution_s[0]
    assert waited_s == pytest.approx(0.03)
    full = trace([0.0, 0.1], [200, 200], [50, 50], [True, True])
    records, _ = run(full, configuration(POLICY, num_instances=2))
    waited_s = (records.end_s[0] - records.first_token_s[0]) - records.decode_execution_s[0]
    assert waited_s == pytest.approx(0.0, abs=1e-9)


def test_without_priorities_in_the_trace_the_policies_with_and_without_are_the_same() -> None:
    normal = crowded_trace(60)
    with_priorities = simulate(normal, configuration(LLUMNIX))
    without = simulate(normal, configuration(LLUMNIX_BASE))
    assert differences(with_priorities, without) == []
