"""The part of docs/policies.md that is written from the results. Pure, from rows alone."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from bench.common.comparison import best, factor, mean
from bench.common.pages import Goal, goal_list
from bench.common.tables import Row, folded, markdown_table, number
from bench.policies.contenders import ALONE, COSTS, LLUMNIX, STERNA, WITHOUT
from bench.policies.families import (
    FAMILIES,
    PREFIXES,
    REASONING,
    SCALING_STEPS,
    SESSIONS,
    Family,
    scaling_point,
)
from bench.policies.measures import METRICS, THIRD_METRICS
from bench.policies.runs import POOLED
from sterna.config import ScalingConfig

SHOWN = ("ttft_mean_s", "ttft_p99_s", "tpot_mean_s", "tpot_p99_s", "request_mean_s")


def markdown(rows: Sequence[Row], goals: Sequence[Mapping[str, object]]) -> str:
    """Plot, goals and all tables."""
    plot = (
        "![Mean TTFT and TPOT of each policy on traces with prefixes; the lower left is better]"
        "(../bench/results/policies.png)"
    )
    num_reached = sum(bool(each["is_reached"]) for each in goals)
    parts = [plot, folded(f"{num_reached} of {len(goals)} goals are reached", goal_list(goals))]
    for family in FAMILIES.values():
        of_family = [row for row in rows if row["family"] == family.name]
        if of_family:
            parts += [f"### {family.title}", *_TABLES[family.name](of_family, family)]
    return "\n\n".join(parts)


# ---------------------------------------------------------------------------------------- tables


def _paper_tables(rows: Sequence[Row], family: Family) -> list[str]:
    chosen = [each.name for each in family.points if each.chooses]
    others = [each.name for each in family.points if not each.chooses]
    whole = [each for each in _policies(rows) if each not in (*ALONE, *WITHOUT)]
    return [
        "Against Llumnix with live load reports; a factor above 1 is better. Means over the points "
        "and seeds, with 90 % intervals over the seeds. On traces that no choice was made on:",
        _factors(rows, whole, METRICS, others),
        folded(
            f"On those of the choice ({', '.join(chosen)})", _factors(rows, whole, METRICS, chosen)
        ),
        "Of each third of the requests by the lengths of their prompts, all traces:",
        _factors(rows, [STERNA], THIRD_METRICS, [*others, *chosen]),
        _parts_table(rows, [each.name for each in family.points if each.has_parts]),
    ]


def _cluster_tables(rows: Sequence[Row], family: Family) -> list[str]:
    parts = [
        "Each instance gets what it gets on M-M at 7.6/s, the middle rate, unless a point says "
        "otherwise."
    ]
    for point in family.points:
        parts += [folded(point.name, _absolute(rows, point.name))]
    return parts


def _prefix_tables(rows: Sequence[Row], family: Family) -> list[str]:
    parts = []
    for point in family.points:
        note = " (parameters were chosen on it, with other seeds)" if point.chooses else ""
        parts += [folded(f"{point.name}{note}", _absolute(rows, point.name))]
    names = [each.name for each in family.points if each.has_parts]
    return [*parts, _parts_table(rows, names), _costs_table(rows, names)]


def _reasoning_tables(rows: Sequence[Row], family: Family) -> list[str]:
    parts = [
        f"*{POOLED}* is a bound: one engine with the memory and the speed of all, so that all "
        "loads are even at each moment."
    ]
    for point in family.points:
        parts += [folded(point.name, _absolute(rows, point.name))]
    return [*parts, _parts_table(rows, [each.name for each in family.points])]


_TABLES: Mapping[str, Callable[[Sequence[Row], Family], list[str]]] = {
    "paper": _paper_tables,
    "clusters": _cluster_tables,
    "prefixes": _prefix_tables,
    "reasoning": _reasoning_tables,
}


def _factors(
    rows: Sequence[Row],
    policies: Iterable[str],
    metrics: Mapping[str, str],
    points: Sequence[str],
    against: str = LLUMNIX,
) -> str:
    lines = [
        [f"`{policy}`"]
        + [_text(factor(rows, metric, policy, against, points)) for metric in metrics]
        for policy in policies
        if policy != against
    ]
    return markdown_table(["policy", *metrics.values()], lines)


def _parts_table(rows: Sequence[Row], points: Sequence[str]) -> str:
    shown = {each: METRICS[each] for each in (*SHOWN, "loss_mean_s")}
    policies = _policies(rows)
    alone = [each for each in ALONE if each in policies]
    without = [each for each in WITHOUT if each in policies]
    return folded(
        "Its parts, one at a time",
        "Llumnix with one part more, against Llumnix:\n\n"
        + _factors(rows, alone, shown, points)
        + "\n\nSterna's policy with one part less, against the whole: below 1, the part helps.\n\n"
        + _factors(rows, without, shown, points, STERNA),
    )


def _costs_table(rows: Sequence[Row], points: Sequence[str]) -> str:
    shown = {each: METRICS[each] for each in SHOWN}
    return folded(
        "Other costs than the engine's",
        "Against Sterna's policy:\n\n"
        + _factors(
            rows, [each for each in COSTS if each in _policies(rows)], shown, points, STERNA
        ),
    )


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
    "prefix_reuse": ("reuse [%]", 100),
    "imbalance_mean": ("largest / mean load", 1),
    "instances_avg": ("instances", 1),
    "makespan_s": ("makespan [s]", 1),
    "migrations": ("moves", 1),
}


def _absolute(rows: Sequence[Row], point: str) -> str:
    """Means over the seeds, of the policies that are no single parts."""
    policies = [each for each in _policies(rows) if each not in (*ALONE, *WITHOUT, *COSTS)]
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
        lines.append([f"**`{policy}`**" if policy == STERNA else f"`{policy}`", *cells])
    return markdown_table(["policy", *(name for name, _ in known.values())], lines)


def _policies(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["policy"] for row in rows))


def _text(value: object) -> str:
    return "" if value is None else str(value)


# ----------------------------------------------------------------------------------------- goals


def goals(rows: Sequence[Row]) -> list[Goal]:
    """What Sterna's policy is to reach, for the families that have rows."""
    found: list[Goal] = []
    by_family = {
        name: of_family
        for name in FAMILIES
        if (of_family := [row for row in rows if row["family"] == name])
    }
    if "paper" in by_family:
        found += _paper_goals(by_family["paper"])
    if "clusters" in by_family:
        found += _cluster_goals(by_family["clusters"])
    if "prefixes" in by_family:
        found += _prefix_goals(by_family["prefixes"])
    if "reasoning" in by_family:
        found += _reasoning_goals(by_family["reasoning"])
    return found


