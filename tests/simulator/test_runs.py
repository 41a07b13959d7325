"""Runs spread over processes: the results of running them here, and nothing left behind."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from sterna.engine.emulated.profiles import A10_LLAMA_7B
from sterna.errors import ConfigurationError
from sterna.policy.presets import LLUMNIX, ROUND_ROBIN
from sterna.simulator.config import SimulationConfig
from sterna.simulator.runs import (
    Job,
    WorkerDeathError,
    _interrupts_blocked,
    map_runs,
    run,
    run_all,
)
from sterna.workload.catalog import Workload
from tests.simulator.reductions import be_killed, fingerprint, stumble

ROOT = Path(__file__).parents[2]

CONFIG = SimulationConfig(
    # So little memory that requests queue, are preempted and move.
    engine=replace(A10_LLAMA_7B.engine, num_blocks=100),
    step_time=A10_LLAMA_7B.step_time,
    copy_time=A10_LLAMA_7B.copy_time,
    policy=LLUMNIX,
    num_instances=2,
    # Nothing of this is about compiled code, which takes a second to import in every process.
    is_fast=False,
)
WORKLOAD = Workload("M-M", num_requests=40, rate=8.0, max_total_tokens=1500)
JOBS = [
    Job(replace(WORKLOAD, seed=seed), replace(CONFIG, policy=policy))
    for policy in (LLUMNIX, ROUND_ROBIN)
    for seed in (1, 2)
]

EXIT_TIMEOUT_S = 20.0


def test_runs_in_processes_are_bit_for_bit_those_run_here_in_the_order_of_the_jobs() -> None:
    before = psutil.Process().children(recursive=True)
    done_here: list[int] = []
    here = map_runs(JOBS, fingerprint, num_processes=1, on_done=done_here.append)
    done: list[int] = []
    elsewhere = map_runs(JOBS, fingerprint, num_processes=2, on_done=done.append)
    assert [each[1:] for each in elsewhere] == [each[1:] for each in here]
    assert len({each[1:] for each in here}) == len(JOBS), "jobs differ, so that order shows"
    assert here[0][-1] > 0, "requests moved"
    assert {pid for pid, *_ in here} == {os.getpid()}
    assert os.getpid() not in {pid for pid, *_ in elsewhere}
    assert done_here == [0, 1, 2, 3]
    assert sorted(done) == [0, 1, 2, 3]
    assert _left_since(before) == []


def test_a_whole_run_travels_with_its_job() -> None:
    job = JOBS[0]
    (here,) = run_all([job])
    elsewhere = run_all(JOBS[:2], num_processes=2)[0]
    assert elsewhere.job == here.job == job
    assert elsewhere.summary() == replace(here.summary(), wall_s=elsewhere.cluster.wall_s)
    assert elsewhere.job.policy == "llumnix"
    assert replace(job, label="mine").policy == "mine"


def test_no_jobs_give_no_runs() -> None:
    assert run_all([]) == []


def test_what_a_job_cannot_do_arrives_as_its_own_error() -> None:
    before = psutil.Process().children(recursive=True)
    jobs = [*JOBS[:2], Job(replace(WORKLOAD, trace="M-N"), CONFIG)]
    with pytest.raises(ConfigurationError, match="'M-N'"):
        run_all(jobs, num_processes=2)
    assert _left_since(before) == []


def test_a_job_alone_fails_in_the_same_way() -> None:
    with pytest.raises(ConfigurationError, match="'M-N'"):
        run(Job(replace(WORKLOAD, trace="M-N"), CONFIG))


@pytest.mark.slow
def test_a_bug_in_a_process_shows_where_it_is() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        map_runs(JOBS, stumble, num_processes=2)
    assert "in stumble" in "".join(caught.value.__notes__)


def test_the_progress_of_a_run_is_told_and_changes_nothing() -> None:
    job = replace(JOBS[0], workload=replace(WORKLOAD, num_requests=200))
    fractions: list[float] = []
    assert fingerprint(run(job, on_progress=fractions.append)) == fingerprint(run(job))
    assert len(fractions) > 2
    assert fractions == sorted(fractions)
    assert 0.0 <= fractions[0] < fractions[-1] <= 1.0
    together: list[float] = []
    run_all([job, job], num_processes=1, on_progress=together.append)
    assert together == fractions + fractions


@pytest.mark.slow
def test_a_killed_process_is_told_rather_than_waited_for() -> None:
    before = psutil.Process().children(recursive=True)
    with pytest.raises(WorkerDeathError, match="run fewer at once"):
        map_runs(JOBS, be_killed, num_processes=2)
    assert _left_since(before) == []


@pytest.mark.slow
def test_a_script_without_a_guard_is_told_of_it(tmp_path: Path) -> None:
    """Its processes import it, would begin the same again, and end before they read their jobs."""
    script = tmp_path / "unguarded.py"
    script.write_text(
        "import sterna\n"
        "sterna.simulate(trace='S-S', rate=2.0, requests=5, seed=[1, 2], processes=2)\n"
    )
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("sterna.simulator.runs.WorkerDeathError: ")
    assert last.endswith('under `if __name__ == "__main__":`')


SCRIPT = """
from tests.simulator.reductions import say_and_stay
from tests.simulator.test_runs import JOBS
from sterna.simulator.runs import map_runs

