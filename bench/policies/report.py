"""Report of the comparison of policies: tables and goals for docs/policies.md. Pure."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean

from bench.common.comparison import Estimate, best, estimate, factor, half_width, mean
from bench.common.pages import Goal, goal_list
from bench.common.tables import Row, folded, markdown_table, number
from bench.policies.contenders import (
    AHEAD,
    ALONE,
    BY_FREENESS,
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
    OVERLOADED,
    PREFIXES,
    REASONING_RATE,
    REASONING_RATES,
    ROLLOUTS,
    SCALING_STEPS,
    SESSIONS,
    Family,
    Point,
    reasoning_point,
    scaling_point,
)
from bench.policies.measures import HIGH_METRICS, METRICS, THIRD_METRICS
from sterna.config import ScalingConfig

LLUMNIX_BOUNDS = {
    "ttft_p99_s": 3.0,
    "ttft_mean_s": 2.0,
    "loss_mean_s": 1.5,
    "request_mean_s": 0.98,
    "tpot_p99_s": 0.95,
}
"""What factors against Llumnix are to be at least."""

THIRD_BOUND = 0.95
"""The same of each third of the requests by the lengths of their prompts."""

HIGH_BOUND = 0.98
"""The same of requests of high priority."""

SHOWN = ("ttft_mean_s", "ttft_p99_s", "tpot_mean_s", "tpot_p99_s", "request_mean_s")


def markdown(rows: Sequence[Row], goals: Sequence[Mapping[str, object]]) -> str:
    """Goals, plots and all tables."""
    shown = [f"*{name}*: {text}" for name, text in _BOUNDS.items() if name in _policies(rows)]
    references = (
        f"References stand beside the policies, with {NUM_SEEDS} seeds. {'; '.join(shown)}."
    )
    num_reached = sum(each["is_reached"] is True for each in goals)
    num_open = sum(each["is_reached"] is None for each in goals)
    title = f"{num_reached} of {len(goals)} goals are reached, {num_open} are not decided"
    parts = [references, folded(title, goal_list(goals))]
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
    whole = [each for each in _policies(rows) if each not in PARTS]
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
    note = " (parameters were chosen on it, with other seeds)" if point.chooses else ""
    return f"{point.name}{note}"


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
        + [_text(factor(rows, metric, policy, against, points)) for metric in metrics]
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
        + [_text(factor(rows, metric, STERNA, LLUMNIX, [point.name])) for metric in shown]
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
    policies = _policies(rows)
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
    """Means over the seeds that all have, of the policies that are no single parts."""
    rows = [row for row in rows if row["seed"] <= NUM_SEEDS]
    policies = [each for each in _policies(rows) if each not in PARTS]
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


def _policies(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["policy"] for row in rows))


def _shown(policy: str) -> str:
    return f"*{policy}*" if policy in DERIVED else f"`{policy}`"


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
    every = FAMILIES["paper"].points
    points = [each.name for each in every]
    found = [
        goal
        for metric, bound in {**LLUMNIX_BOUNDS, **dict.fromkeys(THIRD_METRICS, THIRD_BOUND)}.items()
        for goal in _against(
            rows,
            f"{(METRICS | THIRD_METRICS)[metric]} of the paper's traces against Llumnix's",
            (metric, LLUMNIX, points),
            bound,
        )
    ]
    others = [each.name for each in every if not each.chooses]
    for metric in ("ttft_p99_s", "ttft_mean_s", "loss_mean_s"):
        found += _against(
            rows,
            f"{METRICS[metric]} of those where only ageing was chosen, likewise",
            (metric, LLUMNIX, others),
            LLUMNIX_BOUNDS[metric],
        )
    return found


def _cluster_goals(rows: Sequence[Row]) -> list[Goal]:
    found: list[Goal] = []
    for point in FAMILIES["clusters"].points:
        if point.name.startswith("auto-scaling"):
            continue
        for metric, bound in {**LLUMNIX_BOUNDS, **dict.fromkeys(HIGH_METRICS, HIGH_BOUND)}.items():
            found += _against(
                rows,
                f"{point.name}: {(METRICS | HIGH_METRICS)[metric]} against Llumnix's",
                (metric, LLUMNIX, [point.name]),
                bound,
            )
        found += _third_goals(rows, point.name)
    return [*found, *_collapse_goals(rows), *_scaling_goals(rows)]


def _collapse_goals(rows: Sequence[Row]) -> list[Goal]:
    """Beyond the sustainable rate all policies work off what has come, without a collapse."""
    # The other way round: of more tokens a second the factor is the policy's over the other's.
    tokens = factor(rows, "output_tokens_per_s", LLUMNIX, STERNA, [OVERLOADED])
    if tokens is None:
        return []
    name = f"{OVERLOADED}: output tokens a second against Llumnix's"
    return [Goal(name, "at least 0.98", f"{tokens} times as many", tokens.at_least(0.98))]


def _third_goals(rows: Sequence[Row], point: str) -> list[Goal]:
    """The metric of a third of the requests that is worst against Llumnix's."""
    factors = {
        metric: value
        for metric in THIRD_METRICS
        if (value := factor(rows, metric, STERNA, LLUMNIX, [point])) is not None
    }
    if not factors:
        return []
    worst = min(factors, key=lambda metric: factors[metric].mean)
    return _against(
        rows,
        f"{point}: the worst of the thirds ({THIRD_METRICS[worst]}) against Llumnix's",
        (worst, LLUMNIX, [point]),
        THIRD_BOUND,
    )


