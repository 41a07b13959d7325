"""The numbers of one run. Pure."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bench.common.tables import Row, rounded, statistic
from sterna.metrics.records import Records
from sterna.simulator.runs import SimulationRun
from sterna.types import HIGH

THIRDS = ("short", "middle", "long")

METRICS = {
    "ttft_mean_s": "TTFT mean",
    "ttft_p99_s": "TTFT P99",
    "tpot_mean_s": "TPOT mean",
    "tpot_p99_s": "TPOT P99",
    "request_mean_s": "request mean",
    "request_p99_s": "request P99",
    "loss_mean_s": "preemption loss",
}
"""Of a row, those of which less is better, and their names in the page."""

HIGH_METRICS = {
    "high_ttft_mean_s": "TTFT mean, high priority",
    "high_request_mean_s": "request mean, high priority",
}
"""The same of requests of high priority."""

THIRD_METRICS = {
    f"ttft_{what}_{third}_s": f"TTFT {name}, {third} prompts"
    for third in THIRDS
    for what, name in (("p99", "P99"), ("max", "maximum"))
}
"""The same of each third of the requests by the lengths of their prompts."""


def row_of(run: SimulationRun) -> list[Row]:
    """One row. Durations are in seconds."""
    summary, records = run.summary(), run.records
    duration_s = summary.simulated_s
    high = run.summary(HIGH)
    return [
        {
            "n": summary.num_requests,
            "ttft_mean_s": statistic(summary.ttft_s, "mean"),
            "ttft_p99_s": statistic(summary.ttft_s, "p99"),
            "tpot_mean_s": statistic(summary.tpot_s, "mean"),
            "tpot_p90_s": statistic(summary.tpot_s, "p90"),
            "tpot_p99_s": statistic(summary.tpot_s, "p99"),
            "request_mean_s": statistic(summary.request_s, "mean"),
            "request_p99_s": statistic(summary.request_s, "p99"),
            "high_ttft_mean_s": statistic(high.ttft_s, "mean"),
            "high_tpot_mean_s": statistic(high.tpot_s, "mean"),
            "high_request_mean_s": statistic(high.request_s, "mean"),
            "loss_mean_s": statistic(summary.preemption_loss_s, "mean"),
            "interactivity_mean": statistic(summary.interactivity, "mean"),
            "goodput_ttft": rounded(summary.goodput[0].fraction),
            "goodput_tpot": rounded(summary.goodput[1].fraction),
            "prefix_reuse": rounded(summary.prefix_reuse),
            "imbalance_mean": rounded(summary.imbalance_mean),
            "instances_avg": rounded(summary.instances_avg),
            "makespan_s": rounded(duration_s),
            "output_tokens_per_s": rounded(float(records.output_tokens.sum()) / duration_s),
            "migrations": summary.migrations_committed,
            **by_third(records.first_token_s - records.arrival_s, records.input_tokens),
            **by_reuse(records),
        }
    ]


def by_third(ttft_s: NDArray[np.float64], input_tokens: NDArray[np.int64]) -> Row:
    """`THIRD_METRICS` of these requests."""
    ranks = np.argsort(np.argsort(input_tokens, kind="stable"), kind="stable")
    found: Row = {}
    for index, third in enumerate(THIRDS):
        those = ttft_s[ranks * len(THIRDS) // len(ranks) == index]
        found[f"ttft_p99_{third}_s"] = rounded(float(np.percentile(those, 99)))
        found[f"ttft_max_{third}_s"] = rounded(float(those.max()))
    return found


def by_reuse(records: Records) -> Row:
    """P99 TTFT of the requests of whose prompts an earlier one had a part, and of those that found
    all of it where they ran."""
    reusable, cached = records.reusable_tokens, records.cached_tokens
    if reusable is None or cached is None:
        return {}
    ttft_s = records.first_token_s - records.arrival_s
    again = reusable > 0
    local = again & (cached >= reusable)
    return {
        f"{name}_ttft_p99_s": rounded(float(np.percentile(ttft_s[those], 99)))
        for name, those in (("again", again), ("local", local))
        if those.any()
    }


def policies_of(rows: Sequence[Row]) -> list[str]:
    """The policies and bounds that have rows, in their order."""
    return list(dict.fromkeys(row["policy"] for row in rows))
