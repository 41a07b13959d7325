"""The plot of `sterna bench paced`, from rows alone: latencies of each policy, measured and
predicted, a row of panels for each case."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.common.comparison import mean
from bench.common.tables import Row
from bench.paced.runs import PACED, SIMULATED
from bench.paper.drawing import figure

METRICS: Mapping[str, tuple[str, float]] = {
    "ttft_p99_s": ("TTFT P99 [s]", 1),
    "tpot_p99_s": ("TPOT P99 [ms]", 1000),
    "request_mean_s": ("request mean [s]", 1),
}
"""Each with its name and unit, and the unit's part of a second."""

STYLES: Mapping[str, dict[str, Any]] = {
    PACED: {"marker": "_", "s": 200, "color": "tab:blue", "label": "measured, mean"},
    SIMULATED: {
        "marker": "D",
        "s": 30,
        "facecolor": "none",
        "edgecolor": "tab:red",
        "label": "predicted, mean",
    },
}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw a row of panels for each case, with a column a metric."""
    cases = list(dict.fromkeys(row["point"] for row in rows))
    with figure(path, len(cases), len(METRICS), (3.4, 2.6)) as axes:
        for line, case in zip(axes, cases, strict=True):
            of_case = [row for row in rows if row["point"] == case]
            policies = list(dict.fromkeys(row["policy"] for row in of_case))
            for axis, (metric, (name, scale)) in zip(line, METRICS.items(), strict=True):
                for kind, style in STYLES.items():
                    of_kind = [row for row in of_case if row["kind"] == kind]
                    means = [mean(of_kind, metric, policy, case) for policy in policies]
                    places = [place for place, value in enumerate(means) if value is not None]
                    values = [value * scale for value in means if value is not None]
                    axis.scatter(places, values, **style)
                rounds = [row for row in of_case if row["kind"] == PACED]
                places = [policies.index(row["policy"]) for row in rounds]
                values = [row[metric] * scale for row in rounds]
                axis.scatter(places, values, s=6, color="tab:blue", label="measured, a round")
                if metric.startswith("ttft"):
                    axis.set_yscale("log")
                axis.set_xticks(range(len(policies)), policies, rotation=30, ha="right")
                axis.set_ylabel(name, fontsize=8)
                axis.tick_params(labelsize=7, which="both")
                axis.grid(alpha=0.3)
            line[0].set_title(case, fontsize=9, loc="left")
        handles, names = axes[0][0].get_legend_handles_labels()
        axes[0][0].figure.legend(handles, names, loc="outside lower center", ncols=3, fontsize=8)
