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

    def standard_normal(self, size: int, /) -> NDArray[np.float64]:
        """Draw normally distributed numbers with mean 0 and variance 1."""
        ...

    def gamma(self, shape: float, scale: float, size: int, /) -> NDArray[np.float64]:
        """Draw gamma-distributed numbers with mean `shape * scale` and variance
        `shape * scale**2`."""
        ...
