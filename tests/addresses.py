"""Addresses of this machine."""

import socket

import pytest


def own_address() -> str:
    """An address of this machine that is not that of the loopback; without one the test is
    skipped."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Nothing is sent: the kernel only chooses the address to send from.
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address besides the loopback's")
        return str(probe.getsockname()[0])
