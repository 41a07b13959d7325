"""Sessions in closed loop: a turn comes some time after the answer to the one before."""

from dataclasses import replace

import numpy as np
import pytest

from sterna.engine.emulated.config import Preemption, StepMode
from sterna.simulator import simulate
from sterna.workload.trace import Trace
from sterna.workload.turns import NONE, Turns
from tests.simulator.builders import ENGINE, configuration, requests, ttft_s

THINK_S = 2.5


def session() -> Trace:
    """Two turns, and a stranger at the same time as the first one."""
    return replace(
        requests((1.0, 64, 10), (1.0, 32, 40), (1.0, 90, 5)),
        turns=Turns(np.array([NONE, NONE, 0]), np.array([0.0, 0.0, THINK_S])),
    )


@pytest.mark.parametrize("is_fast", [False, True], ids=["plain", "compiled"])
def test_a_turn_comes_after_the_answer_and_the_time_to_think(is_fast: bool) -> None:
    records, cluster = simulate(session(), configuration(is_fast=is_fast))
    assert records.arrival_s[:2].tolist() == [1.0, 1.0]
    assert records.arrival_s[2] == records.end_s[0] + THINK_S
    assert (ttft_s(records) > 0).all()
    assert cluster.simulated_s == records.end_s.max()


@pytest.mark.parametrize("is_fast", [False, True], ids=["plain", "compiled"])
def test_sessions_are_served_without_rounds_and_samples(is_fast: bool) -> None:
    """Nothing but steps and answers leads on."""
    config = configuration(num_instances=1, is_fast=is_fast, fragmentation_interval_s=None)
    config = replace(config, policy=replace(config.policy, migrates=False))
    records, _ = simulate(session(), config)
    assert not np.isnan(records.end_s).any()


@pytest.mark.parametrize("is_fast", [False, True], ids=["plain", "compiled"])
def test_without_time_to_think_a_turn_comes_with_the_last_token(is_fast: bool) -> None:
    trace = session()
    trace = replace(trace, turns=Turns(np.array([NONE, NONE, 0]), np.zeros(3)))
    records, _ = simulate(trace, configuration(is_fast=is_fast))
    assert records.arrival_s[2] == records.end_s[0]


def test_later_turns_load_the_cluster_when_they_come() -> None:
    """In an open loop they would all come at once."""
    trace = requests(*[(0.0, 100, 20)] * 6)
    chain = Turns(np.arange(-1, 5), np.array([0.0, 1.0, 1.0, 1.0, 1.0, 1.0]))
    engine = replace(
        ENGINE,
        step_mode=StepMode.CHUNKED,
        preemption=Preemption.LAST_ADMITTED,
        keeps_block_free=False,
    )
    records, _ = simulate(replace(trace, turns=chain), configuration(engine=engine))
    alone, _ = simulate(requests((0.0, 100, 20)), configuration(engine=engine))
    expected = alone.end_s[0] - alone.arrival_s[0]
    assert np.allclose(records.end_s - records.arrival_s, expected)
