"""Requests that are drawn: the paper's power-law lengths, and mixes with shared prefixes. Pure.

Section 6.1: "We generate multiple distributions with different long-tail degrees and mean lengths
(128, 256, 512), as shown by the Short (S), Medium (M), and Long (L) distributions in Table 1.
These distributions have a maximum length of 6k". The rule behind them, for the mean m: draw ranks
k from 1 to 2m - 1 with a probability in proportion to k^-a; scale the sample so that its mean is
m; round up; cut at 6,144 tokens. That is 12 times the mean of Long: lengths of larger means are cut
at 12 times these, since the cut would change the mean otherwise.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sterna.errors import ConfigurationError
from sterna.workload.prefix import PrefixBlocks
from sterna.workload.randomness import Draws
from sterna.workload.rows import Rows
from sterna.workload.turns import SessionTurns

MAX_LENGTH_TOKENS = 6144
MAX_LENGTH_MEANS = 12
MAX_MEAN_TOKENS = 10_000
SHORT, MEDIUM, LONG = 128, 256, 512
"""Mean lengths in tokens (Table 1)."""

_PAPER_EXPONENTS = {SHORT: 2.0, MEDIUM: 1.5, LONG: 1.15}

AGENT_BLOCK_TOKENS = 512
AGENT_MAX_TOKENS = 200_000
AGENT_SHARED_BLOCKS, AGENT_GROUP_BLOCKS, AGENT_NUM_GROUPS = 64, 39, 50
AGENT_PREFIX_BLOCKS = AGENT_SHARED_BLOCKS + AGENT_GROUP_BLOCKS

REASONING_SHARED_TOKENS, REASONING_OWN_TOKENS = 250, 1_000
REASONING_MEAN_TOKENS, REASONING_MAX_TOKENS = 8_000, 32_768


def zipf_lengths(mean_tokens: int, num_requests: int, draws: Draws) -> NDArray[np.int64]:
    """Draw lengths in tokens, at least 1, by the paper's rule (Section 6.1).

    Takes one number a request from the stream. The sample's mean is `mean_tokens`; rounding up adds
    less than one token, and the cut takes away 1 % up to means of 1,024, 3 % at 2,048, and 10 % at
    8,192.

    Raises:
        ConfigurationError: the mean is not from 1 to 10,000.
    """
    exponent = zipf_exponent(mean_tokens)
    ranks = np.arange(1, 2 * mean_tokens)
    weights = ranks**-exponent
    cumulative = np.cumsum(weights / weights.sum())
    cumulative /= cumulative[-1]
    sample = ranks[np.searchsorted(cumulative, draws.random(num_requests), side="right")]
    lengths: NDArray[np.int64] = np.ceil(sample * mean_tokens / sample.mean()).astype(np.int64)
    limit = max(MAX_LENGTH_TOKENS, MAX_LENGTH_MEANS * mean_tokens)
    lengths[lengths > limit] = limit
    return lengths


def zipf_exponent(mean_tokens: int) -> float:
    """The exponent a of the paper's rule: 2.0, 1.5 and 1.15 at means of 128, 256 and 512 tokens.

    The paper has only these three. Between them the exponent is interpolated over the logarithm of
    the mean; beyond them it is that of the nearest.

    Raises:
        ConfigurationError: the mean is not from 1 to 10,000.
    """
    if not 1 <= mean_tokens <= MAX_MEAN_TOKENS:
        raise ConfigurationError(
            f"a mean length must be from 1 to {MAX_MEAN_TOKENS} tokens, not {mean_tokens}"
        )
    log_means = [math.log2(mean) for mean in _PAPER_EXPONENTS]
    exponent = np.interp(math.log2(mean_tokens), log_means, list(_PAPER_EXPONENTS.values()))
    return float(exponent)


def agents(num_requests: int, draws: Draws) -> Rows:
    """Sessions of coding agents: prompts of 100,000 tokens, of which a turn adds few, and short
    answers.

    The distributions are those of the packaged `agentic-code`, which aiperf 0.13's generator made
    (by its parameters, or fitted to the sessions). A first prompt has 32,768 tokens that all
    sessions share, 19,968 of one of 50 groups (Zipf, 1.2), and log-normal 4,400 (median; sigma
    1.24). A turn adds 1,800 tokens (median; 1.15) and produces 302 (0.99). It comes 0.97 s (0.88)
    after the answer before where an agent goes on, in 71 % of the turns, and 13.9 s (0.96) where a
    human does. Sessions would have 33 turns in the mean (geometric), but end before 200,000 tokens.
    """
    groups = np.arange(1, AGENT_NUM_GROUPS + 1) ** -1.2
    group_ends = np.cumsum(groups / groups.sum())
    next_block = AGENT_SHARED_BLOCKS + AGENT_NUM_GROUPS * AGENT_GROUP_BLOCKS
    sessions: list[_AgentSession] = []
    num_turns = 0
    while num_turns < num_requests:
        sessions.append(_agent_session(group_ends, next_block, draws))
        num_turns += len(sessions[-1].outputs)
        next_block += sessions[-1].num_own_blocks
    numbers = [np.full(len(each.outputs), number) for number, each in enumerate(sessions)]
    blocks = [each for session in sessions for each in session.blocks][:num_requests]
    drawn = SessionTurns(
        np.concatenate(numbers)[:num_requests],
        np.concatenate([each.added for each in sessions])[:num_requests],
        np.concatenate([each.outputs for each in sessions])[:num_requests],
        np.concatenate([each.think_s for each in sessions])[:num_requests],
        PrefixBlocks(
            np.concatenate(blocks),
            np.cumsum([len(each) for each in blocks], dtype=np.int64),
            AGENT_BLOCK_TOKENS,
        ),
    )
    return Rows(
        drawn.input_tokens,
        drawn.output_tokens,
        prefix_blocks=drawn.prefix_blocks,
        turns=drawn.turns,
    )


@dataclass(frozen=True, slots=True)
class _AgentSession:
    """What each turn adds: tokens and blocks of its prompt, its answer, and the time before it."""

    added: NDArray[np.int64]
    outputs: NDArray[np.int64]
    think_s: NDArray[np.float64]
    blocks: list[NDArray[np.int64]]

    @property
    def num_own_blocks(self) -> int:
        """The blocks that no other session has. A session may be too long from its first turn on,
        and has none then."""
        return sum(map(len, self.blocks)) - AGENT_PREFIX_BLOCKS if self.blocks else 0


def _agent_session(group_ends: NDArray[np.float64], next_block: int, draws: Draws) -> _AgentSession:
    """One session of `agents`, whose own blocks have ids from `next_block` on."""
    group = min(int(np.searchsorted(group_ends, draws.random(1)[0])), AGENT_NUM_GROUPS - 1)
    num_turns = 1 + int(math.log(1.0 - draws.random(1)[0]) / math.log(1.0 - 1 / 33))
    added = log_normal(1_800.0, 1.15, num_turns, draws)
    outputs = log_normal(302.0, 0.99, num_turns, draws)
    is_human = draws.random(num_turns) < 0.29
    think_s = np.where(is_human, 13.9, 0.97) * np.exp(
        np.where(is_human, 0.96, 0.88) * draws.standard_normal(num_turns)
    )
    own_tokens = log_normal(4_400.0, 1.24, 1, draws)[0]
    added[0] = AGENT_PREFIX_BLOCKS * AGENT_BLOCK_TOKENS + own_tokens
    total_tokens = np.cumsum(added + outputs)
    num_kept = int((total_tokens <= AGENT_MAX_TOKENS).sum())
    first_of_group = AGENT_SHARED_BLOCKS + group * AGENT_GROUP_BLOCKS
    group_blocks = np.arange(first_of_group, first_of_group + AGENT_GROUP_BLOCKS)
    blocks, num_known = [], AGENT_PREFIX_BLOCKS
    for turn in range(num_kept):
        prompt_tokens = int(total_tokens[turn] - outputs[turn])
        num_blocks = -(-prompt_tokens // AGENT_BLOCK_TOKENS)
        own = np.arange(next_block, next_block + num_blocks - num_known)
        next_block += len(own)
        num_known = num_blocks
        blocks.append(
            own if turn else np.concatenate([np.arange(AGENT_SHARED_BLOCKS), group_blocks, own])
        )
    return _AgentSession(added[:num_kept], outputs[:num_kept], think_s[:num_kept], blocks)


def system_prompts(
    num_prompts: int,
    shared_tokens: int,
    mean_own_tokens: int,
    mean_output_tokens: int,
    num_requests: int,
    draws: Draws,
) -> Rows:
    """Requests behind one of some system prompts, the k-th most frequent of which is asked for in
    proportion to 1 / k; the rest of the prompt and the output have the paper's power-law lengths.
    """
    shares = 1.0 / np.arange(1, num_prompts + 1)
    ends = np.cumsum(shares / shares.sum())
    which = np.searchsorted(ends, draws.random(num_requests)).clip(max=num_prompts - 1)
    return Rows(
        shared_tokens + zipf_lengths(mean_own_tokens, num_requests, draws),
        zipf_lengths(mean_output_tokens, num_requests, draws),
        prefix_blocks=_one_block_each(which, shared_tokens),
    )


def reasoning(num_requests: int, draws: Draws) -> Rows:
    """Long chains of thought: 250 tokens of system prompt, 1,000 of a question, and 8,000 in the
    mean, at most 32,768, of output: the numbers of llm-d's benchmark (0.9, blog of 2026-08-17). It
    does not publish the form; log-normal with sigma 0.8, drawn again above the limit, is ours.
    """
    sigma = 0.8
    # The mean without what is above the limit, found by halving.
    low, high = 1.0, float(REASONING_MAX_TOKENS)
    while high - low > 0.5:
        median = (low + high) / 2
        if _truncated_mean(median, sigma, REASONING_MAX_TOKENS) < REASONING_MEAN_TOKENS:
            low = median
        else:
            high = median
    outputs = log_normal(low, sigma, num_requests, draws)
    while (is_long := outputs > REASONING_MAX_TOKENS).any():
        outputs[is_long] = log_normal(low, sigma, int(is_long.sum()), draws)
    prompt_tokens = REASONING_SHARED_TOKENS + REASONING_OWN_TOKENS
    return Rows(
        np.full(num_requests, prompt_tokens, np.int64),
        outputs,
        prefix_blocks=_one_block_each(np.zeros(num_requests, np.int64), REASONING_SHARED_TOKENS),
    )


def log_normal(median_tokens: float, sigma: float, num: int, draws: Draws) -> NDArray[np.int64]:
    """Draw log-normal lengths in tokens, at least 1."""
    drawn = np.rint(median_tokens * np.exp(sigma * draws.standard_normal(num)))
    lengths: NDArray[np.int64] = np.maximum(1, drawn).astype(np.int64)
    return lengths


def _truncated_mean(median: float, sigma: float, limit: float) -> float:
    """Mean of a log-normal length that is drawn again above the limit."""
    place = math.log(limit / median) / sigma
    below = 0.5 * (1 + math.erf(place / math.sqrt(2)))
    weighted = 0.5 * (1 + math.erf((place - sigma) / math.sqrt(2)))
    return median * math.exp(sigma**2 / 2) * weighted / below


def _one_block_each(which: NDArray[np.int64], num_tokens: int) -> PrefixBlocks:
    end = np.arange(1, len(which) + 1, dtype=np.int64)
    return PrefixBlocks(which.astype(np.int64), end, num_tokens)
