"""Keeps the terminal for what matters to who serves a model.

Libraries say much while an engine starts, most of it about choices that are not the user's.
Each such message is dropped here by name, so that every other warning, and every error, passes.
Who asks for vLLM's own log (VLLM_LOGGING_LEVEL=INFO or DEBUG) gets everything.
"""

import asyncio
import logging
import os
import warnings
from collections.abc import Mapping
from types import MappingProxyType

VLLM_LOG_LEVEL = "WARNING"
"""vLLM's log level where the user names none."""


class _Drop(logging.Filter):
    """Drops messages that begin so, before or after their arguments are filled in."""

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
        # What Sterna then says in one line.
        "vllm.transformers_utils.repo_utils": _Drop("Error parsing config for", "Error retrieving"),
        "vllm.utils.argparse_utils": _Drop("Unable to read the config file"),
        # Kernels and libraries that vLLM's CPU build does without.
        "vllm.platforms.cpu": _Drop("Triton is not installed", "Reset SSM cache type"),
        "torch._library.triton": _Drop("Triton not available"),
        "vllm.v1.worker.cpu_worker": _Drop("%s is not found in LD_PRELOAD"),
    }
)
"""What is dropped, by logger."""


def library_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables, beside those given, that some libraries read when a process starts."""
    if _wants_everything(environment):
        return {}
    quiet = {
        # Deprecations of libraries, by libraries.
        "PYTHONWARNINGS": "ignore::FutureWarning",
        # torch's C++ side warns that memory is bound to NUMA nodes, also where there is one.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    return {name: value for name, value in quiet.items() if name not in environment}


def log_environment(environment: Mapping[str, str], is_terminal: bool) -> dict[str, str]:
    """Return variables that say how Ray shows its actors' lines; set them before it is
    imported."""
    shown = {
        # A line that another actor printed too would be held back for seconds.
        "RAY_DEDUP_LOGS": "0",
    }
    if not is_terminal or environment.get("NO_COLOR"):
        shown["RAY_COLOR_PREFIX"] = "0"
    return {name: value for name, value in shown.items() if name not in environment}


def drop_noise() -> None:
    """Drop the messages from this process's log, now and when libraries are loaded later."""
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
