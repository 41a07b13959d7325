"""One run of a case: on paced instances, and in simulation."""

import argparse
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from bench.common.tables import Row, rounded, statistic
from bench.paced.cases import Case
from bench.serving.measured import Measured, Notes, Server, started
from sterna.cli.simulate.simulate_command import configuration, jobs_of
from sterna.cli.simulate.simulate_options import add_simulate_options
from sterna.metrics.summary import Summary
from sterna.simulator.runs import Job, run
from sterna.workload.catalog import build_trace

PACED, SIMULATED = "paced", "simulated"
"""The kinds of rows."""

PACE = re.compile(r"paced steps=(\d+) seconds=[\d.]+ late=(\d+) late_seconds=([\d.]+)")
"""The line in which an instance counts its steps, the last one those of its whole life."""

INSTANCE = re.compile(r"^\(instance (\w+)")


def job_of(case: Case, hardware: Path, policy: str, seed: int) -> Job:
    """The simulation of the case under this policy."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_simulate_options(parser)
    args = parser.parse_args(case.simulate_options(hardware, seed))
    (job,) = jobs_of(args, {policy: configuration(args, policy)})
    return job


def simulated_row(case: Case, job: Job) -> Row:
    """What the simulator predicts."""
    done = run(job)
    cached_tokens, input_tokens = done.records.cached_tokens, done.records.input_tokens
    return {
        **_labels(case, job, SIMULATED),
        **_metrics(done.summary()),
        "prefix_hits": None
        if cached_tokens is None
        else rounded(float(cached_tokens.sum() / input_tokens.sum())),
    }


def paced_row(case: Case, job: Job, model: Path, hardware: Path, log: Path, notes: Notes) -> Row:
    """The same requests on a server of their own.

    Raises:
        ConfigurationError: the server did not start; the message says why.
    """
    options = case.serve_options(model, hardware, job.policy)
    with started(options, log) as server:
        server.warm_up(case.instances)
        before = _of_engines(server)
        what = f"{case.name}, {job.policy}"
        done = server.measure(build_trace(job.workload), what, seed=job.workload.seed)
        of_engines = _of_engines(server).since(before)
    notes.say_outcome(done)
    num_steps, num_late, late_s = late_steps(log.read_text("utf-8", "replace").splitlines())
    metrics = _metrics(done.run.summary())
    return {
        **_labels(case, job, PACED),
        **metrics,
        "prefix_hits": of_engines.hits,
        "outside_engines_s": of_engines.outside_s(metrics["ttft_mean_s"]),
        "failed": _num_failed(done),
        "foreign_cores": done.foreign_cores,
        "steps": num_steps,
        "late_steps": num_late,
        "late_s": round(late_s, 2),
    }


def late_steps(lines: Iterable[str]) -> tuple[int, int, float]:
    """Steps of all instances, those that were late, and by how many seconds together."""
    last: dict[str, tuple[int, int, float]] = {}
    for line in lines:
        name, found = INSTANCE.match(line), PACE.search(line)
        if name is not None and found is not None:
            last[name[1]] = int(found[1]), int(found[2]), float(found[3])
    steps, late, seconds = zip(*last.values(), strict=True) if last else ((), (), ())
    return sum(steps), sum(late), sum(seconds)


def _labels(case: Case, job: Job, kind: str) -> Row:
    return {
        "point": case.name,
        "case": case.description,
        "policy": job.policy,
        "seed": job.workload.seed,
        "kind": kind,
    }


def _metrics(summary: Summary) -> Row:
    return {
        "n": summary.num_completed,
        "ttft_mean_s": statistic(summary.ttft_s, "mean"),
        "ttft_p99_s": statistic(summary.ttft_s, "p99"),
        "tpot_mean_s": statistic(summary.tpot_s, "mean"),
        "tpot_p99_s": statistic(summary.tpot_s, "p99"),
        "request_mean_s": statistic(summary.request_s, "mean"),
        "request_p99_s": statistic(summary.request_s, "p99"),
        "makespan_s": rounded(summary.simulated_s),
        "preemptions": summary.num_preemptions,
        "migrations": summary.migrations_committed,
    }


def _num_failed(done: Measured) -> int:
    summary = done.run.summary()
    return summary.num_requests - summary.num_completed


class _OfEngines(NamedTuple):
    """Counts of vLLM's own metrics so far, of all requests: tokens of prompts, those of them that
    prefix caches had, requests that have ended, and the seconds that these waited in
    engines, and until their first token from there on."""

    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0
    requests: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0

    def since(self, earlier: "_OfEngines") -> "_OfEngines":
        return _OfEngines(*(now - before for now, before in zip(self, earlier, strict=True)))

    @property
    def hits(self) -> float | None:
        """The share of prompts that prefix caches had."""
        return rounded(self.cached_tokens / self.prompt_tokens) if self.prompt_tokens else None

    def outside_s(self, ttft_mean_s: float | None) -> float | None:
        """The part of the mean time to the first token that was spent outside of engines."""
        if ttft_mean_s is None or not self.requests:
            return None
        return rounded(ttft_mean_s - (self.queue_s + self.prefill_s) / self.requests)


_COUNTED = (
    "vllm:prompt_tokens_total",
    "vllm:prompt_tokens_cached_total",
    "vllm:request_queue_time_seconds_count",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_prefill_time_seconds_sum",
)
"""The metrics, in the order of `_OfEngines`."""


def _of_engines(server: Server) -> _OfEngines:
    import urllib.request

    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"{server.target.url}/metrics", timeout=30.0) as answer:
        text = answer.read().decode()
    sums = dict.fromkeys(_COUNTED, 0.0)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in sums:
                sums[sample.name] += sample.value
    return _OfEngines(*sums.values())
