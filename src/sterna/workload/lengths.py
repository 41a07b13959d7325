"""Lengths of requests: the paper's power-law lengths, for any mean. Pure.

Section 6.1: "We generate multiple distributions with different long-tail degrees and mean lengths
(128, 256, 512), as shown by the Short (S), Medium (M), and Long (L) distributions in Table 1.
These distributions have a maximum length of 6k". The rule behind them, for the mean m: draw ranks
k from 1 to 2m - 1 with a probability in proportion to k^-a; scale the sample so that its mean is
m; round up; cut at 6,144 tokens. That is 12 times the mean of Long: lengths of larger means are cut
at 12 times these, since the cut would change the mean otherwise.
"""

import math

import numpy as np
from numpy.typing import NDArray

from sterna.errors import ConfigurationError
from sterna.workload.randomness import Draws

MAX_LENGTH_TOKENS = 6144
MAX_LENGTH_MEANS = 12
MAX_MEAN_TOKENS = 10_000
SHORT, MEDIUM, LONG = 128, 256, 512
"""Mean lengths in tokens (Table 1)."""

_PAPER_EXPONENTS = {SHORT: 2.0, MEDIUM: 1.5, LONG: 1.15}


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
