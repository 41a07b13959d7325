"""The experiments by name."""

from collections.abc import Mapping

from bench.paper.experiment import Experiment
from bench.paper.figures.figure3 import FIGURE3
from bench.paper.figures.figure4 import FIGURE4
from bench.paper.figures.figure5 import FIGURE5
from bench.paper.figures.figure10 import FIGURE10
from bench.paper.figures.figure11 import FIGURE11
from bench.paper.figures.figure12 import FIGURE12
from bench.paper.figures.figure13 import FIGURE13
from bench.paper.figures.figure14 import FIGURE14
from bench.paper.figures.figure15 import FIGURE15
from bench.paper.figures.figure16 import FIGURE16
from bench.paper.figures.loads import LOADS
from bench.paper.figures.sensitivity import SENSITIVITY

_FIGURES = (
    FIGURE3,
    FIGURE4,
    FIGURE5,
    FIGURE10,
    FIGURE11,
    FIGURE12,
    FIGURE13,
    FIGURE14,
    FIGURE15,
    FIGURE16,
    LOADS,
)

ALL = tuple(each.name for each in _FIGURES)
"""The experiments of `all`."""

EXPERIMENTS: Mapping[str, Experiment] = {each.name: each for each in (*_FIGURES, SENSITIVITY)}
