"""How long Ray's processes do without its GCS."""

from collections.abc import MutableMapping

PATIENCE_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"

PATIENCE_S = 86_400
"""After Ray's own minute nobody has made room on a full disk, where no GCS comes up."""


def wait_for_gcs(environment: MutableMapping[str, str]) -> None:
    """Have the processes of this node serve on without a GCS, where Ray would end each of them.

    To be called before Ray is imported, which reads it.
    """
    environment.setdefault(PATIENCE_VARIABLE, str(PATIENCE_S))
