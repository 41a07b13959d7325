"""Measures auto-scaling on real instances: the load steps up and down, and instances follow.

The same requests go to three servers in turn: `sterna` with the instances that the load needs,
`infaas++` likewise, which scales but migrates nothing, and `sterna` with the most instances
throughout. No stream may fail or be cut, and the number of instances must return to its start value
after the load. The cost is in instance-seconds until the last request ended: an instance counts
from the start of its process to its end, also while it is warm, starting or being emptied.

    sterna bench autoscaling [--rates 0.3 1.5 0.3] [--phases 60 150 120] [--quick]

`bench/results/autoscaling.json` has a `summary` of the run with `sterna` and scaling, `runs` with
the same and a time line for each, and `rows` with the distributions. Run it on a quiet machine.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.autoscaling.report import (
    FIXED,
    METRICS,
    RUNS,
    SCALING,
    goals_of,
    markdown,
    plot,
    run_json,
    summary_of,
)
from bench.common import results_io
from bench.common.command import end_like_ctrl_c, ended
from bench.common.command import positive as count
from bench.serving.comparing import (
    add_common_options,
    reporting_kept,
    results_folder,
    serve_options,
    write_report,
)
from sterna.cli.options.option_values import positive
from sterna.errors import ConfigurationError
from sterna.workload.arrivals import Step

if TYPE_CHECKING:
    from bench.serving.measured import Measured
    from bench.serving.observer import ClusterSample
    from sterna.workload.trace import Trace

NAME = "autoscaling"
INTERVAL_S = 1.0

QUICK_RATES, QUICK_PHASES = (0.5, 10.0, 0.5), (5.0, 20.0, 25.0)
QUICK_SCALING = ("--scaling-period=2", "--scaling-cooldown=2")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the results."""
    options = _parser().parse_args(argv)
    return ended(lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    if options.report:
        write_report(NAME, results_folder(options), markdown, plot)
        return
    plan = _plan(options)
    with reporting_kept("runs"):
        _Benchmark(plan).run()


@dataclass(frozen=True, slots=True)
class _Plan:
    """The options of the measurement.

    Attributes:
        scaling: options of the servers that scale.
        serve: options of all servers.
        settle_timeout_s: time after the last request within which instances must end.
    """

    runs: tuple[str, ...]
    steps: Step
    min_instances: int
    max_instances: int
    warm_instances: int
    scaling: tuple[str, ...]
    serve: tuple[str, ...]
    settle_timeout_s: float
    seed: int
    folder: Path

    def options(self, run: str) -> list[str]:
        """Return the options of the server of a run."""
        if run == FIXED:
            return [*self.serve, "--policy", "sterna", "--instances", str(self.max_instances)]
        return [
            *self.serve,
            *("--policy", run),
            *("--min-instances", str(self.min_instances)),
            *("--max-instances", str(self.max_instances)),
            *("--warm-instances", str(self.warm_instances)),
            *self.scaling,
        ]

    def is_settled(self, sample: "ClusterSample") -> bool:
        """Whether the number of instances is that without load."""
        return len(sample.instances) <= self.min_instances + self.warm_instances

    @property
    def arrivals(self) -> str:
        """The arrivals in the form of `sterna simulate --arrivals`."""
        pieces = zip(self.steps.rates, self.steps.durations_s, strict=True)
        return "step:" + ",".join(f"{rate:g}@{duration_s:g}" for rate, duration_s in pieces)


class _Benchmark:
    def __init__(self, plan: _Plan) -> None:
        from bench.serving.measured import Notes

        self._plan = plan
        self._notes = Notes()
        self._measured: dict[str, Measured] = {}
        self._model = ""

    def run(self) -> None:
        """Measure all runs; the results so far are written after each."""
        from bench.serving.loads import stepped_trace

        plan = self._plan
        trace = stepped_trace(plan.steps, seed=plan.seed)
        for run in plan.runs:
            self._notes.say(f"{run}, {len(trace)} requests: starting")
            self._measure(run, trace)
            if SCALING in self._measured:
                self._write()
        write_report(NAME, plan.folder, markdown, plot)

    def _measure(self, run: str, trace: "Trace") -> None:
        from bench.serving.measured import LOGS, started

        plan = self._plan
        with started(plan.options(run), LOGS / NAME / f"{run}.log") as server:
            self._model = server.target.model
            server.warm_up()
            done = server.measure(
                trace,
                run,
                seed=plan.seed,
                interval_s=INTERVAL_S,
                is_settled=None if run == FIXED else plan.is_settled,
                settle_timeout_s=plan.settle_timeout_s,
            )
        self._measured[run] = done
        self._notes.say_outcome(done)
        found = run_json(run, done)
        self._notes.say(
            f"{run}: P99 TTFT {found['ttft_s']['p99']:.2f} s, "
            f"{found['instance_seconds']:.0f} instance-seconds, instances "
            f"{found['serving_first']} → {found['serving_max']} → {found['serving_last']}"
        )

    def _write(self) -> None:
        from bench.serving.measured import cell, values_of

        plan = self._plan
        runs = [run_json(run, done) for run, done in self._measured.items()]
        goals = goals_of(runs, plan.min_instances, plan.max_instances)
        rows = [
            {"run": run, "metric": metric, **cell(values_of([done.run], metric))}
            for run, done in self._measured.items()
            for metric in METRICS
        ]
        path = results_io.write(
            NAME,
            self._config(),
            rows,
            plan.folder,
            summary=summary_of(next(run for run in runs if run["run"] == SCALING)),
            more={"goals": [asdict(each) for each in goals], "runs": runs},
        )
        self._notes.say(f"written: {path}")

    def _config(self) -> dict[str, Any]:
        from bench.serving.loads import STEP_LENGTHS

        plan = self._plan
        return {
            "model": self._model,
            "min_instances": plan.min_instances,
            "max_instances": plan.max_instances,
            "warm_instances": plan.warm_instances,
            "serve": {run: plan.options(run) for run in plan.runs},
            "arrivals": plan.arrivals,
            "changes_s": list(accumulate(plan.steps.durations_s)),
            **asdict(STEP_LENGTHS),
            "seed": plan.seed,
        }


def _plan(options: argparse.Namespace) -> _Plan:
    quick = options.quick
    rates = QUICK_RATES if quick else tuple(options.rates)
    phases = QUICK_PHASES if quick else tuple(options.phases)
    if len(rates) != len(phases):
        raise ConfigurationError(
            f"--rates and --phases must be equally many, not {len(rates)} and {len(phases)}"
        )
    if options.max_instances <= options.min_instances:
        raise ConfigurationError(
            f"--max-instances {options.max_instances} must be above --min-instances "
            f"{options.min_instances}"
        )
    scaling = [
        f"{option}={value:g}"
        for option, value in (
            ("--scale-up-freeness", options.scale_up_freeness),
            ("--scale-down-freeness", options.scale_down_freeness),
            ("--scaling-period", options.scaling_period),
            ("--scaling-cooldown", options.scaling_cooldown),
        )
        if value is not None
    ]
    return _Plan(
        runs=tuple(run for run in RUNS if run in options.runs),
        steps=Step(rates, phases),
        min_instances=options.min_instances,
        max_instances=options.max_instances,
        warm_instances=options.warm_instances,
        scaling=(*(QUICK_SCALING if quick else ()), *scaling),
        serve=serve_options(options),
        settle_timeout_s=options.settle_timeout,
        seed=options.seed,
        folder=results_folder(options),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sterna bench autoscaling",
        description="Measures auto-scaling under a load that steps up and down.",
        epilog="docs/benchmarks.md explains what is measured.",
    )
    add_common_options(parser, quick="a short load on emulated instances")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=RUNS, help="default: all")
    parser.add_argument(
        "--rates",
        nargs="+",
        type=positive,
        default=(0.3, 1.5, 0.3),
        metavar="RATE",
        help="requests a second in each phase (default: 0.3 1.5 0.3)",
    )
    parser.add_argument(
        "--phases",
        nargs="+",
        type=positive,
        default=(60.0, 150.0, 120.0),
        metavar="SECONDS",
        help="seconds of each phase (default: 60 150 120)",
    )
    parser.add_argument("--min-instances", type=count, default=1, help="default: %(default)s")
    parser.add_argument("--max-instances", type=count, default=3, help="default: %(default)s")
    parser.add_argument(
        "--warm-instances",
        type=int,
        default=0,
        help="number of further instances without requests (default: %(default)s)",
    )
    for option, metavar in (
        ("--scale-up-freeness", "STEPS"),
        ("--scale-down-freeness", "STEPS"),
        ("--scaling-period", "SECONDS"),
        ("--scaling-cooldown", "SECONDS"),
    ):
        parser.add_argument(
            option, type=float, metavar=metavar, help="as for `sterna serve` (default: its own)"
        )
    parser.add_argument(
        "--settle-timeout",
        type=positive,
        default=120.0,
        metavar="SECONDS",
        help="time for instances to end after the last request (default: %(default)g)",
    )
    return parser


if __name__ == "__main__":
    end_like_ctrl_c()
    sys.exit(main())
