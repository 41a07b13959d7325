"""Tests that start a server take minutes together: they run with `make test-slow`."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("ray"):
            item.add_marker(pytest.mark.slow)
