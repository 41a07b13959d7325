"""The tables that `sterna simulate` prints for people."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sterna.cli.overrides import values
from sterna.cli.simulate import arrivals_of
from sterna.engine.emulated.profiles import PROFILES
from sterna.metrics.summary import Distribution, Summary, summarize_classes
from sterna.policy.presets import INFAAS_PP, LLUMNIX, LLUMNIX_BASE, PRESETS, ROUND_ROBIN, STERNA
from sterna.simulator.config import SimulationConfig
from sterna.simulator.runs import Run
from sterna.workload.catalog import PATTERNS, TRACES

PIPE_WIDTH = 160
"""Columns of a table that no terminal shows."""

ABSENT = "–"

DESCRIPTIONS = {
    LLUMNIX.name: "the paper's: freeness, migration, priorities (Section 4.4)",
    LLUMNIX_BASE.name: "the same, blind to priorities (Section 6.1)",
    INFAAS_PP.name: "dispatch by memory load, no migration (Section 6.1)",
    ROUND_ROBIN.name: "in turns, blind to load (Section 6.1)",
    STERNA.name: "Sterna's own",
}
"""Of policies, in a line; a policy without one is listed all the same."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A row of the comparison.

    Attributes:
        of: its value in a run; None where the run does not have it.
        is_compared: whether less of it is better, so that a ratio says something.
    """

    name: str
    of: Callable[[Summary], float | None]
    is_compared: bool = True


def _of(field: str, statistic: str, scale: float = 1.0) -> Callable[[Summary], float | None]:
    def value(summary: Summary) -> float | None:
        distribution: Distribution | None = getattr(summary, field)
        return None if distribution is None else scale * float(getattr(distribution, statistic))

    return value


def _scaled(field: str, scale: float = 1.0) -> Callable[[Summary], float | None]:
    def value(summary: Summary) -> float | None:
        found: float | None = getattr(summary, field)
        return None if found is None else scale * found

    return value


LATENCIES: Sequence[Metric] = (
    Metric("request mean, s", _of("request_s", "mean")),
    Metric("request P99, s", _of("request_s", "p99")),
    Metric("TTFT mean, s", _of("ttft_s", "mean")),
    Metric("TTFT P50, s", _of("ttft_s", "p50")),
    Metric("TTFT P99, s", _of("ttft_s", "p99")),
    Metric("TTFT max, s", _of("ttft_s", "max")),
    Metric("TPOT mean, ms", _of("tpot_s", "mean", 1e3)),
    Metric("TPOT P99, ms", _of("tpot_s", "p99", 1e3)),
    Metric("queue time mean, s", _of("queue_s", "mean")),
    Metric("preemption loss mean, s", _of("preemption_loss_s", "mean")),
    Metric("preempted, %", _scaled("preempted_fraction", 100.0)),
)
"""What concerns requests, of all or of one class."""

CLUSTER: Sequence[Metric] = (
    Metric("fragmentation mean, %", _scaled("fragmentation_mean", 100.0)),
    Metric("migrations", _scaled("migrations_committed"), False),
    Metric("time with migrations, %", _scaled("migrating_fraction", 100.0), False),
    Metric("instances", _scaled("instances_avg")),
    Metric("simulated, s", _scaled("simulated_s"), False),
    Metric("wall, s", _scaled("wall_s"), False),
)


def print_report(runs: Sequence[Run], *, baseline: str) -> None:
    """Print one run as a table of its distributions, several as a comparison.

    Args:
        baseline: the policy to which ratios are.
    """
    console = _console()
    console.print(_headline(runs))
    if len(runs) == 1:
        _print_run(console, runs[0])
    else:
        _print_comparison(console, runs, baseline)


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def _headline(runs: Sequence[Run]) -> str:
    """What all runs have in common; variants may differ in more than their names."""
    workload = runs[0].job.workload
    seeds = list(dict.fromkeys(run.job.workload.seed for run in runs))
    rate = "" if workload.rate is None else f" at {workload.rate:g}/s"
    parts = [
        {f"[bold]{escape(workload.trace)}[/bold]{rate}, {escape(arrivals_of(workload))}"},
        {_counted(len(run.records), "request") for run in runs},
        {_counted(run.job.config.num_instances, "instance") for run in runs},
        {f"{run.job.config.report.value} reports" for run in runs},
        {f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"},
    ]
    return "; ".join(part for words in parts if len(words) == 1 for part in words)


# --------------------------------------------------------------------------------- a single run


def _print_run(console: Console, run: Run) -> None:
    summary = run.summary()
    table = Table(title=escape(run.job.policy), title_justify="left")
    table.add_column("")
    for column in ("mean", "P50", "P90", "P99", "P99.9", "max"):
        table.add_column(column, justify="right")
    _add_distributions(table, summary)
    for name, each in summarize_classes(run.records, run.cluster).items():
        table.add_section()
        table.add_row(f"[bold]{escape(name)}[/bold] ({_counted(each.num_requests, 'request')})")
        _add_distributions(table, each)
    console.print(table)
    console.print(_facts(summary))


def _add_distributions(table: Table, summary: Summary) -> None:
    rows: Sequence[tuple[str, Distribution | None, float]] = (
        ("request, s", summary.request_s, 1.0),
        ("TTFT, s", summary.ttft_s, 1.0),
        ("TPOT, ms", summary.tpot_s, 1e3),
        ("queue time, s", summary.queue_s, 1.0),
        ("preemption loss, s", summary.preemption_loss_s, 1.0),
    )
    for name, each, scale in rows:
        if each is None:
            table.add_row(name, *[ABSENT] * 6)
            continue
        values = (each.mean, each.p50, each.p90, each.p99, each.p999, each.max)
        table.add_row(name, *(number(scale * value) for value in values))


def _facts(summary: Summary) -> str:
    """What has no distribution, in lines."""
    downtime = summary.downtime_s
    migrations = (
        f"migrations: {summary.migrations_committed:,} committed, "
        f"{summary.migrations_aborted:,} aborted"
    )
    if downtime is not None:
        migrations += (
            f"; downtime {number(1e3 * downtime.p50)} ms (P50), "
            f"{number(1e3 * downtime.p99)} ms (P99); "
            f"{_percent(summary.migrating_fraction)} of the instances' time"
        )
    return "\n".join(
        (
            f"completed {summary.num_completed:,} of {_counted(summary.num_requests, 'request')}; "
            f"{_percent(summary.preempted_fraction)} preempted at least once",
            migrations,
            f"fragmentation {_percent(summary.fragmentation_mean)}; "
            f"instances {number(summary.instances_avg)} on average",
            f"simulated {number(summary.simulated_s)} s and {summary.num_steps:,} steps "
            f"in {summary.wall_s:.2f} s",
        )
    )


# --------------------------------------------------------------------------------- comparisons


def _print_comparison(console: Console, runs: Sequence[Run], baseline: str) -> None:
    policies = list(dict.fromkeys(run.job.policy for run in runs))
    summaries = {
        policy: [run.summary() for run in runs if run.job.policy == policy] for policy in policies
    }
    num_seeds = len(runs) // len(policies)
    table = Table()
    table.add_column("")
    for policy in policies:
        table.add_column(escape(policy), justify="right", overflow="fold")
    _add_metrics(table, LATENCIES, summaries, baseline)
    for name in summarize_classes(runs[0].records, runs[0].cluster):
        of_class = {
            policy: [
                summarize_classes(run.records, run.cluster)[name]
                for run in runs
                if run.job.policy == policy
            ]
            for policy in policies
        }
        table.add_section()
        table.add_row(f"[bold]{escape(name)}[/bold]")
        _add_metrics(table, LATENCIES, of_class, baseline)
    table.add_section()
    _add_metrics(table, CLUSTER, summaries, baseline)
    console.print(table)
    console.print(_caption(policies, num_seeds, baseline))


def _caption(policies: Sequence[str], num_seeds: int, baseline: str) -> str:
    words = []
    if num_seeds > 1:
        words.append(f"Means over {num_seeds} seeds, smallest and largest below.")
    if len(policies) > 1:
        words.append(f"x: times {escape(baseline)}'s.")
    return " ".join(words)


def _add_metrics(
    table: Table,
    metrics: Sequence[Metric],
    summaries: Mapping[str, Sequence[Summary]],
    baseline: str,
) -> None:
    for metric in metrics:
        found = {policy: [metric.of(each) for each in those] for policy, those in summaries.items()}
        compares = metric.is_compared
        table.add_row(
            metric.name,
            *(
                cell(values, found[baseline] if compares and policy != baseline else None)
                for policy, values in found.items()
            ),
        )


def cell(values: Sequence[float | None], baseline: Sequence[float | None] | None) -> str:
    """Mean over the seeds, its ratio to the baseline's mean, and the range.

    Args:
        baseline: the same metric of the policy compared with, None for no comparison.
    """
    mean = _mean(values)
    if mean is None:
        return ABSENT
    known = [value for value in values if value is not None]
    reference = None if baseline is None else _mean(baseline)
    text = number(mean)
    if reference:
        text += f" [bold]{number(mean / reference)}x[/bold]"
    if min(known) < max(known):
        text += f"\n[dim]{number(min(known))} to {number(max(known))}[/dim]"
    return text


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def number(value: float) -> str:
    """Three digits, or all that stand before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _percent(fraction: float | None) -> str:
    return ABSENT if fraction is None else f"{number(100.0 * fraction)} %"


# ------------------------------------------------------------------------------------- choices


def print_choices(config: SimulationConfig, policy: str) -> None:
    """What options can name: traces, profiles, policies, and settings with their values.

    Args:
        config: whose settings are listed.
        policy: what the configuration's policy was called.
    """
    console = _console()
    _print_names(console, "traces (--trace)", {**TRACES, **PATTERNS})
    _print_names(
        console, "profiles (--profile)", {name: each.description for name, each in PROFILES.items()}
    )
    policies = {name: DESCRIPTIONS.get(name, "") for name in PRESETS}
    _print_names(console, "policies (--policy)", policies)
    _print_names(console, f"settings (--set), and their values in {policy}", values(config))


def _print_names(console: Console, title: str, names: Mapping[str, str]) -> None:
    table = Table(title=escape(title), title_justify="left", show_header=False, box=None)
    for name, text in names.items():
        table.add_row(escape(name), escape(text))
    console.print(table)
    console.print()
