"""Figure 10: downtime and overhead of migration (Section 6.2), from bench/results/migration.json.

These are real measurements (`sterna bench migration`), of another model on other hardware than the
paper's: comparable are downtimes in decode steps, and their growth with the length.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.common.results_io import RESULTS
from bench.common.tables import Row, markdown_table, number
from bench.paper.cells import Options
from bench.paper.claims import Claim, Kind, claim
from bench.paper.drawing import figure
from bench.paper.experiment import Experiment
from bench.paper.points import matching, paper_points
from sterna.errors import ConfigurationError

MODEL = "llama-7b"
TRANSPORTS = ("shm", "tcp", "gloo")
"""Order of the transports: the first measured one is shown and judged, Sterna's default first."""


def rows(options: Options) -> list[Row]:
    """The measurements with both instances busy, else with idle ones.

    Raises:
        ConfigurationError: nothing was measured.
    """
    path = RESULTS / "migration.json"
    if not path.exists():
        raise ConfigurationError(
            "bench/results/migration.json is not there: run `sterna bench migration`, or name the "
            "figures to reproduce without figure10"
        )
    measured: list[Row] = json.loads(path.read_text())["rows"]
    is_busy = any(row["busy"] and row["mode"] == "live" for row in measured)
    return [
        {
            "mode": row["mode"],
            "transport": row["transport"],
            "sequence_length": row["tokens"],
            "busy": row["busy"],
            "n": row["n"],
            "downtime_ms": row["downtime_ms"]["median"],
            "decode_step_ms": row["decode_step_ms"]["median"],
            # None where the source had no other request, and this one made no step.
            "decode_step_migrating_ms": (row["decode_step_migrating_ms"] or {}).get("median"),
            "stages": row.get("stages"),
        }
        for row in measured
        if row["busy"] == is_busy or (row["mode"] == "recompute" and not _has_busy(measured))
    ]


def _has_busy(measured: Sequence[Row]) -> bool:
    return any(row["busy"] and row["mode"] == "recompute" for row in measured)


def transport_of(rows: Sequence[Row]) -> str:
    """The transport that is shown."""
    found = {row["transport"] for row in rows}
    return next(each for each in TRANSPORTS if each in found)


def shown(rows: Sequence[Row], mode: str) -> list[Row]:
    """The rows of the mode, by length."""
    transport = None if mode == "recompute" else transport_of(rows)
    return sorted(
        matching(list(rows), mode=mode, transport=transport), key=lambda row: row["sequence_length"]
    )


def growth(rows: Sequence[Row]) -> float:
    """The longest downtime over the shortest, over the lengths."""
    downtimes = [row["downtime_ms"] for row in shown(rows, "live")]
    return float(max(downtimes) / min(downtimes))


def downtime_in_steps(rows: Sequence[Row]) -> float:
    """The longest downtime in decode steps of the same row."""
    steps = (row["downtime_ms"] / row["decode_step_ms"] for row in shown(rows, "live"))
    return float(max(steps))


def most_over_live(rows: Sequence[Row]) -> float:
    """The longest downtime of a baseline over that of migration at the same length."""
    live = {row["sequence_length"]: row["downtime_ms"] for row in shown(rows, "live")}
    ratios = (
        row["downtime_ms"] / live[row["sequence_length"]]
        for mode in ("stop_copy", "recompute")
        for row in shown(rows, mode)
        if row["sequence_length"] in live
    )
    return float(max(ratios))


def recompute_in_steps(rows: Sequence[Row]) -> float:
    """Recomputing the longest sequence, in decode steps."""
    row = shown(rows, "recompute")[-1]
    return float(row["downtime_ms"] / row["decode_step_ms"])


def slowdown(rows: Sequence[Row]) -> float:
    """The largest growth of the others' decode steps during a migration."""
    those = shown(rows, "live")
    return float(max(row["decode_step_migrating_ms"] / row["decode_step_ms"] for row in those) - 1)


