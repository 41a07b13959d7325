"""Measurement of an engine: the batches to time, and the target load that follows. Pure.

The headroom of a high priority is "that required to preserve the ideal decode speed (i.e., no
visible interference), which is obtained through profiling" (Section 4.4.2). The paper reads a
target load of 1,600 tokens off its Figure 4, "as we observe that such load preserves near-ideal
decode speed" (Section 6.4), and defines neither word. Here:

- *ideal* is the decode step of one request that has the batch to itself;
- *near* is at most `TOLERANCE` longer, and the target load is the largest one that is near;
- the batch grows by requests of one length, since a step takes time for its requests as well as for
  their tokens: the same number of tokens in fewer, longer requests is faster. The reference is a
  request of the experiment's Short-Short trace at its end, 128 tokens in and 128 out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby

import numpy as np

from sterna.engine.profiling.fitting import DecodePoint, fit_decode
from sterna.errors import ConfigurationError

TOLERANCE = 0.1
"""Largest excess of a step over the ideal one at the target load, as a fraction."""

REQUEST_TOKENS = 256
"""Tokens of each request in the reference batch."""

LENGTHS = (64, 256, 1024, 4096)
"""Tokens of each request, measured in addition to the reference's: they separate the time for a
request from that for a token."""

QUICK_LENGTHS = (64, 1024)
"""The lengths of these that a quick run measures, too."""

MIN_ROOM = 8
"""Number of requests of another length than the reference's that must fit: the prefills of longer
ones take longer than the rest of the measurement."""

MIN_POINTS = 3
"""Number of batches of the reference length that suffices for a measured curve."""

SAME_LENGTH = 0.25
"""Largest difference of a batch's mean length from the reference's, as a fraction: the first
requests of the batch get tokens while the last ones are prefilled."""

NOISY_FACTOR = 1.5
"""A round contradicts a target load from which its own differs by more than this factor."""

APART = 1.5
"""Smallest factor by which other lengths differ from the reference's."""

ROOM_TOKENS = 96
"""Tokens by which a request may grow while it is measured."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A decode to be timed: a number of requests of equal length."""

    num_requests: int
    tokens_each: int


@dataclass(frozen=True, slots=True)
class Decode:
    """The measured times of a batch.

    Attributes:
        batch: the batch as planned.
        num_tokens: tokens in the KV caches of all its requests, on average over the steps.
        rounds_s: the median step of each round, in seconds.
    """

    batch: Batch
    num_tokens: float
    rounds_s: tuple[float, ...]

    @property
    def step_s(self) -> float:
        """The median of the rounds."""
        return float(np.median(self.rounds_s))

    def point(self, round_index: int | None = None) -> DecodePoint:
        """The point for a fit: of all rounds, or of one."""
        step_s = self.step_s if round_index is None else self.rounds_s[round_index]
        return DecodePoint(self.batch.num_requests, round(self.num_tokens), step_s)


class Basis(Enum):
    """Origin of the curve of steps over tokens."""

    MEASURED = "measured"
    """Batches of the reference length, each timed; in between, straight lines."""
    FITTED = "fitted"
    """The step-time model, fitted to batches of other lengths."""


@dataclass(frozen=True, slots=True)
class TargetLoad:
    """The load up to which decoding has nearly its ideal speed.

    Attributes:
        tokens: the largest number of tokens in the batch within the limit.
        ideal_s: the step of one request alone, in seconds.
        limit_s: the longest step that counts as near.
        request_tokens: tokens of each request.
        basis: origin of the curve.
        is_reached: whether the largest batch's step was longer than the limit; if not, `tokens` is
            that of this batch, and larger ones may be within the limit.
    """

    tokens: int
    ideal_s: float
    limit_s: float
    request_tokens: int
    basis: Basis
    is_reached: bool


