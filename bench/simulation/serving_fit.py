"""Fits the overhead of serving on top of the engine's measured step time on the paper's cluster.

The measured steps of LLaMA-7B on an A10 are of an engine alone; the cluster's were longer by the
work of its CPUs between them. This overhead is fitted to one column: Llumnix's mean decode latency
at the 25 generated points of Figure 11, by least squares of the logarithms (Gauss-Newton, each
derivative a difference of whole simulations). Every prefill delays the decodes of its instance, so
that decode latencies depend on the overhead of prefills, too.

Prints each step of the search, and at the end the constants for `simulator.paper` with their
standard errors. All numbers are simulated; they do not depend on the machine.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from bench.common.command import ended, positive
from bench.paper.figures.figure11 import GENERATED
from bench.paper.points import paper_points
from sterna.engine.emulated.profiles import A10_LLAMA_7B, with_serving
from sterna.simulator.paper import paper_config
from sterna.simulator.runs import Job, SimulationRun, map_runs
from sterna.workload.catalog import Workload
from sterna.workload.seeds import PAPER_SEED

Numbers = NDArray[np.float64]

NAMES = ("step_s", "prefill_s", "request_s", "token_s")
"""The arguments of `with_serving`."""

START = np.array([2e-3, 1e-3, 4e-4, 2e-7])
STEP = np.array([1e-3, 4e-3, 2e-4, 2e-7])
"""Differences that move the latencies by more than a chaotic run's own noise."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Search; returns the process's exit code."""
    options = _parser().parse_args(arguments)
    return ended(lambda: _search(options))


def _search(options: argparse.Namespace) -> None:
    points = [
        point
        for point in paper_points("figure11")
        if point["trace"] in GENERATED and point["policy"].lower() == "llumnix"
    ]
    paper = np.log([point["decode_mean_s"] for point in points])
    free = [name not in options.without for name in NAMES]
    constants = np.where(free, START, 0.0)
    for iteration in range(options.iterations):
        tried = [constants]
        tried += [constants + STEP * (np.arange(len(NAMES)) == k) for k in np.flatnonzero(free)]
        found = _log_latencies(points, tried, options.processes) - paper
        slopes = (found[1:] - found[0]).T / STEP[free]
        _say(iteration, constants, found[0], slopes, free)
        change = np.linalg.lstsq(slopes, -found[0], rcond=None)[0]
        constants = constants.copy()
        constants[free] = np.maximum(0.0, constants[free] + change)


def _log_latencies(
    points: Sequence[dict[str, object]], tried: Sequence[Numbers], processes: int | None
) -> Numbers:
    """The logarithm of each point's mean decode latency, with a row for each set of constants."""
    jobs = [_job(point, constants) for constants in tried for point in points]
    latencies_s: Numbers = np.array(map_runs(jobs, _decode_mean_s, num_processes=processes))
    logs: Numbers = np.log(latencies_s).reshape(len(tried), len(points))
    return logs


def _decode_mean_s(run: SimulationRun) -> float:
    tpot_s = run.summary().tpot_s
    assert tpot_s is not None
    return tpot_s.mean


def _job(point: dict[str, object], constants: Numbers) -> Job:
    trace, added = str(point["trace"]), dict(zip(NAMES, constants.tolist(), strict=True))
    workload = Workload(trace=trace, rate=float(str(point["request_rate"])), seed=PAPER_SEED)
    step_time = with_serving(A10_LLAMA_7B.step_time, **added)
    return Job(workload, replace(paper_config("llumnix", trace), step_time=step_time))


def _say(
    iteration: int, constants: Numbers, residuals: Numbers, slopes: Numbers, free: Sequence[bool]
) -> None:
    num_free = sum(free)
    variance = float(residuals @ residuals) / (len(residuals) - num_free)
    errors = np.zeros(len(NAMES))
    errors[np.array(free)] = np.sqrt(variance * np.diag(np.linalg.inv(slopes.T @ slopes)))
    fitted = ", ".join(
        f"{name} {constant:.3g} +- {error:.2g}"
        for name, constant, error in zip(NAMES, constants, errors, strict=True)
    )
    print(
        f"{iteration}: {fitted}; median |log error| {np.median(abs(residuals)):.4f}, root of the "
        f"mean square {np.sqrt(np.mean(residuals**2)):.4f}",
        flush=True,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulation.serving_fit", description=__doc__
    )
    parser.add_argument("--iterations", type=positive, default=5)
    parser.add_argument(
        "--without", nargs="+", choices=NAMES, default=[], help="constants that are kept at zero"
    )
    parser.add_argument("--processes", type=positive, help="runs at a time; by default one a core")
    return parser


if __name__ == "__main__":
    sys.exit(main())
