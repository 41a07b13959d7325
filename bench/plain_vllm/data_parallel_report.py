"""The results of `sterna bench data-parallel`: tables for each number of replicas. Pure, from rows
alone."""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean

from bench.common.comparison import factor
from bench.common.tables import Row, markdown_table, number, span
from bench.plain_vllm.sides import SIDES, STERNA

SHOWN: Mapping[str, tuple[str, float]] = {
    "ttft_mean_s": ("TTFT mean [s]", 1),
    "ttft_p99_s": ("P99 [s]", 1),
    "tpot_mean_s": ("TPOT mean [ms]", 1000),
    "tpot_p99_s": ("P99 [ms]", 1000),
    "gap_max_s": ("largest gap [s]", 1),
    "request_mean_s": ("request mean [s]", 1),
    "makespan_s": ("all done after [s]", 1),
    "start_s": ("start [s]", 1),
    "failed": ("failed", 1),
}

COMPARED = ("ttft_mean_s", "ttft_p99_s", "tpot_mean_s", "tpot_p99_s", "request_mean_s")


def markdown(rows: Sequence[Row]) -> str:
    """All tables."""
    known = [each for each in SIDES.values() if any(row["side"] == each.name for row in rows)]
    parts = ["\n".join(f"- **{each.name}**: {each.says}" for each in known)]
    for num_replicas in sorted({row["replicas"] for row in rows}):
        of_number = [row for row in rows if row["replicas"] == num_replicas]
        rounds = Counter(row["side"] for row in of_number)
        parts += [
            f"**{num_replicas} replicas**, means over {span(rounds.values())} rounds:",
            _absolute(of_number),
            f"{STERNA} against the others, with 90 % intervals over the rounds; above 1 is better:",
            _factors(of_number),
        ]
    return "\n\n".join(parts)


def _absolute(rows: Sequence[Row]) -> str:
    lines = []
    for name in dict.fromkeys(row["side"] for row in rows):
        of_side = [row for row in rows if row["side"] == name]
        cells = [
            number(fmean(row[column] for row in of_side if row[column] is not None) * scale)
            for column, (_, scale) in SHOWN.items()
        ]
        lines.append([name, *cells])
    return markdown_table(["", *(name for name, _ in SHOWN.values())], lines)


def _factors(rows: Sequence[Row]) -> str:
    alike = [{**row, "point": "", "policy": row["side"]} for row in rows]
    lines = []
    for name in dict.fromkeys(row["side"] for row in rows):
        if name != STERNA:
            found = [factor(alike, metric, STERNA, name, [""]) for metric in COMPARED]
            lines.append([name, *("" if each is None else str(each) for each in found)])
    return markdown_table(["", *(SHOWN[each][0].partition(" [")[0] for each in COMPARED)], lines)