def most_stages(rows: Sequence[Row]) -> float:
    """The largest number of stages."""
    return float(max(row["stages"] for row in shown(rows, "live")))


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Section 6.2's sentences."""
    paper = matching(paper_points("figure10"), model=MODEL)
    downtimes = [row["migration_downtime_ms"] for row in paper]

    def one(
        text: str,
        kind: Kind,
        number: float,
        compute: Callable[[Sequence[Row]], float],
        unit: str = "",
        note: str = "",
        is_judged: bool = True,
    ) -> Claim:
        return claim(
            text, "6.2", kind, number, rows, compute, unit=unit, note=note, is_judged=is_judged
        )

    own = "the paper's number is that of its LLaMA-7B points"
    prefill = "a CPU's prefill is far slower against its decode than a GPU's"
    return [
        one(
            "downtime: the longest over the shortest, over the lengths",
            Kind.AT_MOST,
            max(downtimes) / min(downtimes),
            growth,
            "×",
            own,
        ),
        one("downtime in decode steps, at most", Kind.AT_MOST, 1.0, downtime_in_steps, "steps"),
        one(
            "longest downtime of a baseline over that of migration",
            Kind.FACTOR,
            111,
            most_over_live,
            note=prefill,
            is_judged=False,
        ),
        one(
            "recomputing 8k tokens, in decode steps",
            Kind.FACTOR,
            54,
            recompute_in_steps,
            note=f"the paper's of LLaMA-30B; {prefill}",
            is_judged=False,
        ),
        one("stages", Kind.AT_MOST, 2, most_stages),
        one("decode steps longer during a migration by at most", Kind.AT_MOST, 0.01, slowdown, "%"),
    ]


def tables(rows: Sequence[Row]) -> str:
    """Downtimes by length, ours and the paper's, in ms and in decode steps."""
    paper = {row["sequence_length"]: row for row in matching(paper_points("figure10"), model=MODEL)}
    by_mode = {
        mode: {row["sequence_length"]: row for row in shown(rows, mode)}
        for mode in ("live", "stop_copy", "recompute")
    }
    columns = {
        "live": "migration_downtime_ms",
        "stop_copy": "blocking_copy_ms",
        "recompute": "recompute_ms",
    }
    lines = []
    for length in sorted(by_mode["live"]):
        cells = [f"{length:,}"]
        for mode, column in columns.items():
            ours, theirs = by_mode[mode].get(length), paper.get(length)
            cells.append("" if ours is None else _in_ms_and_steps(ours, theirs, column))
        lines.append(cells)
    header = ["tokens", "migration", "blocking copy", "recompute"]
    state = "busy" if any(row["busy"] for row in shown(rows, "live")) else "otherwise idle"
    return (
        f"Downtime in ms, and in brackets in decode steps; ours (transport "
        f"{transport_of(rows)}, {state} instances) / the paper's (LLaMA-7B on A10, Gloo, busy):"
        "\n\n" + markdown_table(header, lines)
    )


def _in_ms_and_steps(ours: Row, theirs: Row | None, column: str) -> str:
    steps = ours["downtime_ms"] / ours["decode_step_ms"]
    text = f"{number(ours['downtime_ms'])} ({number(steps)})"
    if theirs is None:
        return text
    steps = theirs[column] / theirs["decode_step_normal_ms"]
    return f"{text} / {number(theirs[column])} ({number(steps)})"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Downtimes by length on the left, decode steps with and without a migration on the right."""
    paper = matching(paper_points("figure10"), model=MODEL)
    styles = {
        "live": ("tab:blue", "migration", "migration_downtime_ms"),
        "stop_copy": ("tab:orange", "blocking copy", "blocking_copy_ms"),
        "recompute": ("tab:green", "recompute", "recompute_ms"),
    }
    with figure(path, 1, 2, (5.0, 3.4)) as axes:
        left, right = axes[0]
        for mode, (color, name, column) in styles.items():
            _pair(left, shown(rows, mode), "downtime_ms", paper, column, color, name)
        left.set_yscale("log")
        left.set_ylabel("downtime [ms]")
        for column, theirs, color, name in (
            ("decode_step_ms", "decode_step_normal_ms", "tab:gray", "without"),
            ("decode_step_migrating_ms", "decode_step_migrating_ms", "tab:blue", "during"),
        ):
            _pair(right, shown(rows, "live"), column, paper, theirs, color, name)
        right.set_ylim(bottom=0)
        right.set_ylabel("decode step [ms]")
        for axis in (left, right):
            axis.set_xscale("log", base=2)
            axis.set_xlabel("tokens of the migrated request")
            axis.legend(fontsize=6)


def _pair(
    axis: Any,
    ours: Sequence[Row],
    our_column: str,
    paper: Sequence[Row],
    paper_column: str,
    color: str,
    name: str,
) -> None:
    """One quantity by length: ours, and the paper's dotted beside it."""
    ours_style = {"marker": "o"}
    paper_style = {"marker": "s", "markerfacecolor": "none", "linestyle": ":"}
    for rows, column, whose, style in (
        (ours, our_column, "ours", ours_style),
        (paper, paper_column, "paper", paper_style),
    ):
        axis.plot(
            [row["sequence_length"] for row in rows],
            [row[column] for row in rows],
            color=color,
            label=f"{name}, {whose}",
            **style,
        )


FIGURE10 = Experiment(
    name="figure10",
    title="Figure 10: downtime and overhead of migration",
    rows=rows,
    claims=claims,
    tables=tables,
    draw=draw,
    config={"source": "bench/results/migration.json", "kind": "measured"},
)
