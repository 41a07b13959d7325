"""What a driver makes of the supervisors that another one has started, on a real Ray."""

import os
import signal
import time
from pathlib import Path

import pytest
import ray

from sterna.runtime.home.supervisor_handle import SupervisorHandle, find_supervisors

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PATIENCE_S = 60.0


def test_one_in_reserve_that_was_silent_is_not_taken_for_the_one_that_acts(
    ray_cluster: None, tmp_path: Path
) -> None:
    """Both are silent on a machine that is too busy; nobody would replace the dead for ever."""
    started = [
        SupervisorHandle.begin({}, str(tmp_path), is_successor=True, is_reserve=True)
        for _ in range(2)
    ]
    processes = [ray.get(each.actor.process.remote(), timeout=PATIENCE_S) for each in started]
    try:
        for process in processes:
            os.kill(process.process_id, signal.SIGSTOP)
        acting, reserve = find_supervisors(timeout_s=1.0)
        assert acting is not None
        assert acting.actor == started[1].actor, "the latest"
        assert reserve is None
        assert acting.why_halted() is None
        os.kill(processes[1].process_id, signal.SIGCONT)
        until_s = time.monotonic() + PATIENCE_S
        while (reason := acting.why_halted()) is None and time.monotonic() < until_s:
            ray.wait([acting.actor.has_begun.remote()], timeout=1.0)
        assert reason == "it is in reserve, and no other one acts"
    finally:
        for each in started:
            ray.kill(each.actor)
