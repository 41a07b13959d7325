"""Where actors are: the address on which they listen for each other, the node they stay on."""

import socket
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

GCS_TIMEOUT_S = 1.0
"""For a connection, on the same machine or the next."""


def own_host(internal_host: str | None) -> str:
    """Return the address on which this process listens for other actors.

    Args:
        internal_host: see `ClusterConfig`.
    """
    if internal_host is not None:
        return internal_host
    host: str = ray.util.get_node_ip_address()
    return host


def own_node() -> str:
    """Return Ray's name of the node on which this process runs."""
    node_id: str = ray.get_runtime_context().get_node_id()
    return node_id


def staying_here() -> dict[str, Any]:
    """Return the options with which an actor runs on the node of this process, or not at all: Ray
    would start it anywhere."""
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(own_node(), soft=False)}


def is_gcs_up() -> bool:
    """Whether Ray's GCS listens. Who asks for an actor where it does not is held up for a minute,
    with all that is to be done beside."""
    address: str = ray.get_runtime_context().gcs_address
    return is_listening(address)


def is_listening(address: str) -> bool:
    """Whether somebody takes connections at this host and port."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), GCS_TIMEOUT_S).close()
    except OSError:
        return False
    return True
