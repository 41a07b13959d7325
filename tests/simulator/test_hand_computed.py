"""What a run records, in scenarios of two or three requests computed by hand.

Every decode step takes 0.1 s, whatever it computes; how long prefills take is said in each test.
"""

from dataclasses import replace

import numpy as np
import pytest

from sterna.config import DispatchRule
from sterna.engine.emulated.config import EmulatedEngineConfig
from sterna.engine.emulated.durations import CopyTime, StepTime
from sterna.metrics.summary import summarize
from sterna.policy.presets import INFAAS_PP, LLUMNIX
from sterna.simulator import simulate
from tests.simulator.builders import ENGINE, configuration, requests

pytestmark = pytest.mark.parametrize("is_fast", [False, True], ids=["plain", "compiled"])


def steps_of(prefill_s: float) -> StepTime:
    return StepTime(0.0, 0.0, 0.0, prefill_s, 0.1, 0.0, 0.0)


def test_the_preemption_loss_lasts_from_the_missed_token_to_the_next_one(is_fast: bool) -> None:
    """Section 3: "the extra queuing time and the recomputing for previous KV cache". One instance
    of 3 blocks of 16; a prefill takes 0.3 s.

    0.0 to 0.3: r0, with 16 tokens in 1 block, is prefilled. r1 comes at 0.1 and waits.
    0.3 to 0.6: r1, with 31 tokens in 2 blocks, is prefilled. No block is free.
    0.6 to 0.7: r0 needs a second block for its 17th token: r1 arrived last and loses its two. The
    step would have brought it a token at 0.7.
    0.7 to 0.9: r0 decodes on to its fourth token, its last. r1 waits: it needs 2 blocks for 32
    tokens, and 1 is free.
    0.9 to 1.2: r1 is prefilled again, which brings its second token: 0.5 s after 0.7."""
    engine = EmulatedEngineConfig(num_blocks=3, watermark=0.0, keeps_block_free=False)
    config = configuration(
        INFAAS_PP, num_instances=1, engine=engine, step_time=steps_of(0.3), is_fast=is_fast
    )
    records, cluster = simulate(requests((0.0, 16, 4), (0.1, 31, 2)), config)
    assert records.num_preemptions.tolist() == [0, 1]
    assert records.first_token_s == pytest.approx([0.3, 0.6])
    assert records.end_s == pytest.approx([0.9, 1.2])
    assert records.queue_s == pytest.approx([0.0, 0.2])
    assert records.preemption_loss_s == pytest.approx([0.0, 0.5])
    # r1's second token came of a prefill.
    assert records.decode_execution_s == pytest.approx([0.3, 0.0])
    loss_s = summarize(records, cluster).preemption_loss_s
    assert loss_s is not None
    assert loss_s.mean == pytest.approx(0.25)


def test_the_downtime_of_a_migration_and_the_time_that_it_takes_both_sides(is_fast: bool) -> None:
    """Two instances of 60 blocks of 16; a prefill takes 0.1 s, a message 0.01 s, and a copy 0.02 s
    and 0.01 s a block. Round robin puts r0 and r2 onto i0, and r1, of one token, onto i1.

    0.0 to 0.2: r0 and r2 are prefilled.
    0.25: a round. i0, with (960 - 112 - 32) / 2 = 408 steps, is a source, i1, with 960, the
    destination. r2 is the shorter one. i0 takes part in a migration from now on.
    0.3: between two steps, i0 looks at r2: 21 tokens in 2 blocks, few enough for one stage. It
    asks for memory; i1, which learns of the migration at 0.31, is idle and answers at once.
    0.4: between two steps, r2 leaves the batch with 22 tokens in 2 blocks and its third token.
    0.44: its blocks are on i1, where it joins the batch: 0.04 s after it left. For i1 that is the
    end, 0.13 s after 0.31; for i0 it is when it hears of it at 0.45, 0.2 s after 0.25.
    1.14: r2 ends after its 7 other tokens. r0 ends at 2.1, with its 19 tokens since 0.2."""
    policy = replace(
        LLUMNIX,
        dispatch=DispatchRule.ROUND_ROBIN,
        source_freeness_steps=500.0,
        destination_freeness_steps=500.0,
        round_interval_s=0.25,
        migrates_continuously=False,
    )
    config = configuration(
        policy,
        num_instances=2,
        engine=replace(ENGINE, watermark=0.0),
        step_time=steps_of(0.1),
        copy_time=CopyTime(block_s=0.01, stage_s=0.02),
        message_delay_s=0.01,
        fragmentation_interval_s=None,
        is_fast=is_fast,
    )
    trace = requests((0.0, 100, 20), (0.001, 16, 1), (0.002, 20, 10))
    records, cluster = simulate(trace, config)
    assert (cluster.migrations_started, cluster.migrations_committed) == (1, 1)
    assert records.first_token_s == pytest.approx([0.1, 0.101, 0.2])
    assert records.end_s == pytest.approx([2.1, 0.101, 1.14])
    assert records.decode_execution_s == pytest.approx([1.9, 0.0, 0.9])
    assert cluster.downtime_s == pytest.approx([0.04])
    assert cluster.migrating_instance_s == pytest.approx(0.2 + 0.13)
    assert summarize(records, cluster).migrating_fraction == pytest.approx(0.33 / (2 * 2.1))


