"""Simulation that reports its progress."""

import time
from collections.abc import Callable

from sterna.metrics.records import ClusterRecord, Records
from sterna.simulator.config import SimulationConfig
from sterna.simulator.event_queue import Action, EventQueue
from sterna.simulator.simulation import Simulation
from sterna.workload.trace import Trace

EVENTS_PER_REPORT = 1_000
"""Events between two reports, which are tens of milliseconds apart."""


def simulate_reporting(
    trace: Trace, config: SimulationConfig, on_progress: Callable[[int], None]
) -> tuple[Records, ClusterRecord]:
    """Run the trace as `simulate` does, with reports of the progress.

    Args:
        on_progress: called periodically with the number of requests that have ended.

    Raises:
        ConfigurationError: a request of the trace can never be served by such an instance.
    """
    begin_s = time.perf_counter()
    simulation = _ReportingSimulation(trace, config, on_progress)
    simulation.run()
    return simulation.result(time.perf_counter() - begin_s)


class _ReportingSimulation(Simulation):
    """The same run, with the same results."""

    def __init__(
        self, trace: Trace, config: SimulationConfig, on_progress: Callable[[int], None]
    ) -> None:
        super().__init__(trace, config)
        self._events = _ReportingQueue(lambda: on_progress(self._engines.num_ended))


class _ReportingQueue(EventQueue):
    """Event queue that reports after every EVENTS_PER_REPORT events."""

    def __init__(self, report: Callable[[], None]) -> None:
        super().__init__()
        self._report = report
        self._num_events = 0

    def pop(self) -> tuple[float, Action]:
        self._num_events += 1
        if self._num_events % EVENTS_PER_REPORT == 0:
            self._report()
        return super().pop()
