"""Text of settings: values of a configuration's fields as options and policy classes write them.
Pure.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from math import isfinite
from typing import Any, get_args, get_origin

import msgspec

from sterna.config import PREFIX_RULES, PrefixDispatch, prefix_rule_name
from sterna.errors import ConfigurationError


def read(name: str, text: str, hint: Any) -> Any:
    """The value of a field of this type.

    Args:
        name: that of the setting in messages.
        text: enumerations and rules by their names, `none` for no value, mappings as in
            `1:1600,2:800`.

    Raises:
        ConfigurationError: the type has no such value.
    """
    alternatives = get_args(hint) or (hint,)
    if type(None) in alternatives and text.lower() == "none":
        return None
    if _is_mapping(hint):
        return _mapping(name, text, hint)
    kind = next(each for each in alternatives if each is not type(None))
    if issubclass(kind, Enum):
        rules = {each: rule for each, rule in PREFIX_RULES.items() if rule in alternatives}
        return _member(name, text, kind, rules)
    try:
        value = msgspec.convert(text.lower() if kind is bool else text, kind, strict=False)
    except msgspec.ValidationError:
        value = None
    if value is None:
        raise ConfigurationError(f"{name} must be {_kind_in_words(hint)}, not {text!r}")
    # No setting needs an infinite value, and JSON has none.
    if isinstance(value, float) and not isfinite(value):
        raise ConfigurationError(f"{name} must be finite, not {text!r}")
    return value


def written(value: Any) -> str:
    """The text of which `read` makes the value; a rule without its parameters."""
    if isinstance(value, Enum):
        return str(value.value).replace("_", "-")
    if isinstance(value, PrefixDispatch):
        return prefix_rule_name(value)
    if isinstance(value, Mapping):
        return ",".join(f"{key}:{each}" for key, each in value.items())
    return (
        "none" if value is None else str(value).lower() if isinstance(value, bool) else f"{value}"
    )


def converted(name: str, value: Any, hint: Any) -> Any:
    """The value as a field of this type has it: it may be of another type, or text, if its text can
    be read.

    Raises:
        ConfigurationError: it cannot.
    """
    is_fitting = isinstance(value, Mapping if _is_mapping(hint) else hint)
    return value if is_fitting else read(name, written(value), hint)


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """The end of an error message: the most similar of the words, if one is similar."""
    near = difflib.get_close_matches(word, list(words), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _is_mapping(hint: Any) -> bool:
    origin = get_origin(hint)
    return origin is not None and issubclass(origin, Mapping)


def _member(name: str, text: str, kind: type[Enum], rules: Mapping[str, Callable[[], Any]]) -> Any:
    members: dict[str, Any] = {str(member.value).replace("_", "-"): member for member in kind}
    members |= {each: rule() for each, rule in rules.items()}
    word = text.lower().replace("_", "-")
    if word not in members:
        near = did_you_mean(word, members)
        raise ConfigurationError(f"{name} must be {' or '.join(members)}, not {text!r}{near}")
    return members[word]


def _mapping(name: str, text: str, hint: Any) -> Any:
    """The mapping written as `key:value` pairs between commas."""
    pairs = [pair.partition(":") for pair in text.split(",")]
    try:
        return msgspec.convert({key: value for key, _, value in pairs}, hint, strict=False)
    except msgspec.ValidationError:
        raise ConfigurationError(
            f"{name} must be numbers as in 1:1600,2:800, not {text!r}"
        ) from None


def _kind_in_words(hint: Any) -> str:
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}
    alternatives = get_args(hint) or (hint,)
    return " or ".join("none" if each is type(None) else words[each] for each in alternatives)
