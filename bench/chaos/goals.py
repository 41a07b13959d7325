"""Goals for the lengths of gaps and waits under faults. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.chaos.faults import DEADLY
from bench.chaos.report import MOVED
from bench.common.pages import Goal

MAX_RECOVERY_S = 3.0
MAX_NOTICED_S = 1.0
MAX_MOVE_STEPS = 2.0
MAX_LONGER_WAIT_S = 1.0

Row = Mapping[str, Any]


def goals_of(rows: Sequence[Row], summary: Mapping[str, Any]) -> list[Goal]:
    """Returns the goals that can be judged by the rows."""
    return [*_recovery(rows), *_noticed(rows), *_moves(rows, summary), *_waits(rows, summary)]


def _recovery(rows: Sequence[Row]) -> Iterator[Goal]:
    found = [row["gap_s"]["p99"] for row in rows if row["event"] in DEADLY and row["n"]]
    if found:
        yield Goal(
            "P99 of the longest gap when an instance is killed or stopped",
            f"below {MAX_RECOVERY_S:g} s",
            f"{max(found):.2f} s",
            max(found) < MAX_RECOVERY_S,
        )


def _noticed(rows: Sequence[Row]) -> Iterator[Goal]:
    found = [row["noticed_s"]["max"] for row in rows if row["noticed_s"] is not None]
    if found:
        yield Goal(
            "that is noticed",
            f"within {MAX_NOTICED_S:g} s",
            f"after {max(found):.2f} s at most",
            max(found) < MAX_NOTICED_S,
        )


def _moves(rows: Sequence[Row], summary: Mapping[str, Any]) -> Iterator[Goal]:
    step_s = summary["gap_s"]["steps"]
    for row in rows:
        if row["event"] == MOVED and row["n"]:
            steps = row["gap_s"]["median"] / step_s["median"]
            yield Goal(
                "median of the longest gap when a request is moved on purpose",
                f"below {MAX_MOVE_STEPS:g} median steps",
                f"{steps:.2f}",
                steps < MAX_MOVE_STEPS,
            )


def _waits(rows: Sequence[Row], summary: Mapping[str, Any]) -> Iterator[Goal]:
    found = [
        row["wait_s"]["max"]
        for row in rows
        if row["event"].endswith("-scheduler") and row["wait_s"] is not None
    ]
    if found:
        longer_s = max(found) - summary["wait_s"]["median"]
        yield Goal(
            "longest wait for a first token when the scheduler fails, over the median of all waits",
            f"at most {MAX_LONGER_WAIT_S:g} s",
            f"{longer_s:.2f} s",
            longer_s <= MAX_LONGER_WAIT_S,
        )
