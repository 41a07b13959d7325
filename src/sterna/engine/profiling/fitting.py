"""Fits of step times to measured points: least squares on the relative error. Pure.

The sum of the squares of `fitted / measured - 1` is minimized, so that a point of 40 ms and one of
2 s have the same weight. No constant becomes negative.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from sterna.engine.emulated.durations import StepTime
from sterna.errors import ConfigurationError

Column = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """A step that computed `num_tokens` tokens of one prompt, after `num_tokens_before` others."""

    num_tokens: int
    duration_s: float
    num_tokens_before: int = 0

    @property
    def num_pairs(self) -> int:
        """Pairs of attending tokens, as `StepTime` counts them."""
        return self.num_tokens * (self.num_tokens + 2 * self.num_tokens_before)


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """A step that decoded `num_requests` requests with `num_context_tokens` tokens in their KV
    caches together."""

    num_requests: int
    num_context_tokens: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class FitErrors:
    """Relative errors of a fit: fitted / measured - 1, in the order of the points."""

    relative: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean of the absolute values."""
        return sum(abs(each) for each in self.relative) / len(self.relative)

    @property
    def max(self) -> float:
        """The largest absolute value."""
        return max(abs(each) for each in self.relative)


@dataclass(frozen=True, slots=True)
class StepTimeFit:
    """Fitted constants and their errors."""

    step_time: StepTime
    prefill: FitErrors
    decode: FitErrors


def fit_step_time(
    prefills: Sequence[PrefillPoint],
    decodes: Sequence[DecodePoint],
    *,
    kv_per_weights: float | None = None,
) -> StepTimeFit:
    """The step time nearest to the points.

    The minimum time of a prefill is fitted where short prompts were measured: several of the
    shortest ones may lie on a floor. Where they do not, it is that of a decode of one request,
    because both read all weights once.

    Args:
        kv_per_weights: bytes of one token's KV over bytes of the weights. Given, a decode reads
            both at the same rate, so that `decode_token_s` is this share of `decode_s`. Needed
            where all decodes had the same number of tokens in their caches: such points do not
            determine both.

    Raises:
        ConfigurationError: the points do not determine the constants.
    """
    decode_s, decode_request_s, decode_token_s = fit_decode(decodes, kv_per_weights)
    prefill_min_s, constants = _fit_prefill(prefills, decode_s + decode_request_s)
    prefill_s, token_s, pair_s = constants
    step_time = StepTime(
        prefill_s, token_s, pair_s, prefill_min_s, decode_s, decode_request_s, decode_token_s
    )
    return StepTimeFit(
        step_time,
        FitErrors(
            tuple(
                step_time.duration_s(each.num_tokens, each.num_pairs, 0, 0) / each.duration_s - 1
                for each in prefills
            )
        ),
        FitErrors(
            tuple(
                step_time.duration_s(0, 0, each.num_requests, each.num_context_tokens)
                / each.duration_s
                - 1
                for each in decodes
            )
        ),
    )


def fit_decode(
    points: Sequence[DecodePoint], kv_per_weights: float | None = None
) -> tuple[float, float, float]:
    """`decode_s`, `decode_request_s` and `decode_token_s` nearest to the points.

    Args:
        kv_per_weights: as for `fit_step_time`.

    Raises:
        ConfigurationError: the points do not determine the constants.
    """
    num_requests = _column(each.num_requests for each in points)
    num_tokens = _column(each.num_context_tokens for each in points)
    durations_s = _column(each.duration_s for each in points)
    ones = np.ones_like(num_requests)
    if kv_per_weights is None:
        decode_s, request_s, token_s = _fit("decode", [ones, num_requests, num_tokens], durations_s)
        return decode_s, request_s, token_s
    reads = ones + kv_per_weights * num_tokens
    decode_s, request_s = _fit("decode", [reads, num_requests], durations_s)
    return decode_s, request_s, kv_per_weights * decode_s


def _fit_prefill(
    points: Sequence[PrefillPoint], one_decode_s: float
) -> tuple[float, tuple[float, ...]]:
    """The floor, and the three constants of the curve above it."""
    ordered = sorted(points, key=lambda each: (each.num_tokens, each.num_pairs))
    num_tokens = _column(each.num_tokens for each in ordered)
    durations_s = _column(each.duration_s for each in ordered)
    num_pairs = _column(each.num_pairs for each in ordered)
    columns = [np.ones_like(num_tokens), num_tokens, num_pairs]
    best: tuple[float, float, tuple[float, ...]] | None = None
    # A floor fits any single point, which is therefore no evidence of one.
    for num_on_floor in (0, *range(2, len(ordered) - len(columns) + 1)):
        above = [each[num_on_floor:] for each in columns]
        if num_on_floor > 0 and not _are_independent(np.stack(above, axis=1)):
            # The rest are chunks of one size, from which a step's own time and a token's cannot be
            # separated.
            break
        curve = _fit("prefill", above, durations_s[num_on_floor:])
        floor_s = one_decode_s
        if num_on_floor > 0:
            floor_s, *_ = _fit("prefill", [columns[0][:num_on_floor]], durations_s[:num_on_floor])
        fitted_s = np.maximum(floor_s, sum(map(np.multiply, curve, columns)))
        error = float(np.sum((fitted_s / durations_s - 1) ** 2))
        if best is None or error < best[0]:
            best = error, floor_s, curve
    assert best is not None
    return best[1], best[2]


def _fit(what: str, columns: Sequence[Column], durations_s: Column) -> tuple[float, ...]:
    """Factors of the columns, none negative.

    The columns are few, so that all their subsets are tried: the best unconstrained fit of a
    subset without a negative factor is the best of all.
    """
    scaled = np.stack(columns, axis=1) / durations_s[:, None]
    if not _are_independent(scaled):
        raise ConfigurationError(
            f"the {what} points do not determine {len(columns)} constants: measure more lengths "
            f"and batch sizes than these {len(durations_s)}"
        )
    target = np.ones(len(durations_s))
    best, best_error = np.zeros(len(columns)), np.inf
    for size in range(1, len(columns) + 1):
        for chosen in map(list, combinations(range(len(columns)), size)):
            factors, *_ = np.linalg.lstsq(scaled[:, chosen], target, rcond=None)
            error = float(np.sum((scaled[:, chosen] @ factors - target) ** 2))
            if error < best_error and (factors >= 0).all():
                best = np.zeros(len(columns))
                best[chosen] = factors
                best_error = error
    return tuple(best.tolist())


def _are_independent(columns: NDArray[np.float64]) -> bool:
    return bool(np.linalg.matrix_rank(columns) == columns.shape[1])


def _column(values: Iterable[float]) -> Column:
    return np.array(list(values), np.float64)
