"""The results of `sterna bench paced`: a table for each case, and goals. Pure, from rows alone."""

from collections.abc import Mapping, Sequence

from bench.common.comparison import Estimate, factor, mean
from bench.common.pages import Goal
from bench.common.tables import Row, cell, markdown_table, number
from bench.paced.runs import PACED, SIMULATED

BASE = "llumnix"
"""The policy that factors refer to."""

COMPARED = {
    "ttft_mean_s": "TTFT mean",
    "ttft_p99_s": "TTFT P99",
    "tpot_mean_s": "TPOT mean",
    "tpot_p99_s": "TPOT P99",
    "request_mean_s": "request mean",
}

SHOWN: Mapping[str, tuple[str, float]] = {
    "ttft_mean_s": ("TTFT mean [s]", 1),
    "ttft_p99_s": ("P99 [s]", 1),
    "tpot_mean_s": ("TPOT mean [ms]", 1000),
    "tpot_p99_s": ("P99 [ms]", 1000),
    "request_mean_s": ("request mean [s]", 1),
    "makespan_s": ("all done after [s]", 1),
    "prefix_hits": ("hits [%]", 100),
    "preemptions": ("preemptions", 1),
    "migrations": ("moves", 1),
    "late_steps": ("late steps", 1),
    "late_s": ("by [s]", 1),
    "foreign_cores": ("other load [cores]", 1),
}


def markdown(rows: Sequence[Row]) -> str:
    """All tables."""
    parts = []
    for case in dict.fromkeys(row["point"] for row in rows):
        of_case = [row for row in rows if row["point"] == case]
        paced = [row for row in of_case if row["kind"] == PACED]
        num_rounds = len({row["seed"] for row in paced})
        machines = "; ".join(dict.fromkeys(row["machine"] for row in paced))
        parts += [
            f"**{case}** ({of_case[0]['case']}), {num_rounds} rounds on {machines}; below each "
            "number, in brackets, what the simulator predicts for the same requests:",
            _absolute(of_case),
            f"Against `{BASE}`, with 90 % intervals over the rounds; above 1 is better:",
            _factors(of_case),
            "Predicted over measured, likewise; above 1 the simulator is the slower one:",
            _predictions(of_case),
        ]
    return "\n\n".join(parts)


def goals(rows: Sequence[Row]) -> list[Goal]:
    """The simulator predicts each policy's mean request latency."""
    found = []
    for case in dict.fromkeys(row["point"] for row in rows):
        paced = [row for row in rows if row["point"] == case and row["kind"] == PACED]
        for policy in dict.fromkeys(row["policy"] for row in paced):
            real, predicted = _means(rows, "request_mean_s", policy, case)
            if real and predicted:
                ratio = predicted / real
                name = f"{case}, `{policy}`: predicted over measured mean request latency"
                found.append(Goal(name, "0.9 to 1.1", f"{ratio:.2f}", 0.9 <= ratio <= 1.1))
    return found


def _policies(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["policy"] for row in rows))


def _absolute(rows: Sequence[Row]) -> str:
    case = rows[0]["point"]
    lines = []
    for policy in _policies(rows):
        cells = []
        for column, (_, scale) in SHOWN.items():
            real, predicted = _means(rows, column, policy, case)
            text = number(None if real is None else real * scale)
            if predicted is not None:
                text += f"<br>({number(predicted * scale)})"
            cells.append(text)
        lines.append([f"`{policy}`", *cells])
    return markdown_table(["policy", *(name for name, _ in SHOWN.values())], lines)


def _factors(rows: Sequence[Row]) -> str:
    paced = [row for row in rows if row["kind"] == PACED]
    case = rows[0]["point"]
    lines = [
        [
            f"`{policy}`",
            *(cell(factor(paced, metric, policy, BASE, [case])) for metric in COMPARED),
        ]
        for policy in _policies(paced)
        if policy != BASE
    ]
    return markdown_table(["policy", *COMPARED.values()], lines)


def _predictions(rows: Sequence[Row]) -> str:
    case = rows[0]["point"]
    lines = [
        [f"`{policy}`", *(cell(predicted(rows, metric, case, policy)) for metric in COMPARED)]
        for policy in _policies(rows)
    ]
    return markdown_table(["policy", *COMPARED.values()], lines)


def predicted(rows: Sequence[Row], metric: str, case: str, policy: str) -> Estimate | None:
    """What the simulator predicts over what was measured, round by round."""
    kinds = [
        {**row, "policy": row["kind"]}
        for row in rows
        if (row["point"], row["policy"]) == (case, policy)
    ]
    return factor(kinds, metric, PACED, SIMULATED, [case])


def _means(
    rows: Sequence[Row], metric: str, policy: str, case: str
) -> tuple[float | None, float | None]:
    """The means of what was measured, and of what the simulator predicts."""
    real, predicted = (
        mean([row for row in rows if row["kind"] == kind], metric, policy, case)
        for kind in (PACED, SIMULATED)
    )
    return real, predicted
