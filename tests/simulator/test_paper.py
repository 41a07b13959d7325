"""The paper's parameters and its artifact's rules."""

import pytest

from sterna.config import LlumletConfig, QueueDemand, Victim
from sterna.engine.emulated.profiles import A10_LLAMA_7B
from sterna.errors import ConfigurationError
from sterna.policy.presets import STERNA
from sterna.simulator.config import Report
from sterna.simulator.paper import (
    PAPER_POLICIES,
    SERVING_STEP_TIME,
    paper_config,
    paper_policy,
    shipped_config,
)


def test_the_cluster_is_the_papers() -> None:
    """Section 6.1: "We use a 16-GPU cluster"; the artifact's engine has 792 blocks of 16."""
    config = paper_config("llumnix", "M-M")

    assert config.num_instances == 16
    assert (config.engine.num_blocks, config.engine.block_size) == (792, 16)
    assert config.engine.watermark_blocks == 7
    assert config.report is Report.STALE
    assert config.retry_backoff_s == 0


@pytest.mark.parametrize(
    ("trace", "tokens"), [("M-M", 12_000), ("ShareGPT", 12_800), ("burstgpt", 12_800)]
)
def test_real_traces_have_larger_batches(trace: str, tokens: int) -> None:
    assert paper_config("infaas++", trace).engine.max_num_batched_tokens == tokens


@pytest.mark.parametrize(
    ("trace", "steps"),
    [("S-S", 48), ("M-M", 160), ("L-L", 48), ("S-L", 160), ("L-S", 48), ("ShareGPT", 48)],
)
def test_thresholds_are_three_or_ten_blocks_a_request(trace: str, steps: float) -> None:
    policy = paper_policy("llumnix", trace)

    assert policy.source_freeness_steps == steps
    assert policy.destination_freeness_steps == steps


def test_infaas_differs_from_llumnix_base_by_migration_alone() -> None:
    """The artifact's INFaaS++ dispatches by the load that its Llumnix dispatches by."""
    infaas, base = (paper_policy(name, "M-M") for name in ("infaas++", "llumnix-base"))

    assert (infaas.migrates, base.migrates) == (False, True)
    for option in ("dispatch", "queue_demand", "batch_counts_queue", "counts_dispatched"):
        assert getattr(infaas, option) == getattr(base, option)
    assert infaas.divides_overload == base.divides_overload


def test_every_assumption_can_be_changed() -> None:
    rules = paper_policy(
        "llumnix",
        "M-M",
        queue_demand=QueueDemand.HEAD,
        victim=Victim.SHORTEST,
        threshold_steps=0.0,
        round_interval_s=0.05,
        divides_overload=True,
    )
    config = paper_config("llumnix", "M-M", rules=rules, report=Report.LIVE, num_instances=4)

    assert config.policy is rules
    assert rules.queue_demand is QueueDemand.HEAD
    assert rules.victim is Victim.SHORTEST
    assert (rules.source_freeness_steps, rules.round_interval_s) == (0.0, 0.05)
    assert rules.divides_overload
    assert (config.report, config.num_instances) == (Report.LIVE, 4)


def test_serving_is_slower_than_the_engine_alone() -> None:
    served, alone = SERVING_STEP_TIME, A10_LLAMA_7B.step_time
    for ours, theirs in zip(served.constants, alone.constants, strict=True):
        assert ours >= theirs
    assert served.duration_s(256, 256**2, 0, 0) > alone.duration_s(256, 256**2, 0, 0)
    assert served.duration_s(0, 0, 1, 256) > alone.duration_s(0, 0, 1, 256)


def test_a_shipped_policy_runs_as_it_serves() -> None:
    config = shipped_config(STERNA, "M-M")
    serving = LlumletConfig(STERNA)

    assert (config.policy, config.report) == (STERNA, Report.LIVE)
    assert config.retry_backoff_s == serving.retry_backoff_s > 0
    assert config.migration == serving.migration


def test_a_policy_that_the_paper_has_not_is_answered_with_those_it_has() -> None:
    with pytest.raises(ConfigurationError, match=", ".join(PAPER_POLICIES).replace("+", r"\+")):
        paper_config("sterna", "M-M")
