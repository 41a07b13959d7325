"""Tables of options: what the parser shows, what sets a field, and how errors name options."""

import argparse
import dataclasses
import pickle
from dataclasses import dataclass

import pytest

from sterna.cli.options.option_tables import Option, OptionTable, add_options, given, naming
from sterna.cli.serve.serve_options import TABLES
from sterna.errors import ConfigurationError, InvalidValueError, Setting


@dataclass(frozen=True)
class NestConfig:
    num_eggs: int = 3
    max_bytes: int = 2 << 20
    warmth: float = 37.5
    colour: str | None = None


NEST = OptionTable(
    NestConfig,
    (
        Option("--eggs", "number of eggs", field="num_eggs", type=int),
        Option("--max-mib", "size", field="max_bytes", type=float, unit=1 << 20),
        Option("--warmth", "degrees", field="warmth", type=float, unless_given="the bird's"),
        Option("--colour", "of the eggs", field="colour", default="blue"),
        Option("--guarded", "have it guarded", action="store_true", default=False),
    ),
)


def parsed(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser, NEST)
    return parser.parse_args(options)


def config(*options: str) -> NestConfig:
    return NestConfig(**given(NEST, parsed(*options)))


def test_an_option_that_is_not_given_has_the_fields_default_or_its_own() -> None:
    assert vars(parsed()) == {"eggs": 3, "max_mib": 2.0, "colour": "blue", "guarded": False}
    assert config() == NestConfig(colour="blue")


def test_each_value_is_that_of_its_field_in_the_fields_unit() -> None:
    options = ("--eggs", "5", "--max-mib", "1.5", "--warmth", "36", "--colour", "white")
    assert config(*options, "--guarded") == NestConfig(5, 3 << 19, 36.0, "white")


def test_a_part_of_the_fields_unit_is_rounded_up() -> None:
    assert config("--max-mib", "0.3").max_bytes == 314573


def test_the_help_says_every_default() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, NEST)
    text = " ".join(parser.format_help().split())
    for words in (
        "number of eggs (default: 3)",
        "size (default: 2)",
        "degrees (default: the bird's)",
        "of the eggs (default: blue)",
    ):
        assert words in text
    assert text.endswith("have it guarded")


def wrong(field: str, rule: str, *others: str) -> InvalidValueError:
    nest = NestConfig()
    named = tuple(Setting.of(nest, each) for each in others)
    return InvalidValueError(Setting.of(nest, field), rule, named)


def test_an_error_about_a_field_names_the_option_and_the_value_in_its_unit() -> None:
    with pytest.raises(ConfigurationError) as refused, naming(NEST):
        raise wrong("max_bytes", "below {}", "num_eggs")
    assert str(refused.value) == "--max-mib must be below --eggs (3), not 2"


def test_an_error_does_not_show_that_a_value_was_rounded() -> None:
    nest = config("--max-mib", "0.2")
    with pytest.raises(ConfigurationError) as refused, naming(NEST):
        raise InvalidValueError(Setting.of(nest, "max_bytes"), "at least 1")
    assert str(refused.value) == "--max-mib must be at least 1, not 0.2"


def test_without_an_option_the_field_is_named() -> None:
    error = wrong("max_bytes", "below {}", "num_eggs")
    assert str(error) == "max_bytes must be below num_eggs (3), not 2097152"
    with pytest.raises(ConfigurationError) as refused, naming(OptionTable(NestConfig, ())):
        raise error
    assert str(refused.value) == str(error)


def test_such_an_error_survives_the_way_between_processes() -> None:
    error = wrong("max_bytes", "below {}", "num_eggs")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_every_option_of_serve_is_declared_once_and_sets_a_field_that_there_is() -> None:
    options = [(table, option) for table in TABLES for option in table.options]
    names = [option.name for _, option in options]
    assert len(names) == len(set(names)) > 30
    for table, option in options:
        if option.field is not None:
            assert table.config is not None
            assert option.field in {each.name for each in dataclasses.fields(table.config)}
