"""Environment variables that Ray's processes read: access to them, and the settings of a node."""

import secrets
from collections.abc import Mapping, MutableMapping

from sterna.errors import ConfigurationError

RECONNECT_TIMEOUT_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"

RECONNECT_TIMEOUT_S = 86_400
"""Of the server's own node. Ray's minute is too short for making room on a full disk, without which
no GCS comes up."""

NODE_DEFAULTS: Mapping[str, str] = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's default niceness makes engines yield to every other process of the machine.
    "RAY_worker_niceness": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # A worker that becomes a fork waits for the fork server's imports.
    "RAY_worker_register_timeout_seconds": "300",
    # At 95 % of the machine's memory Ray would kill actors, the newest first and several at once:
    # the supervisor in reserve, front ends and replacements, whatever has taken the memory.
    "RAY_memory_monitor_refresh_ms": "0",
}
"""Settings that every node of a server has, unless the user has set others."""


def set_node_defaults(
    environment: MutableMapping[str, str], reconnect_timeout_s: int = RECONNECT_TIMEOUT_S
) -> None:
    """Set what the user has not set of the settings of a node.

    To be called before Ray is imported.

    Args:
        reconnect_timeout_s: how long this node's processes serve on without a GCS, after which
            each ends itself.
    """
    for name, value in NODE_DEFAULTS.items():
        environment.setdefault(name, value)
    environment.setdefault(RECONNECT_TIMEOUT_VARIABLE, str(reconnect_timeout_s))


IS_SPREAD = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""With 0, a Ray that expects no other nodes listens on the loopback only."""


def has_token(environment: Mapping[str, str]) -> bool:
    """Whether nodes can know each other by a token of the user's, or need none."""
    if environment.get("RAY_AUTH_MODE", "token") != "token":
        return True
    return "RAY_AUTH_TOKEN_PATH" in environment or "RAY_AUTH_TOKEN" in environment


def protect_ray(environment: MutableMapping[str, str], *, is_shared: bool = False) -> None:
    """Let Ray answer only processes that know the run's token, and only on this machine unless it
    is shared.

    Access to Ray's ports is permission to run code here. The processes of the run inherit the
    token. To be called before Ray is imported.

    Args:
        is_shared: whether other nodes are to join, which need to know the token.

    Raises:
        ConfigurationError: the user has set no token for other nodes.
    """
    environment[IS_SPREAD] = str(int(is_shared))
    environment.setdefault("RAY_AUTH_MODE", "token")
    if has_token(environment):
        return
    if is_shared:
        raise ConfigurationError(
            "--cluster-address: other nodes join with a token; set RAY_AUTH_TOKEN to one of yours "
            "(openssl rand -hex 32), and RAY_AUTH_MODE=token, here and there"
        )
    environment["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
