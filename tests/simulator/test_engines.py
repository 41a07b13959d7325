"""Plain and compiled engines answer every call alike, also where runs rarely come to."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from sterna.engine.emulated.config import EmulatedEngineConfig, StepMode
from sterna.simulator.config import SimulationConfig
from sterna.simulator.engines import Engines
from sterna.simulator.fast import FastEngines
from sterna.simulator.plain import PlainEngines
from sterna.types import InstanceId, MigrationId
from sterna.workload.trace import Trace
from tests.simulator.builders import configuration, requests

MakeEngines = Callable[[Trace, SimulationConfig], Engines]
CHUNKED = EmulatedEngineConfig(
    num_blocks=3,
    watermark=0.0,
    max_num_batched_tokens=3,
    step_mode=StepMode.CHUNKED,
    keeps_block_free=False,
)


def step(engines: Engines, row: int, now_s: float) -> float:
    """One step of one engine; returns when it ended."""
    end_s = engines.begin_step(row, now_s)
    assert end_s is not None
    engines.hold(row)
    engines.end_step(row, end_s)
    return end_s


def queue(engines: Engines, row: int, now_s: float) -> list[str]:
    return [each.request_id for each in engines.view(row, now_s).queuing]


@pytest.fixture(params=[PlainEngines, FastEngines], ids=["plain", "compiled"])
def make_engines(request: pytest.FixtureRequest) -> MakeEngines:
    return request.param


def test_a_request_preempted_in_its_prompt_is_adopted_by_its_arrival(
    make_engines: MakeEngines,
) -> None:
    """It has no output, and to its new engine it is one that never ran: one that arrived earlier
    goes first. By hand, with 3 tokens a step and 3 blocks of 16: r0 has a prompt of 14 and takes
    its second block with token 17; r2, whose prompt of 32 would take two, loses its one."""
    trace = requests((0.0, 14, 34), (1.0, 16, 1), (2.0, 32, 1))
    engines = make_engines(trace, replace(configuration(), engine=CHUNKED, num_instances=2))
    for row in range(2):
        engines.start(row, InstanceId(f"i{row}"))
        assert engines.begin_step(row, 0.0) is None
    engines.add(0, 0, 1, 0.0)
    engines.add(0, 2, 2, 0.0)
    now_s = 0.0
    while engines.view(0, now_s).num_preemptions == 0:
        now_s = step(engines, 0, now_s)
    assert queue(engines, 0, now_s) == ["r000000002"]
    assert engines.view(0, now_s).queuing[0].num_output_tokens == 0
    assert engines.begin_drain(0, 2, 1, 0, None) is True
    state = engines.export(0, 2)
    migration_id = MigrationId("m")
    assert engines.reserve(1, migration_id, 0, needs_slot=True) is None
    engines.adopt(1, migration_id, 2, state, 0)
    engines.release(0, 2)
    engines.add(1, 1, 3, now_s)
    assert queue(engines, 1, now_s) == ["r000000001", "r000000002"]
