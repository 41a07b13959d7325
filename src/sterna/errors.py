"""Errors that a caller of Sterna can act on; every message says what to do."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import msgspec


class SternaError(Exception):
    """The root of all errors that Sterna raises on purpose."""


class ConfigurationError(SternaError):
    """An option has a value that cannot work; the message names the option and the value."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A field of a configuration and its value."""

    owner: type
    field: str
    value: object

    @classmethod
    def of(cls, owner: object, field: str) -> Self:
        """Return what that field of a configuration holds."""
        return cls(type(owner), field, getattr(owner, field))


def _as_field(setting: Setting) -> tuple[str, str]:
    return setting.field, repr(setting.value)


class InvalidValueError(ConfigurationError):
    """A field of a configuration has a value that cannot work.

    Attributes:
        wrong: the field.
        rule: what its value must be, with a `{}` for each of the others.
        others: the fields that the rule speaks of.
    """

    def __init__(self, wrong: Setting, rule: str, others: tuple[Setting, ...] = ()) -> None:
        super().__init__(wrong, rule, others)
        self.wrong = wrong
        self.rule = rule
        self.others = others

    def __str__(self) -> str:
        return self.message(_as_field)

    def message(self, spell: Callable[[Setting], tuple[str, str]]) -> str:
        """Return the message with the names that the value's origin has for fields.

        Args:
            spell: returns how a field is called there, and how its value is written.
        """
        name, value = spell(self.wrong)
        others = (f"{name} ({value})" for name, value in map(spell, self.others))
        return f"{name} must be {self.rule.format(*others)}, not {value}"


class ProtocolError(SternaError):
    """A state machine got an event that is illegal in its state; nothing was changed."""


class TransportError(SternaError):
    """KV bytes could not be carried to the peer; the migration that needed them must abort."""


class UnknownInstanceError(SternaError):
    """No instance of the cluster has that id."""


class FleetError(SternaError):
    """An instance cannot be drained, started or replaced now; the message says why."""


class UnknownRequestError(SternaError):
    """No live request has that id."""


class InstanceStartError(SternaError):
    """An engine instance could not be started; the message carries the engine's own reason.

    Attributes:
        is_of_options: whether its options may be the reason.
    """

    def __init__(self, message: str, *, is_of_options: bool = True) -> None:
        super().__init__(message)
        self.is_of_options = is_of_options


class ModelPreparationError(SternaError):
    """The small model could not be fetched or converted; the message says what to do."""


class UnansweredError(SternaError):
    """Another actor died or did not answer in time; the message says which."""


class ImmovableError(SternaError):
    """A request could not be migrated; the message has the reason."""


UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of decoding: the bytes are no message of the expected kind, contain text that is not
UTF-8, or are nested too deeply."""
