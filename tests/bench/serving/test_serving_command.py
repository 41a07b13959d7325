"""`sterna bench serve`, whole."""

import asyncio
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from bench.serving.__main__ import _parser, main
from sterna.cli.main import main as sterna
from sterna.workload.catalog import TRACES, has_drawn_lengths
from tests.bench.serving.sse_server import Body, CompletionsServer, all_tokens, in_thread, token

ROOT = Path(__file__).parents[3]
SMALL = ("--trace", "fixed:8-4", "--rate", "200", "--requests", "6", "--interval", "0.01")


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def bench(server: CompletionsServer, *options: str) -> int:
    with in_thread(server) as url:
        return main(["--url", url, *SMALL, *options])


def test_the_json_has_the_names_of_a_simulation_and_more(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert bench(CompletionsServer(), "--json", "--high-fraction", "0.5") == 0
    captured = capsys.readouterr()
    found: dict[str, Any] = json.loads(captured.out)
    assert captured.err == ""
    assert (found["requests"], found["completed"], found["failed"]) == (6, 6, 0)
    assert set(found["classes"]) == {"high", "normal"}
    assert found["classes"]["high"]["failed"] == 0
    assert found["server"]["model"] == "terns"
    assert found["policy"] is None
    small = ("--trace", "fixed:8-4", "--rate", "2", "--requests", "2", "--instances", "1")
    assert sterna(["simulate", *small, "--set", "is_fast=false", "--json"]) == 0
    simulated = json.loads(capsys.readouterr().out)
    assert set(simulated) - set(found) == {"settings"}
    assert set(found) - set(simulated) == {"server", "failed", "errors", "send_delay_s"}


def test_the_table_says_what_failed(capsys: pytest.CaptureFixture[str]) -> None:
    async def answer(stream: web.StreamResponse, body: Body) -> None:
        if body["priority"] < 0:
            await token(stream)
        else:
            await all_tokens(stream, body)

    assert bench(CompletionsServer(answer), "--high-fraction", "0.5", "--label", "terns") == 0
    shown = capsys.readouterr().out
    assert "fixed:8-4 at 200/s, poisson; 6 requests; seed 51934" in shown
    assert "completed 3 of 6 requests; preemptions: –" in shown
    assert "failed 3 requests: cut: an unknown number of 4 tokens came" in shown
    assert "largest gap, s" in shown


def test_the_tier_can_be_asked_for_instead() -> None:
    server = CompletionsServer()
    options = ("--high-fraction", "0.5", "--priority-field", "service-tier", "--json")
    assert bench(server, *options) == 0
    assert sorted(body["service_tier"] for body in server.bodies) == [
        *["default"] * 3,
        *["priority"] * 3,
    ]


def test_requests_beyond_the_models_length_are_drawn_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = CompletionsServer()
    with in_thread(server) as url:
        options = ("--trace", "M-M", "--rate", "400", "--requests", "60", "--json")
        assert main(["--url", url, *options, "--interval", "0.01"]) == 0
    captured = capsys.readouterr()
    assert "requests of more than 2,048 tokens are drawn again" in captured.err
    assert json.loads(captured.out)["max_total_tokens"] == 2048
    assert max(len(body["prompt"]) + body["max_tokens"] for body in server.bodies) <= 2048


@pytest.mark.parametrize("trace", [*TRACES, "zipf:64-32", "prompts:2-64-16-8"])
def test_every_workload_of_the_catalog_is_sent(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lengths of those that are not drawn are divided, as for a small engine."""
    server = CompletionsServer()
    divisor = "50" if trace == "reasoning" else "64"
    divided = () if has_drawn_lengths(trace) else ("--divide-lengths", divisor)
    # The second one is a later turn where there are sessions.
    options = ("--trace", trace, "--rate", "200", "--requests", "2", *divided, "--json")
    with in_thread(server) as url:
        assert main(["--url", url, *options, "--interval", "0.01"]) == 0
    assert json.loads(capsys.readouterr().out)["completed"] == 2
    assert len(server.bodies) == 2


@pytest.mark.slow
def test_the_file_has_every_request_and_sample(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    assert bench(CompletionsServer(), "--output", str(path)) == 0
    document = json.loads(path.read_text())
    assert list(document) == ["commit", "date", "hardware", "summary", "requests", "samples"]
    assert len(document["requests"]) == document["summary"]["requests"] == 6
    assert {each["error"] for each in document["requests"]} == {None}
    assert document["samples"] == []


def test_a_turn_that_was_never_due_has_no_arrival_in_the_file(tmp_path: Path) -> None:
    """The turn of its session before it failed."""

    async def answer(stream: web.StreamResponse, body: Body) -> None:
        """Nothing but the end."""

    path, trace = tmp_path / "run.json", tmp_path / "trace.csv"
    trace.write_text("session,turn,delay_ms,new_input_tokens,output_tokens\n0,0,0,8,4\n0,1,5,8,4\n")
    sessions = ("--trace", str(trace), "--requests", "2", "--output", str(path))
    assert bench(CompletionsServer(answer), *sessions) == 0
    first, second = json.loads(path.read_text())["requests"]
    assert first["arrival_s"] is not None
    assert second["arrival_s"] is None
    assert second["error"] is not None


def test_no_two_runs_have_prompts_that_a_cache_takes_for_the_same() -> None:
    servers = CompletionsServer(), CompletionsServer()
    for server in servers:
        assert bench(server) == 0
    (salt,), (other) = ({each["cache_salt"] for each in server.bodies} for server in servers)
    assert other != {salt}
    prompts = [sorted(each["prompt"] for each in server.bodies) for server in servers]
    assert prompts[0] == prompts[1]


def test_a_file_that_cannot_be_written_is_refused_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = CompletionsServer()
    assert bench(server, "--output", str(tmp_path)) == 1
    assert f"--output {tmp_path} cannot be written: Is a directory" in capsys.readouterr().err
    assert server.bodies == []


@pytest.mark.slow
def test_a_run_can_be_drawn(tmp_path: Path) -> None:
    path = tmp_path / "run.png"
    assert bench(CompletionsServer(), "--plot", str(path)) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_time_line_needs_a_server_that_tells_its_instances(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "line.png"
    assert bench(CompletionsServer(), "--timeline", str(path)) == 1
    captured = capsys.readouterr()
    assert "does not report its instances" in captured.err
    assert "completed 6 of 6 requests" in captured.out, "what was measured is not lost"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--url", "http://127.0.0.1:1"), "no server answers at http://127.0.0.1:1"),
        (("--plot", "plot.txt"), "--plot must end in .png, .svg, .pdf"),
        (("--timeline", "line.txt"), "--timeline must end in .png, .svg, .pdf"),
        (("--output", "nowhere/run.json"), "--output nowhere/run.json: there is no folder nowhere"),
        (("--serve", "'"), "--serve cannot be read as options"),
        (("--serve", "--port x"), "--serve: --port needs a number, not 'x'"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_what_cannot_work_is_said_in_one_line(
    options: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_the_key_may_be_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    server = CompletionsServer(api_key="sesame")
    assert bench(server) == 1
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    assert bench(server) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "shell"),
    [
        (signal.SIGINT, []),
        (signal.SIGTERM, []),
        # What shells do to a command with an ampersand.
        (signal.SIGTERM, ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]),
    ],
    ids=["Ctrl-C", "SIGTERM", "SIGTERM in the background"],
)
def test_an_interrupted_run_ends_its_streams_and_reports_nothing(
    number: signal.Signals, shell: list[str]
) -> None:
    server = CompletionsServer(_begin_only)
    command = [*shell, sys.executable, "-P", "-m", "bench.serving.__main__", *SMALL, "--json"]
    with in_thread(server) as url:
        process = subprocess.Popen(
            [*command, "--url", url],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert server.has_been_asked.wait(120)
        process.send_signal(number)
        output, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert output == ""
    assert error == "sterna: stopped when 0 of 6 requests had ended; nothing is reported\n"


async def _begin_only(stream: web.StreamResponse, body: Body) -> None:
    """Never end by itself; a client that goes ends this, too."""
    while True:
        await token(stream)
        await asyncio.sleep(0.01)


def test_the_page_has_every_option_and_no_other() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    table = page.split("\n### Options\n")[1].split("\n### ")[0]
    cells = re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`(--[^`]*)`", cell)}
    options = {name for action in _parser()._actions for name in action.option_strings}
    assert named == options - {"-h", "--help"}


def test_the_commands_of_the_page_can_be_read() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    commands = re.findall(r"^    sterna bench serve ([^#\n]*)", page, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        _parser().parse_args(shlex.split(command))
