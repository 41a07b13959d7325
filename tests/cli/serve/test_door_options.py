"""The options about what is taken from clients."""

from argparse import ArgumentParser

import pytest

from sterna.cli.options.option_tables import add_options
from sterna.cli.serve.door_options import DOOR, MIB, door_config
from sterna.config import DoorConfig
from sterna.errors import ConfigurationError


def config(*options: str) -> DoorConfig:
    parser = ArgumentParser()
    add_options(parser, DOOR)
    return door_config(parser.parse_args(options))


def test_by_default_they_are_the_configurations() -> None:
    assert config() == DoorConfig()


def test_a_limit_of_zero_and_no_timing_turn_them_off() -> None:
    assert config("--max-queued-requests", "0") == DoorConfig(max_queued_requests=None)
    assert config("--no-server-timing") == DoorConfig(has_server_timing=False)


def test_the_bodies_that_wait_together_have_room_for_the_largest() -> None:
    assert config("--max-body-mib", "2048").max_waiting_body_bytes == 2048 * MIB
    assert config("--max-waiting-body-mib", "64").max_waiting_body_bytes == 64 * MIB
    assert config("--max-waiting-body-mib", "4096").max_waiting_body_bytes == 4096 * MIB
    with pytest.raises(ConfigurationError, match=r"at least --max-body-mib \(64\), not 63"):
        config("--max-waiting-body-mib", "63")