@dataclass(frozen=True, slots=True)
class Proposal:
    """A target load, and values that show its reliability.

    Attributes:
        target: from all rounds together.
        by_round: the target load of each round alone, in tokens.
        by_length: the target load of requests of other lengths, by their tokens each, if enough
            batches of that length were timed.
    """

    target: TargetLoad
    by_round: tuple[int, ...]
    by_length: tuple[tuple[int, TargetLoad], ...]

    @property
    def is_noisy(self) -> bool:
        """Whether at least half of the rounds contradict it: the median is no better then."""
        tokens = self.target.tokens
        num_contradicting = sum(
            not tokens / NOISY_FACTOR <= each <= tokens * NOISY_FACTOR for each in self.by_round
        )
        return 2 * num_contradicting >= len(self.by_round)


def batches(
    total_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    *,
    request_tokens: int = REQUEST_TOKENS,
    is_quick: bool = False,
) -> tuple[Batch, ...]:
    """The batches to time: for each length one request, two, four, ... and the largest number that
    fits.

    Within a length the largest comes first. A length of which memory holds fewer than
    `MIN_ROOM` requests is left out; a quick run has the reference's length and two batches each of
    two others.

    Args:
        total_tokens: M, the memory that requests can use.
        max_num_seqs: the engine's limit on requests in a batch.
        max_model_len: its limit on tokens of a request.

    Raises:
        ConfigurationError: two requests of the reference's length do not fit.
    """
    chosen = []
    others = {each for each in LENGTHS if not 1 / APART < each / request_tokens < APART}
    for tokens_each in sorted({request_tokens, *others}):
        room = tokens_each + ROOM_TOKENS
        most = min(max_num_seqs, total_tokens // room) if room <= max_model_len else 0
        if tokens_each == request_tokens and most < 2:
            raise ConfigurationError(
                f"two requests of {request_tokens} tokens do not fit into this engine's "
                f"{total_tokens} tokens, {max_num_seqs} requests and {max_model_len} tokens a "
                "request: raise these limits or lower --request-tokens"
            )
        if tokens_each != request_tokens and most < MIN_ROOM:
            continue
        # A power of two close to the largest batch would add little.
        powers = (1 << power for power in range(most.bit_length()))
        sizes = {1, most, *(each for each in powers if 3 * each <= 2 * most)}
        if is_quick and tokens_each != request_tokens:
            sizes = {1, 4} if tokens_each in QUICK_LENGTHS else set()
        chosen += [Batch(size, tokens_each) for size in sorted(sizes, reverse=True)]
    return tuple(chosen)


def prompt_lengths(
    max_num_batched_tokens: int, max_model_len: int, total_tokens: int, *, is_quick: bool = False
) -> tuple[int, ...]:
    """The prompts to time: powers of two that fit into one step, and one of several steps."""
    longest = min(max_model_len - 1, total_tokens)
    one_step = min(max_num_batched_tokens, longest)
    lengths = {one_step, *(1 << power for power in range(4, one_step.bit_length()))}
    several_steps = min(4 * max_num_batched_tokens, longest)
    if several_steps > one_step:
        lengths.add(several_steps)
    ordered = sorted(lengths)
    return tuple(ordered[:2] + ordered[2:-2:2] + ordered[-2:]) if is_quick else tuple(ordered)


def target_load(
    points: Sequence[DecodePoint],
    *,
    request_tokens: int = REQUEST_TOKENS,
    tolerance: float = TOLERANCE,
    kv_per_weights: float | None = None,
) -> TargetLoad:
    """The most tokens in the batch with which a decode step is at most `tolerance` over the ideal.

    The curve of steps consists of the batches whose requests are as long as the reference, if there
    are at least `MIN_POINTS` of them and one is a single request; otherwise of the model fitted to
    all points. Between two batches it is a straight line, and the target load is the point where it
    leaves the limit for good: a smaller batch may be slower, since kernels prefer some sizes. The
    ideal is the beginning of the nearest curve that never falls, so that a request alone that was
    timed slower than a larger batch counts with the mean of both.

    Args:
        points: steps in seconds; enough for a fit.
        kv_per_weights: that of `fit_step_time`, for the fit.

    Raises:
        ConfigurationError: there are too few points.
    """
    measured = _of_length(points, request_tokens)
    if len(measured) >= MIN_POINTS and measured[0].num_requests == 1:
        basis, curve = Basis.MEASURED, measured
    else:
        basis, curve = Basis.FITTED, _fitted(points, request_tokens, kv_per_weights)
    steps_s = [each.duration_s for each in curve]
    ideal_s = rising(steps_s)[0]
    limit_s = (1 + tolerance) * ideal_s
    tokens = [each.num_context_tokens for each in curve]
    is_reached = steps_s[-1] > limit_s
    return TargetLoad(
        tokens=_crossing(tokens, steps_s, limit_s) if is_reached else tokens[-1],
        ideal_s=ideal_s,
        limit_s=limit_s,
        request_tokens=request_tokens,
        basis=basis,
        is_reached=is_reached,
    )


def propose(
    decodes: Sequence[Decode],
    *,
    request_tokens: int = REQUEST_TOKENS,
    tolerance: float = TOLERANCE,
) -> Proposal:
    """The target load of a measurement.

    Raises:
        ConfigurationError: too few batches were measured.
    """
    points = [each.point() for each in decodes]
    num_rounds = min(len(each.rounds_s) for each in decodes)
    by_round = [
        target_load(
            [each.point(index) for each in decodes],
            request_tokens=request_tokens,
            tolerance=tolerance,
        ).tokens
        for index in range(num_rounds)
    ]
    lengths = sorted({each.batch.tokens_each for each in decodes} - {request_tokens})
    others = [
        (length, target_load(points, request_tokens=length, tolerance=tolerance))
        for length in lengths
    ]
    return Proposal(
        target=target_load(points, request_tokens=request_tokens, tolerance=tolerance),
        by_round=tuple(by_round),
        by_length=tuple(
            (length, target) for length, target in others if target.basis is Basis.MEASURED
        ),
    )


def rising(values: Sequence[float]) -> list[float]:
    """The sequence nearest to `values`, by least squares, that never falls.

    Neighbours that fall are replaced by their mean until none are left (isotonic regression by
    pooling adjacent violators).
    """
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, size = value, 1
        while pools and pools[-1][0] > mean:
            other, other_size = pools.pop()
            mean = (mean * size + other * other_size) / (size + other_size)
            size += other_size
        pools.append((mean, size))
    return [mean for mean, size in pools for _ in range(size)]


def _of_length(points: Sequence[DecodePoint], request_tokens: int) -> list[DecodePoint]:
    """One point for each batch size of about this length, the smallest first."""
    same = [
        each
        for each in points
        if abs(each.num_context_tokens / each.num_requests / request_tokens - 1) <= SAME_LENGTH
    ]
    same.sort(key=lambda each: each.num_requests)
    return [
        DecodePoint(
            num_requests,
            round(float(np.median([each.num_context_tokens for each in alike]))),
            float(np.median([each.duration_s for each in alike])),
        )
        for num_requests, group in groupby(same, key=lambda each: each.num_requests)
        for alike in [list(group)]
    ]


def _fitted(
    points: Sequence[DecodePoint], request_tokens: int, kv_per_weights: float | None
) -> list[DecodePoint]:
    """The model's steps for one request of this length, and for the largest measured number of
    tokens."""
    decode_s, request_s, token_s = fit_decode(points, kv_per_weights)
    most = max(each.num_context_tokens for each in points) // request_tokens
    return [
        DecodePoint(
            num_requests,
            num_requests * request_tokens,
            decode_s + num_requests * (request_s + token_s * request_tokens),
        )
        for num_requests in (1, max(2, most))
    ]


def _crossing(tokens: Sequence[int], steps_s: Sequence[float], limit_s: float) -> int:
    """The tokens at which the curve, which ends above the limit, crosses it for the last time.

    At least one step is below: the limit is above the mean of the first ones.
    """
    below = max(index for index, step_s in enumerate(steps_s) if step_s <= limit_s)
    share = (limit_s - steps_s[below]) / (steps_s[below + 1] - steps_s[below])
    return int(tokens[below] + share * (tokens[below + 1] - tokens[below]))
