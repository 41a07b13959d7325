"""`sterna simulate --record` and `sterna replay`."""

import json
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.serving.ports import free_port
from sterna.cli.main import main
from sterna.dashboard import recording
from sterna.dashboard.page import page

HANG_S = 60.0
RUN = ("simulate", "--trace", "S-S", "--requests", "60", "--rate", "8", "--instances", "2")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recorded") / "run.gz"
    assert main([*RUN, "--json", "--record", str(path)]) == 0
    return path


@pytest.fixture
def replayed(file: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address of a replay, and its process."""
    options = ("--port", str(free_port()), "--speed", "1000", "--from", "2")
    command = [sys.executable, "-m", "sterna.cli.main", "replay", str(file), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"([\d,]+) frames at (http://\S+)", line)
        assert found is not None, line
        assert int(found[1]) == sum(1 for _ in recording.read(file)) - 1
        yield found[2], process
        process.kill()


def test_a_run_is_recorded_once_a_second(file: Path) -> None:
    header, *frames = recording.read(file)
    assert header["title"] == "sterna, S-S, 2 instances, simulated"
    assert [frame["t"] for frame in frames[:-1]] == [*map(float, range(len(frames) - 1))]
    assert len(frames) > 5
    assert any(frame["decisions"] for frame in frames)


def test_frames_are_as_far_apart_as_the_option_says(tmp_path: Path) -> None:
    path = tmp_path / "run.gz"
    assert main([*RUN, "--json", "--record", str(path), "--record-interval", "0.5"]) == 0
    _, *frames = recording.read(path)
    assert [frame["t"] for frame in frames[:4]] == [0.0, 0.5, 1.0, 1.5]


def test_a_recorded_run_prints_the_same(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def printed(*options: str) -> dict[str, Any]:
        assert main([*RUN, "--json", *options]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return {name: each for name, each in found.items() if name != "wall_s"}

    assert printed("--record", str(file)) == printed()


def test_the_page_and_the_frames_from_a_moment_on_are_served(
    replayed: tuple[str, subprocess.Popen[str]], file: Path
) -> None:
    url, process = replayed
    for path in ("", "dashboard"):
        with urllib.request.urlopen(url + path, timeout=HANG_S) as answer:
            assert answer.read().decode() == page().html
            assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")
    header, *frames = recording.read(file)
    names = [name for frame in frames if frame["t"] < 2.0 for name in frame["names"]]
    assert names
    wanted = [{**header, "names": names}, *(frame for frame in frames if frame["t"] >= 2.0)]
    with urllib.request.urlopen(url + "admin/watch", timeout=HANG_S) as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        found = []
        while len(found) < len(wanted):
            if (line := answer.readline()).startswith(b"data: "):
                found.append(json.loads(line[6:]))
        process.send_signal(signal.SIGINT)
        assert process.wait(HANG_S) == 130, "Ctrl-C ends it, even with a browser that looks"
    assert found == wanted


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--record", "absent/run.gz"), "there is no folder absent"),
        (("--record", "/"), "cannot be written: Is a directory"),
        (("--record", "run.gz", "--seed", "1", "2"), "--record takes one run"),
        (("--record", "run.gz", "--policy", "sterna", "llumnix"), "--record takes one run"),
    ],
)
def test_a_recording_that_cannot_be_made_is_refused(
    options: tuple[str, ...],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And no empty file is left."""
    monkeypatch.chdir(tmp_path)
    assert main([*RUN, *options]) == 1
    assert reason in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_no_recording_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.gz").write_text("nothing")
    assert main(["replay", str(tmp_path / "run.gz")]) == 1
    assert "is no recording of this version" in capsys.readouterr().err


def test_a_beginning_behind_the_end_is_refused(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(file), "--from", "1e6"]) == 1
    assert "--from 1e+06: the recording ends at" in capsys.readouterr().err


def test_a_port_that_is_taken_is_named(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["replay", str(file), "--port", str(port)]) == 1
    assert f"--port {port}: Address already in use" in capsys.readouterr().err
