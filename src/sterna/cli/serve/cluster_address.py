"""The options of `sterna serve` for the nodes of a cluster and the transport of KV between them."""

import argparse
import ipaddress
import socket
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

from sterna.cli.options.option_tables import Option, OptionTable, add_options, given
from sterna.config import LOOPBACK, TransportConfig
from sterna.errors import ConfigurationError

ADDRESS = Option(
    "--cluster-address",
    "let other nodes, which reach this machine at ADDRESS, join with `sterna join ADDRESS:PORT`",
    metavar="ADDRESS[:PORT]",
    unless_given="everything internal is on 127.0.0.1, for one machine",
)

TRANSPORT = OptionTable(
    TransportConfig,
    (
        ADDRESS,
        Option(
            "--transport",
            "how KV blocks travel between instances; shm works within one host only",
            field="kind",
            choices=("gloo", "tcp", "shm"),
            unless_given=f"shm, with {ADDRESS.name} tcp",
        ),
        Option(
            "--migration-bandwidth-share",
            "fraction of the time, in (0, 1], in which bulk copies may use the memory bus; last "
            "stages and prefixes, for which requests wait, are not limited",
            field="bandwidth_share",
            type=float,
            metavar="SHARE",
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class ClusterAddress:
    """Address at which other nodes reach this one.

    Attributes:
        port: of Ray's GCS, at which they join; None: Ray chooses one.
    """

    host: str
    port: int | None = None

    def environment(self) -> dict[str, str]:
        """Return the environment variables of Ray's head for this address."""
        return {} if self.port is None else {"RAY_GCS_SERVER_PORT": str(self.port)}


def cluster_address(arguments: Sequence[str], *, is_in_use: bool = False) -> ClusterAddress | None:
    """Return the address at which other nodes reach this one; None without other nodes. Ray needs
    it before the other options have been read.

    Args:
        is_in_use: the server's Ray may listen there by now.

    Raises:
        ConfigurationError: other nodes could not use the address.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_options(parser, OptionTable(None, (ADDRESS,)))
    given = getattr(parser.parse_known_args(list(arguments))[0], "cluster_address", None)
    if given is None:
        return None
    host, _, port = given.partition(":")
    try:
        address = ipaddress.IPv4Address(host)
    except ValueError as error:
        raise ConfigurationError(
            f"{ADDRESS.name} {given}: not ADDRESS or ADDRESS:PORT, with an IPv4 address"
        ) from error
    if address.is_loopback or address.is_unspecified:
        raise ConfigurationError(
            f"{ADDRESS.name} {given}: other nodes cannot connect to that; give this machine's "
            "address in their network, or leave the option out"
        )
    if port and not (port.isdecimal() and 1024 <= int(port) <= 65535):
        raise ConfigurationError(f"{ADDRESS.name} {given}: the port must be in [1024, 65535]")
    _check_own(host, 0 if is_in_use else int(port or 0))
    return ClusterAddress(host, int(port) if port else None)


def internal_host(args: Namespace, address: ClusterAddress | None) -> str | None:
    """Return the address at which actors listen for each other (`ClusterConfig`).

    Args:
        address: the result of `cluster_address`.

    Raises:
        ConfigurationError: the option was given where `cluster_address` does not look.
    """
    if ("cluster_address" in args) != (address is not None):
        raise ConfigurationError(f"{ADDRESS.name} is for the command line, and spelt so")
    return LOOPBACK if address is None else None


def transport_config(args: Namespace) -> TransportConfig:
    """Return the transport of KV blocks.

    Raises:
        ConfigurationError: it does not work between nodes.
    """
    is_shared = "cluster_address" in args
    values = {"kind": "tcp" if is_shared else "shm", **given(TRANSPORT, args)}
    if is_shared and values["kind"] == "shm":
        raise ConfigurationError(
            f"--transport shm works on one host only; with {ADDRESS.name} choose tcp or gloo"
        )
    return TransportConfig(**values)


def listen_error(host: str, port: int) -> str | None:
    """Return the reason for which nothing can listen there; None if something can."""
    # As in vLLM, an address with a colon is an IPv6 address.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            return getattr(error, "strerror", None) or str(error)
    return None


def _check_own(host: str, port: int) -> None:
    if (reason := listen_error(host, port)) is not None:
        raise ConfigurationError(
            f"{ADDRESS.name}: cannot listen on {host}:{port} ({reason}); it must be an address of "
            "this machine, and a free port"
        )
