"""Free ports for servers of benchmarks."""

import random
import socket


def free_port() -> int:
    """Return a free port outside of the range of ephemeral ports, of which Ray and other programs
    may get some before the server listens."""
    while not is_port_free(port := random.randrange(20_000, 32_000)):
        pass
    return port


def is_port_free(port: int) -> bool:
    """Whether a process could listen on the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
