"""The compiled engines give the same records as the plain ones, bit for bit."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sterna.config import (
    DispatchRule,
    Dynamo,
    LlmD,
    MigrationConfig,
    PolicyConfig,
    QueueDemand,
    ScalingConfig,
    Soonest,
    Victim,
)
from sterna.engine.emulated.config import EmulatedEngineConfig, Preemption, StepMode
from sterna.engine.emulated.durations import CopyTime, StepTime
from sterna.policy.own import Policy
from sterna.policy.presets import INFAAS_PP, LLUMNIX, LLUMNIX_BASE, ROUND_ROBIN, STERNA
from sterna.policy.virtual_usage import Candidate, NewRequest
from sterna.simulator import Report, SimulationConfig, simulate
from sterna.simulator.fast_tables import VICTIMS
from sterna.types import InstanceId, InstanceView, RequestId, RequestView
from sterna.workload.trace import Trace
from tests.simulator.builders import (
    COPY_TIME,
    ENGINE,
    STEP_TIME,
    Result,
    configuration,
    crowded_trace,
    differences,
    trace,
    with_prefixes,
    with_sessions,
)
from tests.simulator.checked_simulation import simulate_checked

ARTIFACT = replace(
    LLUMNIX,
    queue_demand=QueueDemand.ALL,
    batch_counts_queue=True,
    counts_dispatched=False,
    pairs_only_to_gain=False,
    preempted_make_source=True,
    migrates_continuously=False,
    victim=Victim.LAST_STARTED,
)
CHUNKED = replace(ENGINE, step_mode=StepMode.CHUNKED, keeps_block_free=False)
CACHING = replace(CHUNKED, preemption=Preemption.LAST_ADMITTED, prefix_caching=True)
SCALING = ScalingConfig(
    max_instances=6, low_freeness_steps=20.0, high_freeness_steps=120.0, period_s=0.6
)

LOCKSTEP = StepTime(0.0, 0.0, 0.0, 0.1, 0.1, 0.0, 0.0)
"""Every step takes as long, so that engines that begin together end together."""


class Youngest(Policy):
    """Moves those first that have generated least, and remembers how often it was asked."""

    base = "llumnix"
    num_asked = 0

    def dispatch(self, request: NewRequest, instances: Sequence[Candidate]) -> InstanceId:
        self.num_asked += 1
        return sorted(instances, key=lambda each: each.tie_break)[self.num_asked % 2].instance_id

    def victims(self, instance: InstanceView) -> list[RequestView]:
        movable = [each for each in instance.running if each.immovable is None]
        return sorted(movable, key=lambda each: (each.num_output_tokens, each.request_id))


class Staying(Policy):
    """Remembers the requests that it has seen on its instance, and moves none that it sees for the
    first time."""

    base = "llumnix"
    seen_by: ClassVar[dict[int, set[InstanceId]]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.known: set[RequestId] = set()

    def victims(self, instance: InstanceView) -> list[RequestView]:
        self.seen_by.setdefault(id(self), set()).add(instance.instance_id)
        movable = [each for each in instance.running if each.immovable is None]
        victims = [each for each in movable if each.request_id in self.known]
        self.known.update(each.request_id for each in instance.running)
        return victims


@dataclass(frozen=True)
class Case:
    name: str
    config: SimulationConfig
    trace: Trace
    preempts: bool = True
    migrates: bool = True


def burst_trace() -> Trace:
    """Requests of the same two lengths come eight at a time."""
    arrival_s = np.repeat(np.arange(12) * 0.4, 8)
    lengths = np.tile([64, 96], 48)
    return trace(arrival_s, lengths, 128 - lengths // 2, np.tile([0, 0, 0, 1], 24))


CASES = [
    Case("llumnix", configuration(), crowded_trace()),
    Case("llumnix, stale", configuration(report=Report.STALE), crowded_trace(seed=2)),
    Case(
        "the artifact's rules",
        configuration(ARTIFACT, report=Report.STALE),
        crowded_trace(seed=3),
    ),
    Case("infaas++", configuration(INFAAS_PP), crowded_trace(seed=4), migrates=False),
    Case(
        "round robin",
        configuration(ROUND_ROBIN, report=Report.STALE, fragmentation_interval_s=None),
        crowded_trace(seed=5),
        migrates=False,
    ),
    Case("priorities", configuration(), crowded_trace(seed=6, fraction_high=0.2)),
    Case(
        "priorities, unseen",
        configuration(LLUMNIX_BASE, report=Report.STALE),
        crowded_trace(seed=7, fraction_high=0.2),
    ),
    Case(
        "chunked",
        configuration(
            replace(LLUMNIX, num_concurrent_migrations=3, victim=Victim.LONGEST),
            engine=replace(CHUNKED, max_num_batched_tokens=64),
        ),
        crowded_trace(seed=8, fraction_high=0.1),
    ),
    Case(
        "chunked, last admitted",
        configuration(
            report=Report.STALE,
            engine=replace(
                CHUNKED,
                preemption=Preemption.LAST_ADMITTED,
                max_num_batched_tokens=20,
                watermark=0.05,
            ),
        ),
        crowded_trace(seed=9),
    ),
    Case(
        "prefix cache",
        configuration(engine=replace(CACHING, max_num_batched_tokens=64)),
        with_prefixes(crowded_trace(seed=14, max_input=240)),
    ),
    Case(
        "prefix cache, stale, large steps",
        configuration(
            replace(LLUMNIX, num_concurrent_migrations=3),
            report=Report.STALE,
            engine=replace(CACHING, watermark=0.05),
        ),
        with_prefixes(crowded_trace(seed=15, fraction_high=0.1)),
    ),
    Case(
        "dispatch by prefixes, stale",
        configuration(
            replace(LLUMNIX, dispatch=Dynamo()),
            report=Report.STALE,
            engine=replace(CACHING, max_num_batched_tokens=64),
        ),
        with_prefixes(crowded_trace(seed=18, max_input=240)),
    ),
    Case(
        "balance",
        configuration(replace(STERNA, balance_after_tokens=8)),
        crowded_trace(seed=23, rate=20.0, fraction_high=0.1),
    ),
    Case(
        "balance of the loads that are expected",
        configuration(replace(STERNA, balance_after_tokens=4, balance_horizon_steps=20)),
        crowded_trace(seed=24, rate=20.0, fraction_high=0.1),
    ),
    Case(
        "late binding",
        configuration(replace(LLUMNIX, binds_late=True, ageing_tokens_per_s=100.0)),
        crowded_trace(seed=20, fraction_high=0.1),
    ),
    Case(
        "late binding, limited, by prefixes, sessions",
        configuration(
            replace(LLUMNIX, dispatch=Soonest(), binds_late=True, hold_limit_s=0.3),
            engine=replace(CACHING, max_num_batched_tokens=64),
        ),
        with_sessions(with_prefixes(crowded_trace(seed=21, rate=40.0))),
    ),
    Case(
        "waits for prefixes, without rounds",
        configuration(
            replace(
                STERNA,
                dispatch=Soonest(),
                migrates=False,
                ageing_tokens_per_s=30.0,
                crowded_share=0.0,
                growth_steps=0.0,
            ),
            engine=replace(CACHING, max_num_batched_tokens=64),
        ),
        with_sessions(with_prefixes(crowded_trace(seed=25, rate=40.0))),
        migrates=False,
    ),
    Case(
        "prefixes of sessions copied ahead",
        configuration(
            replace(
                LLUMNIX,
                dispatch=Soonest(copy_token_cost=0.1, copy_start_cost=4.0, backlog_tokens=32.0),
                binds_late=True,
                reserves_after_s=0.5,
                num_session_copies=2,
            ),
            engine=replace(CACHING, max_num_batched_tokens=64),
        ),
        with_sessions(with_prefixes(crowded_trace(seed=23, rate=40.0))),
    ),
    Case(
        "late binding, scaling with delays",
        configuration(
            replace(LLUMNIX, binds_late=True, hold_limit_s=2.0),
            scaling=SCALING,
            start_delay_s=1.0,
            dispatch_delay_s=0.05,
            num_instances=2,
        ),
        crowded_trace(seed=22, num_requests=150),
    ),
    Case(
        "prefix cache, scaling",
        configuration(scaling=SCALING, start_delay_s=1.0, num_instances=2, engine=CACHING),
        with_prefixes(crowded_trace(seed=16, num_requests=150, max_input=240)),
    ),
    Case(
        "sessions",
        configuration(),
        with_sessions(crowded_trace(seed=17, rate=40.0)),
    ),
    Case(
        "sessions, prefix cache, scaling",
        configuration(
            scaling=SCALING,
            num_instances=2,
            report=Report.STALE,
            engine=replace(CACHING, max_num_batched_tokens=64),
        ),
        with_sessions(with_prefixes(crowded_trace(seed=18, rate=40.0, fraction_high=0.1))),
    ),
    Case(
        "last admitted, few slots",
        configuration(
            replace(LLUMNIX, num_concurrent_migrations=2),
            engine=replace(ENGINE, preemption=Preemption.LAST_ADMITTED, max_num_seqs=7),
        ),
        crowded_trace(seed=10),
    ),
    Case(
        "least urgent, chunked",
        configuration(
            report=Report.STALE,
            engine=replace(
                CHUNKED,
                preemption=Preemption.LEAST_URGENT,
                max_num_batched_tokens=20,
                keeps_block_free=False,
            ),
        ),
        crowded_trace(seed=26, fraction_high=0.3),
    ),
    Case(
        "least urgent, prefix cache, late binding",
        configuration(
            replace(LLUMNIX, binds_late=True, ageing_tokens_per_s=100.0),
            engine=replace(
                CACHING,
                preemption=Preemption.LEAST_URGENT,
                max_num_batched_tokens=64,
                keeps_block_free=False,
                watermark=0.0,
            ),
        ),
        with_sessions(with_prefixes(crowded_trace(seed=27, rate=40.0, fraction_high=0.3))),
    ),
    Case(
        "least urgent, whole prompts",
        configuration(
            replace(LLUMNIX, num_concurrent_migrations=2),
            engine=replace(ENGINE, preemption=Preemption.LEAST_URGENT),
        ),
        crowded_trace(seed=28, fraction_high=0.3),
    ),
    Case(
        "a custom class",
        configuration(Youngest().as_config(), engine=replace(CHUNKED, max_num_batched_tokens=64)),
        crowded_trace(seed=23, fraction_high=0.1),
    ),
    Case(
        "late binding with full batches, stale",
        configuration(
            replace(LLUMNIX, binds_late=True),
            report=Report.STALE,
            engine=replace(ENGINE, max_num_seqs=5),
        ),
        crowded_trace(seed=24),
        preempts=False,
    ),
    Case(
        "scaling with delays",
        configuration(scaling=SCALING, start_delay_s=1.0, dispatch_delay_s=0.05, num_instances=2),
        crowded_trace(seed=11, num_requests=150),
    ),
    Case(
        "scaling, chunked, stale",
        configuration(
            ARTIFACT,
            scaling=SCALING,
            report=Report.STALE,
            engine=CHUNKED,
            start_delay_s=0.5,
            num_instances=6,
        ),
        crowded_trace(seed=12, rate=6.0),
        preempts=False,
    ),
    Case(
        "in lockstep",
        configuration(step_time=LOCKSTEP, message_delay_s=0.1, copy_time=CopyTime(0.05, 0.05)),
        burst_trace(),
    ),
    Case(
        "in lockstep, scaling",
        configuration(
            step_time=LOCKSTEP,
            scaling=SCALING,
            message_delay_s=0.0,
            copy_time=CopyTime(0.05, 0.05),
        ),
        burst_trace(),
    ),
]


def both(trace: Trace, config: SimulationConfig) -> tuple[Result, Result]:
    """The plain result, whose checks have passed after every event, and the compiled one."""
    return (
        simulate_checked(trace, config),
        simulate(trace, replace(config, is_fast=True)),
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_compiled_engines_give_the_same_bits(case: Case) -> None:
    plain, fast = both(case.trace, case.config)
    assert differences(plain, fast) == []
    # Else there would be little to compare.
    records, cluster = plain
    assert (records.num_preemptions.sum() >= 10) or not case.preempts
    assert (cluster.migrations_committed >= 10) == case.migrates
    assert (len(cluster.instances_num) > 3) == (case.config.scaling is not None)
    if case.config.engine.prefix_caching:
        assert records.cached_tokens is not None
        assert records.cached_tokens.sum() > 300


@pytest.mark.parametrize("is_fast", [False, True])
def test_each_instance_has_an_object_of_a_custom_class(is_fast: bool) -> None:
    """The one that tells what would move next is the one that decides what does."""
    Staying.seen_by.clear()
    config = configuration(Staying().as_config(), is_fast=is_fast)
    _, cluster = simulate(crowded_trace(seed=23), config)
    assert cluster.migrations_committed is not None
    assert cluster.migrations_committed > 0
    assert sorted(map(list, Staying.seen_by.values())) == [[f"i{row:05d}"] for row in range(4)]


# ------------------------------------------------------------------------ any configuration


def with_prefix_cache(config: EmulatedEngineConfig) -> EmulatedEngineConfig:
    """The engine by vLLM 1's rules, with a prefix cache."""
    preemption = config.preemption
    if preemption is Preemption.LATEST_ARRIVED:
        preemption = Preemption.LAST_ADMITTED
    return replace(config, step_mode=StepMode.CHUNKED, preemption=preemption, prefix_caching=True)


