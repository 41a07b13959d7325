"""Benchmark client of vLLM's own, `vllm bench serve`, which sends the requests of a load."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common.tables import Row, rounded
from sterna.errors import ConfigurationError

TIMEOUT_S = 1_800.0

NUM_WARM_UPS = 2
"""Requests that the client sends before those that it counts."""

BEGIN, END = "Starting main benchmark run", " Serving Benchmark Result "
"""What the client prints before and after the requests that it counts."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one size.

    Attributes:
        name: in rows and tables.
        prompt_tokens, output_tokens: of each request.
        num_requests: their number.
        at_once: as many are under way all the time; None: they come at a rate.
        with_busy_core: another program keeps a core of the machine busy meanwhile.
    """

    name: str
    prompt_tokens: int
    output_tokens: int
    num_requests: int
    at_once: int | None
    with_busy_core: bool = False

    @property
    def is_saturated(self) -> bool:
        """Whether there is always another request that waits."""
        return self.at_once is not None and self.at_once > 1

    @property
    def has_rate(self) -> bool:
        """Whether requests come at a rate, however many are under way."""
        return self.at_once is None


def measure(
    url: str,
    model: Path,
    load: Load,
    *,
    rate: float | None,
    seed: int,
    during: contextlib.AbstractContextManager[None],
) -> Row:
    """Send the load to a server.

    Args:
        model: the folder with the tokenizer.
        rate: requests a second, on average, unless the load says how many are under way.
        seed: of prompts and arrivals.
        during: entered for the requests that count: not while the client starts, draws prompts and
            warms the server up.

    Raises:
        ConfigurationError: the client failed, or no request was answered; the message says why.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "bench.plain_vllm.vllm_command", "bench", "serve"),
            *("--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions"),
            *("--model", "small", "--tokenizer", str(model), "--seed", str(seed)),
            *("--dataset-name", "random", "--random-input-len", str(load.prompt_tokens)),
            *("--random-output-len", str(load.output_tokens), "--ignore-eos"),
            *("--num-prompts", str(load.num_requests), "--temperature", "0"),
            *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "99"),
            *("--save-result", "--result-dir", folder, "--result-filename", "run.json"),
            *("--disable-tqdm", "--num-warmups", str(NUM_WARM_UPS)),
        ]
        if load.at_once is not None:
            command += ["--max-concurrency", str(load.at_once)]
        elif rate is not None:
            command += ["--request-rate", f"{rate:g}"]
        errors = Path(folder) / "errors.txt"
        returncode = _run(command, errors, during)
        path = Path(folder) / "run.json"
        if returncode != 0 or not path.is_file():
            lines = errors.read_text().strip().splitlines() or ["without any output"]
            raise ConfigurationError(f"vllm bench serve failed: {lines[-1]}")
        return _row(json.loads(path.read_text()))


def _run(
    command: Sequence[str], errors: Path, during: contextlib.AbstractContextManager[None]
) -> int:
    """Run the client to its end, at most `TIMEOUT_S`; returns its exit status."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with errors.open("w") as file, contextlib.ExitStack() as counted:
        client = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=file, text=True, env=environment
        )
        counted.callback(client.wait)
        counted.callback(client.kill)
        limit = threading.Timer(TIMEOUT_S, client.kill)
        limit.start()
        counted.callback(limit.cancel)
        assert client.stdout is not None
        with contextlib.ExitStack() as counting:
            for line in client.stdout:
                if BEGIN in line:
                    counting.enter_context(during)
                elif END in line:
                    counting.close()
        return client.wait()


def _row(found: dict[str, Any]) -> Row:
    if found["completed"] == 0:
        raise ConfigurationError("vllm bench serve: no request was answered")
    return {
        "n": found["completed"],
        "failed": found["failed"],
        "duration_s": rounded(found["duration"]),
        "requests_per_s": rounded(found["request_throughput"]),
        "tokens_per_s": rounded(found["output_throughput"]),
        **{
            f"{metric}_{statistic}_ms": rounded(found[f"{statistic}_{metric}_ms"])
            for metric in ("ttft", "tpot", "itl", "e2el")
            for statistic in ("mean", "median", "p99")
        },
    }
