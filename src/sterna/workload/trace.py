"""A trace: the requests of one run. Pure."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sterna.errors import ConfigurationError
from sterna.workload.prefix import PrefixBlocks
from sterna.workload.turns import Turns

MAX_PRIORITY = 1_000
"""A simulation counts the requests of each priority up to the highest."""


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests in the order of their arrival; every array has one entry for each of them.

    Attributes:
        name: its name in reports.
        arrival_s: float64[n], ascending, from 0 on; for a later turn of a session, the arrival of
            its first one.
        input_tokens: int64[n], at least 1.
        output_tokens: int64[n], at least 1: the number of tokens that the model will produce.
        priority: int64[n], the execution priority, which is also the scheduling priority; at most
            MAX_PRIORITY.
        prefix_blocks: the blocks of every prompt; None if the trace does not have them.
        turns: which requests follow answers to others; None if all come by themselves.

    Raises:
        ConfigurationError: the arrays do not fit together; the message has the row.
    """

    name: str
    arrival_s: NDArray[np.float64]
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    priority: NDArray[np.int64]
    prefix_blocks: PrefixBlocks | None = None
    turns: Turns | None = None

    def __post_init__(self) -> None:
        for field, is_valid, rule in (
            ("arrival_s", np.diff(self.arrival_s, prepend=0.0) >= 0, "ascending and from 0 on"),
            ("input_tokens", self.input_tokens >= 1, "at least 1"),
            ("output_tokens", self.output_tokens >= 1, "at least 1"),
            (
                "priority",
                (self.priority >= 0) & (self.priority <= MAX_PRIORITY),
                f"from 0 (normal) to {MAX_PRIORITY:,}",
            ),
        ):
            if len(is_valid) != len(self):
                raise ConfigurationError(
                    f"trace {self.name}: {field} has {len(is_valid)} entries, not {len(self)}"
                )
            if not is_valid.all():
                row = int(np.argmin(is_valid))
                raise ConfigurationError(f"trace {self.name}: {field} of row {row} must be {rule}")
        for field, part in (("prefix_blocks", self.prefix_blocks), ("turns", self.turns)):
            if part is not None and len(part) != len(self):
                raise ConfigurationError(
                    f"trace {self.name}: {field} has {len(part)} entries, not {len(self)}"
                )

    def __len__(self) -> int:
        return len(self.arrival_s)
