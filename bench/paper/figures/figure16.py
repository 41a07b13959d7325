"""Figure 16: cost of scheduling 64 instances under rising rates (Section 6.6).

Measured, in this process: every decision of the production `GlobalScheduler` over 64 instances;
and, by bench/paper/decode_profile.py, the time of vLLM's own scheduler for one iteration, of a
llumlet's report, and of sending an iteration's plan and outcome between processes.

Simulated: the cluster. An instance computes a step (LLaMA-7B on A10, as everywhere here), has its
next one scheduled, and so on. With **llumlets** each instance schedules its own steps, and the
global scheduler sees only new requests and reports. **Centralized**, one scheduler does
this for all instances, one after the other (the paper's baseline: "extending the vLLM scheduler
to manage all requests across all instances"). The time of an iteration beyond its computation is
its scheduling stall.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench.common.tables import Row, markdown_table, number, rounded
from bench.paper.cells import Options
from bench.paper.claims import Claim, Kind, claim
from bench.paper.drawing import figure
from bench.paper.experiment import Experiment
from bench.paper.figures.scheduling_costs import (
    NUM_INSTANCES,
    NUM_TOKENS,
    Costs,
    iteration_costs,
    scheduler_rows,
)
from bench.paper.figures.stress import CENTRALIZED, LLUMLETS, NO_SCHEDULING, stress_row
from bench.paper.points import matching

RATES = (50.0, 100.0, 200.0, 300.0, 400.0, 500.0)
SIMULATED_S = 40.0
NEAR_ZERO = 0.05
"""Interpretation of "near-zero scheduling stalls": this share of a step's computation."""


def rows(options: Options) -> list[Row]:
    """The decisions, then the stress test at rising rates."""
    decisions = scheduler_rows(20 if options.is_quick else 300)
    medians = {row["decision"]: row["duration_ms"]["median"] / 1000 for row in decisions}
    local_s, central_s = iteration_costs()
    costs = Costs(local_s, central_s, medians["dispatch"], medians["report"])
    duration_s = 12.0 if options.is_quick else SIMULATED_S
    used = {
        "measure": "iteration",
        "local_ms": [rounded(1000 * each) for each in local_s],
        "central_ms": [rounded(1000 * each) for each in central_s],
    }
    return [
        *decisions,
        used,
        *(
            stress_row(architecture, rate, costs, duration_s)
            for rate in RATES
            for architecture in (NO_SCHEDULING, LLUMLETS, CENTRALIZED)
        ),
    ]


def stressed(rows: Sequence[Row], architecture: str) -> list[Row]:
    """The stress test's rows, by rate."""
    return matching(list(rows), measure="stress", architecture=architecture)


def most_slowdown(rows: Sequence[Row], architecture: str) -> float:
    """The latency of a token over that without any scheduling, at the worst rate."""
    free = {row["rate"]: row["token_mean_ms"] for row in stressed(rows, NO_SCHEDULING)}
    ratios = (row["token_mean_ms"] / free[row["rate"]] for row in stressed(rows, architecture))
    return float(max(ratios))


def most_stall_share(rows: Sequence[Row]) -> float:
    """With llumlets: the mean stall over the mean computation of a step, at the worst rate."""
    shares = (row["stall_mean_ms"] / row["step_mean_ms"] for row in stressed(rows, LLUMLETS))
    return float(max(shares))


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Section 6.6's sentences."""
    return [
        claim(
            "scheduling stalls with llumlets: near zero, as a share of a step's computation",
            "6.6",
            Kind.AT_MOST,
            NEAR_ZERO,
            rows,
            most_stall_share,
            unit="%",
            note=f"“near-zero” read as {NEAR_ZERO:.0%}; the engine's own scheduling is counted in",
        ),
        claim(
            "a centralized scheduler slows tokens down, up to",
            "6.6",
            Kind.FACTOR,
            1.7,
            rows,
            partial(most_slowdown, architecture=CENTRALIZED),
        ),
        claim(
            "stalls of a centralized scheduler, up to",
            "6.6",
            Kind.VALUE,
            40.0,
            rows,
            lambda those: max(row["stall_mean_ms"] for row in stressed(those, CENTRALIZED)),
            unit="ms",
        ),
    ]


