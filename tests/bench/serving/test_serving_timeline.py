"""What samples say of each moment."""

import json
from dataclasses import fields
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.serving.observer import ClusterSample, InstanceSample
from bench.serving.timeline import draw_timeline, timeline_from_json, timeline_json, timeline_of


def instance(name: str, state: str = "running", **more: Any) -> InstanceSample:
    known: dict[str, Any] = {
        "total_tokens": 1000,
        "used_tokens": 0,
        "freeness": None,
        "running": 0,
        "queuing": 0,
        "migrating": 0,
        "migrations_committed": 0,
    }
    return InstanceSample(id=name, state=state, **{**known, **more})


SAMPLES = (
    ClusterSample(-0.1, (instance("i0", freeness=50.0, migrations_committed=4),)),
    ClusterSample(
        0.5,
        (
            instance("i0", freeness=-10.0, running=3, queuing=2, migrations_committed=4),
            instance("i1", freeness=30.0, running=1),
            instance("i2", "pending"),
        ),
    ),
    ClusterSample(
        1.0,
        (
            instance("i0", "terminating", running=1, migrations_committed=6),
            instance("i1", "starting"),
        ),
    ),
    ClusterSample(1.5, (instance("i1", freeness=70.0, migrations_committed=1),)),
)


def test_each_sample_is_a_moment() -> None:
    timeline = timeline_of(SAMPLES)
    assert timeline.time_s.tolist() == [0.0, 0.5, 1.0, 1.5]
    assert timeline.running.tolist() == [0, 4, 1, 0]
    assert timeline.queuing.tolist() == [0, 2, 0, 0]
    assert timeline.serving.tolist() == [1, 2, 0, 1]
    assert timeline.instances.tolist() == [1, 2, 2, 1]
    assert timeline.migrations.tolist() == [0.0, 0.0, 2.0, 3.0]
    np.testing.assert_equal(timeline.freeness, [50.0, 10.0, nan, 70.0])


def test_migrations_that_are_not_told_are_not_made_up() -> None:
    silent = ClusterSample(2.0, (instance("i3", migrations_committed=None),))
    assert np.isnan(timeline_of([*SAMPLES, silent]).migrations).tolist() == [*[False] * 4, True]


@pytest.mark.slow
def test_the_same_samples_draw_the_same_file(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("first.svg", "second.svg")]
    for path in paths:
        draw_timeline(timeline_of(SAMPLES), "terns", path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert b"terns" in paths[0].read_bytes()


def test_a_time_line_can_be_kept_as_json() -> None:
    timeline = timeline_of(SAMPLES)
    text = json.dumps(timeline_json(timeline), allow_nan=False)
    again = timeline_from_json(json.loads(text))
    for each in fields(timeline):
        np.testing.assert_equal(getattr(again, each.name), getattr(timeline, each.name))
