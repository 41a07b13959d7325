"""`sterna join`: the settings with which it becomes `ray start`, and what it refuses."""

import os
import socket
from pathlib import Path

import pytest

from sterna.cli.main import main
from sterna.runtime.home.ray_environment import IS_SPREAD, NODE_DEFAULTS

OWN = {"RAY_AUTH_TOKEN": "one of ours", "RAY_memory_monitor_refresh_ms": "250"}
"""What the user has set."""


class _BecameError(Exception):
    """In place of the process that would be another one."""


def _joined(
    monkeypatch: pytest.MonkeyPatch, own: dict[str, str], *arguments: str
) -> tuple[list[str], dict[str, str]]:
    """The command that the process becomes, and its environment."""
    environment = {"HOME": "/", "PATH": os.environ["PATH"], **own}
    commands: list[list[str]] = []

    def become(path: str, command: list[str]) -> None:
        assert command[0] == path
        commands.append(command)
        raise _BecameError

    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(os, "execv", become)
    monkeypatch.setattr("sterna.cli.join.raise_limit", lambda: None)
    monkeypatch.setattr("sterna.cli.join.CONNECT_TIMEOUT_S", 0.01)
    with pytest.raises(_BecameError):
        main(["join", *arguments])
    ((ray, *others),) = commands
    assert Path(ray).name == "ray"
    assert os.access(ray, os.X_OK)
    return others, environment


def test_it_becomes_ray_start_with_the_options_after_the_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = ("--block", "--node-ip-address=10.0.0.2", "--num-gpus", "2")
    command, _ = _joined(monkeypatch, OWN, "10.0.0.1:6380", *options)
    assert command == ["start", "--address=10.0.0.1:6380", *options]


def test_the_node_has_the_settings_of_the_servers_own_but_for_the_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, environment = _joined(monkeypatch, OWN, "head.example:6380")
    assert {name: environment[name] for name in NODE_DEFAULTS} == {
        **NODE_DEFAULTS,
        "RAY_memory_monitor_refresh_ms": "250",
    }
    assert environment["RAY_AUTH_TOKEN"] == "one of ours"
    assert environment["RAY_AUTH_MODE"] == "token"
    assert environment[IS_SPREAD] == "1"
    # Ten minutes, and not the day for which the server's own node waits.
    assert environment["RAY_gcs_rpc_server_reconnect_timeout_s"] == "600"


def test_a_server_that_does_not_listen_is_named_before_ray_tries_it_for_minutes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{server.getsockname()[1]}"
        command, _ = _joined(monkeypatch, OWN, address)
        assert capsys.readouterr().err.startswith(
            f"sterna: no server listens at {address} (Connection refused): is it the address "
        )
        server.listen()
        assert _joined(monkeypatch, OWN, address)[0] == command == ["start", f"--address={address}"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("address", ["10.0.0.1", "10.0.0.1:", ":6380", "10.0.0.1:ray"])
def test_an_address_without_a_port_is_refused(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "one of ours")
    assert main(["join", address]) == 1
    assert "is not ADDRESS:PORT, as the server prints it" in capsys.readouterr().err


def test_without_the_servers_token_nothing_is_joined(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    assert main(["join", "10.0.0.1:6380"]) == 1
    assert "RAY_AUTH_TOKEN is not set" in capsys.readouterr().err
