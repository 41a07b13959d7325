"""Where workloads take their random numbers from. Pure."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Draws(Protocol):
    """A seeded stream of random numbers: numpy's `Generator` and its legacy `RandomState` fit.

    Only `RandomState` gives the paper's traces, which numpy promises never to change.
    """

    def random(self, size: int, /) -> NDArray[np.float64]:
        """Draw numbers of [0, 1), all equally likely."""
        ...

    def exponential(self, scale: float, size: int, /) -> NDArray[np.float64]:
        """Draw numbers with that mean."""
        ...

    def gamma(self, shape: float, scale: float, size: int, /) -> NDArray[np.float64]:
        """Draw numbers with mean `shape * scale` and variance `shape * scale**2`."""
        ...


PAPER_SEED = 0xCADE
"""Of the paper's lengths and arrivals, as its artifact draws them; the default."""

MAX_SEED = 2**32 - 1
"""The largest that numpy's legacy generator takes; the smallest is 0."""
