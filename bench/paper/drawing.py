"""Plots like the paper's, with both points: ours filled and solid, the paper's hollow and
dashed."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

from bench.common.tables import Row
from bench.paper.points import matching
from bench.paper.tables import METRIC_NAMES

# Before pyplot, which otherwise looks for a screen.
matplotlib.use("agg")
from matplotlib import pyplot

COLORS = {
    "INFaaS++": "tab:orange",
    "Llumnix": "tab:blue",
    "Llumnix-base": "tab:orange",
    "Round-Robin": "tab:green",
}


@contextmanager
def figure(path: Path, num_rows: int, num_columns: int, size: tuple[float, float]) -> Iterator[Any]:
    """Axes [row][column] to draw into; the file is written at the end.

    Args:
        size: of one panel, in inches.
    """
    canvas, axes = pyplot.subplots(
        num_rows,
        num_columns,
        figsize=(size[0] * num_columns, size[1] * num_rows),
        squeeze=False,
        layout="constrained",
    )
    yield axes
    # Without the software's version and the date, equal rows give equal files.
    canvas.savefig(path, dpi=80, metadata={"Software": None})
    pyplot.close(canvas)


def grid(
    path: Path,
    rows: Sequence[Row],
    paper: Sequence[Row],
    *,
    panel_row: str,
    x: str,
    x_names: Mapping[str, str] | str,
    metrics: Sequence[str],
    log_metrics: Sequence[str] = (),
) -> None:
    """Panels with a row for each value of `panel_row`, a column a metric, a line a policy.

    Args:
        x: the column along the abscissa.
        x_names: its name, one for all or one for each row of panels.
        log_metrics: of these the ordinate is logarithmic.
    """
    values = list(dict.fromkeys(row[panel_row] for row in rows))
    with figure(path, len(values), len(metrics), (2.9, 2.2)) as axes:
        for line, value in enumerate(values):
            name = x_names if isinstance(x_names, str) else x_names[value]
            for column, metric in enumerate(metrics):
                axis = axes[line][column]
                _lines(axis, matching(list(rows), **{panel_row: value}), x, metric, "ours")
                _lines(axis, matching(list(paper), **{panel_row: value}), x, metric, "paper")
                if metric in log_metrics:
                    axis.set_yscale("log")
                else:
                    axis.set_ylim(bottom=0)
                axis.grid(alpha=0.3)
                axis.tick_params(labelsize=7)
                axis.set_xlabel(name, fontsize=8)
                if line == 0:
                    axis.set_title(METRIC_NAMES[metric], fontsize=9)
            axes[line][0].set_ylabel(str(value), fontsize=11)
        handles, names = axes[0][0].get_legend_handles_labels()
        axes[0][0].figure.legend(
            handles, names, loc="outside upper center", ncols=len(names), fontsize=9
        )


def _lines(axis: Any, rows: Sequence[Row], x: str, metric: str, whose: str) -> None:
    is_ours = whose == "ours"
    for policy in dict.fromkeys(row["policy"] for row in rows):
        points = [row for row in matching(list(rows), policy=policy) if row.get(metric) is not None]
        axis.plot(
            [row[x] for row in points],
            [row[metric] for row in points],
            color=COLORS[policy],
            marker="o" if is_ours else "s",
            markerfacecolor=COLORS[policy] if is_ours else "none",
            markersize=4,
            linestyle="-" if is_ours else ":",
            linewidth=1.2,
            label=f"{policy}, {whose}",
        )