def _paper_goals(rows: Sequence[Row]) -> list[Goal]:
    points = [each.name for each in FAMILIES["paper"].points]
    bounds = {
        "ttft_p99_s": 3.0,
        "ttft_mean_s": 2.0,
        "loss_mean_s": 1.5,
        "request_mean_s": 0.98,
        "tpot_p99_s": 0.95,
        **dict.fromkeys(THIRD_METRICS, 0.95),
    }
    names = {**METRICS, **THIRD_METRICS}
    found = []
    for metric, bound in bounds.items():
        value = factor(rows, metric, STERNA, LLUMNIX, points)
        if value is not None:
            text = f"{value} times better"
            name = f"{names[metric]} of the paper's traces against Llumnix's"
            found.append(Goal(name, f"{bound:g}", text, value.mean >= bound))
    return found


def _cluster_goals(rows: Sequence[Row]) -> list[Goal]:
    found = []
    for point in FAMILIES["clusters"].points:
        if point.name.startswith("auto-scaling"):
            continue
        for metric, bound in {
            "ttft_p99_s": 1.0,
            "request_mean_s": 0.98,
            "tpot_p99_s": 0.95,
        }.items():
            value = factor(rows, metric, STERNA, LLUMNIX, [point.name])
            if value is not None:
                name = f"{point.name}: {METRICS[metric]} against Llumnix's"
                reached = value.mean >= bound
                found.append(Goal(name, f"{bound:g}", f"{value} times better", reached))
    found += _scaling_goals(rows)
    return found


