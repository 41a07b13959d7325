"""Environment variables that Ray reads at its import: access to it, and the timeout of its GCS."""

import secrets
from collections.abc import MutableMapping

from sterna.errors import ConfigurationError

RECONNECT_TIMEOUT_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"

RECONNECT_TIMEOUT_S = 86_400
"""Ray's own minute is too short for making room on a full disk, without which no GCS comes up."""


def wait_for_gcs(environment: MutableMapping[str, str]) -> None:
    """Let the processes of this node serve on without a GCS; Ray's default would end each of them.

    To be called before Ray is imported.
    """
    environment.setdefault(RECONNECT_TIMEOUT_VARIABLE, str(RECONNECT_TIMEOUT_S))


IS_SPREAD = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""With 0, a Ray that expects no other nodes listens on the loopback only."""


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
    if environment.setdefault("RAY_AUTH_MODE", "token") != "token":
        return
    if "RAY_AUTH_TOKEN_PATH" in environment or "RAY_AUTH_TOKEN" in environment:
        return
    if is_shared:
        raise ConfigurationError(
            "--cluster-address: other nodes join with a token; set RAY_AUTH_TOKEN to one of yours "
            "(openssl rand -hex 32), and RAY_AUTH_MODE=token, here and there"
        )
    environment["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
