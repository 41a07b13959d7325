"""vLLM's benchmark client is watched only while the requests that count are under way."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.plain_vllm import vllm_client

WAITING_CLIENT = f"""
import pathlib, sys, time

def wait_for(name):
    while not pathlib.Path(sys.argv[1], name).exists():
        time.sleep(0.01)

assert not pathlib.Path(sys.argv[1], "entered").exists()
print("{vllm_client.BEGIN}...")
wait_for("entered")
assert not pathlib.Path(sys.argv[1], "left").exists()
print("====={vllm_client.END}=====")
wait_for("left")
print("anything else", file=sys.stderr)
sys.exit(3)
"""


@contextlib.contextmanager
def _marked(folder: Path) -> Iterator[None]:
    (folder / "entered").touch()
    yield
    (folder / "left").touch()


@pytest.mark.timeout(60)
def test_what_is_counted_begins_and_ends_with_the_requests(tmp_path: Path) -> None:
    """The client waits for both, and ends in the way it says."""
    command = [sys.executable, "-c", WAITING_CLIENT, str(tmp_path)]
    errors = tmp_path / "errors.txt"
    assert vllm_client._run(command, errors, _marked(tmp_path)) == 3
    assert errors.read_text() == "anything else\n"


@pytest.mark.timeout(60)
def test_a_client_that_takes_too_long_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_client, "TIMEOUT_S", 0.1)
    command = [sys.executable, "-c", "import time; time.sleep(1_000)"]
    assert vllm_client._run(command, tmp_path / "errors.txt", _marked(tmp_path)) < 0
    assert not (tmp_path / "entered").exists()
