"""The fidelity benchmark's summary and tables, from its rows alone."""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

Row = Mapping[str, Any]

REAL_TRACES = ("ShareGPT", "BurstGPT")

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
"""Of the generated traces: the largest median of |log(ours / paper)|."""

TITLES = {
    "request_mean_s": "request mean",
    "request_p99_s": "request P99",
    "prefill_mean_s": "prefill mean",
    "prefill_p99_s": "prefill P99",
    "decode_mean_s": "decode mean",
    "decode_p99_s": "decode P99",
    "preemption_loss_s": "preemption loss",
}

LEAST_LOSS_S = 0.05
"""Mean losses below it come from a handful of requests; no ratio of them says anything."""


def summaries(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One entry a policy, kind of trace and column, in the order of the rows.

    Each has `n`, the median of |log(ours / paper)|, the median of the log itself (positive: ours
    is larger), and for the generated traces the goal, where there is one.
    """
    found: list[dict[str, Any]] = []
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    for policy in policies:
        for kind in ("generated", "real"):
            those = [row for row in rows if row["policy"] == policy and _kind(row) == kind]
            found += [
                _summary(policy, kind, column, logs)
                for column in TITLES
                if (logs := _logs(those, column))
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
    return "real" if row["trace"] in REAL_TRACES else "generated"


def _logs(rows: Sequence[Row], column: str) -> list[float]:
    cells = [row[column] for row in rows]
    if column == "preemption_loss_s":
        cells = [each for each in cells if each["paper"] >= LEAST_LOSS_S and each["ours"] > 0]
    return [math.log(each["ours"] / each["paper"]) for each in cells]


def _summary(policy: str, kind: str, column: str, logs: Sequence[float]) -> dict[str, Any]:
    error = round(median(map(abs, logs)), 4)
    entry: dict[str, Any] = {
        "policy": policy,
        "traces": kind,
        "column": column,
        "n": len(logs),
        "median_abs_log": error,
        "median_log": round(median(logs), 4),
    }
    goal = GOALS.get(policy, {}).get(column) if kind == "generated" else None
    if goal is not None:
        entry |= {"goal": goal, "is_reached": error <= goal}
    return entry


def _summary_table(summary: Sequence[Row]) -> str:
    lines = dict.fromkeys((each["policy"], each["traces"]) for each in summary)
    cells = {(each["policy"], each["traces"], each["column"]): each for each in summary}
    table = [
        "| policy | traces | " + " | ".join(TITLES.values()) + " |",
        "|---|---|" + "---:|" * len(TITLES),
    ]
    for policy, kind in lines:
        errors = []
        for column in TITLES:
            cell = cells.get((policy, kind, column))
            text = f"{cell['median_abs_log']:.3f} ({cell['median_log']:+.3f})" if cell else ""
            errors.append(text)
        table.append(f"| {policy} | {kind} | " + " | ".join(errors) + " |")
    return "\n".join(table)


def _goal_lines(summary: Sequence[Row]) -> list[str]:
    with_goal = [each for each in summary if "goal" in each]
    if not with_goal:
        return []
    missed = [
        f"{each['policy']} {TITLES[each['column']]} ({each['median_abs_log']:.3f}, "
        f"goal {each['goal']})"
        for each in with_goal
        if not each["is_reached"]
    ]
    num_reached = len(with_goal) - len(missed)
    line = f"{num_reached} of the {len(with_goal)} goals for the generated traces are reached"
    return [f"{line}; missed: {', '.join(missed)}." if missed else f"{line}."]


def _points_table(rows: Sequence[Row]) -> str:
    table = [
        "| trace | rate | policy | " + " | ".join(TITLES.values()) + " |",
        "|---|---:|---|" + "---:|" * len(TITLES),
    ]
    for row in rows:
        cells = [f"{row[column]['ours']:.3g} / {row[column]['paper']:.3g}" for column in TITLES]
        table.append(
            f"| {row['trace']} | {row['rate']:g} | {row['policy']} | " + " | ".join(cells) + " |"
        )
    return "\n".join(table)
