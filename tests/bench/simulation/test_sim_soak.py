"""The program that runs many seeds under faults, and shows one again."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from bench.common import results_io
from bench.simulation import sim_progress
from bench.simulation.sim_code import code_of_seeds
from bench.simulation.sim_planted import markdown
from bench.simulation.sim_progress import Progress
from bench.simulation.sim_soak import main
from fault_simulation.adversary.faults import LINKS_ONLY
from fault_simulation.run import Result, run_seed
from sterna.errors import ConfigurationError


def test_a_seed_is_shown_again_to_the_same_event(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--replay", "3"]) == 0
    result = run_seed(3)
    shown = capsys.readouterr().out
    assert f"seed 3: {result.num_events} events, digest {result.digest}" in shown


def test_a_seed_is_shown_again_with_nothing_but_links_cut(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--replay", "3", "--links-only"]) == 0
    result = run_seed(3, LINKS_ONLY)
    shown = capsys.readouterr().out
    assert result.digest != run_seed(3).digest
    assert f"seed 3: {result.num_events} events, digest {result.digest}" in shown
    with pytest.raises(SystemExit):
        main(["--seeds", "1", "--links-only"])


def of_seed(seed: int, violation: str | None = None) -> Result:
    return Result(seed, violation, "", "digest", 10, 1.0, {"killed": 2})


def test_what_is_done_is_a_few_ranges_and_is_not_done_again() -> None:
    progress = Progress("abc", overlap=False)
    for seed in (0, 1, 2, 10, 12, 11, 5, 3, 4):
        progress.add(of_seed(seed, "broken" if seed == 11 else None))
    assert progress.done == [(0, 6), (10, 13)]
    assert list(progress.left(0, 15)) == [6, 7, 8, 9, 13, 14]
    assert progress.num_left(0, 15) == 6
    assert list(progress.left(1, 11)) == [6, 7, 8, 9]
    assert progress.num_left(1, 11) == 4
    assert list(progress.left(20, 22)) == [20, 21]
    assert (progress.num_seeds, progress.num_events, progress.counts) == (9, 90, {"killed": 18})
    assert progress.violations == {11: "broken"}


def test_a_run_goes_on_from_its_file(tmp_path: Path) -> None:
    progress = Progress("abc", overlap=False)
    progress.add(of_seed(7, "broken"))
    progress.save(tmp_path / "folder" / "progress.json")
    again = sim_progress.load(tmp_path / "folder" / "progress.json", "abc", overlap=False)
    assert again == progress


@pytest.mark.parametrize(("code", "overlap"), [("another", False), ("abc", True)])
def test_seeds_that_mean_something_else_are_not_gone_on_with(
    code: str, overlap: bool, tmp_path: Path
) -> None:
    progress = Progress("abc", overlap=False, wall_s=1.0)
    progress.save(tmp_path / "progress.json")
    sim_progress.write(progress, 2, tmp_path)
    with pytest.raises(ConfigurationError, match="run without --continue"):
        sim_progress.load(tmp_path / "progress.json", code, overlap=overlap)
    with pytest.raises(ConfigurationError, match="run without --continue"):
        sim_progress.load_results(tmp_path, code, overlap=overlap)


def test_a_run_goes_on_from_its_results(tmp_path: Path) -> None:
    """They are what is left of it on another day, or on another machine."""
    progress = Progress("abc", overlap=True, wall_s=12.5)
    for seed in (0, 1, 2, 10, 11):
        progress.add(of_seed(seed, "broken" if seed == 11 else None))
    sim_progress.write(progress, 2, tmp_path)
    assert sim_progress.load_results(tmp_path, "abc", overlap=True) == progress
    with pytest.raises(ConfigurationError, match=r"sim_soak\.json is not there: run without"):
        sim_progress.load_results(tmp_path / "elsewhere", "abc", overlap=True)


def test_the_code_of_seeds_has_a_name_that_does_not_depend_on_who_asks() -> None:
    asked = [
        sys.executable,
        "-c",
        "import sterna.cli.main, bench.simulation.sim_code as c; c._main()",
    ]
    done = subprocess.run(asked, cwd=results_io.ROOT, stdout=subprocess.PIPE, text=True, check=True)
    name = code_of_seeds()
    assert len(name) == 12
    assert name == code_of_seeds()
    # Who has loaded more modules would call it otherwise: it is asked for in a new process.
    assert done.stdout.strip() != name


@pytest.mark.parametrize("content", [None, b"", b"{}", b"[]"])
def test_a_file_that_is_none_is_said_to_be_none(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"progress\.json"):
        sim_progress.load(path, "abc", overlap=False)


def test_the_table_says_what_was_not_found() -> None:
    document = {
        "date": "2026-11-22T01:02:03+00:00",
        "commit": "abc",
        "config": {"max_seeds_a_mistake": 3000},
        "summary": {"planted": 2, "found": 1},
        "rows": [
            {"planted": "one", "found_after_seeds": 12, "violation": "r1 has two owners"},
            {"planted": "two", "found_after_seeds": None, "violation": None},
        ],
    }
    assert markdown(document).splitlines()[2:] == [
        "| planted | found after seeds | by what |",
        "| --- | ---: | --- |",
        "| one | 12 | r1 has two owners |",
        "| two | not in 3000 |  |",
    ]


@pytest.mark.slow
def test_seeds_are_counted_and_counted_in(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    places = ["--progress", str(tmp_path / "progress.json"), "--results", str(tmp_path)]
    assert main(["--seeds", "12", "--workers", "2", *places]) == 0
    assert "12 seeds, 0 violations" in capsys.readouterr().out
    (tmp_path / "progress.json").unlink()
    assert main(["--seeds", "8", "--first", "10", "--workers", "1", "--continue", *places]) == 0
    assert "18 seeds, 0 violations" in capsys.readouterr().out
    summary = results_io.read("sim_soak", tmp_path)["summary"]
    assert (summary["seeds"], summary["violations"]) == (18, 0)
    assert summary["events"] == sum(run_seed(seed).num_events for seed in range(18))


@contextmanager
def soaking(path: Path) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A run that has done some seeds, as from a terminal; and the processes that it has begun."""
    command = [
        sys.executable,
        "-m",
        "bench.simulation.sim_soak",
        "--workers",
        "2",
        "--progress",
        str(path),
    ]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=results_io.ROOT,
        start_new_session=True,
    ) as running:
        assert running.stderr is not None
        shown = running.stderr.readline()
        assert "of 100000 seeds" in shown, shown + running.stderr.read()
        yield running, psutil.Process(running.pid).children(recursive=True)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_a_run_whole_and_it_goes_on_from_there(
    number: signal.Signals, tmp_path: Path
) -> None:
    """It goes to the whole group, as from a terminal, or from `timeout`."""
    path = tmp_path / "progress.json"
    with soaking(path) as (running, children):
        assert len(children) >= 2
        os.killpg(running.pid, number)
        said, errors = running.communicate(timeout=100)
    assert running.returncode == 130
    assert "seeds, 0 violations" in said
    assert "--continue goes on from here" in said
    assert all("minutes to go" in line for line in errors.splitlines()), errors
    assert psutil.wait_procs(children, timeout=60)[1] == []
    progress = sim_progress.load(path, code_of_seeds(), overlap=False)
    assert progress.num_seeds > 0
    assert len(progress.done) == 1


@pytest.mark.slow
def test_a_run_of_which_a_process_is_killed_ends_and_says_so(tmp_path: Path) -> None:
    """As by a kernel that has no memory left."""
    with soaking(tmp_path / "progress.json") as (running, children):
        worker = max(children, key=lambda each: each.cpu_times().user)
        worker.kill()
        _, errors = running.communicate(timeout=100)
    assert running.returncode == 1
    assert errors.splitlines()[-1].startswith("sterna: error: a worker process was killed")
    assert psutil.wait_procs(children, timeout=60)[1] == []
