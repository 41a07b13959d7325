"""Arrivals of requests: the processes, and their names for users. Pure.

    poisson                  independent arrivals
    gamma:CV                 gaps with that coefficient of variation
    uniform                  equal gaps
    recorded                 the times of the trace, stretched to the rate if one is given
    step:RATE@TIME,...       Poisson; the rate is constant for a time, then another
    daily[:MODEL][@DAY]      Poisson; the rate follows a service's days, each as long as DAY

A TIME or DAY is a number of seconds, or one with a unit: 90, 90s, 1.5m, 2h, 1d. Rates are in
requests a second.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sterna.errors import ConfigurationError
from sterna.workload.curves import RateCurve
from sterna.workload.randomness import Draws

GRAMMAR = "poisson, gamma:CV, uniform, recorded, step:RATE@TIME,... or daily[:MODEL][@DAY]"

DAY_S = 86_400.0

DAILY_MODELS = (
    "language/m-large",
    "language/m-mid",
    "language/m-small",
    "multimodal/mm-image",
    "reason/deepseek-r1",
)
"""The services of ServeGen whose days are known; the part behind the slash is a name, too."""

MIN_CV, MAX_CV = 0.01, 100.0
"""Below this range gaps are equal; above it nearly all are 0, and one gap has all the time."""


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent arrivals at a constant rate (Section 6.1)."""


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gaps of a gamma distribution with a coefficient of variation (Section 6.1)."""

    cv: float


@dataclass(frozen=True, slots=True)
class Uniform:
    """Equal gaps."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The trace's own times."""


@dataclass(frozen=True, slots=True)
class Step:
    """Poisson arrivals with a rate that is constant during each step.

    The first step follows the last one, unless that is infinite.

    Attributes:
        rates: requests a second, for each step.
        durations_s: duration of each step; the last may be infinite.
    """

    rates: tuple[float, ...]
    durations_s: tuple[float, ...]

    def __post_init__(self) -> None:
        # The checks of the curve hold for the steps, too.
        self.curve()

    def curve(self) -> RateCurve:
        """The rate over time."""
        return RateCurve(np.array(self.durations_s), np.array(self.rates))


@dataclass(frozen=True, slots=True)
class Daily:
    """Poisson arrivals whose rate follows the days of a service, one of DAILY_MODELS."""

    model: str = DAILY_MODELS[0]
    day_s: float = DAY_S


Arrivals = Poisson | Gamma | Uniform | Recorded | Step | Daily


# ---------------------------------------------------------------------------- the processes


def poisson_arrivals_s(rate: float, num_requests: int, draws: Draws) -> NDArray[np.float64]:
    """Draw ascending times, the first at 0, as the paper does: one exponential gap a request."""
    return _from_gaps(draws.exponential(1.0 / rate, num_requests))


def gamma_arrivals_s(
    rate: float, cv: float, num_requests: int, draws: Draws
) -> NDArray[np.float64]:
    """Draw ascending times, the first at 0, as the paper does: one gamma gap a request.

    Its shape is 1/cv^2, its scale cv^2/rate. A `cv` of 1 has the distribution of
    `poisson_arrivals_s`, but other draws.
    """
    return _from_gaps(draws.gamma(1.0 / cv**2, cv**2 / rate, num_requests))


def uniform_arrivals_s(rate: float, num_requests: int) -> NDArray[np.float64]:
    """Ascending times with equal gaps, the first at 0."""
    times_s: NDArray[np.float64] = np.arange(num_requests) / rate
    return times_s


def recorded_arrivals_s(
    recorded_s: NDArray[np.float64], rate: float | None = None
) -> NDArray[np.float64]:
    """The recorded times from the first on, which becomes 0, stretched to a mean rate if given.

    Raises:
        ConfigurationError: all came at once, which no stretching can change.
    """
    since_first_s = recorded_s - recorded_s[:1]
    if rate is None or len(recorded_s) < 2:
        return since_first_s
    if since_first_s[-1] <= 0.0:
        raise ConfigurationError(
            "recorded arrivals cannot be stretched to a rate: all requests came at the same time"
        )
    mean_gap_s = since_first_s[-1] / (len(recorded_s) - 1)
    stretched_s: NDArray[np.float64] = since_first_s / (rate * mean_gap_s)
    return stretched_s


