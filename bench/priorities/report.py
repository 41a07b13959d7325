"""Results of `sterna bench priorities`: rows, summary, goals, table and plot.

All results are computed from the cells of the runs, so that a measurement can be continued: each
cell has the numbers of one class's latencies in one run, `{n, median, p99, mean}` in seconds.
"""

from collections.abc import Callable, Mapping, Sequence
from math import exp, log, sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from bench.common.pages import Goal, goal_list
from sterna.types import HIGH, NORMAL

if TYPE_CHECKING:
    from bench.serving.measured import Measured

CLASSES = {"high": HIGH, "normal": NORMAL}
METRICS = ("ttft_s", "tpot_s", "request_s")
NUMBERS = ("mean", "p99")
SIDES = ("on", "off")

HIGH_METRICS = ("ttft_s", "tpot_s")
MAX_NORMAL_RATIO = 1.05
"""Goal: largest ratio of normal requests' mean latency with priorities to that without."""

# fmt: off
STUDENTS_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)
# fmt: on
"""The 97.5 % quantiles of Student's t for one degree of freedom, two, and so on."""

TITLES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "request_s": "request latency"}


def run_json(pair: int, side: str, done: "Measured") -> dict[str, Any]:
    """The numbers of a run: the cells of each class, and counts of events."""
    from bench.serving.measured import cell, values_of

    summary = done.run.summary()
    return {
        "pair": pair,
        "priorities": side,
        "foreign_cores": done.foreign_cores,
        "duration_s": round(summary.simulated_s, 1),
        "failed": summary.num_requests - summary.num_completed,
        "preemptions": summary.num_preemptions,
        "migrations": summary.migrations_committed,
        "classes": {
            name: {metric: cell(values_of([done.run], metric, priority)) for metric in METRICS}
            for name, priority in CLASSES.items()
        },
    }


def cells_of(runs: Sequence[Mapping[str, Any]], side: str) -> dict[str, dict[str, dict[str, Any]]]:
    """The cells of a side: each number is the mean over its runs."""
    those = [run["classes"] for run in runs if run["priorities"] == side]

    def mean_cell(name: str, metric: str) -> dict[str, Any]:
        cells = [each[name][metric] for each in those]
        means = {key: round(fmean(each[key] for each in cells), 4) for key in cells[0]}
        return {**means, "n": sum(each["n"] for each in cells)}

    return {name: {metric: mean_cell(name, metric) for metric in METRICS} for name in CLASSES}


