"""Report of the comparison of policies: tables and goals for docs/policies.md. Pure."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean

from bench.common.comparison import factor, half_width, mean
from bench.common.pages import goal_list
from bench.common.tables import Row, cell, folded, markdown_table, number
from bench.policies.contenders import (
    ALONE,
    COSTS,
    DERIVED,
    FREE_MOVES,
    LLUMNIX,
    MORE,
    PARTS,
    POOLED,
    SOLO,
    STERNA,
    TRUE_LENGTHS,
    VALUES,
    WITHOUT,
)
from bench.policies.families import (
    FAMILIES,
    NUM_DECIDING_SEEDS,
    NUM_SEEDS,
    Family,
    Point,
)
from bench.policies.goals import LLUMNIX_BOUNDS
from bench.policies.measures import HIGH_METRICS, METRICS, THIRD_METRICS, policies_of
from sterna.workload.catalog import has_same_lengths

SHOWN = ("ttft_mean_s", "ttft_p99_s", "tpot_mean_s", "tpot_p99_s", "request_mean_s")


def markdown(rows: Sequence[Row], goals: Sequence[Mapping[str, object]]) -> str:
    """Goals, plots and all tables."""
    shown = [f"*{name}*: {text}" for name, text in _BOUNDS.items() if name in policies_of(rows)]
    references = (
        f"References stand beside the policies, with {NUM_SEEDS} seeds. {'; '.join(shown)}."
    )
    num_reached = sum(each["is_reached"] is True for each in goals)
    num_open = sum(each["is_reached"] is None for each in goals)
    title = f"{num_reached} of {len(goals)} goals are reached, {num_open} are not decided"
    plot = "How much of each goal that is not reached Sterna's policy has, and references"
    parts = [
        references,
        folded(title, goal_list(goals)),
        f"![{plot}](../bench/results/policies_goals.png)",
    ]
    for family in FAMILIES.values():
        of_family = [row for row in rows if row["family"] == family.name]
        if of_family:
            parts += [f"### {family.title}"]
            if family.name in _PLOTS:
                parts += [f"![{_PLOTS[family.name]}](../bench/results/policies_{family.name}.png)"]
            parts += _TABLES[family.name](of_family, family)
    return "\n\n".join(parts)


# ---------------------------------------------------------------------------------------- tables


def _paper_tables(rows: Sequence[Row], family: Family) -> list[str]:
    chosen = [each.name for each in family.points if each.chooses]
    others = [each.name for each in family.points if not each.chooses]
    whole = [each for each in policies_of(rows) if each not in PARTS]
    return [
        "Against Llumnix with live load reports; a factor above 1 is better. Means over the points "
        f"and seeds ({NUM_DECIDING_SEEDS} of `sterna` and `llumnix`, {NUM_SEEDS} of others), with "
        "90 % intervals over the seeds (Student's t). On traces that no choice but that of "
        "`ageing_tokens_per_s` was made on:",
        _factors(rows, whole, METRICS, others),
        folded(
            f"On those of the choice ({', '.join(chosen)})", _factors(rows, whole, METRICS, chosen)
        ),
        "Of each third of the requests by the lengths of their prompts, all traces:",
        _factors(rows, [STERNA, TRUE_LENGTHS], THIRD_METRICS, [*others, *chosen]),
        folded("`sterna` on each of them", _each_point(rows, family)),
        _parts_table(rows, [each.name for each in family.points if each.has_parts]),
    ]


def _cluster_tables(rows: Sequence[Row], family: Family) -> list[str]:
    parts = [
        "Each instance gets what it gets on M-M at 7.6/s, the middle rate, unless a point says "
        "otherwise."
    ]
    for point in family.points:
        policies = {row["policy"] for row in rows if row["point"] == point.name}
        if not policies:
            continue
        parts += [folded(_title(point), _absolute(rows, point.name))]
        if point.has_parts and not policies.isdisjoint(PARTS):
            parts += [_parts_table(rows, [point.name], f"{point.name}: its parts, one at a time")]
    return parts


def _title(point: Point) -> str:
    notes = [point.note] if point.note else []
    if point.chooses:
        other = "arrivals" if has_same_lengths(point.trace) else "seeds"
        notes.append(f"parameters were chosen on it, with other {other}")
    return f"{point.name} ({'; '.join(notes)})" if notes else point.name


def _prefix_tables(rows: Sequence[Row], family: Family) -> list[str]:
    parts = [folded(_title(point), _absolute(rows, point.name)) for point in family.points]
    names = [each.name for each in family.points if each.has_parts]
    return [*parts, _parts_table(rows, names)]


def _reasoning_tables(rows: Sequence[Row], family: Family) -> list[str]:
    parts = [folded(_title(point), _absolute(rows, point.name)) for point in family.points]
    return [*parts, _parts_table(rows, [each.name for each in family.points if each.has_parts])]


_TABLES: Mapping[str, Callable[[Sequence[Row], Family], list[str]]] = {
    "paper": _paper_tables,
    "clusters": _cluster_tables,
    "prefixes": _prefix_tables,
    "reasoning": _reasoning_tables,
}


_BOUNDS = {
    TRUE_LENGTHS: "an oracle, which knows the length of each output: Sterna's policy, which moves "
    "by the loads to come, and whose moves take no time",
    FREE_MOVES: "Sterna's policy, whose moves and copies take no time",
    POOLED: "one engine with the memory and the speed of all instances, so that all loads are even "
    "at each moment, and what one has cached all have; a prompt takes a part of its time there",
    SOLO: "each request on an idle instance that has all of its prefix that was ever computed; no "
    "policy can have earlier first tokens",
}
"""What the references are."""

_PLOTS = {
    "paper": "P99 of TTFT and TPOT of each policy on the paper's traces; the lower left is better",
    "clusters": "P99 of TTFT and TPOT of each policy on other clusters; likewise",
    "prefixes": "Means of TTFT and TPOT of each policy on traces with prefixes; likewise",
    "reasoning": "P90 and P99 of TPOT of each policy, by the rate of requests with long outputs",
}
"""What the plots of the families show."""


def _factors(
    rows: Sequence[Row],
    policies: Iterable[str],
    metrics: Mapping[str, str],
    points: Sequence[str],
    against: str = LLUMNIX,
) -> str:
    lines = [
        [_shown(policy)]
        + [cell(factor(rows, metric, policy, against, points)) for metric in metrics]
        for policy in policies
        if policy != against
    ]
    return markdown_table(["policy", *metrics.values()], lines)


def _each_point(rows: Sequence[Row], family: Family) -> str:
    """The factors of Sterna's policy against Llumnix on each point, which means hide."""
    metrics = METRICS | THIRD_METRICS
    shown = (*LLUMNIX_BOUNDS, "tpot_mean_s", "ttft_p99_long_s", "ttft_max_long_s")
    lines = [
        [point.name]
        + [cell(factor(rows, metric, STERNA, LLUMNIX, [point.name])) for metric in shown]
        for point in family.points
    ]
    return markdown_table(["trace", *(metrics[each] for each in shown)], lines)


