"""Settings of all tests."""

import logging
import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

from sterna.runtime.home.ray_environment import protect_ray

HERE = Path(__file__).parent

ENGINES = "engines"
"""The tests of which only one at a time runs."""

# A shell has what it starts in the background ignore Ctrl-C, and all that is started from there:
# tests that press it would wait in vain.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Before anything imports Ray.
protect_ray(os.environ)

# Continuous integration judges the change, by the same examples each time; new examples are
# looked for on developers' machines.
settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
# A deadline in wall time fails for what else the machine does.
settings.register_profile("developer", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "developer")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Share the tests out to the two processes of `make test`.

    Those that start engines or a Ray have one process for all of them, so that only one at a time
    wants the machine, and begin at once, since they take longest. Of the others, the files are
    shared out.
    """
    if not hasattr(config, "workerinput"):
        return
    for item in items:
        group = ENGINES if _starts_engines(item) else str(item.path.relative_to(HERE))
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: not _starts_engines(item))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let warnings through, as at the start of a process: an import of vLLM's server, by a test
    before, leaves the root logger at errors only."""
    logging.root.setLevel(logging.WARNING)


def _starts_engines(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) is not None for name in ("ray", "vllm"))
