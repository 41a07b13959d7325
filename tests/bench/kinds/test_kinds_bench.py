"""`sterna bench kinds` as a whole, on real instances of tiny models."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bench.common import results_io
from bench.kinds.__main__ import NAME
from bench.kinds.cases import CASES
from bench.kinds.findings import Recovery

COMMAND = [sys.executable, "-m", "sterna.cli.main", "bench", "kinds"]

pytestmark = [
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
]


@pytest.fixture
def own_environment() -> Iterator[None]:
    """Undoes what a Ray of this process leaves in its environment."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *options], capture_output=True, text=True, check=False)


def test_a_kind_is_measured_and_what_does_not_move_has_its_reason(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    done = run("--kinds", "gemma3", "granite4_ngram", "--moves", "4", "--results", str(folder))
    assert done.returncode == 0, done.stderr
    moved, refused = results_io.read(NAME, folder)["rows"]
    assert (moved["kind"], moved["model_type"]) == ("gemma3", "gemma3_text")
    assert moved["groups"] == ["SlidingWindowSpec", "SlidingWindowSpec", "FullAttentionSpec"]
    assert (moved["moves"], moved["n"], moved["neighbours"]) == (True, 4, 2)
    assert (moved["token_identical"], moved["recovered_identical"]) == (True, True)
    assert moved["stages"] == 2
    # Pages of two layers and 32 tokens with keys and values of two heads of 32 in float32.
    assert moved["last_stage_bytes"] % (2 * 32 * 2 * 2 * 32 * 4) == 0
    assert moved["last_stage_bytes"] > 0
    assert refused["kind"] == "granite4_ngram"
    assert refused["moves"] is False
    assert "speculative decoding" in refused["reason"]
    assert "4 of 4 moves, tokens the same" in done.stderr
    assert "the request went on at the other one, tokens the same" in done.stderr
    assert "| Gemma 3 (`gemma3_text`) |" in done.stdout


def test_ctrl_c_ends_a_measurement_and_leaves_no_process(tmp_path: Path) -> None:
    """It goes to the whole process group, as in a terminal."""
    options = ("--kinds", "llama", "--moves", "400", "--results", str(tmp_path))
    with subprocess.Popen(
        [*COMMAND, *options], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as benchmark:
        assert benchmark.stderr is not None
        first = next((line for line in benchmark.stderr if " of 400 moves" in line), None)
        assert first is not None
        started = psutil.Process(benchmark.pid).children(recursive=True)
        assert len(started) > 2
        os.killpg(benchmark.pid, signal.SIGINT)
        rest = benchmark.stderr.read()
    assert benchmark.returncode == 130, rest
    assert "interrupted; the kinds so far are written" in rest
    assert "Traceback" not in rest
    _, left = psutil.wait_procs(started, timeout=60)
    assert left == []
    assert list(tmp_path.iterdir()) == []


def test_pages_that_were_not_copied_are_found_by_their_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_environment: None
) -> None:
    """A recomputed request needs no page: what its tokens become is vLLM's recompute."""
    from bench.kinds import measurement
    from bench.migration.cluster_driver import local_ray
    from sterna.cli.serve.read_options import parse
    from tests.bench.kinds.forgetful_instance import ForgetfulInstance

    monkeypatch.setattr(measurement, "CountingInstance", ForgetfulInstance)
    case = CASES["llama"]
    args = parse(["serve", *case.serve_arguments(tmp_path)])
    said: list[str] = []
    with local_ray():
        found = asyncio.run(measurement.measure(case, args, tmp_path, 2, said.append))
    assert found.is_same is False
    assert found.recovery is Recovery.AS_RECOMPUTED
    assert said[1] == "2 of 2 moves, tokens DIFFER"