def tables(rows: Sequence[Row]) -> str:
    """The decisions' durations, and the stress test by rate."""
    decisions = [
        [
            row["decision"],
            number(1000 * row["duration_ms"]["median"]),
            number(1000 * row["duration_ms"]["p99"]),
            f"{1000 / row['duration_ms']['median']:,.0f}",
        ]
        for row in matching(list(rows), measure="decision")
    ]
    (used,) = matching(list(rows), measure="iteration")
    lines = []
    for rate in dict.fromkeys(row["rate"] for row in stressed(rows, LLUMLETS)):
        by_name = {
            each: matching(stressed(rows, each), rate=rate)[0]
            for each in (NO_SCHEDULING, LLUMLETS, CENTRALIZED)
        }
        lines.append(
            [
                f"{rate:g}",
                *(number(each["token_mean_ms"]) for each in by_name.values()),
                *(number(by_name[each]["stall_mean_ms"]) for each in (LLUMLETS, CENTRALIZED)),
                number(by_name[LLUMLETS]["dispatch_p99_ms"]),
            ]
        )
    header = [
        "requests/s",
        "token, no scheduling [ms]",
        "token, llumlets [ms]",
        "token, centralized [ms]",
        "stall, llumlets [ms]",
        "stall, centralized [ms]",
        "dispatch P99, llumlets [ms]",
    ]
    local, central = used["local_ms"], used["central_ms"]
    return "\n\n".join(
        [
            f"Decisions of the production global scheduler over {NUM_INSTANCES} instances, "
            "measured:",
            markdown_table(["decision", "median [µs]", "P99 [µs]", "a second"], decisions),
            f"An iteration's scheduling, measured with vLLM's own scheduler: with llumlets "
            f"{local[0]:.2f} ms + {1000 * local[1]:.1f} µs a request, on every instance by itself; "
            f"centralized {central[0]:.2f} ms + {1000 * central[1]:.1f} µs a request, one instance "
            f"after the other. Simulated with these, 64 tokens in and out:",
            markdown_table(header, lines, 0),
        ]
    )


def draw(rows: Sequence[Row], path: Path) -> None:
    """Latency of a token on the left, stalls on the right, as in the paper."""
    with figure(path, 1, 2, (4.4, 3.2)) as axes:
        for axis, metric, name in (
            (axes[0][0], "token_mean_ms", "decode latency [ms/token]"),
            (axes[0][1], "stall_mean_ms", "scheduling stall [ms/iteration]"),
        ):
            for architecture, color in ((LLUMLETS, "tab:blue"), (CENTRALIZED, "tab:orange")):
                line = stressed(rows, architecture)
                axis.plot(
                    [row["rate"] for row in line],
                    [row[metric] for row in line],
                    color=color,
                    marker="o",
                    label=architecture,
                )
            axis.set_ylim(bottom=0)
            axis.set_xlabel("requests/s")
            axis.set_ylabel(name)
            axis.legend(fontsize=8)
        axes[0][1].axhline(40, color="tab:orange", linestyle=":", label="centralized, paper: up to")
        axes[0][1].legend(fontsize=8)


FIGURE16 = Experiment(
    name="figure16",
    title="Figure 16: scheduling 64 instances",
    rows=rows,
    claims=claims,
    tables=tables,
    draw=draw,
    config={
        "kind": "costs measured, cluster simulated",
        "instances": NUM_INSTANCES,
        "tokens": f"{NUM_TOKENS} in, {NUM_TOKENS} out",
        "sources": "bench/results/decode_profile.json",
    },
)
