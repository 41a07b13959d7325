"""The policies by name. Pure."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from sterna.config import (
    DispatchRule,
    Dynamo,
    LlmD,
    PolicyConfig,
    ProductionStack,
    QueueDemand,
    Sglang,
    Soonest,
)
from sterna.errors import ConfigurationError

LLUMNIX = PolicyConfig(name="llumnix")
"""The paper's policy: virtual usage, freeness, migration, priorities (Section 4.4)."""

LLUMNIX_BASE = replace(LLUMNIX, name="llumnix-base", has_priorities=False)
"""Priority-agnostic, all the other features included (Section 6.1, Llumnix-base)."""

INFAAS_PP = PolicyConfig(
    name="infaas++", has_priorities=False, migrates=False, queue_demand=QueueDemand.ALL
)
"""Load-balancing dispatch by memory load, including the demand of all queuing requests, and no
migration (Section 6.1, INFaaS++). It dispatches by freeness too, as in the paper's runs, so that
its difference from Llumnix is due to migration."""

ROUND_ROBIN = PolicyConfig(
    name="round-robin",
    has_priorities=False,
    migrates=False,
    dispatch=DispatchRule.ROUND_ROBIN,
)
"""Spreads requests evenly, blind to load (Section 6.1, round-robin dispatching)."""

POWER_OF_TWO = replace(ROUND_ROBIN, name="power-of-two", dispatch=DispatchRule.POWER_OF_TWO)
"""Balances by the number of requests, with a look at two instances only (Mitzenmacher, 2001)."""

SESSION_HASH = replace(ROUND_ROBIN, name="session-hash", dispatch=DispatchRule.SESSION_HASH)
"""Sends every session to one instance, whatever its load."""

VLLM_DP = replace(ROUND_ROBIN, name="vllm-dp", dispatch=DispatchRule.VLLM_DP)
"""The balance of vLLM's own `--data-parallel-size`."""

LLM_D = replace(ROUND_ROBIN, name="llm-d", dispatch=LlmD())
"""Sends requests where most of their prompt is cached until these instances are saturated."""

LLM_D_TUNED = replace(
    LLM_D, name="llm-d-tuned", dispatch=LlmD(min_share=0.5, saturation_tokens=2_000.0)
)
"""The same rule with the parameters that `sterna reproduce policies --search` chose for it."""

DYNAMO = replace(ROUND_ROBIN, name="dynamo", dispatch=Dynamo())
"""Weighs what is to be computed against the memory in use, as NVIDIA's router does."""

DYNAMO_TUNED = replace(
    DYNAMO, name="dynamo-tuned", dispatch=Dynamo(prefill_scale=16.0, request_tokens=32_000.0)
)
"""The same rule with the parameters that the search chose for it."""

SGLANG = replace(ROUND_ROBIN, name="sglang", dispatch=Sglang())
"""Goes by prefix caches until the numbers of requests differ."""

SGLANG_TUNED = replace(
    SGLANG, name="sglang-tuned", dispatch=Sglang(min_share=0.7, max_difference=8)
)
"""The same rule with the parameters that the search chose for it."""

PRODUCTION_STACK = replace(ROUND_ROBIN, name="production-stack", dispatch=ProductionStack())
"""Weighs the cached share of a prompt against the number of requests."""

STERNA = replace(
    LLUMNIX,
    name="sterna",
    dispatch=Soonest(copy_token_cost=0.6),
    binds_late=True,
    reserves_after_s=300.0,
    growth_steps=LLUMNIX.source_freeness_steps,
    crowded_share=0.2,
    holds_by_uncached=True,
    awaits_prefix=True,
    shares_headroom=True,
    balance_ratio=1.2,
)
"""Sterna's own policy (docs/policies.md). Requests go where their first tokens come soonest, prefix
caches included, and wait at the scheduler until an instance has memory for them; for a while, until
the one that has their prefix has. While much waits, it has to have as much besides as those there
may need before any of them would move away. Long outputs move while memory is plenty, too, so that
all decode at the same speed. Headrooms are no larger than the other instances can bear
(`policy.headroom`)."""

POLICIES = (
    LLUMNIX,
    LLUMNIX_BASE,
    INFAAS_PP,
    ROUND_ROBIN,
    POWER_OF_TWO,
    SESSION_HASH,
    VLLM_DP,
    LLM_D,
    LLM_D_TUNED,
    DYNAMO,
    DYNAMO_TUNED,
    SGLANG,
    SGLANG_TUNED,
    PRODUCTION_STACK,
    STERNA,
)

PRESETS: Mapping[str, PolicyConfig] = MappingProxyType({policy.name: policy for policy in POLICIES})


def preset(name: str) -> PolicyConfig:
    """The policy of this name.

    Raises:
        ConfigurationError: there is no such policy; the message lists the names.
    """
    try:
        return PRESETS[name]
    except KeyError:
        names = ", ".join(PRESETS)
        raise ConfigurationError(f"policy must be one of {names}, not {name!r}") from None
