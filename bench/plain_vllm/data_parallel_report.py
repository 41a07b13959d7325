"""Report of `sterna bench data-parallel`: tables and goals for each number of replicas. Pure, from
rows alone."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from bench.common.comparison import Estimate, factor
from bench.common.pages import Goal, goal_list
from bench.common.tables import Row, cell, markdown_table, number, rounded, span
from bench.plain_vllm.sides import SIDES, STERNA, VLLM, VLLM_LEAN

AS_THEY_COME, AT_ONCE = "as they come", "at once"
LOADS = (AS_THEY_COME, AT_ONCE)
"""How requests are sent: at a rate that the replicas carry, or all together."""

SHOWN: Mapping[str, tuple[str, float]] = {
    "ttft_mean_s": ("TTFT mean [s]", 1),
    "ttft_p99_s": ("P99 [s]", 1),
    "tpot_mean_s": ("TPOT mean [ms]", 1000),
    "tpot_p99_s": ("P99 [ms]", 1000),
    "gap_max_s": ("largest gap [s]", 1),
    "request_mean_s": ("request mean [s]", 1),
    "makespan_s": ("all done after [s]", 1),
    "output_tokens_per_s": ("tokens/s", 1),
    "start_s": ("start [s]", 1),
    "failed": ("failed", 1),
}

COMPARED = ("ttft_mean_s", "ttft_p99_s", "tpot_mean_s", "tpot_p99_s", "request_mean_s")

OF_VLLM = (VLLM_LEAN, VLLM)


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Sterna against vLLM's replicas: `throughput_ratio` of output tokens a second when requests
    come at once, `ttft_p99_ratio` as they come (above 1 is better), of each number of replicas
    against each of vLLM's sides; and the goals."""
    ratios = [
        {
            "replicas": num_replicas,
            "side": name,
            "throughput_ratio": _mean(_throughput_ratio(of_number, name)),
            "ttft_p99_ratio": _mean(_ratio(of_number, AS_THEY_COME, "ttft_p99_s", name)),
        }
        for num_replicas, of_number in _by_number(rows)
        for name in OF_VLLM
        if any(row["side"] == name for row in of_number)
    ]
    return {"ratios": ratios, "goals": [asdict(each) for each in goals(rows)]}


def whole(rows: Sequence[Row], sides: Collection[str]) -> list[Row]:
    """The rows without those of these sides where one of them lacks: sides are compared as they run
    one after the other, and are measured together again."""

    def group(row: Row) -> tuple[int, int, str]:
        return row["replicas"], row["seed"], row["load"]

    found = Counter(group(row) for row in rows if row["side"] in sides)
    return [row for row in rows if row["side"] not in sides or found[group(row)] == len(sides)]


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Throughput at least equal, and P99 TTFT better, than those of vLLM's replicas."""
    found = []
    for num_replicas, of_number in _by_number(rows):
        for name in OF_VLLM:
            of_what = f"{num_replicas} replicas, against {name}"
            if (ratio := _throughput_ratio(of_number, name)) is not None:
                what = f"{of_what}: output tokens a second, requests {AT_ONCE}"
                is_reached = ratio.at_least(1.0)
                found.append(Goal(what, "at least 1", f"{ratio} times as many", is_reached))
            if (ratio := _ratio(of_number, AS_THEY_COME, "ttft_p99_s", name)) is not None:
                what = f"{of_what}: P99 TTFT, requests {AS_THEY_COME}"
                found.append(Goal(what, "better", f"{ratio} times better", ratio.at_least(1.0)))
    return found


def markdown(rows: Sequence[Row]) -> str:
    """All tables."""
    known = [each for each in SIDES.values() if any(row["side"] == each.name for row in rows)]
    parts = ["\n".join(f"- **{each.name}**: {each.says}" for each in known)]
    for num_replicas, of_number in _by_number(rows):
        for load in LOADS:
            of_load = [row for row in of_number if row["load"] == load]
            if of_load:
                rounds = Counter(row["side"] for row in of_load)
                parts += [
                    f"**{num_replicas} replicas, requests {load}**, means over "
                    f"{span(rounds.values())} rounds:",
                    _absolute(of_load),
                    f"{STERNA} against the others, with 90 % intervals over the rounds; above 1 is "
                    "better:",
                    _factors(of_load),
                ]
    if found := goals(rows):
        parts.append(goal_list([asdict(each) for each in found]))
    return "\n\n".join(parts)


def _by_number(rows: Sequence[Row]) -> list[tuple[int, list[Row]]]:
    numbers = sorted({row["replicas"] for row in rows})
    return [(each, [row for row in rows if row["replicas"] == each]) for each in numbers]


def _throughput_ratio(rows: Sequence[Row], name: str) -> Estimate | None:
    # Of two throughputs the factor is the other's over Sterna's.
    ratio = _ratio(rows, AT_ONCE, "output_tokens_per_s", name)
    return None if ratio is None else Estimate(1 / ratio.mean, 1 / ratio.high, 1 / ratio.low)


def _ratio(rows: Sequence[Row], load: str, metric: str, name: str) -> Estimate | None:
    alike = [{**row, "point": "", "policy": row["side"]} for row in rows if row["load"] == load]
    return factor(alike, metric, STERNA, name, [""])


def _mean(ratio: Estimate | None) -> float | None:
    return None if ratio is None else rounded(ratio.mean)


def _absolute(rows: Sequence[Row]) -> str:
    lines = []
    for name in dict.fromkeys(row["side"] for row in rows):
        of_side = [row for row in rows if row["side"] == name]
        cells = [
            number(fmean(values) * scale) if values else ""
            for column, (_, scale) in SHOWN.items()
            for values in [[row[column] for row in of_side if row[column] is not None]]
        ]
        lines.append([name, *cells])
    return markdown_table(["", *(name for name, _ in SHOWN.values())], lines)


def _factors(rows: Sequence[Row]) -> str:
    alike = [{**row, "point": "", "policy": row["side"]} for row in rows]
    lines = []
    for name in dict.fromkeys(row["side"] for row in rows):
        if name != STERNA:
            found = [factor(alike, metric, STERNA, name, [""]) for metric in COMPARED]
            lines.append([name, *map(cell, found)])
    return markdown_table(["", *(SHOWN[each][0].partition(" [")[0] for each in COMPARED)], lines)
