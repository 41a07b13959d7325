"""The paper's runs as simulations: its parameters, and the rules of its published artifact.

The paper leaves many choices of its runs open. This module chooses as the artifact does wherever
that is known. Every such choice is an argument of `paper_policy` or of `paper_config` with a
default; docs/internals/fidelity.md has the fits, and the distance to the figures.
"""

from dataclasses import replace
from typing import Any

from sterna.config import (
    DispatchRule,
    LlumletConfig,
    PolicyConfig,
    QueueDemand,
    ScalingConfig,
    Victim,
)
from sterna.engine.emulated.config import EmulatedEngineConfig
from sterna.engine.emulated.durations import CopyTime
from sterna.engine.emulated.profiles import A10_LLAMA_7B, with_serving
from sterna.errors import ConfigurationError
from sterna.policy.presets import preset
from sterna.simulator.config import Report, SimulationConfig

PAPER_POLICIES = ("llumnix", "llumnix-base", "infaas++", "round-robin")

REAL_TRACES = ("sharegpt", "burstgpt")

NUM_BLOCKS = A10_LLAMA_7B.engine.num_blocks
"""The KV cache of LLaMA-7B on an A10, in blocks of 16 tokens: the artifact's 792. The paper's
text says 13,616 tokens, which is 851."""

SERVING_STEP_TIME = with_serving(
    A10_LLAMA_7B.step_time, step_s=1.7e-3, request_s=4.6e-4, token_s=1.95e-7
)
"""LLaMA-7B on an A10 as the paper's cluster ran it: the engine's measured time per step, and the
time that its CPUs added. The three added constants are fitted to Llumnix's mean decode latencies at
the 25 generated points of Figure 11 only, so that this column is no evidence for the simulator.
"""

COPY_TIME = CopyTime(block_s=A10_LLAMA_7B.copy_time.block_s, stage_s=5e-3)
"""The time per block is the measured one. A measured copy of no blocks would take 15 ms, of which
the handshake is about 10: the simulated messages and waits for steps take this time here."""

PAPER_SCALING = ScalingConfig(
    min_instances=1,
    max_instances=16,
    low_freeness_steps=160.0,
    high_freeness_steps=960.0,
    period_s=10.0,
    is_sustained=False,
    terminates_newest=True,
)
"""Section 6.5: [10, 60] blocks per request, of 16 decode steps each. The artifact looks at the mean
once per period, and terminates the instance that joined last."""

PAPER_SCALING_BEGINS_S = 100.0
"""Time before which the artifact does not change the number of instances."""

_FRAGMENTED_TRACES = ("m-m", "s-l")
"""Traces with migration thresholds of 10 blocks per request in the artifact; others have 3."""


def paper_policy(
    name: str,
    trace: str,
    *,
    queue_demand: QueueDemand = QueueDemand.ALL,
    batch_counts_queue: bool = True,
    counts_dispatched: bool = False,
    divides_overload: bool = False,
    victim: Victim = Victim.LAST_STARTED,
    threshold_steps: float | None = None,
    round_interval_s: float = 0.2,
) -> PolicyConfig:
    """The policy with the artifact's rules: for INFaaS++ only those of dispatching, for round robin
    none.

    Pairs are made even if they do not narrow a gap, instances where preempted requests queue are
    sources, and one request moves per round.

    Args:
        queue_demand: the artifact counts every queuing request; Algorithm 1 the head of the queue.
        batch_counts_queue: the artifact counts the queue as part of the batch when it dispatches.
        counts_dispatched: the artifact ignores requests dispatched since the last report.
        divides_overload: the paper's formula divides a negative freeness, too. The default is
            Sterna's: no point differs between the two by more than its noise, and at overload
            every request would go to the worst instance.
        victim: the artifact's rule; Section 4.4.3 has the shortest.
        threshold_steps: below it an instance is a source, above it a destination; by default the
            artifact's 10 blocks per request for M-M and S-L, else 3.
        round_interval_s: the artifact's about four decode steps.

    Raises:
        ConfigurationError: the paper has no such policy.
    """
    if name not in PAPER_POLICIES:
        raise ConfigurationError(f"policy must be one of {', '.join(PAPER_POLICIES)}, not {name!r}")
    policy = preset(name)
    if policy.dispatch is DispatchRule.ROUND_ROBIN:
        return policy
    policy = replace(
        policy,
        queue_demand=queue_demand,
        batch_counts_queue=batch_counts_queue,
        counts_dispatched=counts_dispatched,
        divides_overload=divides_overload,
    )
    if not policy.migrates:
        return policy
    if threshold_steps is None:
        threshold_steps = 160.0 if trace.lower() in _FRAGMENTED_TRACES else 48.0
    return replace(
        policy,
        victim=victim,
        source_freeness_steps=threshold_steps,
        destination_freeness_steps=threshold_steps,
        round_interval_s=round_interval_s,
        pairs_only_to_gain=False,
        preempted_make_source=True,
        migrates_continuously=False,
    )


def paper_config(
    policy: str,
    trace: str,
    *,
    rules: PolicyConfig | None = None,
    num_instances: int = 16,
    report: Report = Report.STALE,
    retry_backoff_s: float = 0.0,
    fragmentation_interval_s: float | None = None,
    **changes: Any,
) -> SimulationConfig:
    """Configuration of a run of the paper's cluster with this policy on this trace.

    Args:
        rules: the rules of the policy; `paper_policy` with its defaults when None.
        num_instances: Section 6.1's 16.
        report: the artifact notes an instance's state as a step begins and reports it when the
            step has ended.
        retry_backoff_s: the artifact tries a request again in the next round.
        fragmentation_interval_s: time between samples; None: no samples.
        changes: other fields of `SimulationConfig`, such as `step_time` instead of
            SERVING_STEP_TIME or `copy_time` instead of COPY_TIME.

    Raises:
        ConfigurationError: the paper has no such policy.
    """
    batched_tokens = 12_800 if trace.lower() in REAL_TRACES else 12_000
    config = SimulationConfig(
        engine=EmulatedEngineConfig(num_blocks=NUM_BLOCKS, max_num_batched_tokens=batched_tokens),
        step_time=SERVING_STEP_TIME,
        copy_time=COPY_TIME,
        policy=paper_policy(policy, trace) if rules is None else rules,
        num_instances=num_instances,
        report=report,
        retry_backoff_s=retry_backoff_s,
        fragmentation_interval_s=fragmentation_interval_s,
    )
    return replace(config, **changes)


def shipped_config(
    policy: PolicyConfig, trace: str, *, num_instances: int = 16, **changes: Any
) -> SimulationConfig:
    """Configuration of a run of the paper's cluster with a policy as it ships: with its own rules,
    live load reports, and a back-off before a request whose migration aborted is tried again.

    Args:
        changes: as in `paper_config`.
    """
    return paper_config(
        policy="llumnix",
        trace=trace,
        rules=policy,
        num_instances=num_instances,
        report=Report.LIVE,
        retry_backoff_s=LlumletConfig(policy).retry_backoff_s,
        **changes,
    )
