"""Addresses and nodes of actors: where they listen for each other, and where Ray places them."""

import socket
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

GCS_TIMEOUT_S = 1.0
"""Time for a connection, within a machine or between two."""


def own_host(internal_host: str | None) -> str:
    """Return the address on which this process listens for other actors.

    Args:
        internal_host: that of `ClusterConfig`.
    """
    if internal_host is not None:
        return internal_host
    host: str = ray.util.get_node_ip_address()
    return host


def own_node() -> str:
    """Return Ray's id of the node on which this process runs."""
    node_id: str = ray.get_runtime_context().get_node_id()
    return node_id


def node_addresses() -> dict[str, str]:
    """Return the address of each live node by Ray's id of the node."""
    return {each["NodeID"]: each["NodeManagerAddress"] for each in ray.nodes() if each["Alive"]}


def node_address(node_id: str) -> str:
    """Return the address of a node, also of one that Ray has lost; its id if Ray does not know
    it."""
    found = (each["NodeManagerAddress"] for each in ray.nodes() if each["NodeID"] == node_id)
    address: str = next(found, node_id)
    return address


def staying_here() -> dict[str, Any]:
    """Return the options with which an actor runs on the node of this process or not at all: by
    default Ray starts it on any node."""
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(own_node(), soft=False)}


def is_gcs_up() -> bool:
    """Whether Ray's GCS listens. Without it, the start of an actor blocks the whole process for a
    minute."""
    address: str = ray.get_runtime_context().gcs_address
    return is_listening(address)


def is_listening(address: str) -> bool:
    """Whether connections to this host and port are accepted."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), GCS_TIMEOUT_S).close()
    except OSError:
        return False
    return True
