"""Log lines: those of libraries that are dropped, and when none are."""

import asyncio
import logging
import sys
import warnings
from collections.abc import Iterator

import pytest

from sterna.runtime.processes.log_lines import (
    drop_cancellations,
    drop_noise,
    library_environment,
    log_environment,
)

NAMES = (
    "vllm.config.scheduler",
    "vllm.v1.worker.cpu_worker",
    "vllm.platforms.cpu",
    "uvicorn.error",
)


@pytest.fixture(autouse=True)
def _filters() -> Iterator[None]:
    """What a process drops ends with the test."""
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict]
    loggers += [logging.getLogger(name) for name in NAMES]
    before = {each: [*each.filters] for each in loggers}
    # An engine of an earlier test in this process may have dropped its noise already.
    for each in loggers:
        each.filters.clear()
    with warnings.catch_warnings():
        yield
    for name in [*logging.root.manager.loggerDict]:
        logger = logging.getLogger(name)
        logger.filters[:] = before.get(logger, [])


def is_shown(logger: str, message: str, *args: object) -> bool:
    record = logging.LogRecord(logger, logging.WARNING, "file", 1, message, args, None)
    return bool(logging.getLogger(logger).filter(record))


@pytest.mark.parametrize(
    ("logger", "message", "args", "shown"),
    [
        ("vllm.config.scheduler", "Using custom scheduler class %s", ("x",), False),
        ("vllm.config.scheduler", "Something else", (), True),
        ("vllm.config.scheduler", "No: Using custom scheduler class", (), True),
        ("vllm.config.vllm", "Using custom scheduler class", (), True),
        ("vllm.v1.worker.cpu_worker", "%s is not found in LD_PRELOAD", ("x",), False),
        ("vllm.v1.worker.cpu_worker", "x is not found in LD_PRELOAD", (), True),
        ("vllm.platforms.cpu", "%s is not installed", ("Triton",), False),
        ("vllm.utils.system_utils", "Found ulimit of %s and failed", (20_000,), False),
    ],
)
def test_a_message_is_dropped_by_its_beginning_on_its_own_logger(
    monkeypatch: pytest.MonkeyPatch,
    logger: str,
    message: str,
    args: tuple[object, ...],
    shown: bool,
) -> None:
    """Before or after its arguments are filled in."""
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    assert is_shown(logger, message, *args)
    drop_noise()
    assert is_shown(logger, message, *args) is shown


@pytest.mark.parametrize(
    ("level", "shown"), [("INFO", True), ("debug", True), ("WARNING", False), ("ERROR", False)]
)
def test_who_asks_for_vllms_log_gets_all_of_it(
    monkeypatch: pytest.MonkeyPatch, level: str, shown: bool
) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", level)
    drop_noise()
    assert is_shown("vllm.config.scheduler", "Using custom scheduler class") is shown
    assert (library_environment({"VLLM_LOGGING_LEVEL": level}) == {}) is shown


def test_deprecations_of_the_future_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        drop_noise()
        warnings.warn("soon", FutureWarning, stacklevel=1)
        warnings.warn("now", UserWarning, stacklevel=1)
    assert [str(each.message) for each in caught] == ["now"]


def test_what_a_process_reads_at_its_start_is_given_unless_the_user_gives_it() -> None:
    assert library_environment({"PYTHONWARNINGS": "error"}) == {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    assert library_environment({}) == {
        "PYTHONWARNINGS": "ignore::FutureWarning",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }


@pytest.mark.parametrize(
    ("environment", "is_terminal", "added"),
    [
        ({}, True, {"RAY_DEDUP_LOGS": "0"}),
        ({}, False, {"RAY_DEDUP_LOGS": "0", "RAY_COLOR_PREFIX": "0"}),
        ({"NO_COLOR": "1"}, True, {"RAY_DEDUP_LOGS": "0", "RAY_COLOR_PREFIX": "0"}),
        ({"NO_COLOR": ""}, True, {"RAY_DEDUP_LOGS": "0"}),
        ({"RAY_DEDUP_LOGS": "1", "RAY_COLOR_PREFIX": "1"}, False, {}),
    ],
)
def test_rays_lines_have_colours_on_a_terminal_alone(
    environment: dict[str, str], is_terminal: bool, added: dict[str, str]
) -> None:
    assert log_environment(environment, is_terminal) == added


@pytest.mark.parametrize(
    ("error", "shown"), [(asyncio.CancelledError, False), (ValueError, True), (None, True)]
)
def test_an_answer_that_is_cut_at_the_end_leaves_no_traceback(
    error: type[BaseException] | None, shown: bool
) -> None:
    drop_cancellations()
    exc_info = None
    if error is not None:
        try:
            raise error
        except error:
            exc_info = sys.exc_info()
    record = logging.LogRecord("uvicorn.error", logging.ERROR, "file", 1, "x", (), exc_info)
    assert bool(logging.getLogger("uvicorn.error").filter(record)) is shown
