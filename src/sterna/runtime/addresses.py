"""Where actors are: the address on which they listen for each other, the node they stay on."""

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


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