@pytest.mark.parametrize("binds_late", [False, True])
@pytest.mark.parametrize(
    ("num_held_blocks", "num_blocking", "num_fragmented_blocks"),
    [(74, 0, 0), (75, 1, 16), (82, 1, 16), (83, 1, 0), (90, 1, 0)],
)
def test_heads_are_blocked_and_served_by_what_the_watermarks_leave(
    num_held_blocks: int,
    num_blocking: int,
    num_fragmented_blocks: int,
    binds_late: bool,
    is_fast: bool,
) -> None:
    """Section 6.3: "the portion of cluster free memory that could satisfy the demands of the
    head-of-line blocking requests across all instances, if no fragmentation".

    Two instances of 100 blocks, of which an admission leaves 10 free. Each has a request that
    holds `num_held_blocks` from its first token to its last. A third one needs 16 blocks.
    With 74 held it fits: 100 - 10 - 74 are 16. With 75, it does not, though 25 blocks are free.
    With 82, there is room for 8 on each instance, in one place for exactly the 16; with 83 for
    14; with 90, all that is free are the watermarks. With late binding it waits at the scheduler,
    whose line is one more."""
    held_tokens = 16 * num_held_blocks
    config = configuration(
        replace(INFAAS_PP, binds_late=binds_late),
        num_instances=2,
        engine=EmulatedEngineConfig(num_blocks=100, watermark=0.1),
        step_time=steps_of(0.1),
        fragmentation_interval_s=0.35,
        is_fast=is_fast,
    )
    held = [(0.001 * k, held_tokens - 15, 15) for k in range(2)]
    _, cluster = simulate(requests(*held, (0.25, 256, 1)), config)
    assert cluster.fragmentation_time_s[0] == 0.35
    assert cluster.total_tokens[0] == 2 * 100 * 16
    if num_blocking:
        assert cluster.free_tokens[0] == 2 * (100 - num_held_blocks) * 16
        assert cluster.room_tokens[0] == 2 * (90 - num_held_blocks) * 16
    assert cluster.blocked_demands_tokens[0] == (256,) * num_blocking
    assert cluster.fragmentation_proportion[0] == num_fragmented_blocks / 200


def test_the_imbalance_is_the_largest_memory_in_use_over_the_mean(is_fast: bool) -> None:
    """One of two instances has 10 blocks in use and the other 30: 30 / 20. Later both are empty."""
    config = configuration(
        INFAAS_PP,
        num_instances=2,
        engine=EmulatedEngineConfig(num_blocks=100),
        step_time=steps_of(0.1),
        fragmentation_interval_s=0.5,
        is_fast=is_fast,
    )
    trace = requests((0.0, 145, 8), (0.001, 465, 8), (3.0, 16, 1))
    _, cluster = simulate(trace, config)
    assert cluster.imbalance[0] == 1.5
    assert np.isnan(cluster.imbalance[3])
