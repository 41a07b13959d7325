"""Virtual time: the production scheduler, llumlets and policies over emulated engines.

`simulate` runs a trace. What is decided is decided by the code that serves; only the engines,
the links and the clock are emulated (Sections 6.3 to 6.6 of the paper's evaluation).
"""

from sterna.simulator.config import Report, SimulationConfig
from sterna.simulator.simulation import simulate

__all__ = ["Report", "SimulationConfig", "simulate"]
