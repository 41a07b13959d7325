"""Measures the gain of urgent requests from priorities and the cost for the others.

The same requests, a tenth of them high, are sent in bursts to real instances of `sterna serve` with
priorities and without them: a pair. Every pair has other requests, so that no prompt is in a cache,
and begins with the other side. The two sides differ only in the policy's priorities (`llumnix`,
`llumnix-base`); clients ask for their tier in both. Both servers run all the time, and take turns:
the two runs of a pair are close to each other, so that a machine that is slower for a while slows
both. A pair during which the machine's speed changed is measured again. Every few pairs have
servers of their own, since no two processes are equally fast.

    sterna bench priorities [--pairs 30] [--rate 1] [--quick] [--continue]

`bench/results/priorities.json` has a row for each class, metric and side over all runs; `runs` has
the same for every run, and `summary` the ratios of the pairs, whose scatter is the noise. The
default rate is a share of the throughput of two instances without priorities in a burst.
Run it on a quiet machine.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.common import results_io
from bench.common.command import end_like_ctrl_c, ended
from bench.common.pace import Pace, at_one_speed
from bench.priorities.plan import POLICIES, Plan, make_parser, plan_of
from bench.priorities.report import (
    CLASSES,
    METRICS,
    cells_of,
    compared,
    goals_of,
    markdown,
    plot,
    run_json,
    summary_of,
)
from bench.serving.comparing import (
    check_machine,
    reporting_kept,
    results_folder,
    write_report,
)
from sterna.errors import ConfigurationError
from sterna.types import HIGH

if TYPE_CHECKING:
    from bench.serving.measured import Server
    from sterna.workload.trace import Trace

NAME = "priorities"

CALIBRATION_REQUESTS = 32
CALIBRATION_SEED = 1_000_000
"""Seed of other prompts than those of the runs, which must be in no cache."""

INTERVAL_S = 1.0

MIN_HIGH = 5
"""Smallest number of high requests in a run: with fewer, their P99 depends on one request."""

PAIRS_A_START = 6
"""Number of pairs with the same two servers."""

FOUND = ("rate", "capacity", "model", "target_load", "speed")
"""Fields of the configuration that are found before or during the first pair."""

SEEDS_AN_ATTEMPT = 1000
"""Offset of the seed of another attempt, whose prompts are in no cache."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the results."""
    options = make_parser().parse_args(argv)
    return ended(lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    if options.report:
        write_report(NAME, results_folder(options), markdown, plot)
        return
    plan = plan_of(options)
    with reporting_kept("pairs"):
        Benchmark(plan).run()


class Benchmark:
    """A measurement in progress.

    Attributes:
        runs: the measured runs, as JSON.
        pace: None until the servers have started, and where it does not matter.
    """

    def __init__(self, plan: Plan) -> None:
        from bench.serving.measured import Notes

        self._plan = plan
        self._notes = Notes()
        self.runs: list[dict[str, Any]] = []
        self._lengths: list[int] = []
        self._facts: dict[str, Any] = {}
        self.pace: Pace | None = None

    def run(self) -> None:
        """Measure all pairs; the results so far are written after each."""
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
        known = {run["pair"] for run in self.runs}
        left = [pair for pair in range(1, plan.pairs + 1) if pair not in known]
        for first in range(0, len(left), PAIRS_A_START):
            pairs = left[first : first + PAIRS_A_START]
            with self._both_started(pairs[0]) as servers:
                for pair in pairs:
                    self.measure_pair(servers, pair, traces[pair - 1])
                    self._write()
        if not left:
            # By the current rules, which may differ from those of the measurement.
            self._write()
        write_report(NAME, plan.folder, markdown, plot)

    @contextmanager
    def _both_started(self, pair: int) -> "Iterator[dict[str, Server]]":
        """A server for each side, from this pair on."""
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
            if self.pace is None and not self._plan.is_quick:
                self.pace = Pace(self._facts.get("speed"), self._notes.say)
                self._facts["speed"] = round(self.pace.first, 2)
            yield servers

    def _continue(self) -> None:
        """Load the existing pairs.

        Raises:
            ConfigurationError: there are none, or they were measured with other options, or on
                another machine.
        """
        folder = self._plan.folder
        try:
            document = results_io.read(NAME, folder)
        except FileNotFoundError:
            raise ConfigurationError(
                f"{folder} has no results that could be continued: leave out --continue"
            ) from None
        config = document["config"]
        check_machine(document["hardware"])
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
        self.runs = document["runs"]
        num_pairs = len({run["pair"] for run in self.runs})
        self._notes.say(f"{num_pairs} pairs exist, at {config['rate']:g} requests a second")

    def _calibrated(self) -> float:
        """A share of the throughput in a burst."""
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

    def measure_pair(self, servers: "Mapping[str, Server]", pair: int, trace: "Trace") -> None:
        """Measure both sides at the same speed of the machine, as far as possible."""
        # A drift over time affects both sides alike.
        sides = list(POLICIES if pair % 2 else reversed(POLICIES))

        def run(side: str, attempt: int) -> dict[str, Any]:
            return self._measure(servers[side], pair, side, trace, attempt)

        runs, is_steady = at_one_speed(self.pace, sides, run, self._notes.say)
        self.runs += [{**each, "is_steady": is_steady} for each in runs]

    def _measure(
        self, server: "Server", pair: int, side: str, trace: "Trace", attempt: int
    ) -> dict[str, Any]:
        self._notes.say(f"pair {pair} of {self._plan.pairs}, priorities {side}")
        seed = self._plan.seeds[pair - 1] + (attempt - 1) * SEEDS_AN_ATTEMPT
        done = server.measure(trace, f"{pair} {side}", seed=seed, interval_s=INTERVAL_S)
        self._notes.say_outcome(done)
        high = done.run.summary(HIGH)
        if high.ttft_s is not None and high.tpot_s is not None:
            self._notes.say(
                f"high: TTFT {high.ttft_s.mean:.3f} s, TPOT {1000 * high.tpot_s.mean:.0f} ms, "
                f"done after {done.run.cluster.simulated_s:.0f} s"
            )
        run = run_json(pair, side, done)
        return {**run, "attempt": attempt, "commit": results_io.measured_commit()}

    def _log(self, name: str) -> Path:
        from bench.serving.measured import LOGS

        return LOGS / NAME / f"{name}.log"

    def _write(self) -> None:
        runs = self.runs
        for run in runs:
            if not all(each["tpot_s"]["n"] for each in run["classes"].values()):
                raise ConfigurationError(
                    f"pair {run['pair']}, priorities {run['priorities']}: of a class no request "
                    f"ended; {self._log('*').parent} has the servers' output"
                )
        counted = compared(runs)
        sides = {side: cells_of(counted, side) for side in POLICIES}
        summary = summary_of(counted)
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
        """The given part of the configuration, common to all pairs."""
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
    """Warn of a run with too few high requests."""
    fewest = min(int((trace.priority == HIGH).sum()) for trace in traces)
    if fewest >= MIN_HIGH:
        return None
    return f"only {fewest} high requests in a run, too few for their P99: raise --seconds"


if __name__ == "__main__":
    end_like_ctrl_c()
    sys.exit(main())
