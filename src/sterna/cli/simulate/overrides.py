"""Overrides of a simulation's configuration: any field as `key=value`, typed and checked.

A key is a field's full name, `policy.round_interval_s`, or its last part where no other section
has a field of that name: `round_interval_s`. The parameters of dispatch rules are the section
`dispatch`; each rule has some of them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any, get_type_hints

from sterna.config import (
    PREFIX_RULES,
    DispatchRule,
    MigrationConfig,
    PolicyConfig,
    ScalingConfig,
)
from sterna.engine.emulated.config import EmulatedEngineConfig
from sterna.engine.emulated.durations import CopyTime, StepTime
from sterna.errors import ConfigurationError
from sterna.policy.setting_text import did_you_mean, read, written
from sterna.simulator.config import SimulationConfig

SECTIONS: Mapping[str, type] = {
    "engine": EmulatedEngineConfig,
    "step_time": StepTime,
    "copy_time": CopyTime,
    "policy": PolicyConfig,
    "migration": MigrationConfig,
    "scaling": ScalingConfig,
}
"""The parts of a configuration that have fields of their own."""

UNCHANGEABLE = {"policy.name", "policy.own"}
"""Fields that no text can give a value: a name, and a class that is named by --policy."""


@dataclass(frozen=True, slots=True)
class Override:
    """One field's value in place of the configuration's own.

    Attributes:
        option: the option that set it, for messages.
        section: a key of SECTIONS, or "" for a field of the configuration itself.
    """

    option: str
    section: str
    field: str
    value: Any


def keys() -> list[str]:
    """The full names of all fields, section after section."""
    return list(_hints())


def override(key: str, text: str, option: str | None = None) -> Override:
    """The override that gives the field of that name this value.

    Args:
        text: the value; enumerations by their values, `none` for no value.
        option: its name in messages; by default the key.

    Raises:
        ConfigurationError: there is no such field, or its type has no such value.
    """
    full = _full_name(key)
    section, _, field = full.rpartition(".")
    value = read(option or key, text, _hints()[full])
    return Override(option or key, section, field, value)


def parse(assignment: str) -> Override:
    """The override written as `key=value`."""
    key, equals, text = assignment.partition("=")
    if not (key and equals and text):
        raise ConfigurationError(f"a setting must be key=value, not {assignment!r}")
    return override(key.strip(), text.strip())


def apply(config: SimulationConfig, overrides: Iterable[Override]) -> SimulationConfig:
    """The configuration with these fields changed, all at once; a later override of a field wins.

    Raises:
        ConfigurationError: the values contradict each other, or set fields that do not exist.
    """
    changes: dict[str, dict[str, Any]] = {}
    for each in overrides:
        if each.section == "scaling" and config.scaling is None:
            raise ConfigurationError(
                f"{each.option} needs auto-scaling, which --auto-scaling MIN:MAX turns on"
            )
        changes.setdefault(each.section, {})[each.field] = each.value
    top = changes.pop("", {})
    parameters = changes.pop("dispatch", {})
    for section, values in changes.items():
        top[section] = replace(getattr(config, section), **values)
    changed = replace(config, **top)
    return _with_dispatch(changed, parameters) if parameters else changed


def _with_dispatch(config: SimulationConfig, values: Mapping[str, Any]) -> SimulationConfig:
    rule = config.policy.dispatch
    for name in values:
        if isinstance(rule, DispatchRule) or name not in _parameters(rule):
            raise ConfigurationError(
                f"dispatch.{name} is no parameter of the dispatch rule {written(rule)}"
            )
    assert not isinstance(rule, DispatchRule)
    policy = replace(config.policy, dispatch=replace(rule, **values))
    return replace(config, policy=policy)


def _parameters(rule: Any) -> list[str]:
    return [each.name for each in fields(rule)] if is_dataclass(rule) else []


def values(config: SimulationConfig) -> dict[str, str]:
    """Every setting's value in that configuration, as text, by full name."""
    found = {}
    for full in _hints():
        section, _, field = full.rpartition(".")
        if section == "dispatch":
            if field in _parameters(config.policy.dispatch):
                found[full] = written(getattr(config.policy.dispatch, field))
            continue
        owner = getattr(config, section) if section else config
        found[full] = written(getattr(ScalingConfig() if owner is None else owner, field))
    return found


@cache
def _hints() -> Mapping[str, Any]:
    """The types of all fields by their full names."""
    found = {}
    for section, owner in {"": SimulationConfig, **SECTIONS}.items():
        hints = get_type_hints(owner)
        for field in fields(owner):
            full = f"{section}.{field.name}" if section else field.name
            if full not in SECTIONS and full not in UNCHANGEABLE:
                found[full] = hints[field.name]
    for rule in PREFIX_RULES.values():
        hints = get_type_hints(rule)
        found.update({f"dispatch.{field.name}": hints[field.name] for field in fields(rule)})
    return found


def _full_name(key: str) -> str:
    if key in _hints():
        return key
    ends = [full for full in _hints() if full.rpartition(".")[2] == key]
    if len(ends) == 1:
        return ends[0]
    if ends:
        raise ConfigurationError(f"setting {key!r} could be {' or '.join(ends)}: name its section")
    short = {full.rpartition(".")[2]: full for full in _hints()}
    near = did_you_mean(key, [*_hints(), *short])
    raise ConfigurationError(f"there is no setting {key!r}{near or '; --list shows all'}")
