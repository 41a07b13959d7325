"""A request on an emulated engine. Pure."""

from dataclasses import dataclass, field

import msgspec

from sterna.engine.emulated.prefix_cache import CachedBlock
from sterna.types import NORMAL, Priority, RequestId


class RequestState(msgspec.Struct, frozen=True, array_like=True):
    """State of a request in a migration: all that an emulated engine needs to continue it.

    Attributes:
        prompt_tokens: length of the prompt.
        output_tokens: tokens that it will produce; an emulated engine knows them in advance.
        arrival_s: when it reached the cluster.
        num_output_tokens: tokens that it has produced.
        num_computed_tokens: tokens, from the first on, whose KV is computed.
        block_hashes: for each full block of prompt and whole output, in order, 8 bytes (native
            int64) that stand for all tokens up to its end; empty, or shorter, where the contents
            are not known. Engines without prefix caching do not look at it.
    """

    request_id: RequestId
    prompt_tokens: int
    output_tokens: int
    arrival_s: float
    scheduling_priority: Priority = NORMAL
    execution_priority: Priority = NORMAL
    num_output_tokens: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    block_hashes: bytes = b""

    def encode(self) -> bytes:
        """The state as bytes; `decode_state` reads them."""
        return msgspec.msgpack.encode(self)


def decode_state(payload: bytes) -> RequestState:
    """The state that `RequestState.encode` wrote."""
    return msgspec.msgpack.decode(payload, type=RequestState)


@dataclass(slots=True, eq=False)
class EmulatedRequest:
    """A request and the memory that it holds; changed by its engine alone.

    Attributes:
        num_tokens: prompt and output so far. The KV of the last one is computed by the step
            that produces the next one.
        num_blocks: blocks held.
        cached: the first ones of them, whose contents can be found.
        is_preempted: it queues because its memory was taken back.
        num_found_tokens: tokens that the prefix cache had when it began to queue.
        num_earlier_tokens: output tokens that it had when it came from another engine.
        num_shared_tokens: tokens that the prefix cache had when it was admitted last.
    """

    request_id: RequestId
    prompt_tokens: int
    output_tokens: int
    arrival_s: float
    scheduling_priority: Priority
    execution_priority: Priority
    num_output_tokens: int
    num_computed_tokens: int
    num_preemptions: int
    block_hashes: memoryview
    num_blocks: int = 0
    cached: list[CachedBlock] = field(default_factory=list)
    is_preempted: bool = False
    num_found_tokens: int = 0
    num_earlier_tokens: int = 0
    num_shared_tokens: int = 0

    @classmethod
    def of(cls, state: RequestState) -> "EmulatedRequest":
        """The request that arrives with this state, without memory."""
        return cls(
            request_id=state.request_id,
            prompt_tokens=state.prompt_tokens,
            output_tokens=state.output_tokens,
            arrival_s=state.arrival_s,
            scheduling_priority=state.scheduling_priority,
            execution_priority=state.execution_priority,
            num_output_tokens=state.num_output_tokens,
            num_computed_tokens=state.num_computed_tokens,
            num_preemptions=state.num_preemptions,
            block_hashes=memoryview(state.block_hashes).cast("q"),
            num_earlier_tokens=state.num_output_tokens,
        )

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return self.prompt_tokens + self.num_output_tokens

    @property
    def is_prefilling(self) -> bool:
        """Whether KV of more than its last token is missing."""
        return self.num_output_tokens == 0 or self.num_computed_tokens < self.num_tokens - 1

    def state(self) -> RequestState:
        """The request's state for a migration."""
        return RequestState(
            request_id=self.request_id,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            arrival_s=self.arrival_s,
            scheduling_priority=self.scheduling_priority,
            execution_priority=self.execution_priority,
            num_output_tokens=self.num_output_tokens,
            num_computed_tokens=self.num_computed_tokens,
            num_preemptions=self.num_preemptions,
            block_hashes=self.block_hashes.tobytes(),
        )
