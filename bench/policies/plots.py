"""The plots of docs/policies.md, from rows alone."""

from collections.abc import Sequence
from pathlib import Path

from bench.common.tables import Row
from bench.paper.drawing import figure
from bench.policies.comparison import mean
from bench.policies.contenders import ALONE, COSTS, STERNA, WITHOUT
from bench.policies.families import PREFIXES

NUM_COLUMNS = 3


def draw_prefixes(rows: Sequence[Row], path: Path) -> None:
    """Mean TTFT and TPOT of each policy on each trace with prefixes; the lower left is better."""
    those = [row for row in rows if row["family"] == PREFIXES.name]
    left_out = {*ALONE, *WITHOUT, *COSTS}
    policies = [
        each for each in dict.fromkeys(row["policy"] for row in those) if each not in left_out
    ]
    points = [each.name for each in PREFIXES.points]
    num_rows = -(-len(points) // NUM_COLUMNS)
    with figure(path, num_rows, NUM_COLUMNS, (3.6, 2.8)) as axes:
        for index, point in enumerate(points):
            axis = axes[index // NUM_COLUMNS][index % NUM_COLUMNS]
            for policy in policies:
                ttft_s = mean(those, "ttft_mean_s", policy, point)
                tpot_s = mean(those, "tpot_mean_s", policy, point)
                if ttft_s is None or tpot_s is None:
                    continue
                is_ours = policy == STERNA
                axis.scatter(
                    ttft_s,
                    1000 * tpot_s,
                    s=60 if is_ours else 25,
                    marker="*" if is_ours else "o",
                    color="tab:red" if is_ours else None,
                    label=policy,
                    zorder=3 if is_ours else 2,
                )
            axis.set_xscale("log")
            axis.set_title(point, fontsize=9)
            axis.set_xlabel("TTFT mean [s]", fontsize=8)
            axis.set_ylabel("TPOT mean [ms]", fontsize=8)
            axis.tick_params(labelsize=7, which="both")
            axis.grid(alpha=0.3)
        handles, names = axes[0][0].get_legend_handles_labels()
        axes[0][0].figure.legend(handles, names, loc="outside lower center", ncols=4, fontsize=7)
