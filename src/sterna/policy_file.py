"""A policy by its name: a preset's, or FILE.py:CLASS for a custom class.

The file's text travels with the policy, so that processes of other nodes need no copy of it. It may
import what is installed, and no other file beside it.
"""

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sterna.config import PolicyConfig
from sterna.errors import ConfigurationError
from sterna.own_log import LogThrottle
from sterna.policy.presets import PRESETS, preset

if TYPE_CHECKING:
    # Imported with the first file only: `--help` needs no numpy.
    from sterna.policy.own import Policy


logger = logging.getLogger(__name__)


def names_file(text: str) -> bool:
    """Whether this names a class in a file, and no preset."""
    return text not in PRESETS and ".py" in text


def policy_named(text: str) -> PolicyConfig:
    """The policy of this name.

    Raises:
        ConfigurationError: there is none; the message says why.
    """
    if not names_file(text):
        return preset(text)
    file, colon, name = text.rpartition(":")
    if not colon or not name.isidentifier():
        raise ConfigurationError(f"{text} must name the class as well: FILE.py:CLASS")
    try:
        source = Path(file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"policy {text}: {file} cannot be read: {error}") from None
    try:
        return load_policy(source, file, name).as_config()
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(f"policy {text}: {type(error).__name__}: {error}") from error


def in_server(policy: PolicyConfig) -> PolicyConfig:
    """The same policy; a custom class in it cannot end this process. What goes wrong in it is
    logged."""
    if policy.own is None:
        return policy
    from sterna.policy.guarded import guarded

    throttles: dict[str, LogThrottle] = {}

    def report(method: str, error: Exception) -> None:
        if throttles.setdefault(method, LogThrottle()).is_due():
            logger.error(
                "policy failed, the rules of its base decide policy=%s method=%s",
                policy.name,
                method,
                exc_info=error,
            )

    return guarded(policy, report)


def load_policy(source: str, file: str, name: str) -> "Policy":
    """Run the source, and make an object of its class.

    Args:
        file: where it comes from, for messages.

    Raises:
        ConfigurationError: it has no such class.
    """
    from sterna.policy.own import Policy

    module = ModuleType(f"sterna_policy_{Path(file).stem}")
    module.__file__ = file
    # Dataclasses look their module up.
    sys.modules[module.__name__] = module
    exec(compile(source, file, "exec"), module.__dict__)
    found = getattr(module, name, None)
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise ConfigurationError(
            f"{file} has no class {name} that is derived from sterna.policy.own.Policy"
        )

    def reduce(_: Policy) -> tuple[Callable[..., Policy], tuple[Any, ...]]:
        # In another process it is made from the source.
        return load_policy, (source, file, name)

    found.__reduce__ = reduce  # type: ignore[assignment]
    return found()
