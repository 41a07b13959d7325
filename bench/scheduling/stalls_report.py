"""The results of `sterna bench stalls`: two tables, a summary and goals. Pure, from rows alone."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bench.common.comparison import INTERVALS, Middle
from bench.common.pages import Goal, goal_list
from bench.common.tables import Row, markdown_table, number, rounded

WALL_CLOCK, SIMULATED = "wall clock", "simulated"
"""The kinds of rows."""

MOST_STALL_MS = 1.0


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The stall of a step on the wall clock, medians over the rounds, by number of instances."""
    found = {
        each: rounded(Middle.of(_stalls_ms(rows, each)).median)
        for each in _numbers(rows, WALL_CLOCK)
    }
    return {"stall_ms": found, "goals": [asdict(each) for each in goals(rows)]}


def markdown(rows: Sequence[Row]) -> str:
    """The tables and the goals."""
    parts = []
    if numbers := _numbers(rows, WALL_CLOCK):
        num_rounds = len({row["seed"] for row in _of(rows, WALL_CLOCK)})
        lines = []
        for each in numbers:
            those = _of(rows, WALL_CLOCK, each)
            lines.append(
                [
                    f"{each:,}",
                    f"{those[0]['rate']:g}",
                    *(number(_median(those, name)) for name in ("step_mean_ms", "tpot_mean_ms")),
                    Middle.of(_stalls_ms(rows, each)).text(3),
                    f"{sum(row['failed'] for row in those)}",
                ]
            )
        parts += [
            f"On the wall clock, medians over {num_rounds} rounds, with {INTERVALS}:",
            markdown_table(
                (
                    "instances", "requests/s for each", "a step [ms]", "TPOT mean [ms]",
                    "stall a step [ms]", "failed",
                ),
                lines,
            ),
        ]  # fmt: skip
    if simulated := _of(rows, SIMULATED):
        names = ("step_mean_ms", "stall_mean_ms", "own_stall_mean_ms", "dispatch_p99_ms")
        lines = [
            [
                f"{row['instances']:,}",
                f"{row['rate']:g}",
                *(number(row[name]) for name in names),
            ]
            for row in simulated
        ]
        parts += [
            "Simulated with measured costs:",
            markdown_table(
                (
                    "instances", "requests/s for each", "a step [ms]", "stall a step [ms]",
                    "of it Sterna's [ms]", "queue for a decision, P99 [ms]",
                ),
                lines,
            ),
        ]  # fmt: skip
    return "\n\n".join([*parts, goal_list([asdict(each) for each in goals(rows)])])


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Goals for each number of instances, simulated ones at the highest rate."""
    found: dict[str, Middle] = {}
    for each in _numbers(rows, WALL_CLOCK):
        name = "1 instance" if each == 1 else f"{each:,} instances"
        found[f"{name} on the wall clock"] = Middle.of(_stalls_ms(rows, each))
    for each in _numbers(rows, SIMULATED):
        # Each is one simulation.
        worst_ms = max(row["stall_mean_ms"] for row in _of(rows, SIMULATED, each))
        found[f"{each:,} simulated instances"] = Middle.of([worst_ms])
    return [
        Goal(
            f"a step's stall, {name}",
            f"below {MOST_STALL_MS:g} ms",
            f"{stall_ms.text(3)} ms",
            stall_ms.at_most(MOST_STALL_MS),
        )
        for name, stall_ms in found.items()
    ]


def _of(rows: Sequence[Row], kind: str, instances: int | None = None) -> list[Row]:
    return [row for row in rows if row["kind"] == kind and instances in (None, row["instances"])]


def _numbers(rows: Sequence[Row], kind: str) -> list[int]:
    return sorted({row["instances"] for row in _of(rows, kind)})


def _stalls_ms(rows: Sequence[Row], instances: int) -> list[float]:
    return [row["stall_mean_ms"] for row in _of(rows, WALL_CLOCK, instances)]


def _median(rows: Sequence[Row], name: str) -> float:
    return Middle.of([row[name] for row in rows]).median
