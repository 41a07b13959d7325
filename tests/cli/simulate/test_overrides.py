"""Settings by name: found, typed, checked, and refused in a line that says what to do."""

import math
from dataclasses import replace
from typing import Any

import pytest

from sterna.cli.simulate.overrides import apply, keys, override, parse, values
from sterna.config import Dynamo, QueueDemand, ScalingConfig, Victim
from sterna.engine.emulated.config import StepMode
from sterna.engine.emulated.profiles import A10_LLAMA_7B
from sterna.errors import ConfigurationError
from sterna.policy.presets import LLUMNIX
from sterna.simulator.config import Report, SimulationConfig
from sterna.types import HIGH

CONFIG = SimulationConfig(
    engine=A10_LLAMA_7B.engine,
    step_time=A10_LLAMA_7B.step_time,
    copy_time=A10_LLAMA_7B.copy_time,
    policy=LLUMNIX,
)


def with_policy(**changes: Any) -> SimulationConfig:
    return replace(CONFIG, policy=replace(LLUMNIX, **changes))


def with_settings(*assignments: str, config: SimulationConfig = CONFIG) -> SimulationConfig:
    return apply(config, [parse(each) for each in assignments])


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("report=stale", replace(CONFIG, report=Report.STALE)),
        ("message_delay_s=0.01", replace(CONFIG, message_delay_s=0.01)),
        ("fragmentation_interval_s=none", replace(CONFIG, fragmentation_interval_s=None)),
        ("is_fast=False", replace(CONFIG, is_fast=False)),
        ("policy.round_interval_s=1", with_policy(round_interval_s=1.0)),
        ("round_interval_s=1", with_policy(round_interval_s=1.0)),
        ("victim=last-started", with_policy(victim=Victim.LAST_STARTED)),
        ("victim=LAST_STARTED", with_policy(victim=Victim.LAST_STARTED)),
        ("queue_demand=all", with_policy(queue_demand=QueueDemand.ALL)),
        ("target_load_tokens=1:800,2:400", with_policy(target_load_tokens={HIGH: 800, 2: 400})),
        (
            "engine.step_mode=chunked",
            replace(CONFIG, engine=replace(CONFIG.engine, step_mode=StepMode.CHUNKED)),
        ),
        ("num_blocks=100", replace(CONFIG, engine=replace(CONFIG.engine, num_blocks=100))),
        (
            "migration.max_stages=3",
            replace(CONFIG, migration=replace(CONFIG.migration, max_stages=3)),
        ),
    ],
)
def test_a_setting_changes_its_field_and_no_other(
    assignment: str, expected: SimulationConfig
) -> None:
    assert with_settings(assignment) == expected


def test_settings_are_applied_at_once_so_that_they_may_depend_on_each_other() -> None:
    """Each of them alone would leave the thresholds in the wrong order."""
    raised = with_settings("source_freeness_steps=160", "destination_freeness_steps=160")
    assert raised.policy.source_freeness_steps == 160.0
    lowered = with_settings("destination_freeness_steps=16", "source_freeness_steps=16")
    assert lowered.policy.destination_freeness_steps == 16.0


def test_the_later_of_two_settings_of_one_field_holds() -> None:
    assert with_settings("num_blocks=100", "engine.num_blocks=200").engine.num_blocks == 200


