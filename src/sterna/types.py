"""Values that all parts of Sterna share: ids, priorities, views and loads. Pure.

Memory is counted in **tokens** (blocks x block size), so that freeness is in decode steps
(Section 4.4.3).
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NewType

import msgspec

InstanceId = NewType("InstanceId", str)
"""Id of one incarnation of an instance. It is never used again after its instance is gone."""

FrontendId = NewType("FrontendId", int)
"""Id of one incarnation of a front end. It is never used again."""

RequestId = NewType("RequestId", str)
MigrationId = NewType("MigrationId", str)

_PREFIX_MARK = "/prefix"


def prefix_id(request_id: RequestId, copy_number: int = 0) -> RequestId:
    """The id under which the request's prefix moves alone, to where the request will be. Ids of
    engine requests end with random digits, whatever name a client has given.

    Args:
        copy_number: another one for each copy from an instance, so that what is kept for one is not
            given back by the end of another.
    """
    return RequestId(f"{request_id}/{copy_number}{_PREFIX_MARK}")


def whose_prefix(request_id: RequestId) -> RequestId | None:
    """The request whose prefix moves under this id; None for that of a request."""
    if request_id.endswith(_PREFIX_MARK):
        return RequestId(request_id.removesuffix(_PREFIX_MARK).rpartition("/")[0])
    return None


Priority = NewType("Priority", int)
"""A rank: larger is more urgent (Section 4.4.1)."""

NORMAL = Priority(0)
HIGH = Priority(1)


class RequestStatus(Enum):
    """Status of a request on its instance."""

    QUEUING = "queuing"
    """Waiting for memory or a batch slot: new, or preempted (vLLM's WAITING)."""
    RUNNING = "running"
    """In the batch, its prompt possibly still in chunks."""


class Immovable(Enum):
    """Reason why a request cannot be migrated at this moment. Operators see the value."""

    PREFILLING = "its prompt is still being prefilled"
    MIGRATING = "it is already migrating"
    UNSUPPORTED_ENGINE_FEATURE = "the engine runs with a feature whose state cannot move"
    UNSUPPORTED_REQUEST_FEATURE = "the request uses a feature whose state cannot move"
    TAKEN_BACK = "it came back from an instance that died, and may have had other tokens there"

    @property
    def is_lasting(self) -> bool:
        """Whether the request will never be movable where it is."""
        return self in (
            Immovable.UNSUPPORTED_ENGINE_FEATURE,
            Immovable.UNSUPPORTED_REQUEST_FEATURE,
            Immovable.TAKEN_BACK,
        )


class RequestView(msgspec.Struct, frozen=True):
    """One request on one instance, as policies see it.

    A struct, which is fastest to make: an engine makes one for each request and step.

    Attributes:
        num_tokens: prompt and output tokens so far.
        physical_usage_tokens: memory held, in tokens of whole blocks; 0 when queuing.
        demand_tokens: memory for all its tokens (prompt, or prompt + generated if it was
            preempted), in tokens of whole blocks, while it queues or is being prefilled; 0 when it
            decodes.
        num_preemptions: number of times that the engine took its memory back on this instance.
        immovable: the reason why it cannot move now; None when it can.
        unsupported: the names of the features that keep it here, where these are the reason.
        uncomputed_tokens: of a request that queues, the tokens that the prefix cache did not have
            when it began to queue; of one that is being prefilled, those that steps have still to
            compute; 0 when it decodes.
        num_earlier_tokens: output tokens that it had when it came to this instance from another
            one.
        num_shared_tokens: tokens of its prefix that it found in the prefix cache when it was
            admitted (the first time on vLLM, the last one on emulated engines), whose memory others
            may hold too.
    """

    request_id: RequestId
    status: RequestStatus
    num_tokens: int
    physical_usage_tokens: int = 0
    demand_tokens: int = 0
    scheduling_priority: Priority = NORMAL
    execution_priority: Priority = NORMAL
    num_output_tokens: int = 0
    num_preemptions: int = 0
    arrival_s: float = 0.0
    immovable: Immovable | None = None
    unsupported: str = ""
    uncomputed_tokens: int = 0
    num_earlier_tokens: int = 0
    num_shared_tokens: int = 0


OUTPUT_LENGTHS = (0, 16, 32, 48, *(length << n for n in range(11) for length in (64, 96)))
"""Lower bounds of the bins of `InstanceView.num_ended`, in tokens."""

MAX_ENDED = 4_096
"""Outputs that an engine remembers: where there are as many, each count is halved, so that the
older ones weigh less."""


MAX_LARGE_PROMPTS = 8
"""Requests with large prompts that a load report names: about as many such prompts, no two of them
alike, as an instance has memory for."""


@dataclass(frozen=True, slots=True)
class InstanceView:
    """The state of one instance at the beginning of a step, or between two steps, as its llumlet
    sees it.

    Attributes:
        total_tokens: M, the memory usable by requests (total less the admission watermark).
        block_size: tokens a block.
        running: requests in the batch, in the engine's order.
        queuing: requests that wait, in the engine's order of admission; the first is the head
            of the line.
        reserved_tokens: blocks held for incoming migrations; they count as used.
        shared_tokens: the excess in the sum of the requests' physical usages, which counts a block
            that requests share through the prefix cache once for each of them; in tokens.
        is_terminating: the instance is being emptied; its freeness is minus infinity.
        num_slots: requests that its batch may have, without those of which it holds the places for
            incoming migrations; None: any number.
        num_prefix_tokens: tokens of requests that were looked up in the prefix cache since the
            engine's start; 0 where they are not counted.
        num_prefix_hits: those of them that were in it.
        external_counts: tokens that were looked up with the engine's KV connector since its start,
            beyond the prefix cache, and those of them that it had.
        draft_counts: of speculative decoding since the engine's start: drafts, their tokens, and at
            each position in a draft those that were accepted. Empty: there is none.
        num_ended: the outputs that have ended here, by their lengths: from each of `OUTPUT_LENGTHS`
            to below the next; aborted ones are among them, those that have moved away are not.
            Empty: they are not counted.
    """

    instance_id: InstanceId
    total_tokens: int
    block_size: int
    running: tuple[RequestView, ...] = ()
    queuing: tuple[RequestView, ...] = ()
    reserved_tokens: int = 0
    shared_tokens: int = 0
    num_preemptions: int = 0
    is_terminating: bool = False
    num_slots: int | None = None
    num_prefix_tokens: int = 0
    num_prefix_hits: int = 0
    external_counts: tuple[int, int] = (0, 0)
    draft_counts: tuple[int, ...] = ()
    num_ended: tuple[int, ...] = ()


class InstanceLoad(msgspec.Struct, frozen=True):
    """A llumlet's report about its instance: metrics of the instance (Section 4.3), and, of single
    requests, the ids of those with large prompts alone.

    Attributes:
        sequence: grows with every report of this instance; an older one is ignored.
        free_tokens: M less the sum of the virtual usages; may be negative.
        normal_free_tokens: the same without any headroom, for the normal priority (auto-scaling,
            Section 4.4.3).
        used_tokens: physical memory in use, reservations included.
        prefill_demand_tokens: memory that requests in the batch will take for those chunks of
            their prompts that have not been scheduled yet.
        head_demand_tokens: demand of the head-of-line queuing request, 0 if none queues.
        queued_demand_tokens: demand of all queuing requests.
        num_by_priority: running requests of each execution priority, as (priority, count).
        last_dispatch: the highest dispatch number among the requests that this instance's engine
            has taken in, so that the other numbers count them; 0 before the first. The scheduler
            corrects for dispatches above it.
        move_tokens: memory that the request which would move next takes at its destination; None
            when none can move.
        moves_queuing: whether that request queues, and needs no place in the destination's batch.
        num_migrating_out: migrations in flight from this instance.
        num_migrating_in: migrations in flight to this instance.
        num_preempted: queuing requests whose memory was taken back.
        uncomputed_tokens: tokens that the engine has still to compute for the requests that queue
            or are being prefilled (`RequestView.uncomputed_tokens`).
        uncomputed_pairs: pairs of tokens that attend to each other in the same computations, which
            take the more time, the longer the prompts are (`pairs_of`).
        num_slots: requests that its batch may have, without those of which it holds the places for
            incoming migrations; None: any number.
        coming_tokens: memory that its requests are expected to use in some decode steps, those that
            have ended by then not among them; 0 unless the policy goes by it
            (`PolicyConfig.balance_horizon_steps`).
        move_coming_tokens: of that, the memory of the request which would move next.
        large_prompts: running requests whose prompts are large and computed, so that others may
            share their memory; the last ones that began to run, the newest first. Only with
            `PolicyConfig.binds_late`.
    """

    instance_id: InstanceId
    sequence: int
    total_tokens: int
    used_tokens: int
    free_tokens: float
    normal_free_tokens: float
    num_running: int
    num_queuing: int
    head_demand_tokens: int = 0
    queued_demand_tokens: int = 0
    num_by_priority: tuple[tuple[Priority, int], ...] = ()
    last_dispatch: int = 0
    move_tokens: int | None = None
    num_migrating_out: int = 0
    num_migrating_in: int = 0
    num_preemptions: int = 0
    is_terminating: bool = False
    num_preempted: int = 0
    prefill_demand_tokens: int = 0
    uncomputed_tokens: int = 0
    uncomputed_pairs: int = 0
    num_slots: int | None = None
    coming_tokens: int = 0
    move_coming_tokens: int = 0
    moves_queuing: bool = False
    large_prompts: tuple[RequestId, ...] = ()


def earliest(deadlines_s: Iterable[float | None]) -> float | None:
    """Return the first of these times; None without any."""
    return min([each for each in deadlines_s if each is not None], default=None)


def pairs_of(num_tokens: int, num_uncomputed: int) -> int:
    """Return the pairs of attending tokens of a prompt, n^2, less those that are computed."""
    return num_uncomputed * (2 * num_tokens - num_uncomputed)


_GROUP_FACTOR = 0x9E3779B97F4A7C15
_KEY_MASK = (1 << 64) - 1


def cache_key(block_hash: int, group: int) -> int:
    """Return the 64-bit key of a KV cache group's block with this 64-bit hash.

    Hashes are chained: equal hashes stand for equal tokens from the beginning on.
    """
    return block_hash ^ (group * _GROUP_FACTOR & _KEY_MASK)


def packed(keys: Iterable[int]) -> bytes:
    """Return hashes or keys of 64 bits as they travel: 8 bytes each, in native order."""
    return array("Q", keys).tobytes()


def unpacked(keys: bytes) -> Sequence[int]:
    """Return what `packed` packed."""
    numbers = array("Q")
    numbers.frombytes(keys)
    return numbers


class CacheGroup(msgspec.Struct, frozen=True, array_like=True):
    """What a hit in an engine's prefix cache needs of one KV cache group.

    Attributes:
        index: of the group in the engine, for `cache_key`.
        block_size: tokens a block.
        num_last_blocks: how many blocks before the hit's end it needs (a window, or 1 for a state);
            None: all.
        chunk_tokens: it needs the blocks from the beginning of the chunk in which it ends; 0:
            attention has no chunks.
        dropped_tokens: it needs as many tokens behind the hit's end as well, which are computed
            nevertheless: drafts. `num_last_blocks` counts theirs, too.
    """

    index: int
    block_size: int
    num_last_blocks: int | None = None
    chunk_tokens: int = 0
    dropped_tokens: int = 0

    @property
    def needs_all(self) -> bool:
        """Whether a hit needs all blocks from the first one on."""
        return self.num_last_blocks is None and not self.chunk_tokens


class CacheLayout(msgspec.Struct, frozen=True, array_like=True):
    """How to look up a prompt among the keys of an engine's prefix cache.

    Attributes:
        hash_tokens: tokens for which a prompt has one hash.
        alignment_tokens: a hit ends at a multiple of this.
        moves: prefixes are copied between engines of this layout.
    """

    hash_tokens: int
    alignment_tokens: int
    groups: tuple[CacheGroup, ...]
    moves: bool = False
