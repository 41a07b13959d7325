"""Plan of a migration's next copy round (Section 4.2). Pure."""

from dataclasses import dataclass, replace

from sterna.config import MigrationConfig
from sterna.migration.messages import Mode, Reason, RequestPosition

NUM_SPARE_BLOCKS = 1
"""Blocks that a last stage reserves beyond the present ones: decoding continues until the drain."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One copy round.

    Attributes:
        first_block: index among the request's blocks; those before it are in place.
        num_blocks: at most this number of blocks.
        is_last: the request is drained for it.
        num_valid_tokens: tokens of the request with valid KV when it was planned.
    """

    number: int
    first_block: int
    num_blocks: int = 0
    is_last: bool = False
    num_valid_tokens: int = 0

    def next_unplanned(self, num_copied: int) -> "Stage":
        """The next stage's number and first block, after `num_copied` blocks of this one."""
        return Stage(self.number + 1, self.first_block + num_copied)


def plan_stage(
    unplanned: Stage, position: RequestPosition, mode: Mode, config: MigrationConfig
) -> Stage | Reason:
    """The stage with its blocks, for a request at `position`; or the reason why none may follow.

    It is the last stage when few blocks of few bytes remain, or none that is full; when the mode
    has only one; or for a queuing request, which has no KV to copy.
    """
    number, first_block = unplanned.number, unplanned.first_block
    num_full = position.num_full_blocks - first_block
    num_remaining = position.num_blocks - first_block
    if position.is_queuing or mode is Mode.RECOMPUTE:
        stage = Stage(number, first_block, 0, True)
    elif mode is Mode.STOP_AND_COPY or num_full <= 0 or _is_small(num_remaining, position, config):
        stage = Stage(number, first_block, num_remaining + NUM_SPARE_BLOCKS, True)
    else:
        stage = Stage(number, first_block, num_full, False)
    if number + (0 if stage.is_last else 1) >= config.max_stages:
        return Reason.TOO_MANY_STAGES
    return replace(stage, num_valid_tokens=position.num_valid_tokens)


def _is_small(num_blocks: int, position: RequestPosition, config: MigrationConfig) -> bool:
    num_bytes = num_blocks * position.block_bytes + position.state_bytes
    return num_blocks <= config.last_stage_max_blocks and num_bytes <= config.last_stage_max_bytes