def _scaling_goals(rows: Sequence[Row]) -> list[Goal]:
    """Fewer instances at no larger P99: the fewest among the thresholds at which the P99 is at most
    that of Llumnix at the default ones."""
    points = [scaling_point(*each) for each in SCALING_STEPS]
    scaling = ScalingConfig()
    default = scaling_point(scaling.low_freeness_steps, scaling.high_freeness_steps)
    known = [each for each in rows if each["point"] in points]
    if mean(known, "instances_avg", LLUMNIX, default) is None:
        return []

    def share(rows: Sequence[Row], policy: str) -> float | None:
        limit_s = mean(rows, "ttft_p99_s", LLUMNIX, default)
        theirs = mean(rows, "instances_avg", LLUMNIX, default)
        if limit_s is None or theirs is None:
            return None
        fewest = [
            instances
            for point in points
            if (p99_s := mean(rows, "ttft_p99_s", policy, point)) is not None and p99_s <= limit_s
            if (instances := mean(rows, "instances_avg", policy, point)) is not None
        ]
        return min(fewest) / theirs if fewest else None

    ours = _estimate(known, share, STERNA, LLUMNIX)
    oracle = _estimate(known, share, TRUE_LENGTHS, LLUMNIX)
    text = "at no threshold" if ours is None else str(ours)
    is_reached = ours is not None and ours.at_most(0.9)
    if not is_reached:
        text = _with_bounds(text, {TRUE_LENGTHS: oracle})
    name = "auto-scaling: instances at no larger TTFT P99 than Llumnix's"
    return [Goal(name, "at most 0.9", text, is_reached)]


def _prefix_goals(rows: Sequence[Row]) -> list[Goal]:
    peers = _peers(rows)
    dynamo = [each for each in peers if each.startswith("dynamo:")] or ["dynamo"]
    found = []
    for name in [each.name for each in PREFIXES.points]:
        found += _reuse_goals(rows, name)
        ttft = factor(rows, "ttft_mean_s", STERNA, dynamo[0], [name])
        tpot = factor(rows, "tpot_mean_s", STERNA, "round-robin", [name])
        if ttft is not None and tpot is not None:
            found.append(
                Goal(
                    f"{name}: TTFT mean against `{dynamo[0]}`, and TPOT mean against round robin",
                    "both 1",
                    f"{ttft} and {tpot} times better",
                    _all_of(ttft.at_least(1.0), tpot.at_least(1.0)),
                )
            )
        peer = _best_peer(rows, "ttft_p99_s", name)
        if peer is not None:
            found += _against(
                rows,
                f"{name}: TTFT P99 against the best other one (`{peer}`)",
                ("ttft_p99_s", peer, [name]),
                1.5,
                (FREE_MOVES, SOLO),
            )
        if name in SESSIONS:
            found += _next_turn_goals(rows, name)
        if name == "1 system prompt":
            found += _imbalance_goals(rows, name)
    return found


