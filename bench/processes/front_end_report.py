"""The results of `sterna bench front-end`: costs, shares of a profile, tables. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from bench.common.comparison import INTERVALS, Middle
from bench.common.pages import Goal, goal_list
from bench.common.tables import Row, markdown_table, number, rounded
from bench.plain_vllm.sides import STERNA, VLLM
from bench.processes import equal_streams

SHORT, LONG = equal_streams.SHORT.name, equal_streams.LONG.name

LEAST_VLLM_SHARE = 0.8
"""Of what a token costs: then the rest is vLLM's, and no work on Sterna's code makes much of a
difference."""

MOST_FRONT_ENDS, MOST_SCALED = 4, 1.1
"""With this number of front ends a token may take this factor of the processor time with one."""

PARTS: Mapping[str, str] = {
    "sterna/": "Sterna",
    "vllm/": "vLLM",
    "uvicorn/": "HTTP",
    "starlette/": "HTTP",
    "fastapi/": "HTTP",
    "anyio/": "HTTP",
    "httptools/": "HTTP",
    "pydantic": "JSON",
    "prometheus_client": "metrics",
    "zmq/": "sockets",
    "asyncio/": "event loop",
    "threading.py": "event loop",
}
"""The part to which a stack belongs, by the innermost of its files that is named here."""

IDLE = ("Worker.main_loop", "Condition.wait", "_worker (concurrent")
"""The last functions of threads that wait."""


def shares(stacks: Iterable[str]) -> dict[str, float]:
    """The share of each part in the stacks that py-spy has seen: lines of frames, the outermost one
    first, and how often."""
    counts: Counter[str] = Counter()
    for line in stacks:
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        if any(each in frames[-1] for each in IDLE):
            continue
        counts[_part(frames)] += int(count)
    total = sum(counts.values())
    return {part: round(count / total, 4) for part, count in counts.most_common()} if total else {}


def _part(frames: Sequence[str]) -> str:
    for frame in reversed(frames):
        for name, part in PARTS.items():
            if name in frame:
                return part
    return "other"


def costs(rows: Sequence[Row], side: str) -> dict[int, tuple[float, float]]:
    """Microseconds for a request and for a token, by round."""
    found = {}
    for seed in sorted({row["seed"] for row in rows}):
        loads = {row["load"]: row for row in rows if row["seed"] == seed and row["side"] == side}
        if SHORT in loads and LONG in loads:
            both = [loads[SHORT], loads[LONG]]
            counts = np.array([[row["n"], row["tokens"]] for row in both], float)
            request_s, token_s = np.linalg.solve(counts, [row["cpu_s"] for row in both])
            found[seed] = (1e6 * float(request_s), 1e6 * float(token_s))
    return found


def compared(rows: Sequence[Row]) -> dict[str, Middle]:
    """Sterna's costs over vLLM's, and vLLM's share of a token's cost: medians over pairs."""
    ours, theirs = costs(rows, STERNA), costs(rows, VLLM)
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return {}
    return {
        "request": Middle.of([ours[seed][0] / theirs[seed][0] for seed in seeds]),
        "token": Middle.of([ours[seed][1] / theirs[seed][1] for seed in seeds]),
        "share": Middle.of([theirs[seed][1] / ours[seed][1] for seed in seeds]),
    }


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Medians over rounds and pairs."""
    ratios = compared(rows)
    values: dict[str, Any] = {
        f"{name}_ratio": rounded(ratios[name].median) for name in ("request", "token") if ratios
    }
    for side in (STERNA, VLLM):
        if found := list(costs(rows, side).values()):
            request_us, token_us = np.median(found, axis=0)
            values[f"{side}_request_us"] = rounded(float(request_us))
            values[f"{side}_token_us"] = rounded(float(token_us))
    return {**values, "goals": [asdict(each) for each in goals(rows)]}


