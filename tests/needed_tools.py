"""Tools and rights that some tests need of the machine.

Without them these tests are skipped, or fail if STERNA_ALL_TOOLS=1 is set: where everything is
meant to be installed, a skipped test hides that something is not.
"""

import os
import shutil
from typing import NoReturn

import pytest

ALL_ARE_HERE = os.environ.get("STERNA_ALL_TOOLS") == "1"


def missing_program(name: str, package: str) -> str | None:
    """The program that is missing, and Debian's package that has it; None if it is installed."""
    return None if shutil.which(name) else f"{name} is in Debian's package {package}"


def needs(missing: str | None) -> pytest.MarkDecorator:
    """A mark for tests of which this is missing; None: nothing is. With STERNA_ALL_TOOLS=1 they run
    nevertheless, and fail."""
    return pytest.mark.skipif(missing is not None and not ALL_ARE_HERE, reason=missing or "")


def skip(missing: str) -> NoReturn:
    """Skip the running test, which needs this, or fail it with STERNA_ALL_TOOLS=1."""
    if ALL_ARE_HERE:
        pytest.fail(missing)
    pytest.skip(missing)