def _reuse_goals(rows: Sequence[Row], point: str) -> list[Goal]:
    def share(rows: Sequence[Row], policy: str) -> float | None:
        return mean(rows, "prefix_reuse", policy, point)

    def text(policy: str) -> str | None:
        reuse = share(rows, policy)
        return None if reuse is None else f"{100 * reuse:.1f} %"

    ours = _estimate([each for each in rows if each["point"] == point], share, STERNA)
    if ours is None:
        return []
    shown = f"{text(STERNA)} [{100 * ours.low:.1f}, {100 * ours.high:.1f}]"
    is_reached = ours.at_least(0.97)
    if not is_reached:
        peer = best(lambda each: -(share(rows, each) or 0.0), _peers(rows))
        most = None if peer is None else text(peer[0])
        shown = _with_bounds(shown, {POOLED: text(POOLED), "the most of others": most})
    return [Goal(f"{point}: reuse", "97 %", shown, is_reached)]


def _next_turn_goals(rows: Sequence[Row], point: str) -> list[Goal]:
    def share(rows: Sequence[Row], policy: str) -> float | None:
        again, local = (
            mean(rows, f"{which}_ttft_p99_s", policy, point) for which in ("again", "local")
        )
        return None if again is None or local is None else again / local

    known = [each for each in rows if each["point"] == point]
    ours, ahead, free = (_estimate(known, share, each) for each in (STERNA, AHEAD, FREE_MOVES))
    if ours is None:
        return []
    text = str(ours)
    if not ours.at_most(1.1):
        text = _with_bounds(text, {f"`{AHEAD}`": ahead, FREE_MOVES: free})
    name = (
        f"{point}: TTFT P99 of prompts that begin as earlier ones over that of those which find "
        "all of that in the cache"
    )
    found = [Goal(name, "at most 1.1", text, ours.at_most(1.1))]
    # The other way round: of more tokens a second the factor is the policy's over the other's.
    tokens = factor(known, "output_tokens_per_s", STERNA, AHEAD, [point])
    if tokens is not None:
        name = f"{point}: output tokens a second with copies ahead (`{AHEAD}`) over those without"
        found.append(Goal(name, "at least 0.98", str(tokens), tokens.at_least(0.98)))
    return found


def _imbalance_goals(rows: Sequence[Row], point: str) -> list[Goal]:
    def imbalance(rows: Sequence[Row], policy: str) -> float | None:
        return mean(rows, "imbalance_mean", policy, point)

    known = [each for each in rows if each["point"] == point]
    policies = (STERNA, FREE_MOVES, BY_FREENESS)
    ours, free, by_freeness = (_estimate(known, imbalance, policy) for policy in policies)
    if ours is None:
        return []
    text = str(ours)
    if not ours.at_most(1.3):
        text = _with_bounds(text, {FREE_MOVES: free, f"`{BY_FREENESS}`": by_freeness})
    return [Goal(f"{point}: largest over mean load", "at most 1.3", text, ours.at_most(1.3))]


def _reasoning_goals(rows: Sequence[Row]) -> list[Goal]:
    point = reasoning_point(REASONING_RATE)
    others = ["round-robin"]
    peer = _best_peer(rows, "tpot_p99_s", point)
    if peer is not None and peer not in others:
        others.append(peer)
    found = []
    for other in others:
        found += _against(
            rows,
            f"{point}: TPOT P99 against `{other}`",
            ("tpot_p99_s", other, [point]),
            2.0,
            (TRUE_LENGTHS, POOLED, SOLO),
        )
        found += _rate_goals(rows, point, other)
    # The other way round: how many times as long as the bound's.
    value = factor(rows, "makespan_s", POOLED, STERNA, [ROLLOUTS])
    if value is not None:
        name = f"{ROLLOUTS}: makespan over the bound's"
        found.append(Goal(name, "at most 1.1", str(value), value.at_most(1.1)))
    return found


