"""The plots of docs/policies.md, from rows alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from bench.common.comparison import mean
from bench.common.tables import Row
from bench.paper.drawing import figure
from bench.policies.contenders import (
    BOUNDS,
    FREE_MOVES,
    PARTS,
    POOLED,
    SOLO,
    STERNA,
    TRUE_LENGTHS,
)
from bench.policies.families import (
    FAMILIES,
    NUM_SEEDS,
    REASONING,
    REASONING_RATES,
    reasoning_point,
)
from bench.policies.goals import PolicyGoal
from bench.policies.measures import METRICS

NUM_COLUMNS = 3

BOUND_MARKERS = {TRUE_LENGTHS: "^", FREE_MOVES: "v", POOLED: "P", SOLO: "X"}

TRADE_OFFS = {
    "prefixes": ("ttft_mean_s", "tpot_mean_s"),
    "paper": ("ttft_p99_s", "tpot_p99_s"),
    "clusters": ("ttft_p99_s", "tpot_p99_s"),
}
"""Of the families with a plot of two latencies, these."""


GOAL_LETTERS = 80
"""Of a goal's name in the plot."""


def draw(rows: Sequence[Row], goals: Sequence[PolicyGoal], folder: Path, name: str) -> None:
    """Draw a plot for each family that has one and rows: `name` with the family's. One more has the
    goals that are not reached."""
    missed = [each for each in goals if each.is_reached is not True and each.shares]
    if missed:
        _draw_goals(missed, folder / f"{name}_goals.png")
    for family, metrics in TRADE_OFFS.items():
        of_family = _of(rows, family)
        if of_family:
            _draw_trade_offs(of_family, family, metrics, folder / f"{name}_{family}.png")
    if of_reasoning := _of(rows, REASONING.name):
        _draw_rates(of_reasoning, folder / f"{name}_{REASONING.name}.png")


def _of(rows: Sequence[Row], family: str) -> list[Row]:
    """Rows of the whole policies and of the bounds, of the seeds that all have."""
    left_out = set(PARTS)
    return [
        row
        for row in rows
        if row["family"] == family and row["policy"] not in left_out and row["seed"] <= NUM_SEEDS
    ]


def _draw_trade_offs(
    rows: Sequence[Row], family: str, metrics: tuple[str, str], path: Path
) -> None:
    """Two latencies of each policy on each point; the lower left is better."""
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    points = [each.name for each in FAMILIES[family].points]
    num_rows = -(-len(points) // NUM_COLUMNS)
    styles = {policy: _style(policy, policies) for policy in policies}
    of_x, of_y = metrics
    with figure(path, num_rows, NUM_COLUMNS, (3.6, 2.8)) as axes:
        for index, point in enumerate(points):
            axis = axes[index // NUM_COLUMNS][index % NUM_COLUMNS]
            for policy in policies:
                x_s, y_s = (mean(rows, metric, policy, point) for metric in metrics)
                if x_s is None or y_s is None:
                    continue
                axis.scatter(x_s, 1000 * y_s, label=policy, **styles[policy])
            axis.set_xscale("log")
            low_s, high_s = axis.get_xlim()
            between = (1, 2, 5) if high_s > 20 * low_s else (1, 1.5, 2, 3, 5, 7)
            axis.xaxis.set_major_locator(LogLocator(subs=between, numticks=12))
            axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axis.xaxis.set_minor_locator(NullLocator())
            axis.set_title(point, fontsize=9)
            axis.set_xlabel(f"{METRICS[of_x]} [s]", fontsize=8)
            axis.set_ylabel(f"{METRICS[of_y]} [ms]", fontsize=8)
            axis.tick_params(labelsize=7, which="both")
            axis.grid(alpha=0.3)
        for index in range(len(points), num_rows * NUM_COLUMNS):
            axes[index // NUM_COLUMNS][index % NUM_COLUMNS].set_axis_off()
        _add_legend(axes)


def _draw_goals(goals: Sequence[PolicyGoal], path: Path) -> None:
    """How much of each goal Sterna's policy has, and the references in its place."""
    names = list(dict.fromkeys(name for each in goals for name in each.shares))
    with figure(path, 1, 1, (10.5, 0.6 + 0.27 * len(goals))) as axes:
        axis = axes[0][0]
        for name in names:
            known = [(y, each.shares[name]) for y, each in enumerate(goals) if name in each.shares]
            style = _style(name, names)
            of_goals = [shares[0] for _, shares in known]
            axis.scatter(of_goals, [y for y, _ in known], label=name, **style)
            if name == STERNA:
                for y, (_, *bounds) in known:
                    axis.plot(bounds, [y] * len(bounds), color=style["color"])
        axis.axvline(1.0, color="gray", linewidth=1)
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_yticks(range(len(goals)), [_short(each.name) for each in goals], fontsize=7)
        axis.invert_yaxis()
        axis.set_xlabel("share of the goal, which is 1", fontsize=8)
        axis.tick_params(axis="x", labelsize=7)
        axis.grid(alpha=0.3)
        _add_legend(axes)


def _short(name: str) -> str:
    return name if len(name) <= GOAL_LETTERS else f"{name[:GOAL_LETTERS]}..."


def _draw_rates(rows: Sequence[Row], path: Path) -> None:
    """P90 and P99 of TPOT by the rate of reasoning requests, a line a policy."""
    # A request alone has a third of the TPOT of all others.
    policies = [each for each in dict.fromkeys(row["policy"] for row in rows) if each != SOLO]
    with figure(path, 1, 2, (4.5, 3.2)) as axes:
        for axis, which in zip(axes[0], ("p90", "p99"), strict=True):
            for policy in policies:
                known = [
                    (rate, 1000 * value_s)
                    for rate in REASONING_RATES
                    for value_s in [mean(rows, f"tpot_{which}_s", policy, reasoning_point(rate))]
                    if value_s is not None
                ]
                rates, values = [rate for rate, _ in known], [value for _, value in known]
                style = _style(policy, policies)
                line = {"marker": style["marker"], "color": style["color"]}
                axis.plot(rates, values, label=policy, markersize=4, **line)
            axis.set_xlabel("requests/s", fontsize=8)
            axis.set_ylabel(f"TPOT {which.upper()} [ms]", fontsize=8)
            axis.tick_params(labelsize=7)
            axis.grid(alpha=0.3)
        _add_legend(axes)


def _add_legend(axes: Any) -> None:
    handles, names = axes[0][0].get_legend_handles_labels()
    axes[0][0].figure.legend(handles, names, loc="outside lower center", ncols=4, fontsize=7)


def _style(policy: str, policies: Sequence[str]) -> dict[str, Any]:
    """A colour for each rule; a diamond where a search has chosen its parameters; black bounds."""
    if policy == STERNA:
        return {"s": 70, "marker": "*", "color": "tab:red", "zorder": 3}
    if policy in BOUNDS:
        return {"s": 25, "marker": BOUND_MARKERS[policy], "color": "black", "zorder": 2}
    rule = policy.partition(":")[0]
    of_rules = [each.partition(":")[0] for each in policies if each not in (STERNA, *BOUNDS)]
    place = list(dict.fromkeys(of_rules)).index(rule)
    colors = ("blue", "orange", "green", "purple", "brown", "pink", "gray", "olive", "cyan")
    is_tuned = ":" in policy
    return {
        "s": 25,
        "marker": "D" if is_tuned else "o",
        "color": f"tab:{colors[place % len(colors)]}",
        "zorder": 2,
    }
