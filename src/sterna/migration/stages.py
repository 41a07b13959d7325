"""Which blocks the next copy round of a migration takes (Section 4.2). Pure."""

from dataclasses import dataclass

from sterna.config import MigrationConfig
from sterna.migration.messages import Mode, Reason, RequestPosition

NUM_SPARE_BLOCKS = 1
"""Blocks that a last stage reserves beyond those there are: decoding goes on until the drain."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One copy round.

    Attributes:
        first_block: counted from the request's first; those before it are in place.
        num_blocks: at most so many.
        is_last: the request is drained for it.
    """

    number: int
    first_block: int
    num_blocks: int = 0
    is_last: bool = False

    def next_unplanned(self, num_copied: int) -> "Stage":
        """The next stage's number and first block, when so many blocks of this one were copied."""
        return Stage(self.number + 1, self.first_block + num_copied)


def plan_stage(
    unplanned: Stage, progress: RequestPosition, mode: Mode, config: MigrationConfig
) -> Stage | Reason:
    """The stage with its blocks, for a request that stands at `progress`; or why none may follow.

    It is the last one when few blocks remain, when the mode has no other, or for a queuing
    request, which has no KV to copy.
    """
    number, first_block = unplanned.number, unplanned.first_block
    num_full = progress.num_full_blocks - first_block
    num_remaining = progress.num_blocks - first_block
    if progress.is_queuing or mode is Mode.RECOMPUTE:
        stage = Stage(number, first_block, 0, True)
    elif (
        mode is Mode.STOP_AND_COPY or num_remaining <= config.last_stage_max_blocks or num_full <= 0
    ):
        stage = Stage(number, first_block, num_remaining + NUM_SPARE_BLOCKS, True)
    else:
        stage = Stage(number, first_block, num_full, False)
    if number + (0 if stage.is_last else 1) >= config.max_stages:
        return Reason.TOO_MANY_STAGES
    return stage