plain_engines = st.builds(
    EmulatedEngineConfig,
    num_blocks=st.integers(12, 40),
    watermark=st.sampled_from([0.0, 0.01, 0.1]),
    max_num_seqs=st.sampled_from([2, 5, 64]),
    max_num_batched_tokens=st.sampled_from([1, 7, 48, 4096]),
    step_mode=st.sampled_from(StepMode),
    preemption=st.sampled_from(Preemption),
    keeps_block_free=st.booleans(),
)
engines = plain_engines | plain_engines.map(with_prefix_cache)
policies = st.builds(
    PolicyConfig,
    name=st.just("any"),
    dispatch=st.sampled_from(
        [
            DispatchRule.FREEST,
            DispatchRule.FREEST,
            DispatchRule.ROUND_ROBIN,
            Dynamo(),
            LlmD(saturation_tokens=100.0),
            Soonest(),
            Soonest(copy_token_cost=0.01, copy_start_cost=1.0),
        ]
    ),
    migrates=st.sampled_from([True, True, True, False]),
    has_priorities=st.booleans(),
    queue_demand=st.sampled_from(QueueDemand),
    victim=st.sampled_from(Victim),
    source_freeness_steps=st.sampled_from([0.0, 20.0, 100.0]),
    destination_freeness_steps=st.sampled_from([100.0, 200.0]),
    round_interval_s=st.sampled_from([0.05, 0.2, 1.0]),
    num_concurrent_migrations=st.integers(1, 3),
    target_load_tokens=st.just({1: 160}),
    shares_headroom=st.booleans(),
    counts_dispatched=st.booleans(),
    batch_counts_queue=st.booleans(),
    divides_overload=st.booleans(),
    pairs_only_to_gain=st.booleans(),
    preempted_make_source=st.booleans(),
    migrates_continuously=st.booleans(),
    binds_late=st.booleans(),
    ageing_tokens_per_s=st.sampled_from([0.0, 100.0]),
    growth_steps=st.sampled_from([0.0, 2.5, 48.0]),
    crowded_share=st.sampled_from([0.0, 0.02, 0.2]),
    hold_limit_s=st.sampled_from([None, 0.1, 2.0]),
    awaits_prefix=st.booleans(),
    holds_by_uncached=st.booleans(),
    balance_ratio=st.sampled_from([None, 1.0, 1.5]),
    balance_after_tokens=st.sampled_from([0, 8, 40]),
    balance_horizon_steps=st.sampled_from([None, None, 1, 30]),
)
scalings = st.builds(
    ScalingConfig,
    max_instances=st.integers(1, 5),
    low_freeness_steps=st.sampled_from([0.0, 30.0]),
    high_freeness_steps=st.sampled_from([60.0, 150.0]),
    period_s=st.sampled_from([0.2, 1.0]),
)
configurations = st.builds(
    SimulationConfig,
    engine=engines,
    step_time=st.sampled_from([STEP_TIME, LOCKSTEP]),
    copy_time=st.sampled_from([COPY_TIME, CopyTime(0.1, 0.1), CopyTime(1e-6, 1e-6)]),
    policy=policies,
    num_instances=st.integers(1, 4),
    report=st.sampled_from(Report),
    migration=st.builds(
        MigrationConfig,
        last_stage_max_blocks=st.integers(1, 3),
        max_stages=st.integers(2, 4),
        lease_s=st.sampled_from([0.2, 10.0]),
    ),
    scaling=st.none() | scalings,
    start_delay_s=st.sampled_from([0.0, 0.1, 0.7]),
    dispatch_delay_s=st.sampled_from([0.0, 0.0, 0.1, 0.3]),
    message_delay_s=st.sampled_from([0.0, 0.0015, 0.1]),
    retry_backoff_s=st.sampled_from([0.0, 0.5]),
    fragmentation_interval_s=st.sampled_from([None, 0.1, 1.0]),
)


