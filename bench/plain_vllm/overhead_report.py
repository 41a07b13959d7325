"""The results of `sterna bench overhead`: tables, a summary and goals. Pure, from rows alone."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from bench.common.comparison import INTERVALS, Middle
from bench.common.pages import Goal, goal_list
from bench.common.tables import Row, markdown_table, number, rounded
from bench.plain_vllm.sides import STERNA, VLLM

LEAST_THROUGHPUT, LEAST_BUSY_THROUGHPUT = 0.99, 0.95
MOST_TTFT_MS, MOST_TPOT, MOST_IDLE_CORES = 2.0, 1.01, 0.03

SUMMARY_MODE, SUMMARY_LOAD = "compiled", "128 tokens, half the rate"
"""The load whose TTFT and TPOT stand in the summary."""


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Sterna against plain vLLM, from the loads for which there is a pair of runs.

    `throughput_ratio` is that of output tokens a second on saturated servers, and
    `busy_throughput_ratio` that beside a busy core: means of the medians of their loads.
    `ttft_added_ms` and `tpot_ratio` are the medians of one load, `SUMMARY_LOAD` in `SUMMARY_MODE`.
    """
    rows = steady(rows)
    found: dict[str, list[float]] = {}
    for row in _first_rows(rows):
        compared = _compared(rows, row["mode"], row["load"])
        if compared is None:
            continue
        if row["with_busy_core"]:
            found.setdefault("busy_throughput_ratio", []).append(compared["throughput"].median)
        elif row["is_saturated"]:
            found.setdefault("throughput_ratio", []).append(compared["throughput"].median)
        elif (row["mode"], row["load"]) == (SUMMARY_MODE, SUMMARY_LOAD):
            found["ttft_added_ms"] = [compared["ttft"].median]
            found["tpot_ratio"] = [compared["tpot"].median]
    means = {name: rounded(sum(values) / len(values)) for name, values in found.items()}
    idle = _middle_of(rows, STERNA, "idle_cores")
    return {**means, "idle_cores": rounded(idle), "goals": [asdict(each) for each in goals(rows)]}


def paired(rows: Sequence[Row]) -> list[Row]:
    """The rows of which the other server has one as well."""
    num_sides = Counter(map(_pair_of, rows))
    return [row for row in rows if num_sides[_pair_of(row)] > 1]


def steady(rows: Sequence[Row]) -> list[Row]:
    """Those of pairs that count: the machine kept its speed, and no request failed."""
    failing = {_pair_of(row) for row in rows if row.get("failed")}
    return [row for row in rows if row.get("is_steady", True) and _pair_of(row) not in failing]


def counted(rows: Sequence[Row], mode: str, seed: int) -> set[str]:
    """The loads of a round with a pair of runs that counts."""
    return {row["load"] for row in steady(rows) if (row["mode"], row["seed"]) == (mode, seed)}


def replaced(rows: Sequence[Row], pair: Sequence[Row]) -> list[Row]:
    """The rows with this pair, in place of an earlier one of the same round and load."""
    new = set(map(_pair_of, pair))
    places = [n for n, row in enumerate(rows) if _pair_of(row) in new]
    kept = [row for n, row in enumerate(rows) if n not in places]
    place = places[0] if places else len(kept)
    return [*kept[:place], *pair, *kept[place:]]


def _pair_of(row: Row) -> tuple[str, int, str]:
    return row["mode"], row["seed"], row["load"]


def markdown(rows: Sequence[Row]) -> str:
    """All tables."""
    left_out = [row for row in rows if row not in steady(rows)]
    num_failed = len({_pair_of(row) for row in left_out if row.get("failed")})
    num_unsteady = len(set(map(_pair_of, left_out))) - num_failed
    rows = steady(rows)
    parts = [
        f"Medians over pairs of runs, with {INTERVALS}; times and tokens in the table are those "
        "of vLLM, then of Sterna:"
    ]
    if num_unsteady:
        parts.insert(
            0,
            f"Of all pairs of runs, {num_unsteady} do not count: the machine's speed changed by "
            "more than a fifth in three attempts. `--continue` measures them once more.",
        )
    if num_failed:
        parts.insert(0, f"Of all pairs of runs, {num_failed} do not count: requests failed.")
    header = (
        *("load", "pairs", "tokens/s", "ratio", "TTFT mean [ms]", "added [ms]", "TPOT mean [ms]"),
        *("ratio", "processor time a token [ms]", "ratio"),
    )
    lines = []
    for row in _first_rows(rows):
        mode, load = row["mode"], row["load"]
        compared = _compared(rows, mode, load)
        if compared is None:
            continue
        both = [
            " / ".join(number(_median(rows, mode, load, side, value)) for side in (VLLM, STERNA))
            for value in (_throughput, _ttft, _tpot, _cpu)
        ]
        ratios = [
            compared["throughput"].text(3),
            compared["ttft"].text(1),
            compared["tpot"].text(3),
            compared["cpu"].text(2),
        ]
        cells = [each for pair in zip(both, ratios, strict=True) for each in pair]
        lines.append([f"{mode}, {load}", str(len(_pairs(rows, mode, load))), *cells])
    parts.append(markdown_table(header, lines))
    parts += _busy_shares(rows)
    parts.append("A server without requests, and the time until it answers:")
    idle_lines = [
        [
            side,
            number(60 * _middle_of(rows, side, "idle_cores")),
            number(_middle_of(rows, side, "memory_bytes") / 2**20),
            *(number(_middle_of(rows, side, "start_s", mode)) for mode in _modes(rows)),
        ]
        for side in (VLLM, STERNA)
    ]
    starts = [f"start, {mode} [s]" for mode in _modes(rows)]
    idle_header = ("server", "processor time a minute [s]", "memory [MiB]", *starts)
    parts.append(markdown_table(idle_header, idle_lines))
    parts.append(goal_list([asdict(each) for each in goals(rows)]))
    return "\n\n".join(parts)