def _scaling_goals(rows: Sequence[Row]) -> list[Goal]:
    """Fewer instances at no larger P99: Sterna's fewest among the thresholds at which its P99 is at
    most that of Llumnix at the default ones."""
    points = [scaling_point(*each) for each in SCALING_STEPS]
    scaling = ScalingConfig()
    default = scaling_point(scaling.low_freeness_steps, scaling.high_freeness_steps)
    limit_s = mean(rows, "ttft_p99_s", LLUMNIX, default)
    theirs = mean(rows, "instances_avg", LLUMNIX, default)
    if limit_s is None or theirs is None:
        return []
    fewest = [
        instances
        for point in points
        if (p99_s := mean(rows, "ttft_p99_s", STERNA, point)) is not None and p99_s <= limit_s
        if (instances := mean(rows, "instances_avg", STERNA, point)) is not None
    ]
    name = "auto-scaling: instances at no larger TTFT P99 than Llumnix's"
    if not fewest:
        return [Goal(name, "at most 0.9", "at no threshold", is_reached=False)]
    share = min(fewest) / theirs
    return [Goal(name, "at most 0.9", f"{share:.2f}", share <= 0.9)]


def _prefix_goals(rows: Sequence[Row]) -> list[Goal]:
    found = []
    peers = [each for each in _policies(rows) if each.partition(":")[0] not in (LLUMNIX, STERNA)]
    dynamo = [each for each in peers if each.startswith("dynamo:")] or ["dynamo"]
    for point in PREFIXES.points:

        def of(metric: str, policy: str, name: str = point.name) -> float | None:
            return mean(rows, metric, policy, name)

        reuse = of("prefix_reuse", STERNA)
        if reuse is None:
            continue
        found.append(Goal(f"{point.name}: reuse", "97 %", f"{100 * reuse:.1f} %", reuse >= 0.97))
        ttft = factor(rows, "ttft_mean_s", STERNA, dynamo[0], [point.name])
        tpot = factor(rows, "tpot_mean_s", STERNA, "round-robin", [point.name])
        if ttft is not None and tpot is not None:
            found.append(
                Goal(
                    f"{point.name}: TTFT mean against `{dynamo[0]}`, and TPOT mean against "
                    "round robin",
                    "both 1",
                    f"{ttft} and {tpot} times better",
                    ttft.mean >= 1 and tpot.mean >= 1,
                )
            )
        peer = best(partial(of, "ttft_p99_s"), peers)
        if peer is not None:
            p99 = factor(rows, "ttft_p99_s", STERNA, peer[0], [point.name])
            if p99 is not None:
                found.append(
                    Goal(
                        f"{point.name}: TTFT P99 against the best other one (`{peer[0]}`)",
                        "1.5",
                        f"{p99} times better",
                        p99.mean >= 1.5,
                    )
                )
        again, local = of("again_ttft_p99_s", STERNA), of("local_ttft_p99_s", STERNA)
        if point.name in SESSIONS and again is not None and local is not None:
            found.append(
                Goal(
                    f"{point.name}: TTFT P99 of next turns over that of those with all of their "
                    "prefix in the cache",
                    "at most 1.1",
                    f"{again / local:.2f}",
                    again <= 1.1 * local,
                )
            )
        imbalance = of("imbalance_mean", STERNA)
        if point.name == "1 system prompt" and imbalance is not None:
            found.append(
                Goal(
                    f"{point.name}: largest over mean load", "at most 1.3", f"{imbalance:.2f}",
                    imbalance <= 1.3,
                )
            )  # fmt: skip
    return found


def _reasoning_goals(rows: Sequence[Row]) -> list[Goal]:
    found = []
    point, batch = (each.name for each in REASONING.points)
    for other in ("round-robin", POOLED):
        value = factor(rows, "tpot_p99_s", STERNA, other, [point])
        if value is not None:
            bound = 2.0 if other == "round-robin" else 1.0
            found.append(
                Goal(
                    f"{point}: TPOT P99 against `{other}`", f"{bound:g}",
                    f"{value} times better", value.mean >= bound,
                )
            )  # fmt: skip
    value = factor(rows, "makespan_s", STERNA, POOLED, [batch])
    if value is not None:
        found.append(
            Goal(
                f"{batch}: makespan over the bound's", "at most 1.1",
                f"{1 / value.mean:.2f}", value.mean >= 1 / 1.1,
            )
        )  # fmt: skip
    return found