def _parts_table(
    rows: Sequence[Row], points: Sequence[str], title: str = "Its parts, one at a time"
) -> str:
    shown = {each: METRICS[each] for each in (*SHOWN, "loss_mean_s")}
    shown |= {
        metric: name
        for metric, name in HIGH_METRICS.items()
        if any(row.get(metric) is not None for row in rows if row["point"] in points)
    }
    policies = policies_of(rows)
    alone = [each for each in ALONE if each in policies]
    without = [each for each in WITHOUT if each in policies]
    more = [each for each in MORE if each in policies]
    values = [each for each in (*VALUES, *COSTS) if each in policies]
    text = (
        "Llumnix with one part more, against Llumnix:\n\n"
        + _factors(rows, alone, shown, points)
        + "\n\nSterna's policy with one part less, against the whole: below 1, the part helps.\n\n"
        + _factors(rows, without, shown, points, STERNA)
    )
    if more:
        text += "\n\nWith one part more, against the same:\n\n"
        text += _factors(rows, more, shown, points, STERNA)
    if values:
        text += "\n\nWith another value of a parameter, against the same:\n\n"
        text += _factors(rows, values, shown, points, STERNA)
    return folded(title, text)


_COLUMNS: Mapping[str, tuple[str, float]] = {
    "ttft_mean_s": ("TTFT mean [s]", 1),
    "ttft_p99_s": ("P99 [s]", 1),
    "tpot_mean_s": ("TPOT mean [ms]", 1000),
    "tpot_p99_s": ("P99 [ms]", 1000),
    "request_mean_s": ("request mean [s]", 1),
    "loss_mean_s": ("preemption loss [s]", 1),
    "high_ttft_mean_s": ("high: TTFT mean [s]", 1),
    "high_tpot_mean_s": ("high: TPOT mean [ms]", 1000),
    "high_request_mean_s": ("high: request mean [s]", 1),
    "goodput_ttft": ("TTFT kept [%]", 100),
    "goodput_tpot": ("TPOT kept [%]", 100),
    "interactivity_mean": ("interactivity", 1),
    "prefix_reuse": ("reuse [%]", 100),
    "imbalance_mean": ("largest / mean load", 1),
    "instances_avg": ("instances", 1),
    "makespan_s": ("makespan [s]", 1),
    "migrations": ("moves", 1),
}


def _absolute(rows: Sequence[Row], point: str) -> str:
    """Means over the seeds that all have, of those policies that ran there as a whole."""
    rows = [row for row in rows if row["seed"] <= NUM_SEEDS and row["point"] == point]
    policies = [each for each in policies_of(rows) if each not in PARTS]
    known = {
        column: name
        for column, name in _COLUMNS.items()
        if any(mean(rows, column, policy, point) is not None for policy in policies)
    }
    lines = []
    for policy in sorted(policies, key=lambda each: mean(rows, "request_mean_s", each, point) or 0):
        cells = [
            number(None if value is None else value * scale)
            for column, (_, scale) in known.items()
            for value in [mean(rows, column, policy, point)]
        ]
        lines.append([f"**{_shown(policy)}**" if policy == STERNA else _shown(policy), *cells])
        if policy == STERNA:
            lines.append(
                ["its 90 % intervals", *(_spread(rows, column, point) for column in known)]
            )
    return markdown_table(["policy", *(name for name, _ in known.values())], lines)


def _spread(rows: Sequence[Row], column: str, point: str) -> str:
    """Half of the interval of Sterna's mean over the seeds, as a share of the mean."""
    values = [
        row[column]
        for row in rows
        if (row["policy"], row["point"]) == (STERNA, point) and row.get(column) is not None
    ]
    if not values or not (whole := fmean(values)) or math.isnan(half := half_width(values)):
        return ""
    return f"± {half / whole:.1%}"


def _shown(policy: str) -> str:
    return f"*{policy}*" if policy in DERIVED else f"`{policy}`"