if __name__ == "__main__":
    map_runs(JOBS, say_and_stay, num_processes=2)
"""


@pytest.fixture
def busy() -> Iterator[tuple["subprocess.Popen[str]", list[psutil.Process]]]:
    """A script all of whose processes are busy, in a process group of their own."""
    script = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert script.stdout is not None
    workers = [psutil.Process(int(script.stdout.readline())) for _ in range(2)]
    yield script, [*workers, *psutil.Process(script.pid).children(recursive=True)]
    script.kill()
    script.communicate()


@pytest.mark.slow
def test_ctrl_c_ends_everything_and_only_the_script_says_so(
    busy: tuple["subprocess.Popen[str]", list[psutil.Process]],
) -> None:
    """The terminal sends it to all processes of the group."""
    script, processes = busy
    os.killpg(script.pid, signal.SIGINT)
    _, errors = script.communicate(timeout=EXIT_TIMEOUT_S)
    assert errors.count("Traceback") == 1
    assert errors.strip().endswith("KeyboardInterrupt")
    gone, alive = psutil.wait_procs(processes, timeout=EXIT_TIMEOUT_S)
    assert (len(gone) >= 2, alive) == (True, [])


@pytest.mark.slow
def test_the_processes_of_a_killed_script_end(
    busy: tuple["subprocess.Popen[str]", list[psutil.Process]],
) -> None:
    script, processes = busy
    script.kill()
    _, errors = script.communicate(timeout=EXIT_TIMEOUT_S)
    assert errors == ""
    gone, alive = psutil.wait_procs(processes, timeout=EXIT_TIMEOUT_S)
    assert (len(gone) >= 2, alive) == (True, [])


def _left_since(before: list[psutil.Process]) -> list[psutil.Process]:
    """The children since then, without the standard library's own, one a program, which ends
    with it."""
    return [
        each
        for each in psutil.Process().children(recursive=True)
        if each not in before and not any("resource_tracker" in word for word in each.cmdline())
    ]


def test_an_interrupt_waits_until_the_processes_have_started() -> None:
    """Else what a process needs to begin would stay half-written. It may come to any thread, such
    as a progress display's, and concerns the main thread all the same."""
    over = threading.Event()
    display = threading.Thread(target=over.wait)
    display.start()
    assert display.ident is not None
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)
    events = []
    try:
        with _interrupts_blocked():
            signal.pthread_kill(display.ident, signal.SIGINT)
            events.append(os.read(reader, 1))
            events.append("all have started")
    except KeyboardInterrupt:
        events.append("interrupted")
    finally:
        signal.set_wakeup_fd(before)
        over.set()
        display.join()
        os.close(reader)
        os.close(writer)
    assert events == [bytes([signal.SIGINT]), "all have started", "interrupted"]
