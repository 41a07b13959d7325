"""The plots of docs/policies.md, from rows alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.ticker import MaxNLocator, NullLocator, ScalarFormatter

from bench.common.comparison import mean
from bench.common.tables import Row
from bench.paper.drawing import figure
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
    styles = {policy: _style(policy, policies) for policy in policies}
    with figure(path, num_rows, NUM_COLUMNS, (3.6, 2.8)) as axes:
        for index, point in enumerate(points):
            axis = axes[index // NUM_COLUMNS][index % NUM_COLUMNS]
            for policy in policies:
                ttft_s = mean(those, "ttft_mean_s", policy, point)
                tpot_s = mean(those, "tpot_mean_s", policy, point)
                if ttft_s is None or tpot_s is None:
                    continue
                axis.scatter(ttft_s, 1000 * tpot_s, label=policy, **styles[policy])
            axis.set_xscale("log")
            # Ticks of a logarithmic axis are decades, of which most of these have none.
            axis.xaxis.set_major_locator(MaxNLocator(4))
            axis.xaxis.set_major_formatter(ScalarFormatter())
            axis.xaxis.set_minor_locator(NullLocator())
            axis.set_title(point, fontsize=9)
            axis.set_xlabel("TTFT mean [s]", fontsize=8)
            axis.set_ylabel("TPOT mean [ms]", fontsize=8)
            axis.tick_params(labelsize=7, which="both")
            axis.grid(alpha=0.3)
        for index in range(len(points), num_rows * NUM_COLUMNS):
            axes[index // NUM_COLUMNS][index % NUM_COLUMNS].set_axis_off()
        handles, names = axes[0][0].get_legend_handles_labels()
        axes[0][0].figure.legend(handles, names, loc="outside lower center", ncols=4, fontsize=7)


def _style(policy: str, policies: Sequence[str]) -> dict[str, Any]:
    """A colour for each rule; a diamond where a search has chosen its parameters."""
    if policy == STERNA:
        return {"s": 70, "marker": "*", "color": "tab:red", "zorder": 3}
    rule = policy.partition(":")[0]
    rules = [each for each in policies if ":" not in each and each != STERNA]
    place = rules.index(rule) if rule in rules else len(rules)
    colors = ("blue", "orange", "green", "purple", "brown", "pink", "gray", "olive", "cyan")
    is_tuned = ":" in policy
    return {
        "s": 25,
        "marker": "D" if is_tuned else "o",
        "color": f"tab:{colors[place % len(colors)]}",
        "zorder": 2,
    }
