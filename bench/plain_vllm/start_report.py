"""Results of `sterna bench start`: a table and a summary. Pure, from rows alone."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from bench.common.comparison import INTERVALS, Middle
from bench.common.tables import Row, markdown_table, number, rounded
from bench.plain_vllm.sides import STERNA, VLLM

COLD, WARM, EAGER = "compiles", "compiled before", "eager"
MODES = (COLD, WARM, EAGER)

STAGES = ("options_s", "engines_s", "ready_s", "first_token_s")
"""When each ends, from the command on."""


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Sterna's time to the first token over that of plain vLLM: medians over pairs of runs."""
    ratios = {}
    for replicas, mode in _kinds(rows):
        if (ratio := _ratio(rows, replicas, mode)) is not None:
            ratios[f"{replicas}, {mode}"] = rounded(ratio.median)
    return {"first_token_ratio": ratios}


def paired(rows: Sequence[Row]) -> list[Row]:
    """The rows of those starts of which the other server has one as well, of the same round."""
    sides: dict[tuple[int, int], set[str]] = {}
    for row in rows:
        sides.setdefault((row["replicas"], row["seed"]), set()).add(row["side"])
    return [row for row in rows if len(sides[row["replicas"], row["seed"]]) > 1]


def markdown(rows: Sequence[Row]) -> str:
    """The table of the page."""
    lines = []
    for replicas, mode in _kinds(rows):
        ratio = _ratio(rows, replicas, mode)
        for side in (VLLM, STERNA):
            chosen = _of(rows, replicas, mode, side)
            if not chosen:
                continue
            cells = [number(_median(chosen, stage)) for stage in STAGES]
            text = ratio.text(2) if ratio is not None and side == STERNA else ""
            lines.append([f"{replicas}, {mode}", side, str(len(chosen)), *cells, text])
    header = (
        *("instances", "server", "starts", "options read after [s]", "engines ready [s]"),
        *("answers [s]", "first token [s]", "ratio"),
    )
    return "\n\n".join(
        [
            "Medians over starts; the ratio is that of the times to the first token, over pairs of "
            f"starts, with {INTERVALS}:",
            markdown_table(header, lines, num_text=2),
        ]
    )


def _kinds(rows: Sequence[Row]) -> list[tuple[int, str]]:
    replicas = sorted({row["replicas"] for row in rows})
    modes = [each for each in MODES if any(row["mode"] == each for row in rows)]
    return [(each, mode) for each in replicas for mode in modes]


def _of(rows: Sequence[Row], replicas: int, mode: str, side: str) -> list[Row]:
    wanted = (replicas, mode, side)
    return [row for row in rows if (row["replicas"], row["mode"], row["side"]) == wanted]


def _median(rows: Sequence[Row], stage: str) -> float | None:
    values = [row[stage] for row in rows if row.get(stage) is not None]
    return median(values) if values else None


def _ratio(rows: Sequence[Row], replicas: int, mode: str) -> Middle | None:
    times = {
        side: {row["seed"]: row["first_token_s"] for row in _of(rows, replicas, mode, side)}
        for side in (STERNA, VLLM)
    }
    pairs = times[STERNA].keys() & times[VLLM].keys()
    if not pairs:
        return None
    return Middle.of([times[STERNA][seed] / times[VLLM][seed] for seed in sorted(pairs)])
