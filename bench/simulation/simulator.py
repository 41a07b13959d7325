"""Measures the speed of the simulator: whole runs, one core each.

`bench/results/simulator.json` has a row for each case: the time of a run once the compiled code is
loaded, the steps of engines per second, and the peak memory of a process that does nothing else. A
run is everything that `simulate` does. `reference_ratio` is the ratio of its time to that of a
simulation of one fixed policy that is compiled as a whole, which needs about 0.1 s for 10,000
requests on 16 instances: the cost of running the production policy, protocol and bookkeeping.

    sterna bench simulator [--runs 5] [--cases M-M 64x]

`warmup_s` is the first run of a process, a short one: it loads compiled functions from numba's
cache, or compiles them. Run it on a quiet machine: `foreign_cores` is the number of cores that
others kept busy during the runs.
"""

import argparse
import multiprocessing
import resource
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.common import results_io
from bench.common.command import ended, positive
from bench.common.machine import ForeignLoad
from bench.common.pages import write_marked
from sterna.engine.emulated.profiles import H100_LLAMA_31_8B, RTX4090_LLAMA_31_8B
from sterna.policy.own import Policy
from sterna.policy.presets import LLUMNIX, ROUND_ROBIN, STERNA
from sterna.policy.virtual_usage import Candidate, NewRequest
from sterna.simulator import SimulationConfig, simulate
from sterna.simulator.paper import paper_config, shipped_config
from sterna.types import InstanceId, InstanceView, RequestView
from sterna.workload.catalog import Workload, build_trace
from sterna.workload.seeds import PAPER_SEED

PAGE = results_io.ROOT / "docs" / "simulation.md"

REFERENCE_S = 0.1
"""Time of a wholly compiled simulation of 10,000 requests on 16 instances."""

MEMORY_GOAL_BYTES = 10**9

OWN_RULES_RATIO = 5.0
"""Largest time of a run that a class of one's own decides, over one under built-in rules."""

NUM_WARMUP_REQUESTS = 50


class OwnRules(Policy):
    """A class as a researcher writes it, which decides what it can by Python alone."""

    base = "llumnix"

    def dispatch(self, request: NewRequest, instances: Sequence[Candidate]) -> InstanceId:
        """The freest one."""
        return max(instances, key=lambda each: (each.freeness, each.instance_id)).instance_id

    def victims(self, instance: InstanceView) -> Sequence[RequestView]:
        """The shortest first."""
        movable = [each for each in instance.running if each.immovable is None]
        return sorted(movable, key=lambda each: (each.num_tokens, each.request_id))


@dataclass(frozen=True, slots=True)
class Case:
    """One workload on one cluster.

    Attributes:
        rules: "paper": its artifact's, with stale load reports; "own": ours, with live reports and
            sampled fragmentation; "class": the same, decided by a class of one's own; "prefix":
            engines of vLLM 1 with prefix caches, requests spread evenly; "prefix, sterna": faster
            ones, which keep up, under Sterna's policy.
        goal_s: largest time of a run on one core.
    """

    trace: str
    rate: float
    rules: str = "paper"
    num_instances: int = 16
    num_requests: int = 10_000
    goal_s: float = 5.0

    @property
    def name(self) -> str:
        """Its name on the command line and in tables."""
        instances = f" on {self.num_instances}" if self.num_instances != 16 else ""
        return f"{self.trace} {self.rate:g}/s{instances}, {self.rules}"

    def workload(self, num_requests: int) -> Workload:
        limit = self.config().engine.total_tokens if self.rules.startswith("prefix") else None
        return Workload(
            self.trace, num_requests, self.rate, seed=PAPER_SEED, max_total_tokens=limit
        )

    def config(self) -> SimulationConfig:
        num_instances = self.num_instances
        if self.rules.startswith("prefix"):
            is_sterna = self.rules.endswith("sterna")
            chosen = H100_LLAMA_31_8B if is_sterna else RTX4090_LLAMA_31_8B
            return SimulationConfig(
                engine=replace(chosen.engine, prefix_caching=True),
                step_time=chosen.step_time,
                copy_time=chosen.copy_time,
                policy=STERNA if is_sterna else ROUND_ROBIN,
                num_instances=num_instances,
            )
        if self.rules == "paper":
            return paper_config("llumnix", self.trace, num_instances=num_instances)
        policy = OwnRules().as_config() if self.rules == "class" else LLUMNIX
        return shipped_config(
            policy, self.trace, num_instances=num_instances, fragmentation_interval_s=1.0
        )