def test_a_setting_of_auto_scaling_needs_auto_scaling() -> None:
    with pytest.raises(ConfigurationError, match=r"low_freeness_steps needs auto-scaling.*MIN:MAX"):
        with_settings("low_freeness_steps=10")
    scaled = with_settings("low_freeness_steps=10", config=replace(CONFIG, scaling=ScalingConfig()))
    assert scaled.scaling == ScalingConfig(low_freeness_steps=10.0)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("round_interval", "there is no setting 'round_interval'; did you mean round_interval_s?"),
        (
            "policy.victm=shortest",
            "there is no setting 'policy.victm'; did you mean policy.victim?",
        ),
        ("policy.name=mine", "there is no setting 'policy.name'"),
        ("engine=3", "there is no setting 'engine'"),
        ("nonsense_at_all=3", "there is no setting 'nonsense_at_all'; --list shows all"),
        (
            "victim=shortst",
            "victim must be shortest or longest or last-started or freeing, not 'shortst'",
        ),
        ("victim=shortst", "; did you mean shortest?"),
        ("num_blocks=many", "num_blocks must be a whole number, not 'many'"),
        ("num_blocks=1.5", "num_blocks must be a whole number, not '1.5'"),
        ("num_blocks=0", "num_blocks must be at least 1, not 0"),
        ("watermark=nan", "watermark must be finite, not 'nan'"),
        ("scaling_begins_s=inf", "scaling_begins_s must be finite, not 'inf'"),
        ("source_freeness_steps=-inf", "source_freeness_steps must be finite, not '-inf'"),
        ("fragmentation_interval_s=Infinity", "must be finite, not 'Infinity'"),
        ("target_load_tokens=1:1600,2:inf", "must be numbers as in 1:1600,2:800"),
        ("watermark=2", "watermark must be in [0, 1), not 2.0"),
        ("is_fast=perhaps", "is_fast must be true or false, not 'perhaps'"),
        ("fragmentation_interval_s=x", "must be a number or none, not 'x'"),
        ("target_load_tokens=1600", "target_load_tokens must be numbers as in 1:1600,2:800"),
        ("victim=", "a setting must be key=value, not 'victim='"),
        ("=3", "a setting must be key=value, not '=3'"),
        ("", "a setting must be key=value, not ''"),
    ],
)
def test_a_wrong_setting_is_refused_with_what_to_do(assignment: str, message: str) -> None:
    if "=" not in assignment and assignment:
        assignment += "=1"
    with pytest.raises(ConfigurationError) as caught:
        with_settings(assignment)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_message_names_the_option_that_the_user_gave() -> None:
    with pytest.raises(ConfigurationError, match=r"^--interval must be a number, not 'soon'$"):
        override("policy.round_interval_s", "soon", "--interval")


def test_every_setting_can_be_given_as_it_is_shown() -> None:
    """What `--list` prints of a configuration, given back, changes nothing."""
    config = replace(CONFIG, scaling=ScalingConfig())
    shown = values(config)
    assert list(shown) == [key for key in keys() if not key.startswith("dispatch.")]
    assert apply(config, [override(key, text) for key, text in shown.items()]) == config


def test_every_number_can_be_set_to_another_one() -> None:
    """A key that reaches nothing, or the wrong section, would leave the configuration as it is."""
    config = replace(CONFIG, scaling=ScalingConfig())
    tried = 0
    for key, text in values(config).items():
        try:
            number = float(text)
        except ValueError:
            continue
        changed = None
        for other in (number + 1, number + 0.01, number / 2):
            word = str(int(other)) if "." not in text and other == int(other) else str(other)
            try:
                changed = apply(config, [override(key, word)])
            except ConfigurationError:
                continue
            break
        assert changed is not None, key
        assert math.isclose(float(values(changed)[key]), float(word)), key
        assert changed != config, key
        tried += 1
    assert tried > 30


# ------------------------------------------------------------------------------ dispatch rules


def test_a_dispatch_rule_has_parameters_of_its_own() -> None:
    changed = with_settings("dispatch.prefill_scale=2", "policy.dispatch=dynamo")
    assert changed == with_policy(dispatch=Dynamo(prefill_scale=2.0))
    assert values(changed)["policy.dispatch"] == "dynamo"
    assert values(changed)["dispatch.prefill_scale"] == "2.0"
    assert "dispatch.saturation_tokens" not in values(changed)
    assert not any(key.startswith("dispatch.") for key in values(CONFIG))


def test_a_parameter_of_another_dispatch_rule_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"load_weight is no parameter of .* freest"):
        with_settings("dispatch.load_weight=2")
    with pytest.raises(ConfigurationError, match=r"load_weight is no parameter of .* dynamo"):
        with_settings("policy.dispatch=dynamo", "load_weight=2")


@pytest.mark.parametrize(
    "assignment",
    [
        "policy.dispatch=dynamo prefill_scale=-1",
        "policy.dispatch=dynamo overlap_credit=1.5",
        "policy.dispatch=dynamo request_tokens=-1",
        "policy.dispatch=llm-d dispatch.min_share=2",
        "policy.dispatch=llm-d saturation_tokens=-1",
        "policy.dispatch=sglang dispatch.min_share=-0.1",
        "policy.dispatch=sglang max_difference=-1",
        "policy.dispatch=sglang max_ratio=0.5",
        "policy.dispatch=production-stack load_weight=-1",
        "policy.dispatch=soonest horizon_steps=-1",
        "policy.dispatch=soonest eviction_weight=-1",
        "policy.binds_late=true ageing_tokens_per_s=-1",
    ],
)
def test_a_parameter_out_of_range_is_refused_with_its_range(assignment: str) -> None:
    name = assignment.split()[1].partition("=")[0].rpartition(".")[2]
    with pytest.raises(ConfigurationError, match=rf"{name}.*(at least|between)"):
        with_settings(*assignment.split())
