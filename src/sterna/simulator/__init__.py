"""Virtual time: the production scheduler, llumlets and policies over emulated engines.

`simulate` runs a trace. The code that serves decides; only the engines, the links and the clock are
emulated (Sections 6.3 to 6.6 of the paper's evaluation).

Offers: config, paper, recorded, runs.
Imports: config, dashboard, engine, engine.emulated, engine.emulated.compiled, errors, instance,
    messages, metrics, migration, migration.messages, policy, scheduler, types, workload.
"""

from sterna.simulator.config import Report, SimulationConfig
from sterna.simulator.simulation import simulate

__all__ = ["Report", "SimulationConfig", "simulate"]
