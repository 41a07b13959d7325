"""`sterna reproduce`: runs the paper's evaluation of the source checkout."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from sterna.errors import ConfigurationError


def reproduce(arguments: Sequence[str]) -> int:
    """Become the evaluation's process, which reads its own options.

    Raises:
        ConfigurationError: this is no source checkout.
    """
    root = Path(__file__).resolve().parents[3]
    if not (root / "bench" / "paper" / "__main__.py").is_file():
        raise ConfigurationError(
            "the paper's evaluation is not installed with sterna: run this from the .venv of a "
            "source checkout"
        )
    os.chdir(root)
    os.execv(sys.executable, [sys.executable, "-m", "bench.paper", *arguments])
