"""The fidelity benchmark's summary and tables, from its rows alone."""

from collections.abc import Mapping, Sequence
from typing import Any

from bench.common.tables import markdown_table, rounded
from bench.paper.figures.figure11 import METRICS, REAL
from bench.paper.points import Distance, distance
from bench.paper.tables import short_name

Row = Mapping[str, Any]

GOALS: Mapping[str, Mapping[str, float]] = {
    "llumnix": {
        "request_mean_s": 0.04,
        "request_p99_s": 0.04,
        "decode_mean_s": 0.05,
        "prefill_mean_s": 0.12,
        "prefill_p99_s": 0.25,
    },
    "infaas++": {
        "request_mean_s": 0.06,
        "request_p99_s": 0.07,
        "decode_mean_s": 0.07,
        "prefill_mean_s": 0.4,
        "prefill_p99_s": 0.5,
    },
}
"""Goals of the generated traces: the largest median of |log(ours / paper)|."""


def summaries(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One entry for each policy, kind of trace and column, in the order of the rows.

    Each has `n`, the median of |log(ours / paper)|, the median of the log itself (positive: ours
    is larger), and for the generated traces the goal, where there is one.
    """
    found: list[dict[str, Any]] = []
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    for policy in policies:
        for kind in ("generated", "real"):
            those = [row for row in rows if row["policy"] == policy and _kind(row) == kind]
            found += [
                _summary(policy, kind, column, far)
                for column in METRICS
                if (far := _distance(those, column)) is not None
            ]
    return found


def markdown(rows: Sequence[Row], summary: Sequence[Row]) -> str:
    """The summary, then every point."""
    return "\n\n".join(
        [
            "Median of |log(ours / paper)| over the points, in brackets the median of the log "
            "itself (positive: ours is larger):",
            _summary_table(summary),
            *_goal_lines(summary),
            "Every point, as ours / paper:",
            _points_table(rows),
        ]
    )


def _kind(row: Row) -> str:
    return "real" if row["trace"] in REAL else "generated"


def _distance(rows: Sequence[Row], column: str) -> Distance | None:
    return distance(column, [(row[column]["ours"], row[column]["paper"]) for row in rows])


def _summary(policy: str, kind: str, column: str, far: Distance) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "policy": policy,
        "traces": kind,
        "column": column,
        "n": far.num_points,
        "median_abs_log": rounded(far.error),
        "median_log": rounded(far.bias),
    }
    goal = GOALS.get(policy, {}).get(column) if kind == "generated" else None
    if goal is not None:
        entry |= {"goal": goal, "is_reached": far.error <= goal}
    return entry


def _summary_table(summary: Sequence[Row]) -> str:
    lines = dict.fromkeys((each["policy"], each["traces"]) for each in summary)
    cells = {(each["policy"], each["traces"], each["column"]): each for each in summary}
    return markdown_table(
        ["policy", "traces", *map(short_name, METRICS)],
        [
            [policy, kind, *(_summary_cell(cells.get((policy, kind, each))) for each in METRICS)]
            for policy, kind in lines
        ],
        2,
    )


def _summary_cell(entry: Row | None) -> str:
    if entry is None:
        return ""
    return str(Distance(entry["n"], entry["median_abs_log"], entry["median_log"]))


def _goal_lines(summary: Sequence[Row]) -> list[str]:
    with_goal = [each for each in summary if "goal" in each]
    if not with_goal:
        return []
    missed = [
        f"{each['policy']} {short_name(each['column'])} ({each['median_abs_log']:.3f}, "
        f"goal {each['goal']})"
        for each in with_goal
        if not each["is_reached"]
    ]
    num_reached = len(with_goal) - len(missed)
    line = f"{num_reached} of the {len(with_goal)} goals for the generated traces are reached"
    return [f"{line}; missed: {', '.join(missed)}." if missed else f"{line}."]


def _points_table(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        cells = [f"{row[column]['ours']:.3g} / {row[column]['paper']:.3g}" for column in METRICS]
        lines.append([row["trace"], f"{row['rate']:g}", row["policy"], *cells])
    return markdown_table(["trace", "rate", "policy", *map(short_name, METRICS)], lines, 3)
