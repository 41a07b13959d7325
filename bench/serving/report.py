"""Reports of a run on a real server: a table, JSON, a file, and a plot."""

import contextlib
import datetime
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from math import isnan
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.markup import escape

from bench.common import results_io
from bench.serving.session import ServedRun
from sterna.cli.simulate.run_report import counted, number, print_run, report_console
from sterna.cli.simulate.workload_options import arrivals_of
from sterna.errors import ConfigurationError
from sterna.metrics.summary import Distribution, as_json, latencies_json, summarize_classes
from sterna.workload.catalog import Workload

LATE_S = 0.05
"""Send delay (P99) above which the client itself distorts the measurement."""


@dataclass(frozen=True, slots=True, eq=False)
class Reported:
    """A run with its workload and label.

    Attributes:
        label: the server's name in reports, such as its policy; None for its address.
    """

    run: ServedRun
    workload: Workload
    label: str | None = None

    @property
    def title(self) -> str:
        """The heading above the numbers."""
        return self.run.target.url if self.label is None else self.label


def run_json(reported: Reported) -> dict[str, Any]:
    """The output of `--json`, with the fields of `sterna simulate --json` (docs/benchmarks.md)."""
    run, workload = reported.run, reported.workload
    summary = run.summary()
    classes = summarize_classes(run.records, run.cluster)
    return {
        "policy": reported.label,
        "server": {"url": run.target.url, "model": run.target.model},
        "trace": workload.trace,
        "arrivals": arrivals_of(workload),
        "rate": workload.rate,
        "seed": workload.seed,
        "instances": run.instances(),
        "max_total_tokens": workload.max_total_tokens,
        **as_json(summary),
        "failed": summary.num_requests - summary.num_completed,
        "errors": dict(run.errors()),
        "send_delay_s": None if (late := send_delay_s(run)) is None else asdict(late),
        "classes": {
            name: {**latencies_json(each), "failed": each.num_requests - each.num_completed}
            for name, each in classes.items()
        },
    }


def send_delay_s(run: ServedRun) -> Distribution | None:
    """The delay from the due time to the sending of each request that was sent. Later turns of a
    session are left out: they are due when the answer before them has come."""
    sent_s = np.array([each.sent_s for each in run.outcomes], np.float64)
    counts = np.isfinite(sent_s)
    if run.trace.turns is not None:
        counts &= run.trace.turns.is_first
    return Distribution.of((sent_s - run.trace.arrival_s)[counts])


def print_report(reported: Reported) -> None:
    """Print the workload, the table of the run, and the failures."""
    run, workload = reported.run, reported.workload
    console = report_console()
    rate = "" if workload.rate is None else f" at {workload.rate:g}/s"
    instances = run.instances()
    parts = (
        f"[bold]{escape(workload.trace)}[/bold]{rate}, {escape(arrivals_of(workload))}",
        counted(len(run.records), "request"),
        *([] if instances is None else [counted(instances, "instance")]),
        f"seed {workload.seed}",
    )
    console.print("; ".join(parts))
    print_run(console, reported.title, run.records, run.cluster)
    for error, times in run.errors().items():
        console.print(f"[bold]failed[/bold] {counted(times, 'request')}: {escape(error)}")
    late = send_delay_s(run)
    if late is not None and late.p99 > LATE_S:
        console.print(
            f"[bold]late[/bold]: requests were sent up to {number(late.max)} s after they were "
            "due; the times above include it, although this client caused it"
        )


def write_run(reported: Reported, path: Path) -> None:
    """Write the run with all its requests and samples, as one JSON document.

    Raises:
        OSError: the file cannot be written.
    """
    run = reported.run
    document = {
        "commit": results_io.measured_commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": results_io.hardware(),
        "summary": run_json(reported),
        "requests": _requests(run),
        "samples": msgspec.to_builtins(run.samples),
    }
    path.write_text(json.dumps(document, allow_nan=False) + "\n")


def _requests(run: ServedRun) -> list[dict[str, Any]]:
    records, outcomes = run.records, run.outcomes
    return [
        {
            "arrival_s": _known(records.arrival_s[index]),
            "input_tokens": int(records.input_tokens[index]),
            "output_tokens": int(records.output_tokens[index]),
            "priority": int(records.priority[index]),
            "sent_s": _known(each.sent_s),
            "first_token_s": _known(each.first_token_s),
            "last_token_s": _known(each.last_token_s),
            "largest_gap_s": _known(each.largest_gap_s),
            "error": each.error,
        }
        for index, each in enumerate(outcomes)
    ]


def _known(value: float) -> float | None:
    return None if isnan(value) else round(float(value), 6)


def draw_run(reported: Reported, path: Path) -> None:
    """Draw the run like a simulated one.

    Raises:
        OSError: the file cannot be written.
    """
    from sterna.cli.simulate.run_plot import Drawn, draw_runs

    run = reported.run
    draw_runs([Drawn(reported.title, run.records, run.cluster)], _plot_title(reported), path)


def draw_samples(reported: Reported, path: Path) -> None:
    """Draw the instances over time.

    Raises:
        ConfigurationError: the server does not report them.
        OSError: the file cannot be written.
    """
    from bench.serving.timeline import draw_timeline, timeline_of

    if not reported.run.samples:
        raise ConfigurationError(
            f"--timeline: {reported.run.target.url} does not report its instances, as Sterna does"
        )
    draw_timeline(timeline_of(reported.run.samples), _plot_title(reported), path)


def _plot_title(reported: Reported) -> str:
    workload = reported.workload
    rate = "" if workload.rate is None else f" at {workload.rate:g}/s"
    return (
        f"{workload.trace}{rate}, {arrivals_of(workload)}, {len(reported.run.records):,} requests "
        f"(measured; seed {workload.seed})"
    )


@contextlib.contextmanager
def progress(num_requests: int, what: str = "requests") -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr; yields a function that sets the number of ended requests."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
    from rich.progress import TimeElapsedColumn as Elapsed

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn())
    numbers = (MofNCompleteColumn(), Elapsed())
    with Progress(*columns, *numbers, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(what, total=num_requests)
        yield lambda num_ended: shown.update(task, completed=num_ended)
