"""Markdown tables from rows."""

from collections.abc import Mapping, Sequence

from bench.common.tables import Row, markdown_table, number
from bench.paper.claims import UNTESTED, Claim, Kind

METRIC_NAMES = {
    "request_p99_s": "request P99 [s]",
    "request_mean_s": "request mean [s]",
    "prefill_p99_s": "prefill P99 [s]",
    "prefill_mean_s": "prefill mean [s]",
    "decode_p99_s": "decode P99 [s/token]",
    "decode_mean_s": "decode mean [s/token]",
    "decode_execution_request_s": "decode execution [s]",
    "preemption_loss_s": "preemption loss [s]",
    "avg_instances": "instances",
}


def short_name(metric: str) -> str:
    """The metric's name without its unit."""
    return METRIC_NAMES[metric].partition(" [")[0]


def points_table(
    rows: Sequence[Row], paper: Sequence[Row], labels: Mapping[str, str], metrics: Sequence[str]
) -> str:
    """A line for each point: ours / the paper's (ratio) for every metric.

    Args:
        labels: the columns that identify a point, and their headings.
    """
    theirs = {tuple(row[name] for name in labels): row for row in paper}
    lines = []
    for row in rows:
        key = tuple(row[name] for name in labels)
        cells = [_versus(row[each], theirs.get(key, {}).get(each)) for each in metrics]
        lines.append([*(_label(each) for each in key), *cells])
    header = [*labels.values(), *(METRIC_NAMES[each] for each in metrics)]
    return markdown_table(header, lines, len(labels))


def claims_table(claims: Sequence[Claim]) -> str:
    """A line for each claim: the paper's number, ours, mean and range over seeds, the verdict."""
    num_seeds = max((len(each.over_seeds) for each in claims), default=0)
    over = f"ours over {num_seeds} seeds" if num_seeds else "ours over seeds"
    header = ["claim", "section", "paper", "ours", over, "verdict"]
    return markdown_table(header, [claim_cells(each, num_seeds) for each in claims], 2)


def claim_cells(claim: Claim, num_seeds: int) -> list[str]:
    """Claim, section, paper, ours, over seeds, verdict.

    Args:
        num_seeds: the seeds that were run; a claim with fewer values shows their number.
    """
    return [
        claim.text + (f" *({claim.note})*" if claim.note else ""),
        claim.section,
        _amount(claim, claim.paper),
        _amount(claim, claim.ours),
        _over_seeds(claim, num_seeds),
        _verdict(claim.verdict),
    ]


def _versus(ours: float | None, paper: float | None) -> str:
    if ours is None or paper is None:
        return number(ours)
    ratio = f"{ours / paper:.2f}" if paper else "-"
    return f"{number(ours)} / {number(paper)} ({ratio})"


def _label(value: object) -> str:
    return f"{value:g}" if isinstance(value, float | int) else str(value)


def _over_seeds(claim: Claim, num_seeds: int) -> str:
    mean = claim.mean_over_seeds
    if mean is None:
        return ""
    low, high = min(claim.over_seeds), max(claim.over_seeds)
    text = f"{_amount(claim, mean)} [{_amount(claim, low)}, {_amount(claim, high)}]"
    found = len(claim.over_seeds)
    return text if found == num_seeds else f"{text} ({found} of {num_seeds})"


def _amount(claim: Claim, value: float | None) -> str:
    if value is None:
        return ""
    if claim.kind is Kind.FACTOR:
        return f"{number(value)}×"
    if claim.kind in (Kind.REDUCTION, Kind.AT_LEAST) or claim.unit == "%":
        sign = "−" if claim.kind is Kind.REDUCTION and value >= 0 else ""
        return f"{sign}{100 * abs(value):.1f} %" if sign else f"{100 * value:.1f} %"
    return f"{number(value)} {claim.unit}".strip()


def _verdict(verdict: str) -> str:
    return verdict if verdict in (UNTESTED, "reproduced") else f"**{verdict}**"
