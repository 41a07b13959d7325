"""Prompts of a trace's requests: random tokens, the same ones where the trace says so. Pure."""

from collections.abc import Sequence

import numpy as np

from sterna.workload.trace import Trace

PROMPT_TOKEN_IDS = (1_000, 30_000)
"""The ids from which prompts are drawn: plain tokens in nearly all vocabularies."""

OWN, SHARED = range(2)
"""Streams of random numbers: of a request, and of a prefix block."""


def prompt_of(trace: Trace, index: int, seed: int, before: Sequence[int] = ()) -> list[int]:
    """The prompt of the trace's request with this index.

    Prompts are alike where they have the same prefix blocks. Behind these each has tokens of its
    own, so that no prefix cache shortens it further.

    Args:
        before: for a later turn of a session, prompt and answer of the turn before.
    """
    num_tokens = int(trace.input_tokens[index])
    prompt = list(before[:num_tokens])
    prefixes = trace.prefix_blocks
    if not before and prefixes is not None:
        for block in prefixes.of(index).tolist():
            prompt += _drawn(prefixes.block_tokens, seed, SHARED, block)
        del prompt[num_tokens:]
    return prompt + _drawn(num_tokens - len(prompt), seed, OWN, index)


def _drawn(num_tokens: int, seed: int, stream: int, number: int) -> list[int]:
    draws = np.random.default_rng([seed, stream, number])
    tokens: list[int] = draws.integers(*PROMPT_TOKEN_IDS, num_tokens).tolist()
    return tokens
