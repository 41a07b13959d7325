"""Kinds of engines by their KV cache, of which each simulated cluster has one.

The groups are those of vLLM: layers with full attention, with a sliding window, with attention
inside a chunk, or with a recurrent state. They are small, so that windows move on while a few
blocks are copied.
"""

import math
from dataclasses import dataclass, field, replace
from random import Random

from fault_simulation.virtual.settings import (
    AGEING_TOKENS_PER_S,
    AHEAD,
    BALANCE_AFTER_TOKENS,
    BALANCE_HORIZON_STEPS,
    BALANCE_RATIO,
    BALANCE_SHARE,
    BY_PREFIX,
    BY_PREFIX_SHARE,
    COPYING,
    COPYING_SHARE,
    CROWDED_SHARE,
    ENGINE,
    GROWTH_STEPS,
    HORIZON_SHARE,
    LATE_SHARE,
    LONG_LINE_SHARE,
    POLICY,
    PREFIX_WAITS_SHARE,
    RESERVES_AFTER_S,
    SESSION_COPIES_SHARE,
    SLOW_AGEING_TOKENS_PER_S,
)
from sterna.config import PolicyConfig
from sterna.engine.emulated.config import EmulatedEngineConfig
from sterna.engine.kv_memory import KvGroup, KvMemory
from sterna.types import CacheGroup, CacheLayout

WHOLE_REQUEST = 1024
"""Tokens of a block with the state of a request of any length: vLLM's without prefix caching."""


