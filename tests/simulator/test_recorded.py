"""Recorded simulations: the same results, and frames that agree with them."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sterna.config import ScalingConfig
from sterna.dashboard import recording
from sterna.dashboard.cluster_frames import LATENCY_WINDOW_S
from sterna.policy.presets import PRESETS
from sterna.simulator import SimulationConfig, simulate
from sterna.simulator.recorded import Recorded, simulate_recorded
from sterna.workload.trace import Trace
from tests.simulator.builders import (
    Result,
    configuration,
    crowded_trace,
    differences,
    with_prefixes,
    with_sessions,
)

Frame = dict[str, Any]
SCALING = ScalingConfig(min_instances=1, max_instances=6)


def recorded(
    tmp_path: Path, trace: Trace, config: SimulationConfig
) -> tuple[Result, Frame, list[Frame]]:
    path = tmp_path / "run.gz"
    result = simulate_recorded(trace, config, Recorded(path, "a run", 0.5))
    header, *frames = recording.read(path)
    return result, header, frames


@pytest.mark.parametrize("is_fast", [False, True])
@pytest.mark.parametrize("policy", ["sterna", "llumnix", "round-robin"])
def test_looking_changes_no_result(tmp_path: Path, policy: str, is_fast: bool) -> None:
    trace = with_sessions(with_prefixes(crowded_trace()))
    config = configuration(PRESETS[policy], is_fast=is_fast, fragmentation_interval_s=None)
    result, _, frames = recorded(tmp_path, trace, config)
    assert differences(result, simulate(trace, config)) == []
    assert len(frames) > 10


def test_a_cluster_that_grows_and_shrinks_is_recorded(tmp_path: Path) -> None:
    trace = crowded_trace()
    config = configuration(num_instances=1, scaling=SCALING, start_delay_s=2.0)
    result, _, frames = recorded(tmp_path, trace, config)
    assert differences(result, simulate(trace, config)) == []
    states = {each["state"] for frame in frames for each in frame["instances"]}
    assert {"starting", "running"} <= states
    assert len({len(frame["instances"]) for frame in frames}) > 1


def test_frames_agree_with_the_records(tmp_path: Path) -> None:
    trace = crowded_trace(fraction_high=0.2)
    (records, cluster), header, frames = recorded(tmp_path, trace, configuration())
    assert (header["title"], header["classes"]) == ("a run", [["normal", 0], ["high", 1]])
    assert [frame["t"] for frame in frames[:-1]] == [0.5 * n for n in range(len(frames) - 1)]
    for frame in frames:
        now_s = frame["t"]
        num_inside = int(np.sum((records.arrival_s <= now_s) & (records.end_s > now_s)))
        shown = [row for each in frame["instances"] for row in each["requests"]]
        assert frame["held"] + len(shown) == pytest.approx(num_inside, abs=2), (
            "a request may be on its way"
        )
        num_running = sum(each["running"] for each in frame["instances"])
        num_queuing = sum(each["queuing"] for each in frame["instances"])
        assert num_running + num_queuing == len(shown)
        assert num_queuing == sum(row[2] & 1 for row in shown if len(row) > 2)
        began = records.first_token_s[
            (records.first_token_s > now_s - LATENCY_WINDOW_S) & (records.first_token_s <= now_s)
        ]
        assert (frame["ttft"] is None) == (len(began) == 0)
    moves = [each for frame in frames for each in frame["decisions"] if each[2] == "moved"]
    assert len(moves) == cluster.migrations_committed
    paused = [float(re.search(r"paused ([\d.]+) ms", each[3])[1]) for each in moves]  # type: ignore[index]
    assert sorted(each for each in paused if each) == pytest.approx(
        sorted(1e3 * cluster.downtime_s), abs=0.1
    )
    assert frames[-1]["instances"][0]["running"] == 0, "the last frame is that of the end"
    lines = [each[3] for frame in frames for each in frame["decisions"] if each[2] == "dispatched"]
    assert lines
    assert all(line.startswith("to i0") for line in lines)


def test_a_request_is_seen_on_the_instance_that_it_has_moved_to(tmp_path: Path) -> None:
    _, _, frames = recorded(tmp_path, crowded_trace(), configuration())
    names = {number: name for frame in frames for number, name in frame["names"]}
    seen: dict[str, list[str]] = {}
    for frame in frames:
        for each in frame["instances"]:
            for number, *_ in each["requests"]:
                places = seen.setdefault(names[number], [])
                if places[-1:] != [each["id"]]:
                    places.append(each["id"])
    decisions = [each for frame in frames for each in frame["decisions"]]
    moved = {name for _, name, event, _ in decisions if event == "moved"}
    assert moved
    assert {name for name, places in seen.items() if len(places) > 1} <= moved
