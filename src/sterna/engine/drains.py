"""Outcome of a drain, and the conditions on which a request leaves the batch. Pure."""

from dataclasses import dataclass

from sterna.migration.messages import Drain, DrainRefused, Mode, Reason, RequestPosition


@dataclass(frozen=True, slots=True)
class Left:
    """The request has left the batch or the queue; its blocks and its slot are kept.

    Attributes:
        num_blocks: blocks of it that hold valid KV, or will once no step is in flight.
        was_queuing: it had not started, or was preempted.
    """

    num_blocks: int
    was_queuing: bool


@dataclass(frozen=True, slots=True)
class Outgrown:
    """The request has more blocks than the last stage may take, and goes on decoding."""


@dataclass(frozen=True, slots=True)
class Stays:
    """The request cannot leave."""

    reason: Reason


DrainOutcome = Left | Outgrown | Stays


def drain_outcome(progress: RequestPosition | None, drain: Drain) -> DrainOutcome:
    """Return whether the request may leave; when it may, the engine takes it out.

    Args:
        progress: the request's position, or None when it is not here. Its `num_blocks` are
            those that it has after the drain.
    """
    if progress is None:
        return Stays(Reason.REQUEST_UNKNOWN)
    if progress.num_preemptions != drain.num_preemptions:
        return Stays(Reason.REQUEST_PREEMPTED)
    if progress.is_immovable:
        return Stays(Reason.REQUEST_IMMOVABLE)
    has_kv_to_move = drain.mode is not Mode.RECOMPUTE and not progress.is_queuing
    if has_kv_to_move and progress.num_blocks - drain.first_block > drain.max_blocks:
        return Outgrown()
    return Left(progress.num_blocks, progress.is_queuing)


def refused(outcome: Outgrown | Stays) -> DrainRefused:
    """Return the refusal of a drain for the migration."""
    return DrainRefused(outcome.reason if isinstance(outcome, Stays) else None)


def position_of_prefix(num_blocks: int, block_size: int) -> RequestPosition:
    """Return the position of a kept prefix (`KeepPrefix`): that of a request whose blocks are all
    full."""
    return RequestPosition(
        is_queuing=False,
        num_full_blocks=num_blocks,
        num_blocks=num_blocks,
        num_preemptions=0,
        num_valid_tokens=num_blocks * block_size,
    )
