"""Who may use a run's Ray."""

import secrets
from collections.abc import MutableMapping

from sterna.errors import ConfigurationError

PATIENCE_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"

PATIENCE_S = 86_400
"""After Ray's own minute nobody has made room on a full disk, where no GCS comes up."""


def wait_for_gcs(environment: MutableMapping[str, str]) -> None:
    """Have the processes of this node serve on without a GCS, where Ray would end each of them.

    To be called before Ray is imported, which reads it.
    """
    environment.setdefault(PATIENCE_VARIABLE, str(PATIENCE_S))


IS_SPREAD = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Without it, Ray listens on the loopback only, where it has no nodes to expect."""


def protect_ray(environment: MutableMapping[str, str], *, is_shared: bool = False) -> None:
    """Have Ray answer only to processes that know this run's token, and to this machine only unless
    it is shared.

    Whoever may use Ray's ports can run code here. The processes of the run inherit the token. To be
    called before Ray is imported, which reads all of this.

    Args:
        is_shared: whether other nodes are to join, which need to know the token.

    Raises:
        ConfigurationError: they could not know it.
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
