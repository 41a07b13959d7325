"""Threads and the core of an engine's steps on CPU, in a process of its own: OpenMP reads its
variables once, and vLLM fixes the number of threads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import tiny_random_llama

pytestmark = pytest.mark.vllm

PROGRAM = """
import json, os, sys, threading
import torch
from vllm.engine.arg_utils import EngineArgs
from sterna.engine.cpu_cores import take_core
from sterna.engine.vllm.hosted_core import build_core

found = {"before": torch.get_num_threads()}
config = EngineArgs(
    model=sys.argv[1], dtype="float32", load_format="dummy", kv_cache_memory_bytes=64 << 20,
    max_model_len=128, enforce_eager=True, distributed_executor_backend="uni",
).create_engine_config()

def affinity_of_a_thread():
    seen = []
    thread = threading.Thread(target=lambda: seen.append(sorted(os.sched_getaffinity(0))))
    thread.start()
    thread.join()
    return seen[0]

def build():
    core = build_core(config, log_stats=False, num_threads=3, binds=True)
    found["threads"] = torch.get_num_threads()
    found["bound"] = sorted(os.sched_getaffinity(0))
    with core.unbound():
        found["unbound"] = affinity_of_a_thread()
    core.shutdown()
    found["taken"] = core.held_core.number
    found["taken again"] = take_core().number

everywhere = sorted(os.sched_getaffinity(0))
thread = threading.Thread(target=build)
thread.start()
thread.join()
print(json.dumps({**found, "everywhere": everywhere, "others": sorted(os.sched_getaffinity(0))}))
"""


def test_the_thread_of_the_steps_has_its_threads_and_a_core(tmp_path: Path) -> None:
    from sterna.cli.serve.serve_command import engine_environment

    model = tiny_random_llama(tmp_path / "tiny", seed=5)
    # The locks of cores are in the temporary folder.
    environment = {**os.environ, **engine_environment(), "TMPDIR": str(tmp_path)}

    done = subprocess.run(
        (sys.executable, "-c", PROGRAM, str(model)),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["before"], found["threads"]) == (1, 3)
    assert found["bound"] == [found["taken"]]
    assert found["unbound"] == found["everywhere"] == found["others"]
    assert found["taken again"] == found["taken"]