def _busy_shares(rows: Sequence[Row]) -> list[str]:
    """What the programs got that would keep a core busy beside the servers, for each mode."""
    lines = []
    for mode in _modes(rows):
        got = [_middle_of(rows, side, "busy_program_cores", mode) for side in (VLLM, STERNA)]
        if not any(map(math.isnan, got)):
            lines.append(
                f"{mode}: the program that would keep a core busy got {got[0]:.2f} of a core "
                f"beside vLLM, {got[1]:.2f} beside Sterna."
            )
    return lines


def goals(rows: Sequence[Row]) -> list[Goal]:
    """What Sterna may cost at most, for each load, and idle."""
    rows = steady(rows)
    found = []
    for row in _first_rows(rows):
        compared = _compared(rows, row["mode"], row["load"])
        if compared is None:
            continue
        name = f"{row['mode']}, {row['load']}"
        if row["is_saturated"]:
            least = LEAST_BUSY_THROUGHPUT if row["with_busy_core"] else LEAST_THROUGHPUT
            ratio = compared["throughput"]
            found.append(
                Goal(
                    f"{name}: throughput", f"at least {least:g}", ratio.text(3),
                    ratio.at_least(least),
                )
            )  # fmt: skip
        else:
            added, tpot = compared["ttft"], compared["tpot"]
            most = f"at most {MOST_TTFT_MS:g} ms"
            is_reached = added.at_most(MOST_TTFT_MS)
            found.append(Goal(f"{name}: added to TTFT", most, f"{added.text(1)} ms", is_reached))
            most, is_reached = f"at most {MOST_TPOT:g}", tpot.at_most(MOST_TPOT)
            found.append(Goal(f"{name}: TPOT", most, tpot.text(3), is_reached))
    idle = _middle_of(rows, STERNA, "idle_cores")
    if not math.isnan(idle):
        most = f"at most {100 * MOST_IDLE_CORES:g} % of a core"
        found.append(Goal("idle", most, f"{100 * idle:.1f} %", idle <= MOST_IDLE_CORES))
    return found


def _first_rows(rows: Sequence[Row]) -> list[Row]:
    """A row for each mode and load, in the order of their first runs."""
    first: dict[tuple[str, str], Row] = {}
    for row in rows:
        if "tokens_per_s" in row:
            first.setdefault((row["mode"], row["load"]), row)
    return list(first.values())


def _modes(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["mode"] for row in rows))


def _throughput(row: Row) -> float:
    return float(row["tokens_per_s"])


def _ttft(row: Row) -> float:
    return float(row["ttft_mean_ms"])


def _tpot(row: Row) -> float:
    return float(row["tpot_mean_ms"])


def _cpu(row: Row) -> float:
    """Processor time of all of the server's processes for a token, in ms.

    In older rows the time is also that in which the client started and warmed the server up, for
    whose tokens `warm_up_tokens` stands.
    """
    num_tokens = row["tokens_per_s"] * row["duration_s"] + row.get("warm_up_tokens", 0)
    return 1_000 * float(row["server_cpu_s"] / num_tokens)


def throughput_ratio(rows: Sequence[Row], mode: str, load: str) -> float | None:
    """Sterna's tokens a second over those of plain vLLM, the median over pairs; None without
    one."""
    compared = _compared(steady(rows), mode, load)
    return None if compared is None else compared["throughput"].median


def _pairs(rows: Sequence[Row], mode: str, load: str) -> list[tuple[Row, Row]]:
    """The runs of vLLM and of Sterna with the same requests."""
    by_side: dict[str, dict[int, Row]] = {VLLM: {}, STERNA: {}}
    for row in rows:
        if row["mode"] == mode and row["load"] == load:
            by_side[row["side"]][row["seed"]] = row
    seeds = sorted(by_side[VLLM].keys() & by_side[STERNA].keys())
    return [(by_side[VLLM][seed], by_side[STERNA][seed]) for seed in seeds]


def _compared(rows: Sequence[Row], mode: str, load: str) -> dict[str, Middle] | None:
    pairs = _pairs(rows, mode, load)
    if not pairs:
        return None

    def ratio(value: Callable[[Row], float]) -> Middle:
        return Middle.of([value(ours) / value(theirs) for theirs, ours in pairs])

    return {
        "throughput": ratio(_throughput),
        "ttft": Middle.of([_ttft(ours) - _ttft(theirs) for theirs, ours in pairs]),
        "tpot": ratio(_tpot),
        "cpu": ratio(_cpu),
    }


def _median(
    rows: Sequence[Row], mode: str, load: str, side: str, value: Callable[[Row], float]
) -> float:
    values = [
        value(row)
        for row in rows
        if row["mode"] == mode and row["load"] == load and row["side"] == side
    ]
    return float(np.median(values)) if values else math.nan


def _middle_of(rows: Sequence[Row], side: str, name: str, mode: str | None = None) -> float:
    values = [
        row[name]
        for row in rows
        if row["side"] == side and name in row and mode in (None, row["mode"])
    ]
    return float(np.median(values)) if values else math.nan