@st.composite
def small_runs(draw: st.DrawFn) -> tuple[Trace, SimulationConfig]:
    """Requests that an instance can serve; many of them arrive together."""
    config = draw(configurations)
    num_requests = draw(st.integers(1, 40))
    num_ticks = draw(st.sampled_from([1, 10, 40]))
    fraction_high = draw(st.sampled_from([0.0, 0.3]))
    # Lists drawn one by one would be short.
    rng = np.random.default_rng(draw(st.integers(0, 1_000_000)))
    most = config.engine.total_tokens
    inputs = rng.integers(1, most // draw(st.integers(1, 6)), num_requests)
    outputs = np.minimum(rng.integers(1, 80, num_requests), most - inputs)
    arrival_s = np.sort(rng.integers(0, num_ticks, num_requests)) * 0.1
    drawn = trace(arrival_s, inputs, outputs, rng.random(num_requests) < fraction_high)
    if config.engine.prefix_caching:
        drawn = with_prefixes(drawn, seed=int(rng.integers(1000)))
    return with_sessions(drawn, seed=int(rng.integers(1000))) if draw(
        st.booleans()
    ) else drawn, config


def check_any(small_run: tuple[Trace, SimulationConfig]) -> None:
    plain, fast = both(*small_run)
    assert differences(plain, fast) == []


def test_a_victim_rule_that_is_not_compiled_is_simulated_on_the_plain_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rule that is added to the policy alone works; it is only slower."""
    config = configuration(replace(LLUMNIX, victim=Victim.LONGEST))
    _, fast = both(crowded_trace(seed=13), config)
    monkeypatch.delitem(VICTIMS, Victim.LONGEST)
    assert differences(simulate(crowded_trace(seed=13), config), fast) == []


def test_an_instance_ends_while_a_request_is_held() -> None:
    """By hand: r0 fills i0, and i1, which is emptied since the cluster is free enough, ends with
    r1. Meanwhile r2 waits for memory, of i0 or of another instance."""
    policy = replace(LLUMNIX, migrates=False, binds_late=True)
    scaling = ScalingConfig(
        max_instances=2,
        low_freeness_steps=0.0,
        high_freeness_steps=1.0,
        period_s=0.1,
        terminates_newest=True,
    )
    config = configuration(policy, scaling=scaling, num_instances=2)
    large = config.engine.total_tokens - 100
    times_s, lengths = np.array([0.0, 0.0, 1.0]), np.array([large, 16, large])
    held = trace(times_s, lengths, np.array([90, 60, 4]), np.zeros(3))
    plain, fast = both(held, config)
    assert differences(plain, fast) == []
    records, cluster = plain
    assert cluster.instances_num[-1] == 1
    assert records.end_s[1] < min(records.end_s[0], records.first_token_s[2])


@pytest.mark.parametrize("seed", [295, 375])
def test_an_instance_ends_at_the_very_moment_at_which_others_end_their_steps(seed: int) -> None:
    """Their llumlets learn of it when all steps of that moment have ended, in either engine."""
    rng = np.random.default_rng(seed)
    arrival_s = np.round(np.sort(rng.uniform(0, 4, 12)), 1)
    inputs, outputs = rng.choice([16, 64, 96, 200], 12), rng.choice([8, 20, 60, 100], 12)
    scaling = replace(SCALING, max_instances=4, low_freeness_steps=10.0, high_freeness_steps=100.0)
    config = configuration(
        scaling=replace(scaling, period_s=0.4),
        step_time=LOCKSTEP,
        message_delay_s=0.1,
        copy_time=CopyTime(0.05, 0.05),
    )
    plain, fast = both(trace(arrival_s, inputs, outputs, [0] * 12), config)
    assert plain[1].instances_num.min() < 4
    assert plain[1].migrations_committed > 0
    assert differences(plain, fast) == []


@given(small_runs())
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_compiled_engines_give_the_same_bits_in_any_small_run(
    small_run: tuple[Trace, SimulationConfig],
) -> None:
    check_any(small_run)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@given(small_runs())
@settings(max_examples=2_000, deadline=None, suppress_health_check=list(HealthCheck))
def test_compiled_engines_give_the_same_bits_in_many_small_runs(
    small_run: tuple[Trace, SimulationConfig],
) -> None:
    check_any(small_run)
