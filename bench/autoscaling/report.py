"""Results of `sterna bench autoscaling`: numbers, goals, table and plot."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.common.pages import Goal, goal_list
from sterna.errors import ConfigurationError

if TYPE_CHECKING:
    from bench.serving.measured import Measured

SCALING, WITHOUT_MIGRATION, FIXED = "sterna", "infaas++", "fixed"
RUNS = (SCALING, WITHOUT_MIGRATION, FIXED)

SUMMARY = (
    "requests",
    "failed",
    "instances_min",
    "instances_max",
    "instance_seconds",
    "ttft_s",
    "tpot_s",
    "request_s",
)

METRICS = ("ttft_s", "tpot_s", "request_s")

Run = Mapping[str, Any]


def run_json(name: str, done: "Measured") -> dict[str, Any]:
    """The numbers of a run.

    Raises:
        ConfigurationError: no request of the run ended.
    """
    from bench.autoscaling.filling import fillings_of
    from bench.serving.measured import distribution_json
    from bench.serving.timeline import timeline_json, timeline_of

    run, summary = done.run, done.run.summary()
    if summary.tpot_s is None or not run.samples:
        raise ConfigurationError(
            f"{name}: no request ended; .cache/bench/autoscaling has the server's output"
        )
    timeline = timeline_of(run.samples)
    return {
        "run": name,
        "requests": summary.num_requests,
        "failed": summary.num_requests - summary.num_completed,
        "instances_min": int(timeline.instances.min()),
        "instances_max": int(timeline.instances.max()),
        "instance_seconds": round((summary.instances_avg or 0.0) * summary.simulated_s, 1),
        "ttft_s": distribution_json(summary.ttft_s),
        "tpot_s": distribution_json(summary.tpot_s),
        "request_s": distribution_json(summary.request_s),
        "largest_gap_s": distribution_json(summary.largest_gap_s),
        "serving_first": int(timeline.serving[0]),
        "serving_max": int(timeline.serving.max()),
        "serving_last": int(timeline.serving[-1]),
        "duration_s": round(summary.simulated_s, 1),
        "migrations": summary.migrations_committed,
        "preemptions": summary.num_preemptions,
        "errors": dict(run.errors()),
        "fillings": [asdict(each) for each in fillings_of(run.samples)],
        "foreign_cores": done.foreign_cores,
        "timeline": timeline_json(timeline),
    }


def summary_of(run: Run) -> dict[str, Any]:
    """The numbers of a run that show its latencies and its cost."""
    return {name: run[name] for name in SUMMARY}


def goals_of(runs: Sequence[Run], num_least: int, num_most: int) -> list[Goal]:
    """The goals of the existing runs, and whether they were reached."""
    by_name = {run["run"]: run for run in runs}
    scaled = by_name[SCALING]
    serving = (scaled["serving_first"], scaled["serving_max"], scaled["serving_last"])
    found = [
        Goal(
            "`sterna`: no stream is refused, fails or is cut while instances come and go",
            found=f"{scaled['failed']} of {scaled['requests']}",
            bound="none",
            is_reached=scaled["failed"] == 0,
        ),
        Goal(
            "`sterna`: instances follow the load up and down",
            found=" → ".join(map(str, serving)),
            bound=f"{num_least} → {num_most} → {num_least}",
            is_reached=serving == (num_least, num_most, num_least),
        ),
    ]
    if FIXED in by_name:
        share = scaled["instance_seconds"] / by_name[FIXED]["instance_seconds"]
        found.append(
            Goal(
                "`sterna`: instance-seconds until the last request ended",
                found=f"{100 * share:.0f} % of those of {num_most} instances throughout",
                bound="less",
                is_reached=share < 1.0,
            )
        )
    return found


# ------------------------------------------------------------------------------------ the page


def markdown(document: Mapping[str, Any]) -> str:
    """The table and the goals of `autoscaling.json`."""
    columns = (
        ("requests", "requests"),
        ("failed", "failed"),
        ("serving", "instances"),
        ("instance_seconds", "instance-seconds"),
        ("ttft_mean", "mean TTFT, s"),
        ("ttft_p99", "P99 TTFT, s"),
        ("tpot_mean", "mean TPOT, ms"),
        ("tpot_p99", "P99 TPOT, ms"),
        ("request_mean", "mean request, s"),
        ("migrations", "migrations"),
        ("preemptions", "preemptions"),
    )
    lines = [
        f"| | {' | '.join(title for _, title in columns)} |",
        f"| --- |{' ---: |' * len(columns)}",
    ]
    for run in document["runs"]:
        shown = _shown(run)
        lines.append(f"| {_label(run)} | {' | '.join(shown[name] for name, _ in columns)} |")
    parts = [
        _headline(document),
        "\n".join(lines),
        _filling_table(document["runs"]),
        goal_list(document["goals"]),
    ]
    return "\n\n".join([*parts, "![A step up and down](../bench/results/autoscaling.svg)"])


def _filling_table(runs: Sequence[Run]) -> str:
    """The time until each new instance had half of the others' requests."""
    lines = [
        "| came up | at, s | half as full as the others after, s | migrations by then |",
        "| --- | ---: | ---: | ---: |",
    ]
    for run in runs:
        for each in run["fillings"]:
            after = "never" if each["filled_s"] is None else f"{each['filled_s']:.1f}"
            moved = "unknown" if each["migrations"] is None else str(each["migrations"])
            name = f"instance {each['instance']} of {_label(run)}"
            lines.append(f"| {name} | {each['ready_s']:.0f} | {after} | {moved} |")
    return "\n".join(lines)


