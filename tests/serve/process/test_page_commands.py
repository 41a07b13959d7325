"""The shell commands of README and of the operators' pages run, and do what the pages say.

Of an emulated server under the name that the commands have for the model. What a reader fills in
(REQUEST, INSTANCE, PID) is filled in here, and the port is the test's own.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sterna.cli.operate.admin_commands import ServerError
from tests.serve.emulated.quick import MODEL, PROFILE, quick_server
from tests.serve.server import ServerProcess, until

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[3]
OPERATIONS = ROOT / "docs" / "operations"
COMMAND_TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A thousand tokens take a minute, in which all commands of a page run."""
    slow = PROFILE.replace("decode_s: 0.02", "decode_s: 0.06")
    assert slow != PROFILE
    options = ("--instances", "2", "--max-model-len", "1152")
    with quick_server(tmp_path_factory.mktemp("pages"), *options, profile=slow) as server:
        yield server
    assert "Traceback" not in server.log


def commands(page: Path, *begins: str) -> list[str]:
    """The page's commands that begin so, as they are written, without their comments."""
    found: list[str] = []
    is_open = False
    for line in page.read_text("utf-8").splitlines():
        text = line.removeprefix("    ")
        if text == line:
            is_open = False
        elif is_open:
            found[-1] += f"\n{text}"
        elif text.removeprefix(".venv/bin/").startswith(begins):
            found.append(re.sub(r"   *#.*$", "", text))
        else:
            continue
        # A quotation or a backslash goes on in the next line.
        is_open = text != line and (found[-1].count("'") % 2 == 1 or found[-1].endswith("\\"))
    assert found, f"{page.name} has no command that begins with {begins}"
    return found


