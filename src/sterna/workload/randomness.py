"""Random numbers of workloads. Pure."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Draws(Protocol):
    """A seeded stream of random numbers: numpy's `Generator` and its legacy `RandomState` fit.

    Only `RandomState` gives the paper's traces; numpy promises never to change it.
    """

    def random(self, size: int, /) -> NDArray[np.float64]:
        """Draw uniformly distributed numbers from [0, 1)."""
        ...

    def exponential(self, scale: float, size: int, /) -> NDArray[np.float64]:
        """Draw exponentially distributed numbers with this mean."""
        ...

    def gamma(self, shape: float, scale: float, size: int, /) -> NDArray[np.float64]:
        """Draw gamma-distributed numbers with mean `shape * scale` and variance
        `shape * scale**2`."""
        ...


PAPER_SEED = 0xCADE
"""Seed of the paper's lengths and arrivals, as its artifact draws them; the default."""

MAX_SEED = 2**32 - 1
"""The largest seed of numpy's legacy generator; the smallest is 0."""