def goals(rows: Sequence[Row]) -> list[Goal]:
    """What is to be reached."""
    found = []
    if ratios := compared(rows):
        share = ratios["share"]
        found.append(
            Goal(
                "vLLM's share of what a token costs", f"at least {LEAST_VLLM_SHARE:g}",
                share.text(2), share.at_least(LEAST_VLLM_SHARE),
            )
        )  # fmt: skip
    if many := [row for row in rows if row["n"] >= 5_000]:
        failed = sum(row["failed"] for row in many)
        most_open = max(row.get("most_open", 0) for row in many)
        at_once = f", and {most_open:,} were open at one time" if most_open else ""
        # Rows of earlier programs do not say how many were open.
        is_reached = failed == 0 and (most_open == 0 or most_open >= 5_000)
        name = "5,000 streams at once: failed"
        found.append(Goal(name, "none", f"{failed}{at_once}", is_reached))
    return [*found, *_scaling_goals(rows)]


def _scaling_goals(rows: Sequence[Row]) -> list[Goal]:
    """Several front ends, each with as many streams as a single one, serve as many times as many
    tokens with as many times the processor time."""
    costs_s = {
        (row["instances"], row["n"] // row["front_ends"], row["front_ends"]): row["cpu_s"]
        / row["tokens"]
        for row in rows
        if "instances" in row
    }
    ratios = [
        costs_s[instances, streams, MOST_FRONT_ENDS] / one_s
        for (instances, streams, number), one_s in costs_s.items()
        if number == 1 and (instances, streams, MOST_FRONT_ENDS) in costs_s
    ]
    return [
        Goal(
            f"a token's processor time with {MOST_FRONT_ENDS} front ends, over that with one",
            f"at most {MOST_SCALED:g}", f"{ratio:.2f}", ratio <= MOST_SCALED,
        )
        for ratio in ratios
    ]  # fmt: skip


def markdown(rows: Sequence[Row]) -> str:
    """All tables."""
    num_rounds = len({row["seed"] for row in rows})
    ratios = compared(rows)
    lines = []
    for side in (VLLM, STERNA):
        found = list(costs(rows, side).values())
        if not found:
            continue
        request_us, token_us = (float(each) for each in np.median(found, axis=0))
        is_ours = side == STERNA and bool(ratios)
        lines.append(
            [
                side,
                number(request_us),
                ratios["request"].text(2) if is_ours else "",
                number(token_us),
                ratios["token"].text(2) if is_ours else "",
                number(1e6 / token_us),
                number(_tokens_a_chunk(row for row in rows if _is_of(row, side, LONG))),
            ]
        )
    parts = [
        f"Processor time of the HTTP process, medians over {num_rounds} pairs of runs; ratios with "
        f"{INTERVALS}:",
        markdown_table(
            (
                *("server", "a request [us]", "ratio", "a token [us]", "ratio"),
                *("tokens/s and core", "tokens a chunk"),
            ),
            lines,
        ),
    ]
    if emulated := [row for row in rows if "instances" in row]:
        parts.append("Sterna with emulated instances; requests are included in the time of tokens:")
        header = (
            *("load", "tokens/s", "a token [us]", "tokens/s and core", "tokens a chunk"),
            *("memory of front ends [MiB]", "open at once", "failed"),
        )
        parts.append(markdown_table(header, map(_emulated_line, emulated)))
    for row in rows:
        if row.get("profile"):
            text = ", ".join(f"{part} {share:.0%}" for part, share in row["profile"].items())
            parts.append(f"Profile of `{row['side']}`, {row['load']}: {text}.")
    parts.append(goal_list([asdict(each) for each in goals(rows)]))
    return "\n\n".join(parts)


def _emulated_line(row: Row) -> list[str]:
    return [
        row["load"],
        number(row["tokens"] / row["duration_s"]),
        number(1e6 * row["cpu_s"] / row["tokens"]),
        number(row["tokens"] / row["cpu_s"]),
        number(_tokens_a_chunk([row])),
        number(row["memory_bytes"] / 2**20),
        number(row.get("most_open")),
        str(row["failed"]),
    ]


def _is_of(row: Row, side: str, load: str) -> bool:
    return bool(row["side"] == side and row["load"] == load)


def _tokens_a_chunk(rows: Iterable[Row]) -> float | None:
    """Tokens in a chunk that a client gets, in the mean; None where older rows lack it. Above 1
    the front end was late, and had less to do for a token."""
    counted = [row for row in rows if row.get("chunks")]
    if not counted:
        return None
    return float(sum(row["tokens"] for row in counted) / sum(row["chunks"] for row in counted))
