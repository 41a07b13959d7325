"""Ports for servers that are started here."""

import random
import socket


def free_port() -> int:
    """Return a port that nobody listens on, and that nobody gets who asks for any one: Ray and
    others do before the server listens."""
    while not is_port_free(port := random.randrange(20_000, 32_000)):
        pass
    return port


def is_port_free(port: int) -> bool:
    """Whether somebody could begin to listen on the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
