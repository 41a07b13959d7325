"""Findings about one kind of model."""

from dataclasses import dataclass
from enum import Enum

from bench.migration.samples import Sample


@dataclass(frozen=True, slots=True)
class Move:
    """One migration.

    Attributes:
        stage_bytes: bytes of each stage in order, as the destination's data planes count them.
    """

    sample: Sample
    stage_bytes: tuple[int, ...]


class Recovery(Enum):
    """Tokens of a request whose instance died and that went on at another one."""

    SAME = "same"
    """Those of a request that stays."""
    AS_RECOMPUTED = "as recomputed"
    """Others, but those that vLLM alone gives when it computes the KV cache of the same tokens."""
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Found:
    """The measurement of one kind.

    Attributes:
        groups: vLLM's names for the kinds of its KV cache groups.
        reason: the name of the feature for which nothing moves; None where requests move.
        is_same: whether each request that moved had the tokens of one that stayed; None if none
            moved.
        recovery: None if none moved.
        num_neighbours: other requests on each instance.
        foreign_cores: number of cores that other programs kept busy.
    """

    model_type: str
    groups: tuple[str, ...]
    reason: str | None = None
    moves: tuple[Move, ...] = ()
    is_same: bool | None = None
    recovery: Recovery | None = None
    num_neighbours: int = 0
    foreign_cores: float = 0.0
