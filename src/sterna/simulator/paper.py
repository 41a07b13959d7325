"""The paper's runs as simulations: its parameters, and the rules of its published artifact. Pure.

The paper leaves much open that its runs had to settle. Here it is settled as the artifact does
wherever that is known. Every such choice is an argument of `paper_policy` or of `paper_config`,
with its default; docs/fidelity.md says what was fitted to what, and how near the figures this
comes.
"""

from dataclasses import replace
from typing import Any

from sterna.config import DispatchRule, PolicyConfig, QueueDemand, Victim
from sterna.engine.emulated.config import EmulatedEngineConfig
from sterna.engine.emulated.copy_time import CopyTime
from sterna.engine.emulated.step_time import StepTime
from sterna.errors import ConfigurationError
from sterna.policy.presets import preset
from sterna.simulator.config import Report, SimulationConfig

PAPER_SEED = 0xCADE
"""Of the artifact's lengths and arrivals."""

PAPER_POLICIES = ("llumnix", "llumnix-base", "infaas++", "round-robin")

REAL_TRACES = ("sharegpt", "burstgpt")

NUM_BLOCKS = 792
"""The KV cache of LLaMA-7B on an A10, in blocks of 16 tokens (the artifact's value)."""

SERVING_STEP_TIME = StepTime(
    prefill_s=5e-3,
    prefill_token_s=2.09e-4,
    prefill_pair_s=4.2e-9,
    prefill_min_s=38e-3,
    decode_s=33.4e-3,
    decode_request_s=7.8e-4,
    decode_token_s=1.5e-6,
)
"""LLaMA-7B on an A10 as a client sees it: the engine's time a step with what serving adds to each
request."""

COPY_TIME = CopyTime(block_s=3.36e-3, stage_s=5e-3)

_FRAGMENTED_TRACES = ("m-m", "s-l")
"""Those with migration thresholds of 10 blocks a request in the artifact; else it has 3."""


def paper_policy(name: str, trace: str) -> PolicyConfig:
    """The policy by the artifact's rules.

    Raises:
        ConfigurationError: the paper has no such policy.
    """
    if name not in PAPER_POLICIES:
        raise ConfigurationError(f"policy must be one of {', '.join(PAPER_POLICIES)}, not {name!r}")
    policy = preset(name)
    if policy.dispatch is DispatchRule.ROUND_ROBIN:
        return policy
    policy = replace(
        policy, queue_demand=QueueDemand.ALL, batch_counts_queue=True, counts_dispatched=False
    )
    if not policy.migrates:
        return policy
    threshold_steps = 160.0 if trace.lower() in _FRAGMENTED_TRACES else 48.0
    return replace(
        policy,
        victim=Victim.LAST_STARTED,
        source_freeness_steps=threshold_steps,
        destination_freeness_steps=threshold_steps,
        pairs_only_to_gain=False,
        preempted_make_source=True,
        migrates_continuously=False,
    )


def paper_config(
    policy: str, trace: str, *, num_instances: int = 16, **changes: Any
) -> SimulationConfig:
    """A run of the paper's cluster with this policy on this trace.

    Args:
        changes: fields of `SimulationConfig` that differ from the paper's.

    Raises:
        ConfigurationError: the paper has no such policy.
    """
    batched_tokens = 12_800 if trace.lower() in REAL_TRACES else 12_000
    config = SimulationConfig(
        engine=EmulatedEngineConfig(num_blocks=NUM_BLOCKS, max_num_batched_tokens=batched_tokens),
        step_time=SERVING_STEP_TIME,
        copy_time=COPY_TIME,
        policy=paper_policy(policy, trace),
        num_instances=num_instances,
        report=Report.STALE,
        fragmentation_interval_s=None,
    )
    return replace(config, **changes)
