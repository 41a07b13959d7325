"""Commands that are programs of the source checkout, in its `bench` folder."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from sterna.errors import ConfigurationError

ROOT = Path(__file__).resolve().parents[3]


def reproduce(arguments: Sequence[str]) -> NoReturn:
    """Run `sterna reproduce`: become the paper's evaluation, or the comparison of policies.

    Raises:
        ConfigurationError: this is no source checkout.
    """
    if arguments[:1] == ["policies"]:
        become("bench.policies", arguments[1:])
    become("bench.paper", arguments)


def become(module: str, arguments: Sequence[str]) -> NoReturn:
    """Become the process of a module or package of the checkout, which reads its own options.

    It stays in the user's folder, because the options may have paths relative to it.

    Raises:
        ConfigurationError: this is no source checkout.
    """
    path = ROOT.joinpath(*module.split("."))
    if not (path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()):
        raise ConfigurationError(
            f"{module} is not installed with sterna: run this from the .venv of a source checkout"
        )
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), before] if before else [str(ROOT)])
    # Safe paths: the user's folder may have another module of that name.
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *arguments])
