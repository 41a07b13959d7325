"""The results of `sterna bench dispatch`: a table, a summary and goals. Pure, from rows alone."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from bench.common.comparison import Middle
from bench.common.pages import Goal, goal_list
from bench.common.tables import Row, markdown_table, number

DEFAULT, WITHOUT_A_LOOK = "sterna", "round-robin"
POLICIES = (DEFAULT, WITHOUT_A_LOOK)

SHOWN: Mapping[str, str] = {
    "decisions_per_s_per_core": "decisions/s and core",
    "decision_median_ms": "a decision, median [ms]",
    "decision_p99_ms": "P99 [ms]",
    "p50_ms": "wait, median [ms]",
    "p99_ms": "P99 [ms]",
    "load_report_us": "a load report [us]",
    "reports_cores": "cores for all reports",
    "round_ms": "a round [ms]",
}

LEAST_DECISIONS = 5_000
MOST_WAIT_MS, MOST_WAIT_P99_MS = 0.5, 3.0
MOST_REPORTS_CORES, MOST_ROUND_MS = 0.25, 5.0
MOST_SLOWDOWN = 1.25
WAIT_INSTANCES = 64


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The default policy's medians over the rounds, for each number of instances."""
    found = [
        {"instances": each, **{name: _median(rows, DEFAULT, each, name) for name in SHOWN}}
        for each in _numbers(rows)
    ]
    return {"instances": found, "goals": [asdict(each) for each in goals(rows)]}


def markdown(rows: Sequence[Row]) -> str:
    """The table and the goals."""
    num_rounds = len({row["seed"] for row in rows})
    lines = [
        [policy, f"{instances:,}"]
        + [number(_median(rows, policy, instances, name)) for name in SHOWN]
        for policy in POLICIES
        for instances in _numbers(rows)
        if _of(rows, policy, instances)
    ]
    return "\n\n".join(
        (
            f"Medians over {num_rounds} rounds:",
            markdown_table(("policy", "instances", *SHOWN.values()), lines),
            *_arrived(rows),
            *_asking(rows),
            goal_list([asdict(each) for each in goals(rows)]),
        )
    )


def _arrived(rows: Sequence[Row]) -> list[str]:
    """The load reports that arrived, of those that were due."""
    counted = [row for row in rows if "reports_due_per_s" in row]
    if not counted:
        return ["In these rows it was not counted how many of the load reports arrived."]
    lines = [
        [
            f"{instances:,}",
            number(due := _median(counted, DEFAULT, instances, "reports_due_per_s")),
            number(100 * _median(counted, DEFAULT, instances, "reports_per_s") / due),
            number(100 * _median(counted, DEFAULT, instances, "asked_reports_per_s") / due),
        ]
        for instances in _numbers(counted)
    ]
    titles = ("instances", "due a second", "arrived [%]", "while requests come [%]")
    return [
        f"Load reports that arrived at the scheduler of `{DEFAULT}`:",
        markdown_table(titles, lines),
    ]


def _asking(rows: Sequence[Row]) -> list[str]:
    """What it costs to know prefix caches, for each request; nothing without such rows."""
    asked = [row for row in rows if "asking_ms" in row]
    if not asked:
        return []
    lines = [
        [
            f"{instances:,}",
            number(_median(asked, DEFAULT, instances, "cache_report_us") / 1e3),
            number(_median(asked, DEFAULT, instances, "reporting_ms")),
            number(_median(asked, DEFAULT, instances, "asking_ms")),
        ]
        for instances in _numbers(asked)
    ]
    titles = (
        "instances",
        "a report, the core alone [ms]",
        "a report, the process [ms]",
        "asking all instances, the process [ms]",
    )
    return [
        "To know prefix caches, processor time for each prompt; that of the process is its "
        "mailbox's, too:",
        markdown_table(titles, lines),
    ]


def goals(rows: Sequence[Row]) -> list[Goal]:
    """What the default policy is to reach, by medians over the rounds and their intervals."""
    numbers = _numbers(rows)
    if not numbers:
        return []
    rates = {each: _by_seed(rows, each, "decisions_per_s_per_core") for each in numbers}
    fewest, most = numbers[0], numbers[-1]
    middles = {each: Middle.of([*of_seed.values()]) for each, of_seed in rates.items()}
    worst = min(middles, key=lambda each: middles[each].median)
    found = [
        Goal(
            "decisions a second and core",
            f"at least {LEAST_DECISIONS:,}",
            f"{middles[worst].text(0)} with {worst:,} instances",
            middles[worst].at_least(LEAST_DECISIONS),
        )
    ]
    if seeds := sorted(rates[fewest].keys() & rates[most].keys()):
        slowdown = Middle.of([rates[fewest][seed] / rates[most][seed] for seed in seeds])
        found.append(
            Goal(
                f"from {fewest:,} to {most:,} instances, a decision takes",
                f"at most {MOST_SLOWDOWN:g} times as long",
                f"{slowdown.text(2)} times as long",
                slowdown.at_most(MOST_SLOWDOWN),
            )
        )
    limits = [
        (f"reports of {most:,} instances", most, "reports_cores", MOST_REPORTS_CORES, "of a core"),
        (f"a round of {most:,} instances", most, "round_ms", MOST_ROUND_MS, "ms"),
    ]
    if WAIT_INSTANCES in numbers:
        wait = f"wait with {WAIT_INSTANCES} instances"
        limits = [
            (f"{wait}, median", WAIT_INSTANCES, "p50_ms", MOST_WAIT_MS, "ms"),
            (f"{wait}, P99", WAIT_INSTANCES, "p99_ms", MOST_WAIT_P99_MS, "ms"),
            *limits,
        ]
    for name, instances, field, limit, unit in limits:
        value = Middle.of([*_by_seed(rows, instances, field).values()])
        text = f"{value.text(2)} {unit}"
        found.append(Goal(name, f"at most {limit:g} {unit}", text, value.at_most(limit)))
    return found


def _numbers(rows: Sequence[Row]) -> list[int]:
    return sorted({row["instances"] for row in rows if row["policy"] == DEFAULT})


def _by_seed(rows: Sequence[Row], instances: int, name: str) -> dict[int, float]:
    """The default policy's value in each round."""
    return {row["seed"]: row[name] for row in _of(rows, DEFAULT, instances)}


def _of(rows: Sequence[Row], policy: str, instances: int) -> list[Row]:
    return [row for row in rows if row["policy"] == policy and row["instances"] == instances]


def _median(rows: Sequence[Row], policy: str, instances: int, name: str) -> float:
    """NaN where older rows do not have it."""
    found = [row[name] for row in _of(rows, policy, instances) if name in row]
    return float(median(found)) if found else math.nan
