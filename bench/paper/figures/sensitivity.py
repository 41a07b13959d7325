"""Sensitivity: the effect of each assumption, varied alone, on three points of Figure 11.

The base is the paper's run with Llumnix (`paper_config`). A variant's effect on a metric is the
base's value over the variant's, the geometric mean over points and seeds: above 1 the variant is
better.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.ticker import NullFormatter

from bench.common.tables import LOSS_FLOOR_S, Row, markdown_table, number
from bench.paper.cells import NUM_REQUESTS, Cell, Options, geometric_mean, run_cells
from bench.paper.claims import Claim
from bench.paper.drawing import figure
from bench.paper.experiment import Experiment
from bench.paper.points import matching
from sterna.config import QueueDemand, Victim
from sterna.engine.emulated.config import Preemption, StepMode
from sterna.simulator.config import Report, SimulationConfig
from sterna.simulator.paper import paper_config
from sterna.workload.catalog import Workload

POINTS = (("M-M", 7.5), ("L-L", 2.8), ("ShareGPT", 7.5))
METRICS = ("prefill_mean_s", "prefill_p99_s", "decode_p99_s", "preemption_loss_s")
BASE = "base"

Change = Callable[[SimulationConfig], SimulationConfig]


@dataclass(frozen=True, slots=True)
class Variant:
    """One changed assumption.

    Attributes:
        assumption: its name, with its value in the base.
        value: its value here.
        num_requests: requests of the trace.
    """

    assumption: str
    value: str
    change: Change
    num_requests: int = NUM_REQUESTS


def _same(config: SimulationConfig) -> SimulationConfig:
    return config


def _policy(**changes: Any) -> Change:
    return lambda config: replace(config, policy=replace(config.policy, **changes))


def _engine(**changes: Any) -> Change:
    return lambda config: replace(config, engine=replace(config.engine, **changes))


def _migration(**changes: Any) -> Change:
    return lambda config: replace(config, migration=replace(config.migration, **changes))


def _run(**changes: Any) -> Change:
    return lambda config: replace(config, **changes)


def _both(*changes: Change) -> Change:
    def change(config: SimulationConfig) -> SimulationConfig:
        for each in changes:
            config = each(config)
        return config

    return change


def _thresholds(steps: float) -> Change:
    return _policy(source_freeness_steps=steps, destination_freeness_steps=steps)


def _bandwidth(factor: float) -> Change:
    def change(config: SimulationConfig) -> SimulationConfig:
        copy_time = replace(config.copy_time, block_s=config.copy_time.block_s / factor)
        return replace(config, copy_time=copy_time)

    return change


def _decode_cost(factor: float) -> Change:
    def change(config: SimulationConfig) -> SimulationConfig:
        step_time = config.step_time
        step_time = replace(step_time, decode_request_s=step_time.decode_request_s * factor)
        return replace(config, step_time=step_time)

    return change


_LIVE = _run(report=Report.LIVE)

VARIANTS = (
    Variant("what the scheduler knows: the state at the last step's start", "live", _LIVE),
    Variant(
        "dispatched requests that no report shows: not counted",
        "counted",
        _policy(counts_dispatched=True),
    ),
    Variant("both of these", "live, counted", _both(_LIVE, _policy(counts_dispatched=True))),
    Variant("demand of the queue: all", "head of line", _policy(queue_demand=QueueDemand.HEAD)),
    Variant(
        "batch size that dispatching divides by: running and all queuing",
        "running, one for the queue",
        _policy(batch_counts_queue=False),
    ),
    Variant(
        "negative freeness: not divided by the batch size",
        "divided",
        _policy(divides_overload=True),
    ),
    Variant("victim: last started", "shortest", _policy(victim=Victim.SHORTEST)),
    Variant("victim: last started", "longest", _policy(victim=Victim.LONGEST)),
    Variant("migration thresholds: 160 steps (M-M), 48", "0", _thresholds(0.0)),
    Variant("migration thresholds: 160 steps (M-M), 48", "16", _thresholds(16.0)),
    Variant("migration thresholds: 160 steps (M-M), 48", "48", _thresholds(48.0)),
    Variant("migration thresholds: 160 steps (M-M), 48", "160", _thresholds(160.0)),
    Variant("migration thresholds: 160 steps (M-M), 48", "480", _thresholds(480.0)),
    Variant("pairing interval: 0.2 s", "0.05 s", _policy(round_interval_s=0.05)),
    Variant("pairing interval: 0.2 s", "1 s", _policy(round_interval_s=1.0)),
    Variant("pairing interval: 0.2 s", "5 s", _policy(round_interval_s=5.0)),
    Variant("migrations of an instance at once: 1", "2", _policy(num_concurrent_migrations=2)),
    Variant("migrations of an instance at once: 1", "4", _policy(num_concurrent_migrations=4)),
    Variant("pairs: at any price", "only to gain", _policy(pairs_only_to_gain=True)),
    Variant(
        "queuing preempted requests make a source: yes",
        "no",
        _policy(preempted_make_source=False),
    ),
    Variant(
        "migrations a round and source: one",
        "one after the other",
        _policy(migrates_continuously=True),
    ),
    Variant("migration: on", "off", _policy(migrates=False)),
    Variant("bandwidth of migrations: 1", "a quarter", _bandwidth(0.25)),
    Variant("bandwidth of migrations: 1", "four times", _bandwidth(4.0)),
    Variant("messages between llumlets: 1.5 ms", "0", _run(message_delay_s=0.0)),
    Variant("messages between llumlets: 1.5 ms", "20 ms", _run(message_delay_s=0.02)),
    Variant("dispatch: 0", "20 ms", _run(dispatch_delay_s=0.02)),
    Variant("last stage of at most 2 blocks", "1", _migration(last_stage_max_blocks=1)),
    Variant("last stage of at most 2 blocks", "8", _migration(last_stage_max_blocks=8)),
    Variant("an aborted migration's request waits: 0", "1 s", _run(retry_backoff_s=1.0)),
    Variant("watermark: 1 %", "0", _engine(watermark=0.0)),
    Variant("watermark: 1 %", "5 %", _engine(watermark=0.05)),
    Variant("blocks: 792", "851 (the paper's text)", _engine(num_blocks=851)),
    Variant("last free block: never used", "used", _engine(keeps_block_free=False)),
    Variant(
        "steps: whole prompts first",
        "chunked prefill, 2,048 tokens",
        _engine(step_mode=StepMode.CHUNKED, max_num_batched_tokens=2_048),
    ),
    Variant(
        "preempted: the last arrived",
        "the last admitted",
        _engine(preemption=Preemption.LAST_ADMITTED),
    ),
    Variant("requests of a trace: 10,000", "30,000", _same, num_requests=30_000),
    Variant("decode cost of a request: 1", "0.8 times", _decode_cost(0.8)),
    Variant("decode cost of a request: 1", "1.2 times", _decode_cost(1.2)),
)


def cells() -> list[Cell]:
    """Every variant, and the base, at every point."""
    found = []
    for trace, rate in POINTS:
        base = paper_config("llumnix", trace)
        for each in (Variant(BASE, BASE, _same), *VARIANTS):
            labels: dict[str, str | float] = {
                "trace": trace,
                "request_rate": rate,
                "assumption": each.assumption,
                "value": each.value,
            }
            workload = Workload(trace=trace, rate=rate, num_requests=each.num_requests)
            found.append(Cell(labels, workload, each.change(base)))
    return found


def rows(options: Options) -> list[Row]:
    """The runs."""
    planned = cells()
    return run_cells("sensitivity", planned[::10] if options.is_quick else planned, options)


def effects(rows: Sequence[Row], assumption: str, value: str, metric: str) -> list[float]:
    """The base's metric over the variant's, one for each point and seed."""
    base = {
        (row["trace"], row["request_rate"], row["seed"]): _floored(row, metric)
        for row in matching(list(rows), assumption=BASE)
    }
    return [
        base[row["trace"], row["request_rate"], row["seed"]] / _floored(row, metric)
        for row in matching(list(rows), assumption=assumption, value=value)
    ]


def _floored(row: Row, metric: str) -> float:
    value = float(row[metric])
    return max(value, LOSS_FLOOR_S) if metric == "preemption_loss_s" else value


def claims(rows: Sequence[Row]) -> list[Claim]:
    """The paper has no claims on these."""
    return []


def tables(rows: Sequence[Row]) -> str:
    """A line for each variant: geometric means, with the smallest and the largest in brackets."""
    lines = []
    previous = ""
    for assumption, value in _variants(rows):
        cells = [_effect(effects(rows, assumption, value, metric)) for metric in METRICS]
        lines.append([assumption if assumption != previous else "", value, *cells])
        previous = assumption
    header = [
        "assumption, with its value in the base",
        "instead",
        "prefill mean",
        "prefill P99",
        "decode P99",
        "preemption loss",
    ]
    return markdown_table(header, lines, 2)


def _variants(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Assumption and value of each variant that ran, in the order of `VARIANTS`."""
    found = dict.fromkeys((row["assumption"], row["value"]) for row in rows)
    return [(assumption, value) for assumption, value in found if assumption != BASE]


