"""The port of a server, which is held from its start on.

Front ends listen when instances are up, which may take minutes, and share the port among
themselves. Without this a server that starts meanwhile would find the port free, and share it with
them: requests and operators' orders would go to either.
"""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from sterna.errors import ConfigurationError
from sterna.folders import lock_file, users_folder

EVERYWHERE = frozenset({None, "", "0.0.0.0", "::"})
"""Hosts that stand for all addresses of the machine."""

logger = logging.getLogger("sterna.launch")


@contextmanager
def holding_port(host: str | None, port: int, parent: Path | None = None) -> Iterator[None]:
    """Context in which no other server of this user starts at the same address.

    Args:
        parent: of the folder of the lock files; by default the temporary folder.

    Raises:
        ConfigurationError: another one has the port.
    """
    with ExitStack() as held:
        try:
            folder = users_folder("ports", parent)
            # Ports are those of a network namespace; the folder may be several machines'.
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            name = f"{boot}-{os.stat('/proc/self/ns/net').st_ino}-{port}"
            # One that listens everywhere has the first file alone.
            locks = [lock_file(folder / name, is_shared=host not in EVERYWHERE)]
            if host not in EVERYWHERE:
                locks.append(lock_file(folder / f"{name}-{_address(str(host))}"))
        except OSError as error:
            logger.warning("port is not held error=%s", error)
            locks = []
        for lock in locks:
            if lock is not None:
                held.callback(os.close, lock)
        if None in locks:
            raise ConfigurationError(
                f"cannot listen on {host or '*'}:{port}: another server of yours has been started "
                "there; choose another --port"
            )
        yield


def _address(host: str) -> str:
    """The address of a host, which may have several names."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        # To listen there will fail.
        return host.replace("/", "_")
    return str(found[0][4][0])