def _rate_goals(rows: Sequence[Row], point: str, other: str) -> list[Goal]:
    """Output tokens at the P90 TPOT that another policy has on this point: in the steady state they
    are as the rate of the requests."""

    def share(rows: Sequence[Row], policy: str) -> float | None:
        limit_s = mean(rows, "tpot_p90_s", other, point)
        rate = None if limit_s is None else rate_at(rows, policy, limit_s)
        return None if rate is None else rate / REASONING_RATE

    ours, pooled = (_estimate(rows, share, policy, other) for policy in (STERNA, POOLED))
    name, bound = f"{point}: output tokens at the P90 TPOT of `{other}`", "1.15, or the P99 halved"
    if ours is None:
        text = "at none of the rates that were simulated"
        return [Goal(name, bound, _with_bounds(text, {POOLED: pooled}), None)]
    text = f"{ours} times as many"
    if not ours.at_least(1.15):
        text = _with_bounds(text, {POOLED: pooled})
    return [Goal(name, bound, text, ours.at_least(1.15))]


def rate_at(rows: Sequence[Row], policy: str, tpot_s: float) -> float | None:
    """The rate of reasoning requests at which the policy's P90 TPOT is this, on the line between
    the two rates around it; None outside of those that were simulated."""
    known = [
        (rate, value)
        for rate in REASONING_RATES
        if (value := mean(rows, "tpot_p90_s", policy, reasoning_point(rate))) is not None
    ]
    for (low, low_s), (high, high_s) in itertools.pairwise(known):
        if low_s <= tpot_s <= high_s:
            return low + (high - low) * (tpot_s - low_s) / (high_s - low_s)
    return None


def _peers(rows: Sequence[Row]) -> list[str]:
    """The rules of others."""
    own = (*DERIVED, LLUMNIX, STERNA)
    return [each for each in _policies(rows) if each.partition(":")[0] not in own]


def _best_peer(rows: Sequence[Row], metric: str, point: str) -> str | None:
    found = best(lambda policy: mean(rows, metric, policy, point), _peers(rows))
    return None if found is None else found[0]


def _estimate(
    rows: Sequence[Row],
    statistic: Callable[[Sequence[Row], str], float | None],
    policy: str,
    *others: str,
) -> Estimate | None:
    """A number of a policy, from its rows and those of the others that it is compared with."""
    known = [each for each in rows if each["policy"] in (policy, *others)]
    return estimate(known, lambda drawn: statistic(drawn, policy))


def _against(
    rows: Sequence[Row],
    name: str,
    compared: tuple[str, str, Sequence[str]],
    bound: float,
    bounds: Sequence[str] = (TRUE_LENGTHS, SOLO),
) -> list[Goal]:
    """A goal for the factor of a metric against another policy's on some points; none without
    rows."""
    metric, other, points = compared
    value = factor(rows, metric, STERNA, other, points)
    if value is None:
        return []
    text = f"{value} times better"
    if not value.at_least(bound):
        factors = {each: factor(rows, metric, each, other, points) for each in bounds}
        text = _with_bounds(text, factors)
    return [Goal(name, f"{bound:g}", text, value.at_least(bound))]


def _all_of(*verdicts: bool | None) -> bool | None:
    """The verdict on several goals in one."""
    return False if False in verdicts else None if None in verdicts else True


def _with_bounds(text: str, values: Mapping[str, str | Estimate | None]) -> str:
    """What was found, with what references have in its place."""
    known = [
        f"*{name}*: {value if isinstance(value, str) else f'{value.mean:.2f}'}"
        for name, value in values.items()
        if value is not None
    ]
    return f"{text} ({'; '.join(known)})" if known else text
