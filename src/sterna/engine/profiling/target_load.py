"""Target load of high priority on an engine (Section 4.4.2): what was measured, else a default.

The paper's 1,600 tokens hold for LLaMA-7B on an A10 (Section 6.4). Where they are more than half of
an instance's memory, half of the memory replaces them: a target load near or above the whole memory
would leave high priority little headroom, or none.
"""

from pathlib import Path

from sterna.config import PolicyConfig
from sterna.engine.profiling.profile_file import read
from sterna.types import HIGH

MAX_DEFAULT_SHARE = 0.5
"""Largest share of an instance's memory for the default target load."""


def measured_tokens(profile: str) -> int | None:
    """The target load in the file of a profile; None for one that `sterna profile` has not
    written, or that has a name.

    Raises:
        ConfigurationError: the file is broken or of another version of Sterna.
    """
    path = Path(profile)
    measurement = read(path) if path.suffix == ".json" else None
    return None if measurement is None else measurement.target_load_tokens


def default_tokens(total_tokens: int | None) -> int:
    """The target load of an engine that was not measured: the paper's, or half of the memory where
    that is less.

    Args:
        total_tokens: M, where it is known.
    """
    paper_tokens = PolicyConfig(name="default").target_load_tokens[HIGH]
    if total_tokens is None:
        return paper_tokens
    return min(paper_tokens, max(1, int(MAX_DEFAULT_SHARE * total_tokens)))
