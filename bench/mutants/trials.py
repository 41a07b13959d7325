"""One run of some tests over one mutant, in a process of its own.

The process is forked from one that has imported pytest and the libraries, but nothing of Sterna.
There an import of the mutated module gives the mutant; the file stays as it is. Limits are on
processor time, so that a busy machine changes no verdict; whatever hangs without using it is ended
later.

This module must import nothing of Sterna, and neither must those that it imports.
"""

import contextlib
import importlib.machinery
import importlib.util
import os
import resource
import select
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from types import CodeType, ModuleType

import hypothesis.stateful  # imported here, so that no trial has to
import msgspec  # noqa: F401
import numpy  # noqa: F401
import pytest
import zmq  # noqa: F401
from hypothesis.configuration import set_hypothesis_home_dir

HYPOTHESIS_PROFILE = "mutants"

OPTIONS = (
    *("-x", "--import-mode=importlib", "-p", "no:cacheprovider"),
    *("-p", "_hypothesis_pytestplugin", f"--hypothesis-profile={HYPOTHESIS_PROFILE}"),
    *("-p", "pytest_timeout", "--timeout=0"),
)
"""pytest's. Other plug-ins are not loaded."""

MEMORY_BYTES = 4 << 30
WALL_FACTOR = 20
"""A trial is ended after this many times its limit of processor time."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What to run.

    Attributes:
        module: the mutated one.
        source: its mutant; None runs the original.
        stages: arguments of pytest. The second ones run where the first find nothing, and so on.
        limits_s: processor time for each of them.
        scratch: a folder for what Python and hypothesis keep from one trial to the next: compiled
            files, but never the mutant's.
    """

    module: str
    source: str | None
    stages: tuple[tuple[str, ...], ...]
    limits_s: tuple[float, ...]
    scratch: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the tests say.

    Attributes:
        found_by: the first test that failed, or what ended the trial; None: no test failed.
        cpu_s: the processor time of each stage that was run.
    """

    found_by: str | None
    cpu_s: tuple[float, ...]


class NoTestsError(Exception):
    """pytest has run nothing: the arguments are wrong."""


def run(trial: Trial) -> Verdict:
    """Run the stages until a test fails.

    Raises:
        NoTestsError: a stage has no tests.
    """
    times = []
    for arguments, limit_s in zip(trial.stages, trial.limits_s, strict=True):
        found_by, cpu_s = _stage(trial, arguments, limit_s)
        times.append(cpu_s)
        if found_by is not None:
            return Verdict(found_by, tuple(times))
    return Verdict(None, tuple(times))


def _stage(trial: Trial, arguments: Sequence[str], limit_s: float) -> tuple[str | None, float]:
    reader, writer = os.pipe()
    process_id = os.fork()
    if process_id == 0:
        os.close(reader)
        _in_child(trial, arguments, limit_s, writer)
    os.close(writer)
    with open(reader, "rb") as said:
        ended = os.pidfd_open(process_id)
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        if not poll.poll(limit_s * WALL_FACTOR * 1000):
            os.kill(process_id, signal.SIGKILL)
        os.close(ended)
        _, status, usage = os.wait4(process_id, 0)
        # Its own children, which hold the pipe open.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process_id, signal.SIGKILL)
        first_failed = said.read().decode()
    cpu_s = usage.ru_utime + usage.ru_stime
    if os.WIFSIGNALED(status):
        return f"ended by {signal.Signals(os.WTERMSIG(status)).name}", cpu_s
    code = os.WEXITSTATUS(status)
    if code == pytest.ExitCode.OK:
        return None, cpu_s
    if code in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise NoTestsError(f"pytest runs no tests for {' '.join(arguments)}")
    return first_failed or f"pytest ended with {code}", cpu_s


def _in_child(trial: Trial, arguments: Sequence[str], limit_s: float, writer: int) -> None:
    """Never returns."""
    code = int(pytest.ExitCode.INTERNAL_ERROR)
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        seconds = int(limit_s) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(nothing, descriptor)
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        sys.pycache_prefix = trial.scratch
        sys.dont_write_bytecode = False
        set_hypothesis_home_dir(trial.scratch)
        # By a seed, without what earlier runs found, and only until one example fails.
        hypothesis.settings.register_profile(
            HYPOTHESIS_PROFILE,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
            report_multiple_bugs=False,
            # Some of them measure time.
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        if trial.source is not None:
            sys.meta_path.insert(0, _Planted(trial.module, trial.source))
        code = int(pytest.main([*OPTIONS, *arguments], plugins=[_Reporter(writer)]))
    finally:
        os._exit(code)


class _Reporter:
    """Writes the name of the first test that fails."""

    def __init__(self, writer: int) -> None:
        self._writer = writer

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            os.write(self._writer, report.nodeid.encode())

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            os.write(self._writer, f"{report.nodeid} (import)".encode())


class _Planted(MetaPathFinder):
    """Finds the mutant where the module is imported."""

    def __init__(self, module: str, source: str) -> None:
        self._module = module
        self._source = source

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._module:
            return None
        original = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        assert original is not None
        assert original.origin is not None
        loader = _MutantLoader(fullname, original.origin, self._source)
        return importlib.util.spec_from_file_location(fullname, original.origin, loader=loader)


class _MutantLoader(importlib.machinery.SourceFileLoader):
    """Runs other source than the file's, and caches nothing."""

    def __init__(self, fullname: str, path: str, source: str) -> None:
        super().__init__(fullname, path)
        self._mutant = source

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._mutant, self.get_filename(fullname), "exec", dont_inherit=True)
