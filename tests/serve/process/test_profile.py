"""`sterna profile` on a real engine, and what can be done with its file."""

import json
import os
import signal
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sterna.cli.profile import conclusion, report
from sterna.engine.emulated.profiles import A10_LLAMA_7B, profile
from sterna.engine.profiling.measurement_plan import Batch, Decode
from sterna.engine.profiling.profile_file import Measurement, read
from sterna.errors import ConfigurationError
from tests.engine.profiling.test_profile_file import MEASUREMENT
from tests.models import tiny_random_llama

OPTIONS = ("--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20), "--max-num-seqs", "16")


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "sterna.cli.main", "profile", *options]


def environment(cache: Path) -> dict[str, str]:
    return {**os.environ, "STERNA_CACHE": str(cache)}


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_a_real_engine_is_profiled_and_serve_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_random_llama(tmp_path / "tiny", seed=5)
    output = tmp_path / "mine.json"
    options = (str(model), *OPTIONS)

    done = subprocess.run(
        command(*options, "--quick", "--json", "--output", str(output)),
        env=environment(tmp_path / "cache"),
        capture_output=True,
        text=True,
        check=False,
    )

    # 1 says that the machine was too busy for a proposal, and that nothing was saved.
    assert done.returncode in (0, 1), done.stderr
    printed = json.loads(done.stdout)
    assert printed == json.loads(output.read_text())
    measurement = read(output)
    assert measurement is not None
    assert measurement.is_noisy == (done.returncode == 1)
    assert 1 <= measurement.target_load_tokens <= measurement.total_tokens
    reference = [each for each in measurement.decodes if each.batch.tokens_each == 256]
    assert [each.batch.num_requests for each in reference] == [16, 8, 4, 2, 1]
    for each in measurement.decodes:
        assert len(each.rounds_s) == 3
        assert each.step_s > 0
        mean_tokens = each.num_tokens / each.batch.num_requests
        assert mean_tokens == pytest.approx(each.batch.tokens_each, rel=0.2)
    assert all(each.duration_s > 0 for each in measurement.prefills)
    emulated = profile(str(output))
    assert emulated.engine.total_tokens == measurement.total_tokens
    _check_what_serve_finds(options, measurement, tmp_path / "cache", monkeypatch)


def _check_what_serve_finds(
    options: tuple[str, ...],
    measurement: Measurement,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sterna.cli.serve.engine_options import checked_engine_config
    from sterna.cli.serve.read_options import parse
    from sterna.cli.serve.serve_command import engine_environment
    from sterna.cli.serve.serve_options import cluster_config
    from sterna.engine.profiling.profile_file import find
    from sterna.engine.vllm.facts import profile_key, total_tokens

    for name, value in engine_environment().items():
        monkeypatch.setenv(name, value)
    args: Namespace = parse(["serve", *options])
    cluster_config(args)
    engine: Any = checked_engine_config(args)

    assert profile_key(engine, args.num_threads) == measurement.key
    assert total_tokens(engine) == measurement.total_tokens
    assert find(cache, profile_key(engine, args.num_threads)) == (
        None if measurement.is_noisy else measurement
    )


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_ctrl_c_ends_it_in_silence_and_saves_nothing(tmp_path: Path) -> None:
    model = tiny_random_llama(tmp_path / "tiny", seed=5)
    # The log says when the engine is there: what is to be broken off is the measurement.
    loud = {**environment(tmp_path / "cache"), "VLLM_LOGGING_LEVEL": "INFO"}
    with subprocess.Popen(
        command(str(model), *OPTIONS),
        env=loud,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "init engine" in line:
                break
        process.send_signal(signal.SIGINT)
        printed, log = process.communicate(timeout=60)

    assert process.returncode == 130
    assert printed == ""
    assert "Traceback" not in log
    assert not (tmp_path / "cache" / "profiles").exists()


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--request-tokens", "3"], "--request-tokens must be at least 16, not 3"),
        (["--tolerance", "0"], r"--tolerance must be between 0 and 1, not 0\.0"),
        (["--output", "no/such/file.json"], "--output no/such/file.json: name a .json file"),
        (["--output", "mine.yaml"], r"--output mine\.yaml: name a \.json file"),
        (["--engine", "emulated"], "--engine emulated: there is nothing to measure"),
        (["--quik"], r"unrecognized arguments: --quik \(did you mean --quick\?\)"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_work_is_refused_before_anything_is_started(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sterna.cli.profile import profile as profile_command
    from sterna.cli.serve.serve_command import engine_environment

    for name, value in engine_environment().items():
        # The command sets the same, and the tests after this one shall not see it.
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=message):
        profile_command(options)


# ------------------------------------------------------------------------------------- in words


def changed(**changes: object) -> Measurement:
    return replace(MEASUREMENT, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("measurement", "said"),
    [
        (
            MEASUREMENT,
            "Target load: 1162 tokens (rounds: 1151, 1173, 1160): with requests of 256 tokens, a "
            "decode step of more than these is not within 10% of 32.7 ms, that of one request "
            "alone.",
        ),
        (
            changed(is_reached=False, target_load_tokens=8192),
            "Target load: 8192 tokens, the most that was measured: with requests of 256 tokens, "
            "a decode step of all of them is within 10% of 32.7 ms, that of one request alone.",
        ),
        (
            changed(is_noisy=True, target_load_by_round_tokens=(300, 1162, 4000)),
            "Too noisy for a target load: the rounds say 300, 1162, 4000 tokens.",
        ),
    ],
    ids=["reached", "all within", "noisy"],
)
def test_the_conclusion_says_what_it_rests_on(measurement: Measurement, said: str) -> None:
    assert conclusion(measurement) == said


def test_the_report_has_a_line_for_every_batch() -> None:
    decodes = (
        Decode(Batch(4, 256), 1028.5, (0.0346, 0.035, 0.0345)),
        Decode(Batch(1, 256), 257.0, (0.0327, 0.0327, 0.0327)),
    )

    lines = report(A10_LLAMA_7B, changed(decodes=decodes)).splitlines()

    assert lines[3:5] == [
        "        256         1      257    32.70   1.00",
        "        256         4     1028    34.60   1.06",
    ]
    assert lines[-2] == "With requests of other lengths: 350 of 64 each, 1383 of 1024 each."


def test_a_noisy_report_proposes_nothing() -> None:
    decodes = (Decode(Batch(1, 256), 257.0, (0.03, 0.04, 0.05)),)

    text = report(A10_LLAMA_7B, changed(decodes=decodes, is_noisy=True))

    assert "Too noisy for a target load" in text
    assert "Target load:" not in text
    assert "other lengths" not in text
