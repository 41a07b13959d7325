"""A server of the benchmark's own, with emulated instances, under a workload."""

import asyncio
import socketserver
import sys
import threading
import urllib.request
from pathlib import Path

import psutil
import pytest

from bench.serving.client import ClientConfig
from bench.serving.served import served
from bench.serving.session import run_trace
from bench.serving.target import find_target
from sterna.errors import ConfigurationError
from sterna.metrics.summary import summarize_classes
from sterna.types import HIGH
from sterna.workload.catalog import Workload, build_trace
from tests.serve.server import has_ended, until

PROFILE = """
name: small
description: an engine with little memory, and steps that take longer than a client to send all
source: made up for this test
engine:
  num_blocks: 60
  step_mode: chunked
  max_num_batched_tokens: 512
step_time:
  prefill_s: 0.002
  prefill_token_s: 1.0e-5
  prefill_pair_s: 0.0
  prefill_min_s: 0.004
  decode_s: 0.1
  decode_request_s: 1.0e-5
  decode_token_s: 1.0e-8
copy_time:
  block_s: 0.0002
  stage_s: 0.004
"""


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.timeout(1800)
def test_a_server_under_load_is_recorded_and_ended(tmp_path: Path) -> None:
    """Two instances with room for 15 requests each get 60 at once: some must queue, and some of
    these be preempted or move."""
    profile = tmp_path / "small.yaml"
    profile.write_text(PROFILE)
    options = ["--engine", "emulated", "--profile", str(profile), "--policy", "llumnix"]
    workload = Workload("fixed:40-60", 60, 60.0, class_fractions={HIGH: 0.1})
    with served([*options, "--instances", "2"]) as url:
        target = asyncio.run(find_target(url))
        assert target.max_model_len == 944, "what an empty instance holds"
        run = asyncio.run(
            run_trace(target, build_trace(workload), ClientConfig(seed=1), interval_s=0.1)
        )
    summary = run.summary()
    assert run.errors() == {}
    assert (summary.num_requests, summary.num_completed) == (60, 60)
    assert summary.instances_avg == 2.0
    assert summary.tpot_s is not None
    assert summary.tpot_s.p50 > 0.1, "a step takes so long"
    assert max(each.queuing for sample in run.samples for each in sample.instances) > 0
    assert run.cluster.free_tokens.min() < 0.5 * run.cluster.total_tokens.max()
    assert (summary.num_preemptions or 0) + (summary.migrations_committed or 0) > 0
    assert set(summarize_classes(run.records, run.cluster)) == {"high", "normal"}
    assert not [each for each in psutil.process_iter() if str(profile) in _words(each)]
    with pytest.raises(ConfigurationError, match="no server answers"):
        asyncio.run(find_target(url))


@pytest.mark.slow
@pytest.mark.vllm
def test_a_server_that_does_not_start_says_why() -> None:
    options = ["--engine", "emulated", "--profile", "no-such-hardware"]
    with (
        pytest.raises(ConfigurationError, match=r"the server ended: .*no-such-hardware"),
        served(options),
    ):
        pass


@pytest.mark.slow
@pytest.mark.vllm
def test_another_program_at_the_port_is_not_taken_for_the_server() -> None:
    class Noise(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(b"\0@not HTTP\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Noise) as other:
        threading.Thread(target=other.serve_forever).start()
        port = other.server_address[1]
        options = ["--engine", "emulated", "--port", str(port)]
        try:
            with pytest.raises(ConfigurationError, match="choose another --port"), served(options):
                pass
        finally:
            other.shutdown()


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


LEAVES_A_CHILD = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(child.pid).encode())

http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""


def test_what_a_server_leaves_behind_is_killed() -> None:
    with (
        served([], program=[sys.executable, "-c", LEAVES_A_CHILD]) as url,
        urllib.request.urlopen(f"{url}/health") as answer,
    ):
        child = psutil.Process(int(answer.read()))
    until(lambda: has_ended(child), "the child has ended")
