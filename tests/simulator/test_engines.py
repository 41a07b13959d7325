"""Plain and compiled engines answer every call alike, also where runs rarely come to."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from sterna.engine.drains import Left
from sterna.engine.emulated.config import EmulatedEngineConfig, StepMode
from sterna.engine.emulated.requests import RequestState
from sterna.migration.messages import Drain, Mode, Reason
from sterna.policy.presets import LLUMNIX
from sterna.simulator.config import SimulationConfig
from sterna.simulator.engines import Engines, request_id_of
from sterna.simulator.fast import FastEngines
from sterna.simulator.plain import PlainEngines
from sterna.types import InstanceId, MigrationId
from sterna.workload.trace import Trace
from tests.simulator.builders import configuration, requests, with_sessions

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
        engines.start(row, InstanceId(f"i{row}"), LLUMNIX)
        assert engines.begin_step(row, 0.0) is None
    engines.add(0, 0, 1, 0.0)
    engines.add(0, 2, 2, 0.0)
    now_s = 0.0
    while engines.view(0, now_s).num_preemptions == 0:
        now_s = step(engines, 0, now_s)
    assert queue(engines, 0, now_s) == ["r000000002"]
    assert engines.view(0, now_s).queuing[0].num_output_tokens == 0
    drain = Drain(MigrationId("m"), request_id_of(2), Mode.LIVE, 1, 0, 0)
    assert engines.core(0).begin_drain(drain) == Left(0, was_queuing=True)
    state = engines.export(0, 2)
    migration_id = MigrationId("m")
    assert engines.core(1).reserve(migration_id, 0, needs_slot=True) is None
    engines.adopt(1, migration_id, 2, state, 0)
    engines.core(0).release(request_id_of(2))
    engines.add(1, 1, 3, now_s)
    assert queue(engines, 1, now_s) == ["r000000001", "r000000002"]


def test_a_request_that_will_queue_is_reserved_neither_slot_nor_memory(
    make_engines: MakeEngines,
) -> None:
    """By hand: the only slot is taken, and 2 of 3 blocks are, where the watermark is 2."""
    engine = EmulatedEngineConfig(
        num_blocks=3, max_num_seqs=1, watermark=0.7, keeps_block_free=False
    )
    engines = make_engines(
        requests((0.0, 16, 9), (1.0, 16, 9)),
        replace(configuration(), engine=engine, num_instances=1),
    )
    engines.start(0, InstanceId("i0"), LLUMNIX)
    assert engines.begin_step(0, 0.0) is None
    engines.add(0, 0, 1, 0.0)
    now_s = step(engines, 0, step(engines, 0, 0.0))
    migration_id = MigrationId("m")
    core = engines.core(0)
    assert core.reserve(migration_id, 1, needs_slot=False) is Reason.NO_MEMORY
    assert core.reserve(migration_id, 0, needs_slot=True) is None
    assert not engines.is_empty(0)
    state = RequestState(request_id_of(1), prompt_tokens=16, output_tokens=9, arrival_s=1.0)
    engines.adopt(0, migration_id, 1, state.encode(), 0)
    assert queue(engines, 0, now_s) == ["r000000001"]


def test_a_prompt_in_chunks_counts_as_a_whole_from_its_first_chunk_on(
    make_engines: MakeEngines,
) -> None:
    """Algorithm 1 gives the head of the line the usage of its whole prompt. By hand: 792 blocks
    without 7 of the watermark are 12,560 tokens. A prompt of 6,000 takes 375 blocks, a step
    computes 2,048 tokens, or 128 blocks, and 6,560 stay free whatever of it is in memory."""
    engine = EmulatedEngineConfig(
        num_blocks=792, max_num_batched_tokens=2_048, step_mode=StepMode.CHUNKED
    )
    engines = make_engines(
        requests((0.0, 6_000, 9)), replace(configuration(), engine=engine, num_instances=1)
    )
    engines.start(0, InstanceId("i0"), LLUMNIX)
    assert engines.begin_step(0, 0.0) is None
    engines.changed_loads(0.0)
    engines.add(0, 0, 1, 0.0)
    loads = engines.changed_loads(0.0)
    now_s = 0.0
    for _ in range(3):
        end_s = engines.begin_step(0, now_s)
        assert end_s is not None
        loads += engines.changed_loads(now_s)
        (request,) = engines.view(0, now_s).running
        assert (request.physical_usage_tokens, request.demand_tokens) == (
            loads[-1].used_tokens,
            6_000,
        )
        engines.hold(0)
        engines.end_step(0, end_s)
        now_s = end_s
    assert [each.used_tokens for each in loads] == [0, 2_048, 4_096, 6_000]
    assert [each.prefill_demand_tokens for each in loads] == [0, 3_952, 1_904, 0]
    assert [each.head_demand_tokens for each in loads] == [6_000, 0, 0, 0]
    assert [each.free_tokens for each in loads] == [6_560] * 4
    assert engines.view(0, now_s).running[0].demand_tokens == 0


def test_compiled_steps_go_on_where_room_is_not_looked_for() -> None:
    config = replace(configuration(), num_instances=1)
    engines = FastEngines(with_sessions(requests((0.0, 16, 99))), config)
    engines.start(0, InstanceId("i0"), LLUMNIX)
    engines.begin_step(0, 0.0)
    engines.add(0, 0, 1, 0.0)
    engines.begin_step(0, 0.0)
    assert engines.notices(1.0, None, 0.0) == ([], None)
    assert engines.notices(2.0, 16, 0.0)[1] is not None


def test_migrations_in_flight_make_a_load_that_is_reported(make_engines: MakeEngines) -> None:
    """The number of migrations is part of the load: a change of it alone is a change."""
    engines = make_engines(requests((0.0, 16, 1)), configuration())
    for row in range(2):
        engines.start(row, InstanceId(f"i{row}"), LLUMNIX)
    engines.changed_loads(0.0)
    engines.set_migrating(1, 2, 1)
    (load,) = engines.changed_loads(0.0)
    assert (load.instance_id, load.num_migrating_out, load.num_migrating_in) == ("i1", 2, 1)
    assert engines.changed_loads(0.0) == []
