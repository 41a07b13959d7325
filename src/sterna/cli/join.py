"""`sterna join`: gives this machine's GPUs and cores to a server that runs on another one.

It becomes `ray start` with the settings that the server's own node has: each process of Ray reads
them from its own environment, so that they do not come with the address.
"""

import argparse
import os
import shutil
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

from sterna.errors import ConfigurationError
from sterna.runtime.home.ray_environment import has_token, protect_ray, set_node_defaults
from sterna.runtime.processes.limits import raise_limit

WAITS_FOR_SERVER_S = 600
"""A node that joined ends when its server has been away for as long: much longer than a new GCS
takes, and not the day for which the server's own node waits."""

CONNECT_TIMEOUT_S = 5.0


def add_commands(commands: Any) -> None:
    """Add `join` to the parser's subcommands."""
    parser = commands.add_parser(
        "join",
        help="let a server on another machine use this one",
        description="Gives this machine to the server that was started with `sterna serve "
        "--cluster-address ADDRESS:PORT`. `sterna start` or auto-scaling then starts instances "
        "here. RAY_AUTH_TOKEN must be the server's.",
        epilog="docs/operations/several_nodes.md explains what the nodes need.",
    )
    parser.add_argument("address", metavar="ADDRESS:PORT", help="as the server has printed it")
    parser.add_argument(
        "ray_options",
        nargs=argparse.REMAINDER,
        metavar="OPTIONS",
        help="of `ray start`, such as --node-ip-address=ADDRESS, this machine's in their network, "
        "and --block, to stay in the foreground",
    )
    parser.set_defaults(run=join)


def join(args: argparse.Namespace) -> NoReturn:
    """Become `ray start`.

    Raises:
        ConfigurationError: the address has no port, no token was set, or there is no Ray.
    """
    host, _, port = args.address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigurationError(
            f"{args.address} is not ADDRESS:PORT, as the server prints it after its start"
        )
    if not has_token(os.environ):
        raise ConfigurationError(
            "RAY_AUTH_TOKEN is not set: give this machine the same token as the server"
        )
    if (reason := _connection_error(host, int(port))) is not None:
        print(
            f"sterna: no server listens at {args.address} ({reason}): is it the address that "
            "`sterna serve` has printed, and may this machine reach its ports? Ray tries it for "
            "some minutes",
            file=sys.stderr,
            flush=True,
        )
    protect_ray(os.environ, is_shared=True)
    set_node_defaults(os.environ, WAITS_FOR_SERVER_S)
    raise_limit()
    ray = shutil.which("ray", path=str(Path(sys.executable).parent)) or shutil.which("ray")
    if ray is None:
        raise ConfigurationError("the command ray, which is installed with sterna, is not there")
    os.execv(ray, [ray, "start", f"--address={args.address}", *args.ray_options])


def _connection_error(host: str, port: int) -> str | None:
    """Return the reason for which no connection is accepted there; None if one is."""
    try:
        socket.create_connection((host.strip("[]"), port), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None