def _shown(run: Run) -> dict[str, str]:
    return {
        "requests": str(run["requests"]),
        "failed": str(run["failed"]),
        "serving": f"{run['serving_first']} → {run['serving_max']} → {run['serving_last']}",
        "instance_seconds": f"{run['instance_seconds']:,.0f}",
        "ttft_mean": f"{run['ttft_s']['mean']:.2f}",
        "ttft_p99": f"{run['ttft_s']['p99']:.2f}",
        "tpot_mean": f"{1000 * run['tpot_s']['mean']:,.0f}",
        "tpot_p99": f"{1000 * run['tpot_s']['p99']:,.0f}",
        "request_mean": f"{run['request_s']['mean']:.1f}",
        "migrations": str(run["migrations"]),
        "preemptions": str(run["preemptions"]),
    }


def _label(run: Run) -> str:
    return {
        SCALING: "`sterna`, scaling",
        WITHOUT_MIGRATION: "`infaas++`, scaling without migration",
        FIXED: "`sterna`, fixed",
    }[run["run"]]


def _headline(document: Mapping[str, Any]) -> str:
    hardware, config, runs = document["hardware"], document["config"], document["runs"]
    busiest = max(run["foreign_cores"] for run in runs)
    return (
        f"Measured on {document['date'][:10]} at commit {document['commit']}: "
        f"{hardware['cpu']}, {hardware['num_cores']} cores, {config['model']}; "
        f"{config['min_instances']} to {config['max_instances']} instances, "
        f"{config['warm_instances']} of them kept warm; arrivals {config['arrivals']}, "
        "the same requests in every run. One run each, so that differences of some percent have "
        f"no meaning; other programs kept up to {busiest:.1f} cores busy."
    )


# ------------------------------------------------------------------------------------ the plot


def plot(document: Mapping[str, Any], path: Path) -> None:
    """Draw the time line of the run with Sterna's policy and scaling.

    Raises:
        OSError: the file cannot be written.
    """
    from bench.serving.timeline import draw_timeline, timeline_from_json

    config = document["config"]
    (run,) = (run for run in document["runs"] if run["run"] == SCALING)
    title = (
        f"{config['min_instances']} to {config['max_instances']} instances, policy sterna, "
        f"arrivals {config['arrivals']}"
    )
    timeline = timeline_from_json(run["timeline"])
    draw_timeline(timeline, title, path, changes_s=config["changes_s"])