CASES = (
    Case("M-M", 7.5, goal_s=2.0),
    Case("M-M", 7.5, rules="own", goal_s=2.0),
    Case("M-M", 7.5, rules="class", goal_s=10.0),
    Case("sharegpt", 7.0),
    Case("sharegpt", 8.0),
    Case("burstgpt", 7.5),
    Case("burstgpt", 8.5),
    Case("S-S", 32.0),
    Case("S-S", 36.0),
    Case("M-M", 7.8),
    Case("L-L", 3.0),
    Case("S-L", 4.3),
    Case("L-S", 10.0),
    Case("L-S", 18.0),
    Case("mooncake-conversation", 6.0, "prefix"),
    Case("mooncake-conversation", 6.0, "prefix, sterna"),
    Case("fixed:64-64", 400.0, num_instances=64, num_requests=100_000, goal_s=15.0),
    Case("fixed:64-64", 400.0, "own", num_instances=64, num_requests=100_000, goal_s=15.0),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the cases, print a line each and write the result file."""
    parser = _parser()
    options = parser.parse_args(argv)
    cases = [case for case in CASES if any(part in case.name for part in options.cases)]
    if not cases:
        parser.error(f"no case has {' or '.join(options.cases)} in its name; see --help")
    return ended(lambda: _run(cases, options))


def _run(cases: Sequence[Case], options: argparse.Namespace) -> None:
    rows = []
    for case in cases:
        rows.append(_in_fresh_process(case, options.runs))
        print(_line(case, rows[-1]), flush=True)
    config = {
        "runs": options.runs,
        "reference_s": REFERENCE_S,
        "memory_goal_bytes": MEMORY_GOAL_BYTES,
    }
    if options.results is None and len(cases) < len(CASES):
        print("not all cases: nothing is written without --results")
        return
    print(results_io.write("simulator", config, rows, options.results or results_io.RESULTS))
    if options.results is None:
        text = markdown(results_io.read("simulator"))
        write_marked(PAGE, "sterna bench simulator", text)


def markdown(document: dict[str, Any]) -> str:
    """The table of docs/simulation.md, from the result file."""
    hardware, config = document["hardware"], document["config"]
    foreign_cores = max(row["foreign_cores"] for row in document["rows"])
    lines = [
        f"Measured on {document['date'][:10]} at commit {document['commit']} on one core of "
        f"{hardware['cpu']}, medians of {config['runs']} runs; other programs kept up to "
        f"{foreign_cores:g} of {hardware['num_cores']} cores busy.",
        "",
        "| case | requests | s a run | goal | steps/s | times the reference | MiB |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row['case']} | {row['num_requests']} | {row['run_s']['median']:.2f} "
        f"| {row['goal_s']:g} | {row['steps_per_s']} | {row['reference_ratio']:g} "
        f"| {row['peak_memory_bytes'] / 2**20:.0f} |"
        for row in document["rows"]
    ]
    ratio = own_rules_ratio(document["rows"])
    if ratio is not None:
        lines += [
            "",
            f"Decisions of a class of one's own, in Python, take {ratio:.1f} times as long as the "
            f"rules that are built in (goal: at most {OWN_RULES_RATIO:g} times).",
        ]
    return "\n".join(lines)


def own_rules_ratio(rows: Sequence[dict[str, Any]]) -> float | None:
    """The time of a run that a class decides over that of the same run under built-in rules."""
    times_s = {
        row["rules"]: row["run_s"]["median"]
        for row in rows
        if (row["trace"], row["rate"], row["num_instances"]) == ("M-M", 7.5, 16)
    }
    if not {"class", "own"} <= times_s.keys():
        return None
    return float(times_s["class"] / times_s["own"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sterna bench simulator", description="Measures the speed of the simulator."
    )
    parser.add_argument("--runs", type=positive, default=5, help="of each case, after a warm-up")
    parser.add_argument(
        "--cases",
        nargs="+",
        default=[""],
        metavar="PART",
        help=f"those with such a part in their name: {'; '.join(case.name for case in CASES)}",
    )
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FOLDER",
        help="where the results go (default: bench/results, of all cases only)",
    )
    return parser


def _in_fresh_process(case: Case, num_runs: int) -> dict[str, Any]:
    """Measure the case in a fresh process, so that the peak of memory is its own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as executor:
        return executor.submit(_measure, case, num_runs).result()


def _measure(case: Case, num_runs: int) -> dict[str, Any]:
    config = case.config()
    begin_s = time.perf_counter()
    simulate(build_trace(case.workload(NUM_WARMUP_REQUESTS)), config)
    warmup_s = time.perf_counter() - begin_s
    trace = build_trace(case.workload(case.num_requests))
    # Not by the parent, which would count this process as a foreign one after its end.
    foreign = ForeignLoad()
    runs_s, cpu_s = [], []
    for _ in range(num_runs):
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        _, cluster = simulate(trace, config)
        runs_s.append(time.perf_counter() - begin_s)
        cpu_s.append(time.process_time() - begin_cpu_s)
    foreign_cores = round(foreign.cores(), 2)
    run_s = results_io.summary(runs_s)
    num_steps, committed = cluster.num_steps, cluster.migrations_committed
    aborted = cluster.migrations_aborted
    assert num_steps is not None
    assert committed is not None
    assert aborted is not None
    return {
        "case": case.name,
        "trace": case.trace,
        "rate": case.rate,
        "rules": case.rules,
        "policy": config.policy.name,
        "report": config.report.value,
        "num_instances": case.num_instances,
        "num_requests": case.num_requests,
        "n": num_runs,
        "run_s": run_s,
        "run_cpu_s": results_io.summary(cpu_s),
        "foreign_cores": foreign_cores,
        "goal_s": case.goal_s,
        "warmup_s": round(warmup_s, 2),
        "steps": num_steps,
        "steps_per_s": round(num_steps / run_s["median"]),
        "migrations": committed + aborted,
        "simulated_s": round(cluster.simulated_s, 1),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "reference_ratio": round(run_s["median"] / _reference_s(case), 1),
    }


def _reference_s(case: Case) -> float:
    """The reference for this number of requests."""
    return REFERENCE_S * case.num_requests / 10_000


def _line(case: Case, row: dict[str, Any]) -> str:
    return (
        f"{case.name:30} {row['run_s']['median']:6.2f} s (goal {case.goal_s:g}), "
        f"{row['steps_per_s'] / 1e3:5.0f}k steps/s, {row['reference_ratio']:5.1f} x the reference, "
        f"{row['peak_memory_bytes'] / 2**20:4.0f} MiB"
    )


if __name__ == "__main__":
    sys.exit(main())
