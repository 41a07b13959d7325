"""Tables of options: each row names an option and the field of a configuration that it sets.

The parser, the configuration and the names in errors are derived from the table, so that each
option is defined once.
"""

import argparse
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sterna.errors import ConfigurationError, InvalidValueError, Setting


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a command.

    Attributes:
        name: with its dashes.
        field: of the table's configuration; None: the command uses the value in another way.
        unit: the option's unit in the field's: 1 << 20 for MiB where the field has bytes.
        default: None: that of the field.
        unless_given: the default in words, for an option that is in the namespace only where it
            was given.
    """

    name: str
    help: str
    field: str | None = None
    type: Callable[[str], Any] | None = None
    metavar: str | None = None
    choices: Sequence[str] | None = None
    action: Any = None
    unit: int = 1
    default: Any = None
    unless_given: str | None = None

    @property
    def dest(self) -> str:
        """The attribute of the namespace that holds the value."""
        return self.name.removeprefix("--").replace("-", "_")


@dataclass(frozen=True, slots=True)
class OptionTable:
    """The options for one configuration; its fields have the defaults.

    Attributes:
        config: the dataclass; None: the command looks the fields up itself.
    """

    config: type | None
    options: tuple[Option, ...]

    def default_of(self, option: Option) -> Any:
        """Return the value of an option that is not given, in its own unit; None: no value."""
        if option.default is not None or option.field is None or self.config is None:
            return option.default
        defaults: dict[str, Any] = {
            each.name: each.default for each in dataclasses.fields(self.config)
        }
        value = defaults[option.field]
        return value if option.unit == 1 else value / option.unit


def add_options(group: Any, table: OptionTable) -> None:
    """Add the table's options to a parser or to one of its groups."""
    for option in table.options:
        default, shown = table.default_of(option), option.unless_given
        if shown is not None:
            default = argparse.SUPPRESS
        elif default is not None and option.action is None:
            shown = "%(default)g" if isinstance(default, float) else "%(default)s"
        keywords = {
            name: value
            for name in ("type", "metavar", "choices", "action")
            if (value := getattr(option, name)) is not None
        }
        group.add_argument(
            option.name,
            default=default,
            help=option.help if shown is None else f"{option.help} (default: {shown})",
            **keywords,
        )


def given(table: OptionTable, args: argparse.Namespace) -> dict[str, Any]:
    """Return the values of the options that are in the namespace, by the fields that they set."""
    values = {}
    for option in table.options:
        if option.field is not None and option.dest in args:
            value = getattr(args, option.dest)
            values[option.field] = value if option.unit == 1 else math.ceil(value * option.unit)
    return values


@contextmanager
def naming(*tables: OptionTable) -> Iterator[None]:
    """Make an error about a field name the option that sets it.

    Raises:
        ConfigurationError: in place of an InvalidValueError.
    """
    try:
        yield
    except InvalidValueError as error:
        raise ConfigurationError(error.message(lambda each: _as_option(each, tables))) from None


def _as_option(setting: Setting, tables: Iterable[OptionTable]) -> tuple[str, str]:
    for table in tables:
        for option in table.options:
            if (table.config, option.field) == (setting.owner, setting.field):
                value = setting.value
                if option.unit != 1 and isinstance(value, int):
                    # The field was rounded to a whole number of its own unit.
                    return option.name, f"{round(value / option.unit, 3):g}"
                return option.name, repr(value)
    return setting.field, repr(setting.value)