def curve_arrivals_s(curve: RateCurve, num_requests: int, draws: Draws) -> NDArray[np.float64]:
    """Draw ascending times of a Poisson process with the curve's rate, the first as it begins.

    It begins at 0, or when the rate is first above 0. Takes one number a request from the stream.
    """
    return curve.time_s(_from_gaps(draws.exponential(1.0, num_requests)))


def _from_gaps(gaps_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """The first request comes at once; the last gap, drawn as the paper does, is not used."""
    return np.concatenate(([0.0], np.cumsum(gaps_s[:-1])))


# ---------------------------------------------------------------------------- their names


def parse_arrivals(text: str) -> Arrivals:
    """The process with this name, by the grammar above, in upper or lower case.

    Raises:
        ConfigurationError: the text does not follow the grammar; the message contains it.
    """
    lower = text.lower()
    daily = _DAILY.fullmatch(lower)
    if daily:
        return _daily(daily["model"], daily["day"], text)
    kind, colon, parameters = lower.partition(":")
    if kind in _WITHOUT_PARAMETER and colon:
        raise ConfigurationError(f"arrivals {text!r}: {kind} takes no parameter; use {kind}")
    if kind in _WITHOUT_PARAMETER:
        return _WITHOUT_PARAMETER[kind]()
    if kind == "gamma":
        return _gamma(parameters, text)
    if kind == "step":
        return _step(parameters, text)
    raise ConfigurationError(f"arrivals must be {GRAMMAR}, not {text!r}")


_WITHOUT_PARAMETER: dict[str, Callable[[], Arrivals]] = {
    "poisson": Poisson,
    "uniform": Uniform,
    "recorded": Recorded,
}
_DAILY = re.compile(r"daily(?::(?P<model>[^@]*))?(?:@(?P<day>.*))?")


def _gamma(cv: str, text: str) -> Gamma:
    if not cv:
        raise ConfigurationError(
            f"arrivals {text!r}: gamma needs a coefficient of variation, as in gamma:4"
        )
    value = _number(cv, text)
    if not MIN_CV <= value <= MAX_CV:
        raise ConfigurationError(
            f"arrivals {text!r}: the coefficient of variation must be from {MIN_CV} to "
            f"{MAX_CV:g}, not {cv}"
        )
    return Gamma(value)


def _step(pieces: str, text: str) -> Step:
    rates, durations_s = [], []
    listed = pieces.split(",")
    for position, piece in enumerate(listed, start=1):
        rate, at, duration = piece.partition("@")
        if not at and position < len(listed):
            raise ConfigurationError(
                f"arrivals {text!r}: only the last step may leave out @TIME; step {position} is "
                f"{piece!r}, not RATE@TIME"
            )
        rates.append(_number(rate, text))
        durations_s.append(_time_s(duration, text) if at else np.inf)
    try:
        return Step(tuple(rates), tuple(durations_s))
    except ConfigurationError as error:
        raise ConfigurationError(f"arrivals {text!r}: {error}") from error


def _daily(name: str | None, day: str | None, text: str) -> Daily:
    day_s = DAY_S if day is None else _time_s(day, text)
    if name is None:
        return Daily(day_s=day_s)
    for model in DAILY_MODELS:
        if name in (model, short_name(model)):
            return Daily(model, day_s)
    allowed = ", ".join(map(short_name, DAILY_MODELS))
    raise ConfigurationError(f"arrivals {text!r}: the model must be one of {allowed}, not {name!r}")


def short_name(model: str) -> str:
    """The short name of a model: "m-large" for "language/m-large"."""
    return model.rpartition("/")[2]


_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?(e[+-]?[0-9]{1,2})?")
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": DAY_S}


def _number(digits: str, text: str) -> float:
    # Python's float() also takes "nan", "1_0" and " 4".
    if not _NUMBER.fullmatch(digits):
        raise ConfigurationError(
            f"arrivals {text!r}: {digits!r} is not a number of at least 0; arrivals are {GRAMMAR}"
        )
    return float(digits)


def _time_s(time: str, text: str) -> float:
    unit_s = _UNITS_S.get(time[-1:])
    value_s = _number(time if unit_s is None else time[:-1], text) * (unit_s or 1.0)
    if value_s <= 0.0:
        raise ConfigurationError(f"arrivals {text!r}: a time must be positive, not {time!r}")
    return value_s
