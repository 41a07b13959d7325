"""The paper's runs as simulations: its parameters, and the rules of its published artifact.

The paper leaves much open that its runs had to settle. Here it is settled as the artifact does
wherever that is known. Every such choice is an argument of `paper_policy` or of `paper_config`,
with its default; docs/internals/fidelity.md says what was fitted to what, and how near the figures
this comes.
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
"""LLaMA-7B on an A10 as the paper's cluster ran it: the engine's measured time a step, and what
its CPUs added to that. The three added constants are fitted to Llumnix's mean decode latencies at
the 25 generated points of Figure 11, and to nothing else: that column is no evidence of anything.
"""

COPY_TIME = CopyTime(block_s=A10_LLAMA_7B.copy_time.block_s, stage_s=5e-3)
"""A block takes the measured time. Of the 15 ms that a measured copy of no blocks would take, the
handshake makes up about 10, which the simulated messages and waits for steps take here."""

PAPER_SCALING = ScalingConfig(
    min_instances=1,
    max_instances=16,
    low_freeness_steps=160.0,
    high_freeness_steps=960.0,
    period_s=10.0,
    is_sustained=False,
    terminates_newest=True,
)
"""Section 6.5: [10, 60] blocks a request, of 16 decode steps each. The artifact looks at the mean
once a period, and terminates the instance that joined last."""

PAPER_SCALING_BEGINS_S = 100.0
"""Until then the artifact leaves the instances alone."""

_FRAGMENTED_TRACES = ("m-m", "s-l")
"""Those with migration thresholds of 10 blocks a request in the artifact; else it has 3."""


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
    """The policy by the artifact's rules. INFaaS++ has those of dispatching only, round robin none.

    Pairs are made whether they narrow a gap or not, instances where preempted requests queue are
    sources, and one request moves a round.

    Args:
        queue_demand: the artifact counts every queuing request; Algorithm 1 the head of the line.
        batch_counts_queue: the artifact dispatches by a batch that holds the queue.
        counts_dispatched: the artifact forgets what it dispatched since the last report.
        divides_overload: the paper's formula divides a negative freeness, too. The default is
            Sterna's: no point tells the two apart beyond its own noise, and at overload every
            request would go to the worst instance.
        victim: the artifact's; Section 4.4.3 says the shortest.
        threshold_steps: below it an instance is a source, above it a destination; by default the
            artifact's 10 blocks a request for M-M and S-L, else 3.
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
    """A run of the paper's cluster with this policy on this trace.

    Args:
        rules: what the policy decides by; `paper_policy` with its defaults when None.
        num_instances: Section 6.1's 16.
        report: the artifact notes an instance's state as a step begins and reports it when the
            step has ended.
        retry_backoff_s: the artifact tries a request again in the next round.
        fragmentation_interval_s: between samples; None: none are taken.
        changes: other fields of `SimulationConfig` that are to differ: `step_time` from
            SERVING_STEP_TIME, `copy_time` from COPY_TIME, and so on.

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
    """A run of the paper's cluster with a policy as it ships: by its own rules, with live load
    reports, and a while before a request whose migration was given up is tried again.

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
