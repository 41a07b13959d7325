"""The table of one run, simulated or real, for people."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sterna.metrics.records import ClusterRecord, Records
from sterna.metrics.summary import Distribution, Summary, summarize, summarize_classes

PIPE_WIDTH = 160
"""Columns of a table that is not printed on a terminal."""

ABSENT = "–"


def report_console() -> Console:
    """Standard output, with the width of its terminal, or of a table."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def print_run(console: Console, title: str, records: Records, cluster: ClusterRecord) -> None:
    """Print the distributions of all requests and of each class, and what has none, in lines."""
    summary = summarize(records, cluster)
    table = Table(title=escape(title), title_justify="left")
    table.add_column("")
    for column in ("mean", "P50", "P90", "P99", "P99.9", "max"):
        table.add_column(column, justify="right")
    _add_distributions(table, summary)
    for name, each in summarize_classes(records, cluster).items():
        table.add_section()
        table.add_row(f"[bold]{escape(name)}[/bold] ({counted(each.num_requests, 'request')})")
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
        *([("largest gap, s", gap_s, 1.0)] if (gap_s := summary.largest_gap_s) else []),
    )
    for name, each, scale in rows:
        if each is None:
            table.add_row(name, *[ABSENT] * 6)
            continue
        values = (each.mean, each.p50, each.p90, each.p99, each.p999, each.max)
        table.add_row(name, *(number(scale * value) for value in values))


def _facts(summary: Summary) -> str:
    """Lines for the quantities without a distribution."""
    return "\n".join(
        (
            f"completed {summary.num_completed:,} of {counted(summary.num_requests, 'request')}; "
            + _preemptions(summary)
            + _prefix_reuse(summary),
            _migrations(summary),
            f"fragmentation {percent(summary.fragmentation_mean)}; "
            f"instances {_known(summary.instances_avg)} on average",
            _duration(summary),
        )
    )


def _preemptions(summary: Summary) -> str:
    if summary.preempted_fraction is not None:
        return f"{percent(summary.preempted_fraction)} preempted at least once"
    return f"preemptions: {_known(summary.num_preemptions)}"


def _prefix_reuse(summary: Summary) -> str:
    reuse = summary.prefix_reuse
    return "" if reuse is None else f"; {percent(reuse)} of what prompts share was cached"


def _migrations(summary: Summary) -> str:
    committed, aborted = summary.migrations_committed, summary.migrations_aborted
    words = f"migrations: {_known(committed)} committed, {_known(aborted)} aborted"
    downtime = summary.downtime_s
    if downtime is not None:
        words += (
            f"; downtime {number(1e3 * downtime.p50)} ms (P50), "
            f"{number(1e3 * downtime.p99)} ms (P99)"
        )
    if committed:
        words += f"; {percent(summary.migrating_fraction)} of the instances' time"
    return words


def _duration(summary: Summary) -> str:
    """Steps are counted in simulations only."""
    if summary.num_steps is None:
        return f"the last request ended after {number(summary.simulated_s)} s"
    return (
        f"simulated {number(summary.simulated_s)} s and {summary.num_steps:,} steps "
        f"in {summary.wall_s:.2f} s"
    )


def _known(value: float | None) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return ABSENT if value is None else number(value)


def number(value: float) -> str:
    """Three digits, or all digits before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def counted(count: int, noun: str) -> str:
    """The number and the noun, in the plural where needed."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def percent(fraction: float | None) -> str:
    """The fraction in percent, or a dash for an unknown one."""
    return ABSENT if fraction is None else f"{number(100.0 * fraction)} %"
