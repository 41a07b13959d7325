"""Configuration of an emulated engine: its memory, limits and scheduling rules. Pure."""

from dataclasses import dataclass, replace
from enum import Enum

from sterna.errors import ConfigurationError


class StepMode(Enum):
    """Rule for the composition of a step."""

    PREFILL_FIRST = "prefill_first"
    """Whole prompts, or one token of every running request (vLLM 0.1, the paper's engine)."""
    CHUNKED = "chunked"
    """One token of every running request and chunks of prompts in one batch (vLLM 1)."""


class Preemption(Enum):
    """Order in which running requests get memory, and the one that is preempted first."""

    LATEST_ARRIVED = "latest_arrived"
    """By scheduling priority, then arrival; the last one is preempted (vLLM 0.1)."""
    LAST_ADMITTED = "last_admitted"
    """By entry into the batch; the last one is preempted (vLLM 1, first come first served)."""
    LEAST_URGENT = "least_urgent"
    """By entry into the batch; the last one by scheduling priority, then arrival, is preempted,
    wherever it stands in the batch, and queues by the same order (vLLM 1 with priority scheduling).
    """


@dataclass(frozen=True, slots=True)
class EmulatedEngineConfig:
    """The limits and the rules of one emulated engine.

    Attributes:
        num_blocks: blocks of the KV cache.
        block_size: tokens a block.
        watermark: the fraction of all blocks that an admission leaves free.
        max_num_seqs: running requests at most.
        max_num_batched_tokens: tokens of one step at most. With whole prompts, one that is
            longer runs alone.
        step_mode: the composition of a step.
        preemption: the request that is preempted.
        keeps_block_free: whether every running request needs a free block before each of its
            tokens, used or not (vLLM 0.1: the last free block is never used).
        prefix_caching: whether full blocks are found again by their contents (vLLM 1).
    """

    num_blocks: int
    block_size: int = 16
    watermark: float = 0.01
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 12_000
    step_mode: StepMode = StepMode.PREFILL_FIRST
    preemption: Preemption = Preemption.LATEST_ARRIVED
    keeps_block_free: bool = True
    prefix_caching: bool = False

    def __post_init__(self) -> None:
        for option in ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, option)
            if value < 1:
                raise ConfigurationError(f"{option} must be at least 1, not {value!r}")
        if not 0 <= self.watermark < 1:
            raise ConfigurationError(f"watermark must be in [0, 1), not {self.watermark!r}")
        if self.prefix_caching and (
            self.step_mode is not StepMode.CHUNKED or self.preemption is Preemption.LATEST_ARRIVED
        ):
            raise ConfigurationError(
                "prefix_caching needs the rules of vLLM 1: step_mode chunked, and preemption "
                "last_admitted or least_urgent"
            )
        if self.num_usable_blocks < 1:
            raise ConfigurationError(
                f"num_blocks must leave a block usable beside those that stay free "
                f"({self._kept_blocks}), not {self.num_blocks!r}"
            )

    @property
    def watermark_blocks(self) -> int:
        """Blocks that an admission leaves free."""
        return int(self.watermark * self.num_blocks)

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that one request can fill, from its admission to its last token."""
        return self.num_blocks - self._kept_blocks

    @property
    def _kept_blocks(self) -> int:
        return max(self.watermark_blocks, int(self.keeps_block_free))

    @property
    def total_tokens(self) -> int:
        """M: memory usable by requests, in tokens."""
        return self.num_usable_blocks * self.block_size

    def with_priorities(self) -> "EmulatedEngineConfig":
        """This engine where vLLM schedules by priority, as `sterna serve` has it do under policies
        with priorities. vLLM 0.1 always does."""
        if self.preemption is not Preemption.LAST_ADMITTED:
            return self
        return replace(self, preemption=Preemption.LEAST_URGENT)

    def blocks_of(self, num_tokens: int) -> int:
        """Blocks for the KV of `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)
