"""A simulation that is checked after every event, and at its end (`checkers`)."""

import time
from collections.abc import Callable
from dataclasses import replace

from sterna.metrics.records import ClusterRecord, Records
from sterna.simulator.config import SimulationConfig
from sterna.simulator.engines import index_of, request_id_of
from sterna.simulator.event_queue import Action, EventQueue
from sterna.simulator.plain import PlainEngines
from sterna.simulator.simulation import Simulation
from sterna.workload.trace import Trace
from tests.simulator.checkers import Checker


def simulate_checked(trace: Trace, config: SimulationConfig) -> tuple[Records, ClusterRecord]:
    """What `simulate` returns, if all is well.

    Raises:
        AssertionError: a check failed; the message says which, and when.
    """
    begin_s = time.perf_counter()
    simulation = CheckedSimulation(trace, config)
    simulation.run()
    result = simulation.result(time.perf_counter() - begin_s)
    simulation.settle()
    return result


class CheckedSimulation(Simulation):
    """The same run, one step after the other on plain engines, with the same results."""

    def __init__(self, trace: Trace, config: SimulationConfig) -> None:
        super().__init__(trace, replace(config, is_fast=False))
        assert isinstance(self._engines, PlainEngines)
        plain = self._engines
        self._plain = plain
        self._checker = Checker(
            config.engine, lambda request_id: plain.num_delivered(index_of(request_id))
        )
        self._events = _CheckedQueue(self._check)

    def _arrive(self, now_s: float) -> None:
        super()._arrive(now_s)
        self._check(now_s)

    def settle(self) -> None:
        """Let what is left after the last request happen: then nothing may be held any more."""
        now_s = 0.0
        while self._events.next is not None:
            now_s, action = self._events.pop()
            action(now_s)
        request_ids = [request_id_of(index) for index in range(len(self._trace))]
        lengths = self._trace.output_tokens.tolist()
        cores = self._plain.cores()
        _require_none(self._checker.final_violations(cores, request_ids, lengths), now_s)

    def _check(self, now_s: float) -> None:
        _require_none(self._checker.violations(self._plain.cores()), now_s)


class _CheckedQueue(EventQueue):
    """Its events are followed by a check."""

    def __init__(self, check: Callable[[float], None]) -> None:
        super().__init__()
        self._check = check

    def pop(self) -> tuple[float, Action]:
        time_s, action = super().pop()

        def checked(now_s: float) -> None:
            action(now_s)
            self._check(now_s)

        return time_s, checked


def _require_none(violations: list[str], now_s: float) -> None:
    if violations:
        raise AssertionError(f"at {now_s} s: {'; '.join(violations)}")
