"""Goals of the comparison of policies, with the values of the references in their place. Pure."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from bench.common.comparison import Estimate, best, estimate, factor, mean
from bench.common.pages import Goal
from bench.common.tables import Row
from bench.policies.contenders import (
    AHEAD,
    BY_FREENESS,
    DERIVED,
    FREE_MOVES,
    LLUMNIX,
    POOLED,
    SOLO,
    STERNA,
    TRUE_LENGTHS,
)
from bench.policies.families import (
    FAMILIES,
    OVERLOADED,
    PREFIXES,
    REASONING_RATE,
    REASONING_RATES,
    ROLLOUTS,
    SCALING_STEPS,
    SESSIONS,
    reasoning_point,
    scaling_point,
)
from bench.policies.measures import HIGH_METRICS, METRICS, THIRD_METRICS, policies_of
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

BEST_PEER = "the best of others"


@dataclass(frozen=True, slots=True)
class PolicyGoal(Goal):
    """A goal of Sterna's policy.

    Attributes:
        shares: how much of the goal Sterna's policy has, and each reference in its place: the mean,
            and the bounds of its interval if there is one. The goal is 1, and more is better.
    """

    shares: Mapping[str, Sequence[float]] = field(default_factory=dict)


def goals(rows: Sequence[Row]) -> list[PolicyGoal]:
    """What Sterna's policy is to reach, for the families that have rows."""
    found: list[PolicyGoal] = []
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


def _paper_goals(rows: Sequence[Row]) -> list[PolicyGoal]:
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


def _cluster_goals(rows: Sequence[Row]) -> list[PolicyGoal]:
    found: list[PolicyGoal] = []
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


def _collapse_goals(rows: Sequence[Row]) -> list[PolicyGoal]:
    """Beyond the sustainable rate all policies work off what has come, without a collapse."""
    # The other way round: of more tokens a second the factor is the policy's over the other's.
    tokens = factor(rows, "output_tokens_per_s", LLUMNIX, STERNA, [OVERLOADED])
    if tokens is None:
        return []
    name = f"{OVERLOADED}: output tokens a second against Llumnix's"
    text, shares = f"{tokens} times as many", _shares(0.98, {STERNA: tokens})
    return [PolicyGoal(name, "at least 0.98", text, tokens.at_least(0.98), shares)]


def _third_goals(rows: Sequence[Row], point: str) -> list[PolicyGoal]:
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


def _scaling_goals(rows: Sequence[Row]) -> list[PolicyGoal]:
    """Fewer instance-seconds at no larger P99: the fewest among the thresholds at which the P99 is
    at most that of Llumnix at the default ones."""
    points = [scaling_point(*each) for each in SCALING_STEPS]
    scaling = ScalingConfig()
    default = scaling_point(scaling.low_freeness_steps, scaling.high_freeness_steps)
    known = [
        {**each, "used_s": each["instances_avg"] * each["makespan_s"]}
        for each in rows
        if each["point"] in points and each.get("instances_avg") is not None
    ]
    if mean(known, "used_s", LLUMNIX, default) is None:
        return []

    def share(rows: Sequence[Row], policy: str) -> float | None:
        limit_s = mean(rows, "ttft_p99_s", LLUMNIX, default)
        theirs_s = mean(rows, "used_s", LLUMNIX, default)
        if limit_s is None or theirs_s is None:
            return None
        found_s = [
            used_s
            for point in points
            if (p99_s := mean(rows, "ttft_p99_s", policy, point)) is not None and p99_s <= limit_s
            if (used_s := mean(rows, "used_s", policy, point)) is not None
        ]
        return min(found_s) / theirs_s if found_s else None

    ours = _estimate(known, share, STERNA, LLUMNIX)
    oracle = _estimate(known, share, TRUE_LENGTHS, LLUMNIX)
    text = "at no threshold" if ours is None else str(ours)
    is_reached = ours is not None and ours.at_most(0.9)
    if not is_reached:
        text = _with_bounds(text, {TRUE_LENGTHS: oracle})
    name = "auto-scaling: instance-seconds at no larger TTFT P99 than Llumnix's"
    shares = _shares(0.9, {STERNA: ours, TRUE_LENGTHS: oracle}, is_most=True)
    return [PolicyGoal(name, "at most 0.9", text, is_reached, shares)]


def _prefix_goals(rows: Sequence[Row]) -> list[PolicyGoal]:
    peers = _peers(rows)
    dynamo = [each for each in peers if each.startswith("dynamo:")] or ["dynamo"]
    found = []
    for name in [each.name for each in PREFIXES.points]:
        found += _reuse_goals(rows, name)
        found += _both_goals(rows, name, dynamo[0])
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


