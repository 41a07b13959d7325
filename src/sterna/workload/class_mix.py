"""Mix of priority classes: assigns priorities to requests by fraction. Pure."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from sterna.errors import ConfigurationError
from sterna.types import NORMAL, Priority
from sterna.workload.randomness import Draws

_ROUNDING = 1e-9


def require_fractions(fractions: Mapping[Priority, float]) -> None:
    """Refuse invalid fractions of requests.

    Raises:
        ConfigurationError: a priority is below normal, a fraction is not from 0 to 1, or they add
            up to more than 1, or, with the normal priority among them, to less.
    """
    for priority, fraction in fractions.items():
        if priority < NORMAL:
            raise ConfigurationError(
                f"class_fractions: a priority must be at least 0 (normal), not {priority}"
            )
        if not 0.0 <= fraction <= 1.0:
            raise ConfigurationError(
                f"class_fractions: that of priority {priority} must be from 0 to 1, not {fraction}"
            )
    total = sum(fractions.values())
    if total > 1.0 + _ROUNDING or (NORMAL in fractions and total < 1.0 - _ROUNDING):
        raise ConfigurationError(
            f"class_fractions: the fractions add up to {total:g}; they must leave the normal "
            "priority what is left of 1"
        )


def mix_priorities(
    fractions: Mapping[Priority, float], num_requests: int, draws: Draws
) -> NDArray[np.int64]:
    """Pick the requests of every priority at random; the rest are normal.

    Section 6.4: "randomly picking 10% of the requests and assigning high scheduling and execution
    priorities". Each class gets exactly its fraction of the requests, up to rounding. Takes one
    number a request from the stream, whatever the fractions.
    """
    require_fractions(fractions)
    priority = np.full(num_requests, NORMAL, dtype=np.int64)
    order = np.argsort(draws.random(num_requests), kind="stable")
    total, start = 0.0, 0
    # The highest class comes first, so that the fraction of a lower one does not change it.
    for each in sorted(fractions, reverse=True):
        if each == NORMAL:
            continue
        total += fractions[each]
        end = min(num_requests, round(total * num_requests))
        priority[order[start:end]] = each
        start = end
    return priority
