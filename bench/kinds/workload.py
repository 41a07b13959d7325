"""Requests of `sterna bench kinds`: their lengths, their tokens, and how often each moves. Pure."""

import itertools

PROMPT_TOKENS = (40, 230)
"""Prompts of the requests that move, in turns: within a window of the models, and beyond it."""

NEIGHBOUR_TOKENS = (30, 130)
"""Prompts of the other requests on each instance."""

MOVES_A_REQUEST = 10

MAX_OUTPUTS = 1500
"""Output tokens of requests that are aborted: more than their moves take."""

RECOVERED_TOKENS = 100
TOKENS_BEFORE_MOVE, TOKENS_BEFORE_DEATH = 20, 45
"""Output tokens of the request that is recovered: in all, before its move, before the death."""


def shares(num_moves: int) -> list[tuple[int, int]]:
    """The prompt tokens and the number of moves of each request that moves."""
    num_requests = max(-(-num_moves // MOVES_A_REQUEST), min(num_moves, len(PROMPT_TOKENS)))
    each, left = divmod(num_moves, num_requests)
    lengths = itertools.islice(itertools.cycle(PROMPT_TOKENS), num_requests)
    return [(length, each + (number < left)) for number, length in enumerate(lengths)]


def prompt_of(num_tokens: int, number: int = 0) -> list[int]:
    """Tokens of a prompt; other numbers give other tokens.

    They are neither special tokens nor above the vocabulary of the tiny models.
    """
    return [3 + (7 * place + 31 * number) % 500 for place in range(num_tokens)]