def compared(runs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The runs that count: those of pairs in which the machine kept its speed.

    In the others, a change of speed would be attributed to priorities. If fewer than two pairs
    are left, all count.
    """
    steady = [run for run in runs if run["is_steady"]]
    return steady if len({run["pair"] for run in steady}) >= 2 else list(runs)


def summary_of(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """For each class: the numbers of either side, and their ratios, on over off.

    Args:
        runs: each with its `pair`, `priorities` (on or off), and cells as `classes`.
    """
    sides = {side: cells_of(runs, side) for side in SIDES}
    return {
        name: {
            **{side: _numbers(sides[side][name]) for side in SIDES},
            "ratio": _ratios(runs, name),
        }
        for name in CLASSES
    }


def goals_of(summary: Mapping[str, Any]) -> list[Goal]:
    """The goals, and whether they were reached."""
    found = []
    for metric in HIGH_METRICS:
        for number in NUMBERS:
            ratio = summary["high"]["ratio"][metric][number]
            found.append(
                Goal(
                    f"high, {_title(metric, number)}: better by more than the noise",
                    found=_found(ratio),
                    bound="the whole interval below 100 %",
                    is_reached=ratio["interval"] is not None and ratio["interval"][1] < 1.0,
                )
            )
    ratio = summary["normal"]["ratio"]["request_s"]["mean"]
    found.append(
        Goal(
            "normal, mean request latency: about the same",
            found=_found(ratio),
            bound=f"at most {100 * MAX_NORMAL_RATIO:.0f} %",
            is_reached=ratio["mean"] <= MAX_NORMAL_RATIO,
        )
    )
    return found


def _of_each(compute: Callable[[str, str], Any]) -> dict[str, dict[str, Any]]:
    return {m: {number: compute(m, number) for number in NUMBERS} for m in METRICS}


def _numbers(cells: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return _of_each(lambda metric, number: cells[metric][number])


def _ratios(runs: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    return _of_each(lambda metric, number: _ratio(runs, name, metric, number))


def _ratio(
    runs: Sequence[Mapping[str, Any]], name: str, metric: str, number: str
) -> dict[str, Any]:
    """The ratio of every pair, their geometric mean, and its interval by their scatter."""
    pairs = sorted({run["pair"] for run in runs})
    values = {
        (run["pair"], run["priorities"]): run["classes"][name][metric][number] for run in runs
    }
    ratios = [values[pair, "on"] / values[pair, "off"] for pair in pairs]
    interval = interval_95(ratios)
    return {
        "pairs": [round(each, 4) for each in ratios],
        "mean": round(_geometric_mean(ratios), 4),
        "interval": None if interval is None else [round(each, 4) for each in interval],
    }


def interval_95(ratios: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % confidence interval of the ratios' geometric mean, by Student's t of their
    logarithms; None for a single ratio, whose noise is unknown."""
    if len(ratios) < 2:
        return None
    logarithms = [log(each) for each in ratios]
    quantile = STUDENTS_T[min(len(ratios) - 1, len(STUDENTS_T)) - 1]
    spread = quantile * stdev(logarithms) / sqrt(len(ratios))
    return exp(fmean(logarithms) - spread), exp(fmean(logarithms) + spread)


def _geometric_mean(ratios: Sequence[float]) -> float:
    return exp(fmean(map(log, ratios)))


# ------------------------------------------------------------------------------------ the page


def markdown(document: Mapping[str, Any]) -> str:
    """The table and the goals of `priorities.json`."""
    summary = document["summary"]
    lines = [
        "| class | | off | on | on/off | 95 % interval | shorter in |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in CLASSES:
        for metric in METRICS:
            for number in NUMBERS:
                lines.append(_line(summary[name], name, metric, number))
    parts = [_headline(document), "\n".join(lines), goal_list(document["goals"])]
    return "\n\n".join([*parts, "![Priorities on and off](../bench/results/priorities.svg)"])


def _line(of_class: Mapping[str, Any], name: str, metric: str, number: str) -> str:
    ratio = of_class["ratio"][metric][number]
    # Milliseconds: seconds of a TPOT would be all zeros.
    off, on = (f"{1000 * of_class[side][metric][number]:,.0f}" for side in ("off", "on"))
    pairs = ratio["pairs"]
    shorter = f"{sum(each < 1.0 for each in pairs)} of {len(pairs)} pairs"
    title = _title(metric, number)
    shown = f"{title}, ms | {off} | {on} | {ratio['mean']:.2f} | {_interval(ratio)} | {shorter}"
    return f"| {name} | {shown} |"


def _headline(document: Mapping[str, Any]) -> str:
    hardware, config, runs = document["hardware"], document["config"], document["runs"]
    busiest = max(run["foreign_cores"] for run in runs)
    failed = sum(run["failed"] for run in runs)
    # A continued measurement may have several commits.
    commits = list(dict.fromkeys(run.get("commit", document["commit"]) for run in runs))
    num_pairs, num_compared = len(runs) // 2, len(compared(runs)) // 2
    left_out = (
        ""
        if num_compared == num_pairs
        else f" {num_compared} count: in the others the machine did not keep its speed."
    )
    return (
        f"Measured on {document['date'][:10]} at commit {', '.join(commits)}: "
        f"{hardware['cpu']}, {hardware['num_cores']} cores, {config['model']} on "
        f"{config['instances']} instances, {config['requests']} requests at "
        f"{config['rate']:g}/s in bursts (cv {config['cv']:g}), "
        f"{100 * config['high_fraction']:.0f} % of them high, "
        f"target load {config['target_load']['tokens']:,} tokens, "
        f"{config['target_load']['from']}. {num_pairs} pairs of runs of the same requests; "
        f"{failed} requests failed; other programs kept up to {busiest:.1f} cores busy.{left_out} "
        "Numbers are means over the runs; the ratio is the geometric mean over the pairs."
    )


def _title(metric: str, number: str) -> str:
    return f"{'mean' if number == 'mean' else 'P99'} {TITLES[metric]}"


def _found(ratio: Mapping[str, Any]) -> str:
    return f"{100 * ratio['mean']:.0f} % of what it is without, interval {_interval(ratio)}"


def _interval(ratio: Mapping[str, Any]) -> str:
    if ratio["interval"] is None:
        return "unknown"
    low, high = ratio["interval"]
    return f"{low:.2f} to {high:.2f}"


# ------------------------------------------------------------------------------------ the plot


def plot(document: Mapping[str, Any], path: Path) -> None:
    """Draw the numbers of every run and of all together, with a row of axes for each class.

    Raises:
        OSError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    from sterna.cli.simulate.run_plot import COLOURS, RC_PARAMS, metadata

    with matplotlib.rc_context(RC_PARAMS):
        figure, axes = pyplot.subplots(2, 3, figsize=(10, 6), layout="constrained")
        for row, name in zip(axes, CLASSES, strict=True):
            for axis, metric in zip(row, METRICS, strict=True):
                for side, colour in zip(SIDES, COLOURS, strict=False):
                    _draw(axis, document, (name, metric, side), colour)
                axis.set_xticks(range(len(NUMBERS)), ["mean", "P99"])
                axis.set_ylim(bottom=0.0)
                axis.set_title(f"{name}: {TITLES[metric]}, seconds")
        axes[0][0].legend(frameon=False, title="priorities")
        figure.suptitle("The same requests with priorities on and off (dots: single runs)")
        figure.savefig(path, dpi=150, metadata=metadata(path))
        pyplot.close(figure)


def _draw(axis: Any, document: Mapping[str, Any], which: tuple[str, str, str], colour: str) -> None:
    name, metric, side = which
    shift = -0.2 if side == "on" else 0.2
    heights = [document["summary"][name][side][metric][number] for number in NUMBERS]
    places = [place + shift for place in range(len(NUMBERS))]
    axis.bar(places, heights, 0.36, color=colour, alpha=0.55, label=side)
    for run in compared(document["runs"]):
        if run["priorities"] == side:
            values = [run["classes"][name][metric][number] for number in NUMBERS]
            axis.plot(places, values, "o", color=colour, markersize=4, markeredgecolor="white")
