"""`sterna reproduce`: runs the paper's evaluation of the source checkout."""

from collections.abc import Sequence

from sterna.cli.checkout import become


def reproduce(arguments: Sequence[str]) -> int:
    """Become the evaluation's process, which reads its own options.

    Raises:
        ConfigurationError: this is no source checkout.
    """
    become("bench.paper", arguments)
