"""The tables that `sterna simulate` prints for people, and its plot."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sterna.cli.simulate.overrides import values
from sterna.cli.simulate.run_report import ABSENT, counted, number, print_run, report_console
from sterna.cli.simulate.workload_options import arrivals_of
from sterna.engine.emulated.profiles import PROFILES
from sterna.metrics.summary import Distribution, Summary, summarize_classes
from sterna.policy.presets import PRESETS
from sterna.simulator.config import SimulationConfig
from sterna.simulator.runs import SimulationRun
from sterna.workload.catalog import PATTERNS, TRACES

DESCRIPTIONS = {
    "llumnix": "the paper's: freeness, migration, priorities (Section 4.4)",
    "llumnix-base": "the same, blind to priorities (Section 6.1)",
    "infaas++": "dispatch by memory load, no migration (Section 6.1)",
    "round-robin": "in turns, blind to load (Section 6.1)",
    "power-of-two": "the one with fewer requests, of two that are drawn",
    "session-hash": "every session to one instance",
    "vllm-dp": "vLLM's --data-parallel-size: fewest requests",
    "llm-d": "llm-d's: to the prefix cache, until it is saturated",
    "llm-d-tuned": "the same, with parameters that a search has chosen",
    "dynamo": "Dynamo's: tokens to compute and memory in use",
    "dynamo-tuned": "the same, with parameters that a search has chosen",
    "sglang": "SGLang's: to the prefix cache, unless loads differ",
    "sglang-tuned": "the same, with parameters that a search has chosen",
    "production-stack": "vLLM production stack's: cached share less relative load",
    "sterna": "Sterna's own: late binding, first token soonest, migration",
}
"""Descriptions of policies in one line; a policy without one is listed as well."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A row of the comparison.

    Attributes:
        of: its value in a run; None where the run does not have it.
        is_compared: whether less of it is better, so that a ratio is meaningful.
        is_optional: whether it is left out if no run has it.
    """

    name: str
    of: Callable[[Summary], float | None]
    is_compared: bool = True
    is_optional: bool = False


def _of(field: str, statistic: str, scale: float = 1.0) -> Callable[[Summary], float | None]:
    def value(summary: Summary) -> float | None:
        distribution: Distribution | None = getattr(summary, field)
        return None if distribution is None else scale * float(getattr(distribution, statistic))

    return value


def _scaled(field: str, scale: float = 1.0) -> Callable[[Summary], float | None]:
    def value(summary: Summary) -> float | None:
        found: float | None = getattr(summary, field)
        return None if found is None else scale * found

    return value


LATENCIES: Sequence[Metric] = (
    Metric("request mean, s", _of("request_s", "mean")),
    Metric("request P99, s", _of("request_s", "p99")),
    Metric("TTFT mean, s", _of("ttft_s", "mean")),
    Metric("TTFT P50, s", _of("ttft_s", "p50")),
    Metric("TTFT P99, s", _of("ttft_s", "p99")),
    Metric("TTFT max, s", _of("ttft_s", "max")),
    Metric("TPOT mean, ms", _of("tpot_s", "mean", 1e3)),
    Metric("TPOT P99, ms", _of("tpot_s", "p99", 1e3)),
    Metric("queue time mean, s", _of("queue_s", "mean")),
    Metric("preemption loss mean, s", _of("preemption_loss_s", "mean")),
    Metric("preempted, %", _scaled("preempted_fraction", 100.0)),
    Metric("prefix reuse, %", _scaled("prefix_reuse", 100.0), False, is_optional=True),
)
"""Metrics of requests, of all or of one class."""

CLUSTER: Sequence[Metric] = (
    Metric("fragmentation mean, %", _scaled("fragmentation_mean", 100.0)),
    Metric("largest over mean load", _scaled("imbalance_mean"), is_optional=True),
    Metric("migrations", _scaled("migrations_committed"), False),
    Metric("time with migrations, %", _scaled("migrating_fraction", 100.0), False),
    Metric("instances", _scaled("instances_avg")),
    Metric("simulated, s", _scaled("simulated_s"), False),
    Metric("wall, s", _scaled("wall_s"), False),
)


def print_report(runs: Sequence[SimulationRun], *, baseline: str) -> None:
    """Print one run as a table of its distributions, several as a comparison.

    Args:
        baseline: the policy to which ratios refer.
    """
    console = report_console()
    console.print(_headline(runs))
    if len(runs) == 1:
        run = runs[0]
        print_run(console, run.job.policy, run.records, run.cluster)
    else:
        _print_comparison(console, runs, baseline)


def _headline(runs: Sequence[SimulationRun]) -> str:
    """The settings that all runs share; variants may differ in more than their names."""
    workload = runs[0].job.workload
    seeds = list(dict.fromkeys(run.job.workload.seed for run in runs))
    rate = "" if workload.rate is None else f" at {workload.rate:g}/s"
    parts = [
        {f"[bold]{escape(workload.trace)}[/bold]{rate}, {escape(arrivals_of(workload))}"},
        {counted(len(run.records), "request") for run in runs},
        {counted(run.job.config.num_instances, "instance") for run in runs},
        {f"{run.job.config.report.value} reports" for run in runs},
        {f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"},
    ]
    return "; ".join(part for words in parts if len(words) == 1 for part in words)


# --------------------------------------------------------------------------------- comparisons


def _print_comparison(console: Console, runs: Sequence[SimulationRun], baseline: str) -> None:
    policies = list(dict.fromkeys(run.job.policy for run in runs))
    summaries = {
        policy: [run.summary() for run in runs if run.job.policy == policy] for policy in policies
    }
    num_seeds = len(runs) // len(policies)
    table = Table()
    table.add_column("")
    for policy in policies:
        table.add_column(escape(policy), justify="right", overflow="fold")
    _add_metrics(table, LATENCIES, summaries, baseline)
    for name in summarize_classes(runs[0].records, runs[0].cluster):
        of_class = {
            policy: [
                summarize_classes(run.records, run.cluster)[name]
                for run in runs
                if run.job.policy == policy
            ]
            for policy in policies
        }
        table.add_section()
        table.add_row(f"[bold]{escape(name)}[/bold]")
        _add_metrics(table, LATENCIES, of_class, baseline)
    table.add_section()
    _add_metrics(table, CLUSTER, summaries, baseline)
    console.print(table)
    console.print(_caption(policies, num_seeds, baseline))


def _caption(policies: Sequence[str], num_seeds: int, baseline: str) -> str:
    words = []
    if num_seeds > 1:
        words.append(f"Means over {num_seeds} seeds, smallest and largest below.")
    if len(policies) > 1:
        words.append(f"x: times {escape(baseline)}'s.")
    return " ".join(words)


def _add_metrics(
    table: Table,
    metrics: Sequence[Metric],
    summaries: Mapping[str, Sequence[Summary]],
    baseline: str,
) -> None:
    for metric in metrics:
        found = {policy: [metric.of(each) for each in those] for policy, those in summaries.items()}
        compares = metric.is_compared
        if metric.is_optional and all(_mean(values) is None for values in found.values()):
            continue
        table.add_row(
            metric.name,
            *(
                cell(values, found[baseline] if compares and policy != baseline else None)
                for policy, values in found.items()
            ),
        )


def cell(values: Sequence[float | None], baseline: Sequence[float | None] | None) -> str:
    """Mean over the seeds, its ratio to the baseline's mean, and the range.

    Args:
        baseline: the same metric of the policy compared with, None for no comparison.
    """
    mean = _mean(values)
    if mean is None:
        return ABSENT
    known = [value for value in values if value is not None]
    reference = None if baseline is None else _mean(baseline)
    text = number(mean)
    if reference:
        text += f" [bold]{number(mean / reference)}x[/bold]"
    if min(known) < max(known):
        text += f"\n[dim]{number(min(known))} to {number(max(known))}[/dim]"
    return text


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


# ---------------------------------------------------------------------------------------- plot


def draw(runs: Sequence[SimulationRun], path: Path) -> None:
    """Draw the runs into the file, in the format of its suffix (`draw_runs`).

    Runs of one policy with several seeds share their lines; time series are of the first seed.

    Raises:
        OSError: the file cannot be written.
    """
    from sterna.cli.simulate.run_plot import Drawn, draw_runs

    drawn = [Drawn(run.job.policy, run.records, run.cluster) for run in runs]
    draw_runs(drawn, _title(runs), path)


def _title(runs: Sequence[SimulationRun]) -> str:
    """The settings that all runs share; variants may differ in more than their names."""
    workload = runs[0].job.workload
    rate = "" if workload.rate is None else f" at {workload.rate:g}/s"
    seeds = list(dict.fromkeys(run.job.workload.seed for run in runs))
    note = f"{len(seeds)} seeds; below, seed {seeds[0]}" if len(seeds) > 1 else f"seed {seeds[0]}"
    sizes = {run.job.config.num_instances for run in runs}
    instances = f", {sizes.pop()} instances" if len(sizes) == 1 else ""
    return (
        f"{workload.trace}{rate}, {arrivals_of(workload)}, {len(runs[0].records):,} requests"
        f"{instances} (simulated; {note})"
    )


# ------------------------------------------------------------------------------------- choices


def print_choices(config: SimulationConfig, policy: str) -> None:
    """Print the names for options: traces, profiles, policies, and settings with their values.

    Args:
        config: the configuration whose settings are listed.
        policy: the policy's name, as it was given.
    """
    console = report_console()
    _print_names(console, "traces (--trace)", {**TRACES, **PATTERNS})
    _print_names(
        console, "profiles (--profile)", {name: each.description for name, each in PROFILES.items()}
    )
    policies = {name: DESCRIPTIONS.get(name, "") for name in PRESETS}
    _print_names(console, "policies (--policy)", policies)
    _print_names(console, f"settings (--set), and their values in {policy}", values(config))


def _print_names(console: Console, title: str, names: Mapping[str, str]) -> None:
    table = Table(title=escape(title), title_justify="left", show_header=False, box=None)
    for name, text in names.items():
        table.add_row(escape(name), escape(text))
    console.print(table)
    console.print()
