"""Log lines: where Sterna's go, and which ones of libraries mean nothing to a user who serves a
model.

Libraries log much while an engine starts, most of it about choices that are not the user's.
Each such message is dropped here by its text, so that every other warning, and every error, passes.
VLLM_LOGGING_LEVEL=INFO or DEBUG lets everything pass.
"""

import asyncio
import logging
import os
import warnings
from collections.abc import Mapping
from types import MappingProxyType

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

VLLM_LOG_LEVEL = "WARNING"
"""vLLM's log level unless the user sets one."""


class _Drop(logging.Filter):
    """Drops messages with these beginnings, before or after their arguments are filled in."""

    def __init__(self, *beginnings: str) -> None:
        super().__init__()
        self._beginnings = beginnings

    def filter(self, record: logging.LogRecord) -> bool:
        texts = (str(record.msg), record.getMessage())
        return not any(text.startswith(self._beginnings) for text in texts)


_FILTERS: Mapping[str, _Drop] = MappingProxyType(
    {
        # Consequences of how Sterna runs the engine.
        "vllm.engine.arg_utils": _Drop("The global random seed is set to"),
        "vllm.config.scheduler": _Drop("Using custom scheduler class"),
        "vllm.config.vllm": _Drop(
            # Repeats --enforce-eager.
            "Enforce eager set",
            "Inductor compilation was disabled",
            # vLLM's CPU build does without Triton.
            "Model Runner V2 requires Triton",
        ),
        # Sterna reports these in one line of its own.
        "vllm.transformers_utils.repo_utils": _Drop("Error parsing config for", "Error retrieving"),
        "vllm.utils.argparse_utils": _Drop("Unable to read the config file"),
        # The start raises the limit as far as it goes, and warns where that is little (`limits`).
        "vllm.utils.system_utils": _Drop("Found ulimit of %s"),
        # Kernels and libraries that vLLM's CPU build does without.
        "vllm.platforms.cpu": _Drop("Triton is not installed", "Reset SSM cache type"),
        "torch._library.triton": _Drop("Triton not available"),
        "vllm.v1.worker.cpu_worker": _Drop("%s is not found in LD_PRELOAD"),
    }
)
"""The filters, by the name of the logger."""


def configure_logging(level: str) -> None:
    """Send Sterna's log lines to stderr, which Ray forwards from an actor to the driver."""
    root = logging.getLogger("sterna")
    root.setLevel(level)
    if not root.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(FORMAT))
        root.addHandler(handler)
        root.propagate = False


def library_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that quiet some libraries from the start of a process, unless
    they are set already."""
    if _wants_everything(environment):
        return {}
    quiet = {
        # Deprecations of libraries, by libraries.
        "PYTHONWARNINGS": "ignore::FutureWarning",
        # torch's C++ side warns that memory is bound to NUMA nodes, even if there is only one.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    return {name: value for name, value in quiet.items() if name not in environment}


def log_environment(environment: Mapping[str, str], is_terminal: bool) -> dict[str, str]:
    """Return environment variables for the way in which Ray shows the lines of its actors; set
    them before Ray is imported."""
    shown = {
        # Otherwise Ray holds a line back for seconds if another actor printed the same one.
        "RAY_DEDUP_LOGS": "0",
    }
    if not is_terminal or environment.get("NO_COLOR"):
        shown["RAY_COLOR_PREFIX"] = "0"
    return {name: value for name, value in shown.items() if name not in environment}


def drop_noise() -> None:
    """Install the filters in this process, also for libraries that are loaded later."""
    if _wants_everything(os.environ):
        return
    warnings.simplefilter("ignore", FutureWarning)
    for logger_name, drop in _FILTERS.items():
        logging.getLogger(logger_name).addFilter(drop)


def drop_cancellations() -> None:
    """Drop uvicorn's traceback for each answer that it cuts because the server ends."""
    logging.getLogger("uvicorn.error").addFilter(
        lambda record: not (record.exc_info and record.exc_info[0] is asyncio.CancelledError)
    )


def _wants_everything(environment: Mapping[str, str]) -> bool:
    return environment.get("VLLM_LOGGING_LEVEL", VLLM_LOG_LEVEL).upper() in ("INFO", "DEBUG")
