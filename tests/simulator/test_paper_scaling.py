"""What the paper's runs of auto-scaling need of the simulator, and the samples of the memory."""

from dataclasses import replace

import numpy as np
import pytest

from sterna.config import ScalingConfig
from sterna.engine.emulated.config import EmulatedEngineConfig
from sterna.engine.emulated.durations import CopyTime, StepTime
from sterna.errors import ConfigurationError
from sterna.metrics.summary import fragmentation_proportion
from sterna.policy.presets import LLUMNIX
from sterna.simulator import SimulationConfig, simulate
from sterna.workload.trace import Trace

CONFIG = SimulationConfig(
    engine=EmulatedEngineConfig(num_blocks=64),
    step_time=StepTime(0.005, 2e-4, 0.0, 0.03, 0.03, 1e-3, 1e-6),
    copy_time=CopyTime(0.003, 0.005),
    policy=LLUMNIX,
    num_instances=2,
    is_fast=False,
    scaling=ScalingConfig(
        min_instances=1,
        max_instances=4,
        low_freeness_steps=20.0,
        high_freeness_steps=200.0,
        period_s=2.0,
        is_sustained=False,
    ),
)


def a_rush(num_requests: int) -> Trace:
    """More than two instances can hold, all within a second."""
    return Trace(
        "rush",
        np.linspace(0.0, 1.0, num_requests),
        np.full(num_requests, 100, np.int64),
        np.full(num_requests, 200, np.int64),
        np.zeros(num_requests, np.int64),
    )


def test_no_instance_comes_or_goes_before_scaling_begins() -> None:
    _, at_once = simulate(a_rush(20), CONFIG)
    _, later = simulate(a_rush(20), replace(CONFIG, scaling_begins_s=7.0))

    assert at_once.instances_time_s[1] < 7.0
    assert later.instances_time_s[1] >= 7.0
    assert later.instances_num[0] == 2


@pytest.mark.parametrize("is_fast", [False, True])
def test_an_average_that_is_low_for_long_is_met_when_scaling_begins(is_fast: bool) -> None:
    """Low since the rush, for the whole period of 2 s by 3.0: the round at 6.0, or the one after
    it, adds instances, and not one a period after a decision that was not carried out."""
    assert CONFIG.scaling is not None
    scaling = replace(CONFIG.scaling, is_sustained=True)
    config = replace(CONFIG, scaling=scaling, scaling_begins_s=6.0, is_fast=is_fast)
    _, cluster = simulate(a_rush(20), config)

    assert 6.0 <= cluster.instances_time_s[1] <= 6.0 + config.policy.round_interval_s


def test_scaling_cannot_begin_before_the_run() -> None:
    with pytest.raises(ConfigurationError, match="scaling_begins_s"):
        replace(CONFIG, scaling_begins_s=-1.0)


@pytest.mark.parametrize("is_fast", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_samples_of_the_memory_explain_the_fragmentation(is_fast: bool) -> None:
    _, cluster = simulate(a_rush(20), replace(CONFIG, scaling=None, is_fast=is_fast))

    sampled = zip(
        cluster.room_tokens, cluster.blocked_demands_tokens, cluster.total_tokens, strict=True
    )
    again = [fragmentation_proportion(room, demands, total) for room, demands, total in sampled]
    assert again == cluster.fragmentation_proportion.tolist()
    assert any(cluster.blocked_demands_tokens)
    assert (cluster.total_tokens == 2 * 64 * 16).all()
    assert (cluster.room_tokens <= cluster.free_tokens).all()
    assert (cluster.free_tokens <= cluster.total_tokens).all()
