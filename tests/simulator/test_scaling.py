"""Instances come and go with the load (Section 4.4.3, auto-scaling); computed by hand.

An idle instance has a freeness of 944 decode steps: one of its 60 blocks is never used.
"""

from dataclasses import replace

import pytest

from sterna.config import DispatchRule, ScalingConfig
from sterna.metrics.summary import summarize
from sterna.policy.presets import INFAAS_PP, LLUMNIX
from sterna.simulator import SimulationConfig, simulate
from tests.simulator.builders import Result, configuration, differences, requests
from tests.simulator.checked_simulation import simulate_checked

GROWING = ScalingConfig(
    min_instances=1,
    max_instances=3,
    low_freeness_steps=200.0,
    high_freeness_steps=5_000.0,
    period_s=1.0,
)
SHRINKING = ScalingConfig(
    min_instances=1,
    max_instances=3,
    low_freeness_steps=0.0,
    high_freeness_steps=100.0,
    period_s=1.0,
)


def run_both(trace, config: SimulationConfig) -> Result:
    """Plain with checks, and compiled: the same."""
    plain = simulate_checked(trace, config)
    assert differences(plain, simulate(trace, replace(config, is_fast=True))) == []
    return plain


@pytest.mark.parametrize("start_delay_s", [0.5, 1.5])
def test_an_instance_serves_after_its_start_delay(start_delay_s: float) -> None:
    """The first request leaves 944 - 816 tokens, less than 200 steps, from the round at 0.2 on.
    After a period, at 1.2 or at the next round, an instance is added. The second request comes at
    2.0: after 0.5 s it can go to the new instance, where it is prefilled at once, after 1.5 s it
    is not there yet, and on the first instance there is no room for it."""
    trace = requests((0.0, 800, 140), (2.0, 800, 10))
    config = configuration(INFAAS_PP, num_instances=1, scaling=GROWING, start_delay_s=start_delay_s)
    records, cluster = run_both(trace, config)
    assert cluster.instances_num[:2].tolist() == [1, 2]
    assert cluster.instances_time_s[1] == pytest.approx(1.3, abs=0.11)
    prefill_s = 0.005 + 800 * 0.0002 + 800**2 * 4e-9
    if start_delay_s == 0.5:
        assert records.first_token_s[1] == pytest.approx(2.0 + prefill_s)
    else:
        assert records.first_token_s[1] == pytest.approx(records.end_s[0] + prefill_s)


def test_an_instance_that_starts_is_counted_as_one_that_will_serve() -> None:
    """No second one is added while the first one starts, however long the average stays low."""
    trace = requests((0.0, 800, 140))
    config = configuration(INFAAS_PP, num_instances=1, scaling=GROWING, start_delay_s=100.0)
    records, cluster = run_both(trace, config)
    assert records.end_s[0] > 4.0
    assert cluster.instances_num.tolist() == [1, 2]


def test_a_terminating_instance_is_emptied_by_migration() -> None:
    """Section 4.4.2: "the remaining requests will be migrated to other instances". Two requests,
    one on each instance, leave both nearly idle; the one with the fewest tokens is terminated at
    the first round after a period, and its request decodes on elsewhere."""
    trace = requests((0.0, 160, 150), (0.001, 320, 150))
    migrating = configuration(LLUMNIX, num_instances=2, scaling=SHRINKING)
    records, cluster = run_both(trace, migrating)
    assert cluster.migrations_committed == 1
    assert cluster.instances_num.tolist() == [2, 1]
    assert 1.2 <= cluster.instances_time_s[1] <= 2.0
    staying = replace(migrating, policy=INFAAS_PP)
    records, cluster = run_both(trace, staying)
    assert cluster.migrations_started == 0
    assert cluster.instances_num.tolist() == [2, 1]
    assert cluster.instances_time_s[1] == records.end_s[0]


def test_a_terminating_instance_gets_no_new_requests() -> None:
    """It ends with the request that it had, though it is the freer one for those that come."""
    trace = requests((0.0, 16, 100), (0.001, 480, 150), *((2.0 + k, 16, 20) for k in range(5)))
    config = configuration(INFAAS_PP, num_instances=2, scaling=SHRINKING)
    records, cluster = run_both(trace, config)
    assert cluster.instances_num.tolist() == [2, 1]
    assert cluster.instances_time_s[1] == records.end_s[0]
    assert records.end_s[0] < records.end_s[-1]


def test_queuing_requests_leave_a_terminating_instance_too() -> None:
    """i0 has one request that nearly fills it and one of 200 tokens that waits for its end; i1
    has two small ones. When i0 is terminated, the waiting one moves, first of all, and is
    prefilled where there is room. Nothing else makes an instance a source here."""
    policy = replace(LLUMNIX, dispatch=DispatchRule.ROUND_ROBIN, source_freeness_steps=-1_000_000.0)
    trace = requests((0.0, 800, 130), (0.001, 16, 150), (0.002, 200, 20), (0.003, 16, 150))
    config = configuration(policy, num_instances=2, scaling=SHRINKING)
    records, cluster = run_both(trace, config)
    assert cluster.instances_num.tolist() == [2, 1]
    assert 1.2 < records.first_token_s[2] < 2.0
    # The waiting one left no batch, and has no downtime.
    assert cluster.migrations_committed == 1
    assert len(cluster.downtime_s) == 0
    records, cluster = run_both(trace, replace(config, policy=replace(policy, migrates=False)))
    assert records.first_token_s[2] > records.end_s[0] > 4.0


def test_a_request_on_its_way_to_an_instance_that_ends_goes_to_another() -> None:
    """The second instance is idle and gets the second request at 1.0; it is terminated at 1.2 or
    at the next round, before the request is there at 1.5. The request is dispatched anew."""
    trace = requests((0.0, 480, 150), (1.0, 16, 10))
    config = configuration(INFAAS_PP, num_instances=2, scaling=SHRINKING, dispatch_delay_s=0.5)
    records, cluster = run_both(trace, config)
    assert cluster.instances_num.tolist() == [2, 1]
    assert cluster.instances_time_s[1] < 1.5
    assert records.queue_s[1] == pytest.approx(1.0, abs=0.05)


def test_the_average_number_of_instances_is_weighted_by_time() -> None:
    """Section 6.5: instances that start or end count while they exist."""
    trace = requests((0.0, 160, 150), (0.001, 320, 150))
    records, cluster = run_both(trace, configuration(num_instances=2, scaling=SHRINKING))
    change_s, end_s = cluster.instances_time_s[1], records.end_s.max()
    expected = (2 * change_s + 1 * (end_s - change_s)) / end_s
    assert summarize(records, cluster).instances_avg == pytest.approx(expected)
    assert 1.0 < expected < 1.5
