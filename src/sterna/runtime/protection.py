"""Who may use a run's Ray."""

import secrets
from collections.abc import MutableMapping


def protect_ray(environment: MutableMapping[str, str]) -> None:
    """Have Ray answer only to processes that know this run's token.

    Ray's ports are open to the network, and whoever may use them can run code here. The processes
    of the run inherit the token. To be called before Ray is imported, which reads it.
    """
    if environment.setdefault("RAY_AUTH_MODE", "token") == "token":
        environment.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