@dataclass(frozen=True, slots=True)
class SimulatedGroup:
    """A KV cache group (`kv_columns.ColumnGroup`): full attention, unless it is of another kind.

    Attributes:
        window: tokens that a token looks at, itself included.
        chunk: tokens of a chunk. A token looks at those before it in its chunk.
        has_state: it has a recurrent state.
    """

    block_size: int
    window: int | None = None
    chunk: int | None = None
    has_state: bool = False
    clears_new_blocks: bool = False

    def num_skipped_tokens(self, num_valid_tokens: int) -> int:
        """The first tokens that a request of this length no longer looks at, as vLLM's managers
        have them (`get_num_skipped_tokens`)."""
        if self.has_state:
            return max(0, num_valid_tokens - 1)
        if self.window is not None:
            return max(0, num_valid_tokens - self.window + 1)
        return 0 if self.chunk is None else num_valid_tokens // self.chunk * self.chunk

    @property
    def keeps_all(self) -> bool:
        """Whether a request keeps the blocks of all of its tokens."""
        return self.window is None and self.chunk is None and not self.has_state

    def cache_group(self, index: int) -> CacheGroup:
        """What a hit in the prefix cache needs of it."""
        num_last_blocks = 1 if self.has_state else None
        if self.window is not None:
            num_last_blocks = -(-(self.window - 1) // self.block_size)
        return CacheGroup(index, self.block_size, num_last_blocks, self.chunk or 0)

    def memory(self, max_num_batched_tokens: int) -> KvGroup:
        """The memory that a request needs in order to run, as vLLM admits it."""
        if self.has_state:
            return KvGroup(self.block_size, 1)
        if self.window is not None:
            # Of a window, the first block may be one of which only the last token is looked at.
            num_tokens = self.window - 1 + max_num_batched_tokens
            return KvGroup(self.block_size, -(-num_tokens // self.block_size) + 1)
        if self.chunk is not None:
            num_tokens = self.chunk + max_num_batched_tokens
            return KvGroup(self.block_size, -(-num_tokens // self.block_size))
        return KvGroup(self.block_size)


@dataclass(frozen=True, slots=True)
class EngineKind:
    """The engines of a cluster.

    Attributes:
        num_blocks: blocks for all groups together. The longest request fits.
        has_prefix_cache: whether full blocks are found again by their tokens.
        has_prompts_first: whether prompts take the tokens of a step before other requests. These
            stand still then, as in an engine behind a prompt that came before they moved there.
        config: of the engine.
        memory: the memory that requests need.
    """

    name: str
    groups: tuple[SimulatedGroup, ...]
    num_blocks: int = ENGINE.num_blocks
    has_prefix_cache: bool = True
    max_num_batched_tokens: int = ENGINE.max_num_batched_tokens
    has_prompts_first: bool = False
    config: EmulatedEngineConfig = field(init=False)
    memory: KvMemory = field(init=False)

    @property
    def cache_layout(self) -> CacheLayout:
        """How to look prompts up in its prefix cache."""
        sizes = [each.block_size for each in self.groups]
        groups = [each.cache_group(index) for index, each in enumerate(self.groups)]
        return CacheLayout(
            math.gcd(*sizes), math.lcm(*sizes), tuple(groups), moves=self.moves_prefixes
        )

    @property
    def moves_prefixes(self) -> bool:
        """Whether prefixes move without a request, as between vLLM's engines with one group."""
        has_one = len(self.groups) == 1 and self.groups[0].keeps_all
        return has_one and self.has_prefix_cache

    def __post_init__(self) -> None:
        config = replace(
            ENGINE, num_blocks=self.num_blocks, max_num_batched_tokens=self.max_num_batched_tokens
        )
        groups = tuple(each.memory(self.max_num_batched_tokens) for each in self.groups)
        object.__setattr__(self, "config", config)
        object.__setattr__(self, "memory", KvMemory(ENGINE.block_size, groups))


_FULL = SimulatedGroup(ENGINE.block_size)
_CLEARED = replace(_FULL, clears_new_blocks=True)

FULL = EngineKind("full attention", (_FULL,), has_prefix_cache=False)

CACHED = EngineKind("full attention with a prefix cache", (_FULL,))

WINDOW = EngineKind("a window", (SimulatedGroup(2, window=9), _FULL), num_blocks=72)

CHUNK = EngineKind("a chunk", (_FULL, SimulatedGroup(4, chunk=10)), num_blocks=58)
"""Chunks end inside blocks."""

WINDOWS = EngineKind(
    "two windows",
    (SimulatedGroup(8, window=10), SimulatedGroup(2, window=5), _FULL),
    num_blocks=80,
)
"""A unit is two blocks of full attention."""

STATE = EngineKind(
    "a state",
    (SimulatedGroup(WHOLE_REQUEST, has_state=True), _CLEARED),
    num_blocks=44,
    has_prefix_cache=False,
    max_num_batched_tokens=8,
    has_prompts_first=True,
)
SNAPSHOTS = EngineKind(
    "a state with snapshots",
    (_CLEARED, SimulatedGroup(8, has_state=True)),
    num_blocks=46,
    max_num_batched_tokens=8,
    has_prompts_first=True,
)
"""A state is kept at the end of each of its blocks, for the prefix cache."""

KINDS = (FULL, CACHED, WINDOW, CHUNK, WINDOWS, STATE, SNAPSHOTS)

_WEIGHTS = (6, 4, 3, 3, 2, 2, 2)


def kind_of(seed: int) -> EngineKind:
    """The kind of the seed's cluster, drawn by random numbers of its own."""
    return Random(f"caches of {seed}").choices(KINDS, _WEIGHTS)[0]


def policy_of(seed: int, kind: EngineKind) -> PolicyConfig:
    """The policy of the seed's cluster, drawn by random numbers of its own."""
    rng = Random(f"policy of {seed}")
    is_by_prefix = rng.random() < BY_PREFIX_SHARE
    policy = BY_PREFIX if kind.has_prefix_cache and is_by_prefix else POLICY
    if kind is CACHED and (is_by_prefix or rng.random() < COPYING_SHARE):
        policy = COPYING
    if rng.random() < LATE_SHARE:
        policy = replace(
            policy,
            binds_late=True,
            ageing_tokens_per_s=AGEING_TOKENS_PER_S,
            growth_steps=GROWTH_STEPS,
            reserves_after_s=RESERVES_AFTER_S,
        )
        if Random(f"waits for prefixes of {seed}").random() < PREFIX_WAITS_SHARE:
            dispatch = policy.dispatch
            if kind.has_prefix_cache and not policy.looks_at_prefixes:
                dispatch = BY_PREFIX.dispatch
            policy = replace(
                policy,
                dispatch=dispatch,
                ageing_tokens_per_s=SLOW_AGEING_TOKENS_PER_S,
                awaits_prefix=True,
                holds_by_uncached=True,
            )
        if Random(f"line of {seed}").random() < LONG_LINE_SHARE:
            policy = replace(policy, crowded_share=CROWDED_SHARE)
    if rng.random() < BALANCE_SHARE:
        policy = replace(
            policy, balance_ratio=BALANCE_RATIO, balance_after_tokens=BALANCE_AFTER_TOKENS
        )
    if policy.dispatch == COPYING.dispatch and rng.random() < SESSION_COPIES_SHARE:
        policy = replace(policy, dispatch=AHEAD, num_session_copies=2)
    if policy.balance_ratio is not None and Random(f"horizon of {seed}").random() < HORIZON_SHARE:
        policy = replace(policy, balance_horizon_steps=BALANCE_HORIZON_STEPS)
    return policy
