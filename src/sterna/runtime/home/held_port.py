"""Port of a server, which is held from its start on.

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

EVERYWHERE = frozenset({"", "0.0.0.0", "::"})
"""What stands for all addresses of the machine."""

logger = logging.getLogger("sterna.launch")


@contextmanager
def holding_port(host: str | None, port: int, parent: Path | None = None) -> Iterator[None]:
    """Context in which no other server of this user starts at the same address.

    Args:
        parent: of the folder of the lock files; by default the temporary folder.

    Raises:
        ConfigurationError: another one has the port.
    """
    address = _address(host or "")
    with ExitStack() as held:
        try:
            folder = users_folder("ports", parent)
            # Ports are those of a network namespace; the folder may be several machines'.
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            name = f"{boot}-{os.stat('/proc/self/ns/net').st_ino}-{port}"
            # One that listens everywhere has the first file alone.
            locks = [lock_file(folder / name, is_shared=address not in EVERYWHERE)]
            if address not in EVERYWHERE:
                locks.append(lock_file(folder / f"{name}-{address}"))
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
    # As in vLLM, a host with a colon is an IPv6 address, and any other has an IPv4 address.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        found = socket.getaddrinfo(host, None, family, socket.SOCK_STREAM) if host else []
    except (OSError, UnicodeError):
        # To listen there will fail.
        return host.replace("/", "_")
    return str(found[0][4][0]) if found else ""