def _both_goals(rows: Sequence[Row], point: str, dynamo: str) -> list[PolicyGoal]:
    """First tokens as early as the rule that packs prefixes, outputs as fast as even loads."""

    def factors(policy: str) -> tuple[Estimate, Estimate] | None:
        ttft = factor(rows, "ttft_mean_s", policy, dynamo, [point])
        tpot = factor(rows, "tpot_mean_s", policy, "round-robin", [point])
        return None if ttft is None or tpot is None else (ttft, tpot)

    known = {each: both for each in (STERNA, FREE_MOVES, SOLO) if (both := factors(each))}
    if STERNA not in known:
        return []
    ttft, tpot = known[STERNA]
    is_reached = _all_of(ttft.at_least(1.0), tpot.at_least(1.0))
    worse = {each: min(both, key=lambda value: value.mean) for each, both in known.items()}
    text = f"{ttft} and {tpot} times better"
    if not is_reached:
        references = (each for each in worse if each != STERNA)
        text = _with_bounds(text, {f"the worse of both with {x}": worse[x] for x in references})
    return [
        PolicyGoal(
            f"{point}: TTFT mean against `{dynamo}`, and TPOT mean against round robin",
            *("both 1", text, is_reached, _shares(1.0, worse)),
        )
    ]


def _reuse_goals(rows: Sequence[Row], point: str) -> list[PolicyGoal]:
    def share(rows: Sequence[Row], policy: str) -> float | None:
        return mean(rows, "prefix_reuse", policy, point)

    known = [each for each in rows if each["point"] == point]
    ours, pooled = (_estimate(known, share, each) for each in (STERNA, POOLED))
    if ours is None:
        return []
    peer = best(lambda each: -(share(known, each) or 0.0), _peers(rows))
    most = None if peer is None else _estimate(known, share, peer[0])

    def text(reuse: Estimate | None) -> str | None:
        return None if reuse is None else f"{100 * reuse.mean:.1f} %"

    shown = f"{text(ours)} [{100 * ours.low:.1f}, {100 * ours.high:.1f}]"
    is_reached = ours.at_least(0.97)
    if not is_reached:
        shown = _with_bounds(shown, {POOLED: text(pooled), "the most of others": text(most)})
    shares = _shares(0.97, {STERNA: ours, POOLED: pooled, BEST_PEER: most})
    return [PolicyGoal(f"{point}: reuse", "97 %", shown, is_reached, shares)]


def _next_turn_goals(rows: Sequence[Row], point: str) -> list[PolicyGoal]:
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
    shares = _shares(1.1, {STERNA: ours, AHEAD: ahead, FREE_MOVES: free}, is_most=True)
    found = [PolicyGoal(name, "at most 1.1", text, ours.at_most(1.1), shares)]
    # The other way round: of more tokens a second the factor is the policy's over the other's.
    tokens = factor(known, "output_tokens_per_s", STERNA, AHEAD, [point])
    if tokens is not None:
        name = f"{point}: output tokens a second with copies ahead (`{AHEAD}`) over those without"
        verdict, shares = tokens.at_least(0.98), _shares(0.98, {STERNA: tokens})
        found.append(PolicyGoal(name, "at least 0.98", str(tokens), verdict, shares))
    return found


def _imbalance_goals(rows: Sequence[Row], point: str) -> list[PolicyGoal]:
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
    shares = _shares(1.3, {STERNA: ours, FREE_MOVES: free, BY_FREENESS: by_freeness}, is_most=True)
    name = f"{point}: largest over mean load"
    return [PolicyGoal(name, "at most 1.3", text, ours.at_most(1.3), shares)]


def _reasoning_goals(rows: Sequence[Row]) -> list[PolicyGoal]:
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
        verdict, shares = value.at_most(1.1), _shares(1.1, {STERNA: value}, is_most=True)
        found.append(PolicyGoal(name, "at most 1.1", str(value), verdict, shares))
    return found


def _rate_goals(rows: Sequence[Row], point: str, other: str) -> list[PolicyGoal]:
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
        return [PolicyGoal(name, bound, _with_bounds(text, {POOLED: pooled}), None)]
    text = f"{ours} times as many"
    if not ours.at_least(1.15):
        text = _with_bounds(text, {POOLED: pooled})
    shares = _shares(1.15, {STERNA: ours, POOLED: pooled})
    return [PolicyGoal(name, bound, text, ours.at_least(1.15), shares)]


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
    return [each for each in policies_of(rows) if each.partition(":")[0] not in own]


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
) -> list[PolicyGoal]:
    """A goal for the factor of a metric against another policy's on some points; none without
    rows."""
    metric, other, points = compared
    value = factor(rows, metric, STERNA, other, points)
    if value is None:
        return []
    text = f"{value} times better"
    factors = {each: factor(rows, metric, each, other, points) for each in bounds}
    if not value.at_least(bound):
        text = _with_bounds(text, factors)
    shares = _shares(bound, {STERNA: value, **factors})
    return [PolicyGoal(name, f"{bound:g}", text, value.at_least(bound), shares)]


def _shares(
    bound: float, values: Mapping[str, Estimate | None], *, is_most: bool = False
) -> dict[str, list[float]]:
    """See `PolicyGoal`.

    Args:
        is_most: whether values are to be at most the bound.
    """
    found = {}
    for name, value in values.items():
        if value is None:
            continue
        of_value = [value.mean, value.low, value.high]
        shares = [bound / each if is_most else each / bound for each in of_value]
        if is_most:
            shares = [shares[0], shares[2], shares[1]]
        found[name] = [float(f"{each:.5g}") for each in shares if not math.isnan(each)]
    return found


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
