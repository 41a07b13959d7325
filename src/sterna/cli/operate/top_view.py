"""Tables of the operators' commands as text, and those of `sterna top`.

They are made of what the admin API answers (docs/operations/run.md).
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sterna.dashboard.cluster_frames import percentiles
from sterna.dashboard.decisions import line_of

Described = dict[str, Any]

MEMORY_CELLS = 20
"""Width of the bar of an instance's memory."""


@dataclass(frozen=True, slots=True)
class Table:
    """Column titles and rows of text; the first column names the row."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the server answered at one moment.

    Attributes:
        recent: see `/admin/recent`.
        errors: of the questions that it did not answer.
    """

    instances: Sequence[Described]
    requests: Sequence[Described]
    recent: Described
    errors: Sequence[str] = ()


def headline(snapshot: Snapshot) -> str:
    """The cluster in one line."""
    instances = snapshot.instances
    total_tokens = sum(each["total_tokens"] for each in instances)
    used_tokens = sum(each["used_tokens"] for each in instances)
    memory = f"{100 * used_tokens / total_tokens:.0f} %" if total_tokens else "-"
    parts = [
        f"{len(instances)} instances",
        f"{sum(each['running'] for each in instances)} running",
        f"{sum(each['queuing'] for each in instances)} queuing",
        f"{snapshot.recent['waiting']} held",
        f"memory {memory}",
        f"TTFT {_latencies(snapshot.recent['ttft_s'])}",
        f"TPOT {_latencies(snapshot.recent['tpot_s'])}",
        *snapshot.errors,
    ]
    return " | ".join(parts)


def instances_table(instances: Iterable[Described]) -> Table:
    """One row for each instance."""
    columns = ("id", "state", "memory", "used", "running", "queuing", "moving", "freeness", "note")
    rows = [
        (
            each["id"],
            each["state"],
            _bar(each["used_tokens"], each["total_tokens"]),
            f"{each['used_tokens']:,}",
            str(each["running"]),
            str(each["queuing"]),
            str(each["migrating"]),
            "-" if each["freeness"] is None else f"{each['freeness']:.0f}",
            each["note"] or "",
        )
        for each in instances
    ]
    return Table(columns, tuple(rows))


def requests_table(requests: Iterable[Described]) -> Table:
    """One row for each live request, the largest first."""
    columns = ("id", "instance", "status", "class", "tokens", "output", "memory", "stays because")
    ordered = sorted(requests, key=lambda each: (-each["num_tokens"], each["id"]))
    rows = [
        (
            each["id"],
            each["instance"] or "-",
            each["status"],
            each["class"],
            f"{each['num_tokens']:,}",
            f"{each['num_output_tokens']:,}",
            f"{each['used_tokens']:,}",
            each["immovable"] or "",
        )
        for each in ordered
    ]
    return Table(columns, tuple(rows))


def decisions_table(decisions: Iterable[Described]) -> Table:
    """One row for each decision, the newest first."""
    rows = [
        (
            time.strftime("%H:%M:%S", time.localtime(each["time_s"])),
            each["request"],
            line_of(each),
        )
        for each in reversed(list(decisions))
    ]
    return Table(("time", "request", "decision"), tuple(rows))


def plain(snapshot: Snapshot, max_rows: int) -> str:
    """All of it as text, with at most this number of rows in each table."""
    tables = (
        instances_table(snapshot.instances),
        requests_table(snapshot.requests),
        decisions_table(snapshot.recent["decisions"]),
    )
    return "\n\n".join([headline(snapshot), *(text_of(each, max_rows) for each in tables)])


def text_of(table: Table, max_rows: int | None = None) -> str:
    """The table as lines of text, with at most this number of rows."""
    shown = [table.columns, *table.rows[:max_rows]]
    widths = [max(len(row[column]) for row in shown) for column in range(len(table.columns))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in shown
    ]
    if max_rows is not None and len(table.rows) > max_rows:
        lines.append(f"({len(table.rows) - max_rows} more)")
    return "\n".join(lines)


def _latencies(values_s: Sequence[float]) -> str:
    if (found := percentiles(values_s)) is None:
        return "-"
    median_s, p99_s = found
    return f"{1e3 * median_s:.0f} ms, P99 {1e3 * p99_s:.0f} ms"


def _bar(used_tokens: int, total_tokens: int) -> str:
    if not total_tokens:
        return "-"
    share = used_tokens / total_tokens
    num_full = min(MEMORY_CELLS, round(share * MEMORY_CELLS))
    return f"{'█' * num_full}{'░' * (MEMORY_CELLS - num_full)} {100 * share:3.0f} %"