def _effect(values: Sequence[float]) -> str:
    mean = geometric_mean(values)
    text = f"{mean:.2f} [{number(min(values))}, {number(max(values))}]"
    return f"**{text}**" if mean > 1.15 or mean < 1 / 1.15 else text


def draw(rows: Sequence[Row], path: Path) -> None:
    """A bar for each variant and metric, on a logarithmic scale around 1."""
    variants = _variants(rows)
    height = 0.24 * len(variants) + 1
    with figure(path, 1, len(METRICS), (3.2, height)) as axes:
        names = [f"{assumption.split(':')[0]}: {value}" for assumption, value in variants]
        places = range(len(variants))
        for column, metric in enumerate(METRICS):
            axis = axes[0][column]
            found = [geometric_mean(effects(rows, *each, metric)) for each in variants]
            colors = ["tab:blue" if each >= 1 else "tab:red" for each in found]
            axis.barh(places, [each - 1 for each in found], left=1, color=colors)
            axis.set_xscale("log")
            axis.xaxis.set_minor_formatter(NullFormatter())
            axis.axvline(1, color="black", linewidth=0.8)
            axis.set_title(metric.removesuffix("_s").replace("_", " "), fontsize=9)
            axis.set_yticks(places, names if column == 0 else [""] * len(names), fontsize=7)
            axis.invert_yaxis()
            axis.grid(axis="x", alpha=0.3)


SENSITIVITY = Experiment(
    name="sensitivity",
    title="Sensitivity: what each assumption does",
    rows=rows,
    claims=claims,
    tables=tables,
    draw=draw,
    config={
        "points": [f"{trace} {rate:g}" for trace, rate in POINTS],
        "policy": "llumnix",
        "instances": 16,
        "requests": 10_000,
        "kind": "simulated",
    },
)
