"""Time line of a run: sampled load, freeness, instances and migrations."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import nan
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib import pyplot
from numpy.typing import NDArray

from bench.serving.observer import ClusterSample, InstanceSample
from bench.serving.records import PENDING, counted_until
from sterna.cli.simulate.run_plot import COLOURS, RC_PARAMS, metadata

RUNNING = "running"


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """Arrays with one entry for each sample.

    Attributes:
        time_s: float64[n].
        running: int64[n], requests in the batches.
        queuing: int64[n], requests that wait on instances.
        freeness: float64[n], mean of the instances that serve, in decode steps; NaN where none
            does.
        serving: int64[n], instances that take requests.
        instances: int64[n], those with a machine: starting, warm and terminating ones, too.
        migrations: float64[n], committed since the first sample; NaN where they are not reported.
    """

    time_s: NDArray[np.float64]
    running: NDArray[np.int64]
    queuing: NDArray[np.int64]
    freeness: NDArray[np.float64]
    serving: NDArray[np.int64]
    instances: NDArray[np.int64]
    migrations: NDArray[np.float64]


def timeline_of(samples: Sequence[ClusterSample]) -> Timeline:
    """The time line of the samples."""

    def summed(of: Callable[[InstanceSample], int]) -> NDArray[np.int64]:
        return np.array([sum(map(of, each.instances)) for each in samples], np.int64)

    return Timeline(
        time_s=np.array([max(0.0, each.time_s) for each in samples], np.float64),
        running=summed(lambda each: each.running),
        queuing=summed(lambda each: each.queuing),
        freeness=np.array([_freeness(each) for each in samples], np.float64),
        serving=summed(lambda each: each.state == RUNNING),
        instances=summed(lambda each: each.state != PENDING),
        migrations=np.array(
            [
                nan if count is None else count
                for count in counted_until(samples, lambda each: each.migrations_committed)
            ],
            np.float64,
        ),
    )


def timeline_json(timeline: Timeline) -> dict[str, list[float | None]]:
    """A list for each attribute; unknown values are None."""
    return {
        field.name: [
            None if np.isnan(value) else round(value, 3)
            for value in getattr(timeline, field.name).tolist()
        ]
        for field in fields(timeline)
    }


def timeline_from_json(columns: Mapping[str, Sequence[float | None]]) -> Timeline:
    """The time line from the result of `timeline_json`."""
    return Timeline(
        **{
            name: np.array([nan if value is None else value for value in values])
            for name, values in columns.items()
        }
    )


def draw_timeline(
    timeline: Timeline, title: str, path: Path, *, changes_s: Sequence[float] = ()
) -> None:
    """Draw the time line into the file, in the format of its suffix.

    Args:
        changes_s: the marked times at which the rate of requests changed.

    Raises:
        OSError: the file cannot be written.
    """
    matplotlib.use("agg")
    with matplotlib.rc_context(RC_PARAMS):
        figure, axes = pyplot.subplots(4, sharex=True, figsize=(9, 9), layout="constrained")
        load, freeness, instances, migrations = axes
        lines = (("running", timeline.running), ("queuing", timeline.queuing))
        _draw(load, "requests", timeline, lines)
        _draw(
            freeness,
            "freeness, mean of the instances that serve",
            timeline,
            (("", timeline.freeness),),
        )
        counts = (("with a machine", timeline.instances), ("serving", timeline.serving))
        _draw(instances, "instances", timeline, counts)
        _draw(migrations, "migrations so far", timeline, (("", timeline.migrations),))
        instances.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
        # An empty instance is hundreds of times as free as one at a threshold.
        freeness.set_yscale("symlog", linthresh=100.0)
        freeness.axhline(0.0, color="black", linewidth=0.6)
        for axis in (load, instances, migrations):
            axis.set_ylim(bottom=0)
        migrations.set_xlabel("seconds")
        for axis in axes:
            for change_s in changes_s:
                axis.axvline(change_s, color="black", linestyle=":", linewidth=1.0)
        figure.suptitle(title, fontsize="large")
        figure.savefig(path, dpi=150, metadata=metadata(path))
        pyplot.close(figure)


def _freeness(sample: ClusterSample) -> float:
    known = [
        each.freeness
        for each in sample.instances
        if each.state == RUNNING and each.freeness is not None
    ]
    return sum(known) / len(known) if known else nan


def _draw(
    axis: Any, title: str, timeline: Timeline, lines: Sequence[tuple[str, NDArray[Any]]]
) -> None:
    axis.set_title(title)
    for colour, (label, values) in zip(COLOURS, lines, strict=False):
        axis.step(timeline.time_s, values, where="post", color=colour, label=label or None)
    if len(lines) > 1:
        axis.legend(frameon=False, loc="best")