def begun(line: str, server: ServerProcess, folder: Path) -> "subprocess.Popen[str]":
    """Run a command of a page in this folder, in a session of its own."""
    line = re.sub(r"(http://127\.0\.0\.1|localhost):8000", server.url, line)
    line = line.replace(".venv/bin/sterna", "sterna")
    binaries = Path(sys.executable).parent
    return subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", line.removesuffix("&")],
        cwd=folder,
        env={**os.environ, "STERNA_URL": server.url, "PATH": f"{binaries}:{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def said(line: str, server: ServerProcess, folder: Path) -> str:
    """What a command prints that ends in good order."""
    process = begun(line, server, folder)
    try:
        printed, _ = process.communicate(timeout=COMMAND_TIMEOUT_S)
    finally:
        end(process)
    assert process.returncode == 0, f"{line}\n{printed}"
    return printed


def end(process: "subprocess.Popen[str]") -> None:
    """End what is left of a command."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def instance_of(server: ServerProcess, name: str) -> str | None:
    """Where the request runs, by the client's name for it; None while that is not known."""
    try:
        found = [each["instance"] for each in server.requests() if f"cmpl-{name}" in each["id"]]
    except ServerError:
        # An instance that has just died does not answer.
        return None
    return found[0] if found else None


def running(server: ServerProcess) -> set[str]:
    """The instances that serve."""
    return {str(each["id"]) for each in server.instances() if each["state"] == "running"}


@pytest.fixture
def stream(
    server: ServerProcess, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator["subprocess.Popen[str]"]:
    """The page's stream of a thousand tokens, which is under way."""
    page, name = request.param
    (line,) = (each for each in commands(page, "curl") if name in each)
    process = begun(line, server, tmp_path)
    until(lambda: instance_of(server, name) is not None, "the request runs")
    yield process
    end(process)


def test_readme_asks_the_model(server: ServerProcess, tmp_path: Path) -> None:
    (line,) = (each for each in commands(ROOT / "README.md", "curl") if "Hello" in each)
    assert '"choices":[' in said(line, server, tmp_path)


@pytest.mark.parametrize("stream", [(ROOT / "README.md", "tern")], indirect=True)
def test_readme_moves_a_request(
    server: ServerProcess, tmp_path: Path, stream: "subprocess.Popen[str]"
) -> None:
    look, migrate, explain, instances = commands(
        ROOT / "README.md",
        "sterna migrate",
        "sterna requests",
        "sterna explain",
        "sterna instances",
    )
    assert "cmpl-tern" in said(look, server, tmp_path)
    here = instance_of(server, "tern")
    if here == migrate.split()[-1]:
        migrate = migrate.replace("i1", "i0")
    assert "cmpl-tern" in said(migrate, server, tmp_path)
    until(lambda: instance_of(server, "tern") == migrate.split()[-1], "it runs there")
    assert f"moved from {here} to {migrate.split()[-1]}" in said(explain, server, tmp_path)
    printed = said(instances, server, tmp_path)
    assert all(name in printed for name in ("i0", "i1"))
    assert stream.poll() is None


@pytest.mark.parametrize("stream", [(OPERATIONS / "failures.md", "skua")], indirect=True)
def test_failures_kills_an_instance_under_a_stream(
    server: ServerProcess, tmp_path: Path, stream: "subprocess.Popen[str]"
) -> None:
    page = OPERATIONS / "failures.md"
    look, kill, again = commands(page, "sterna requests", "kill")
    assert (look, again) == ("sterna requests", "sterna requests")
    here = instance_of(server, "skua")
    assert str(here) in said(look, server, tmp_path)
    said(kill.replace("PID", str(server.instance_process(str(here)).pid)), server, tmp_path)
    until(lambda: instance_of(server, "skua") not in (None, here), "it runs elsewhere")
    assert "cmpl-skua" in said(again, server, tmp_path)
    assert stream.wait(COMMAND_TIMEOUT_S) == 0
    lines = (tmp_path / "skua.txt").read_text().splitlines()
    assert lines.count("data: [DONE]") == 1
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    found = "".join(each["choices"][0]["text"] for each in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    # An emulated engine says the same to the same prompt.
    undisturbed = server.client().completions.create(
        model=MODEL,
        prompt="Once upon a time",
        max_tokens=1000,
        extra_body={"ignore_eos": True},
    )
    assert found == undisturbed.choices[0].text
    until(lambda: here not in (up := running(server)) and len(up) == 2, "another has its place")


def test_priorities_are_asked_for(server: ServerProcess, tmp_path: Path) -> None:
    printed = [
        said(each, server, tmp_path) for each in commands(OPERATIONS / "priorities.md", "curl")
    ]
    assert '"service_tier":"priority"' in printed[0]
    assert '"service_tier":"priority"' in printed[1]
    assert (
        "service_tier must be one of default, auto, priority, flex, normal, high, not" in printed[2]
    )


@pytest.mark.parametrize("stream", [(OPERATIONS / "failures.md", "skua")], indirect=True)
def test_run_looks_at_everything(
    server: ServerProcess, tmp_path: Path, stream: "subprocess.Popen[str]"
) -> None:
    page = OPERATIONS / "run.md"
    looks = commands(page, "sterna instances", "sterna requests", "sterna explain", "sterna top")
    assert len(looks) == 4
    for each in looks:
        assert said(each.replace("REQUEST", "skua"), server, tmp_path)
    (metrics,) = commands(page, "curl")
    assert "sterna_instance" in said(metrics, server, tmp_path)
    (migrate,) = commands(page, "sterna migrate")
    here = instance_of(server, "skua")
    (other,) = running(server) - {str(here)}
    said(migrate.replace("REQUEST", "skua").replace("INSTANCE", other), server, tmp_path)
    (explain,) = commands(OPERATIONS / "explain.md", "sterna explain")
    assert f"moved from {here} to {other}" in said(
        explain.replace("REQUEST", "skua"), server, tmp_path
    )


def test_instances_come_and_go(server: ServerProcess, tmp_path: Path) -> None:
    """In another order than on the page: two more, one less, and all of them anew."""
    lines = commands(
        OPERATIONS / "scale_and_drain.md", "sterna start", "sterna drain i0", "sterna restart"
    )
    # An emulated engine has no options that a restart could change.
    drain, start, restart, *_ = lines
    assert (drain, start) == ("sterna drain i0", "sterna start 2")
    one = min(running(server))
    said(start, server, tmp_path)
    assert f"{one} has ended" in said(drain.replace("i0", one), server, tmp_path)
    old = running(server)
    assert len(old) == 3
    said(restart, server, tmp_path)
    assert not old & running(server)
