"""The plot of runs, simulated or real: latencies of requests, and memory over time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib import pyplot
from numpy.typing import NDArray

from sterna.metrics.records import ClusterRecord, Records

Values = NDArray[np.float64]

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's colours, which are distinct for people with any colour vision."""

PERCENTILES = {1.0: "0", 0.5: "P50", 0.1: "P90", 0.01: "P99", 0.001: "P99.9", 1e-4: "P99.99"}
"""Labels of a distribution's axis, by the share of requests that take this time or longer."""

NUM_POINTS = 400
"""Points of a distribution's line: more would not be visible."""

RC_PARAMS = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.titlesize": "medium",
    "axes.titlelocation": "left",
    # Makes two drawings of the same runs identical files.
    "svg.hashsalt": "sterna",
}


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """One run of a plot.

    Attributes:
        label: of its lines; runs with the same label are one policy with several seeds.
    """

    label: str
    records: Records
    cluster: ClusterRecord


def draw_runs(runs: Sequence[Drawn], title: str, path: Path) -> None:
    """Draw the runs into the file, in the format of its suffix.

    Above, the distributions of TTFT and request latency, over the requests of all runs of a
    label; below, memory and fragmentation over time in the first of them, and the instances where
    their number changes.

    Raises:
        OSError: the file cannot be written.
    """
    matplotlib.use("agg")
    has_scaling = any(len(run.cluster.instances_num) > 1 for run in runs)
    series = ["memory", "fragmentation"] + ["instances"] * has_scaling
    mosaic = [
        [name for name in row for _ in range(6 // len(row))]
        for row in (["ttft", "request"], series)
    ]
    with matplotlib.rc_context(RC_PARAMS):
        figure, axes = pyplot.subplot_mosaic(mosaic, figsize=(11, 7.5), layout="constrained")
        for place, label in enumerate(dict.fromkeys(run.label for run in runs)):
            those = [run for run in runs if run.label == label]
            style = {"color": COLOURS[place % len(COLOURS)], "label": label}
            _draw_tail(axes["ttft"], _pooled(those, "first_token_s"), style)
            _draw_tail(axes["request"], _pooled(those, "end_s"), style)
            _draw_series(axes, those[0], style)
        _finish(axes, has_fragmentation=_is_sampled(runs))
        figure.suptitle(title, fontsize="large")
        figure.savefig(path, dpi=150, metadata=metadata(path))
        pyplot.close(figure)


# -------------------------------------------------------------------------------- distributions


def _pooled(runs: Sequence[Drawn], until: str) -> Values:
    """The time from arrival to this event, of all requests that reached it."""
    found = np.concatenate([getattr(run.records, until) - run.records.arrival_s for run in runs])
    return np.asarray(found[~np.isnan(found)], np.float64)


def _draw_tail(axis: Any, latencies_s: Values, style: Mapping[str, Any]) -> None:
    """A line from the shortest latency to the longest, that of a single request."""
    if len(latencies_s) == 0:
        return
    shares = np.geomspace(1.0, 1.0 / len(latencies_s), NUM_POINTS)
    ranks = np.maximum(np.round(shares * len(latencies_s)), 1).astype(np.int64)
    axis.plot(np.sort(latencies_s)[-ranks], shares, **style)


def _finish_tail(axis: Any, title: str, what: str) -> None:
    """Shares decrease upwards, in decades, so that the tail is readable."""
    axis.set_xscale("log")
    axis.set_yscale("log")
    lowest = min([0.5, *(line.get_ydata()[-1] for line in axis.lines)])
    axis.set_ylim(1.0, lowest)
    shown = {share: name for share, name in PERCENTILES.items() if share >= lowest}
    axis.set_yticks(list(shown), list(shown.values()))
    axis.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    axis.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda x, _: f"{x:g}"))
    axis.set_title(title)
    axis.set_xlabel(what)


# ---------------------------------------------------------------------------------- time series


def _is_sampled(runs: Sequence[Drawn]) -> bool:
    return any(len(run.cluster.fragmentation_time_s) > 0 for run in runs)


def _draw_series(axes: Mapping[str, Any], run: Drawn, style: Mapping[str, Any]) -> None:
    cluster = run.cluster
    times_s = cluster.fragmentation_time_s
    thin = {**style, "linewidth": 0.9, "alpha": 0.85}
    if len(cluster.total_tokens) == len(times_s) > 0:
        used = 1.0 - cluster.free_tokens / cluster.total_tokens
        axes["memory"].plot(times_s, 100.0 * used, **thin)
    axes["fragmentation"].plot(times_s, 100.0 * cluster.fragmentation_proportion, **thin)
    if "instances" in axes:
        begins_s = np.append(cluster.instances_time_s, cluster.simulated_s)
        counts = np.append(cluster.instances_num, cluster.instances_num[-1:])
        lasting = begins_s <= cluster.simulated_s
        axes["instances"].step(begins_s[lasting], counts[lasting], where="post", **style)


def _finish(axes: Mapping[str, Any], *, has_fragmentation: bool) -> None:
    _finish_tail(axes["ttft"], "TTFT", "seconds from arrival to the first token")
    _finish_tail(axes["request"], "request latency", "seconds from arrival to the last token")
    axes["ttft"].legend(frameon=False, loc="best")
    for name, title in (
        ("memory", "memory in use, % of all instances'"),
        ("fragmentation", "fragmented memory, % of all instances'"),
        ("instances", "instances"),
    ):
        if name in axes:
            axes[name].set_title(title)
            axes[name].set_xlabel("seconds")
            axes[name].set_ylim(bottom=0)
    if "instances" in axes:
        axes["instances"].yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    if not has_fragmentation:
        for name in ("memory", "fragmentation"):
            axes[name].text(0.5, 0.5, "not sampled", transform=axes[name].transAxes, ha="center")


def metadata(path: Path) -> dict[str, None]:
    """Metadata of the file, without versions and dates: equal runs give equal files."""
    match path.suffix.lower():
        case ".png":
            return {"Software": None}
        case ".svg":
            return {"Date": None}
        case _:
            return {"CreationDate": None}
