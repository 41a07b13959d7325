"""The policies by name (Section 6.1, baselines)."""

import pytest

from sterna.config import DispatchRule, PolicyConfig, QueueDemand, Soonest, Victim
from sterna.errors import ConfigurationError
from sterna.policy.pairing import pair
from sterna.policy.presets import (
    DYNAMO,
    DYNAMO_TUNED,
    INFAAS_PP,
    LLM_D,
    LLM_D_TUNED,
    LLUMNIX,
    LLUMNIX_BASE,
    POWER_OF_TWO,
    PRESETS,
    PRODUCTION_STACK,
    ROUND_ROBIN,
    SESSION_HASH,
    SGLANG,
    SGLANG_TUNED,
    STERNA,
    VLLM_DP,
    preset,
)
from tests.policy.builders import candidate, evenly_loaded, instance


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("llumnix", LLUMNIX),
        ("llumnix-base", LLUMNIX_BASE),
        ("infaas++", INFAAS_PP),
        ("round-robin", ROUND_ROBIN),
        ("power-of-two", POWER_OF_TWO),
        ("session-hash", SESSION_HASH),
        ("vllm-dp", VLLM_DP),
        ("llm-d", LLM_D),
        ("llm-d-tuned", LLM_D_TUNED),
        ("dynamo", DYNAMO),
        ("dynamo-tuned", DYNAMO_TUNED),
        ("sglang", SGLANG),
        ("sglang-tuned", SGLANG_TUNED),
        ("production-stack", PRODUCTION_STACK),
        ("sterna", STERNA),
    ],
)
def test_a_preset_is_found_by_its_name(name: str, policy: object) -> None:
    assert preset(name) is policy
    assert preset(name).name == name


def test_an_unknown_name_is_refused_with_the_names_that_there_are() -> None:
    with pytest.raises(ConfigurationError) as caught:
        preset("freest")
    for name in ("llumnix", "llumnix-base", "infaas++", "round-robin", "sterna", "'freest'"):
        assert name in str(caught.value)


def test_llumnix_is_the_papers_policy() -> None:
    """Sections 4.4 and 6.4: head-of-line demand, shorter sequences first, a target load of 1,600
    tokens for high priority."""
    assert LLUMNIX.dispatch is DispatchRule.FREEST
    assert LLUMNIX.queue_demand is QueueDemand.HEAD
    assert LLUMNIX.victim is Victim.SHORTEST
    assert LLUMNIX.has_priorities
    assert list(LLUMNIX.target_load_tokens.values()) == [1_600]


def test_the_baselines_do_not_migrate() -> None:
    """Section 6.1: neither round robin nor INFaaS++ reschedules, and neither knows priorities."""
    assert [each.name for each in PRESETS.values() if not each.migrates] == [
        "infaas++",
        "round-robin",
        "power-of-two",
        "session-hash",
        "vllm-dp",
        "llm-d",
        "llm-d-tuned",
        "dynamo",
        "dynamo-tuned",
        "sglang",
        "sglang-tuned",
        "production-stack",
    ]
    assert not INFAAS_PP.has_priorities
    assert not ROUND_ROBIN.has_priorities


def test_llumnix_base_differs_from_llumnix_in_priorities_alone() -> None:
    """Section 6.1: Llumnix-base is "priority-agnostic [...] but enables all the other features
    including migration"."""
    differing = {
        name for name in LLUMNIX.__slots__ if getattr(LLUMNIX, name) != getattr(LLUMNIX_BASE, name)
    }
    assert differing == {"name", "has_priorities"}


def test_sternas_own_policy_is_the_papers_with_rules_of_its_own() -> None:
    differing = {
        name for name in LLUMNIX.__slots__ if getattr(LLUMNIX, name) != getattr(STERNA, name)
    }
    late = {"binds_late", "reserves_after_s", "growth_steps", "crowded_share"}
    late |= {"awaits_prefix", "holds_by_uncached"}
    assert differing == {"name", "dispatch", *late, "shares_headroom", "balance_ratio"}
    # What a request leaves to others is the freeness below which they move away.
    assert STERNA.growth_steps == STERNA.source_freeness_steps
    assert STERNA.dispatch == Soonest(copy_token_cost=0.6)
    assert STERNA.binds_late
    assert STERNA.shares_headroom


@pytest.mark.parametrize("policy", [LLUMNIX, LLUMNIX_BASE, STERNA], ids=lambda each: each.name)
def test_migration_is_on_by_default_and_its_thresholds_have_the_right_sign(
    policy: PolicyConfig,
) -> None:
    """An overloaded and an idle instance are paired without any option being set."""
    overloaded = evenly_loaded("i0", 12_640, 20)
    assert policy.migrates
    assert pair([candidate(each, policy) for each in (overloaded, instance("i1"))], policy) == {
        "i0": "i1"
    }
