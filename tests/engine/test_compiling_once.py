"""The first run of a model that vLLM compiles: one instance of a machine at a time."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from sterna.engine.vllm.hosted_core import compiling_once

LONG_S = 60.0
"""Enough for anything that happens at all."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.delenv("VLLM_DISABLE_COMPILE_CACHE", raising=False)
    return tmp_path


def config(model: str = "m", *, enforce_eager: bool = False) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(model=model, enforce_eager=enforce_eager),
        compute_hash=lambda: f"hash-of-{model}",
    )


class Instance:
    """Runs its model for the first time in a thread, until it may go on.

    Args:
        begun: gets the instance when it runs.
    """

    def __init__(
        self,
        pool: ThreadPoolExecutor,
        config: Any,
        *,
        fails: bool = False,
        begun: "SimpleQueue[Instance] | None" = None,
    ) -> None:
        self.begun: SimpleQueue[Instance] = begun or SimpleQueue()
        self.runs = threading.Event()
        self.may_end = threading.Event()
        self.fails = fails
        self.result = pool.submit(self._run, config)

    def _run(self, config: Any) -> None:
        with compiling_once(config):
            self.runs.set()
            self.begun.put(self)
            assert self.may_end.wait(LONG_S)
            if self.fails:
                raise MemoryError

    def end(self) -> None:
        self.may_end.set()
        self.result.result(LONG_S)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def test_an_instance_waits_for_the_one_that_compiles_and_later_ones_for_none(
    cache: Path, pool: ThreadPoolExecutor
) -> None:
    first = Instance(pool, config())
    assert first.runs.wait(LONG_S)
    second, third = Instance(pool, config()), Instance(pool, config())
    other = Instance(pool, config("other"))
    assert other.runs.wait(LONG_S)
    assert not second.runs.is_set()
    assert not third.runs.is_set()
    first.end()
    # Both at once: what they run is in the cache.
    assert second.runs.wait(LONG_S)
    assert third.runs.wait(LONG_S)
    for each in (second, third, other):
        each.end()


def test_the_next_one_compiles_if_the_first_one_fails(
    cache: Path, pool: ThreadPoolExecutor
) -> None:
    first = Instance(pool, config(), fails=True)
    assert first.runs.wait(LONG_S)
    begun: SimpleQueue[Instance] = SimpleQueue()
    second, third = (Instance(pool, config(), begun=begun) for _ in range(2))
    first.may_end.set()
    assert isinstance(first.result.exception(LONG_S), MemoryError)
    running = begun.get(timeout=LONG_S)
    waiting = third if running is second else second
    assert not waiting.runs.is_set()
    running.end()
    assert waiting.runs.wait(LONG_S)
    waiting.end()


def test_a_cache_that_cannot_be_written_stops_nobody(
    cache: Path, pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    (cache / "torch_compile_cache").write_text("in the way")
    both = [Instance(pool, config()) for _ in range(2)]
    assert all(each.runs.wait(LONG_S) for each in both)
    for each in both:
        each.end()
    assert "compiled by each instance" in caplog.text


@pytest.mark.parametrize("way", ["eager", "no cache"])
def test_nobody_waits_where_nothing_is_kept(
    cache: Path, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    if way == "no cache":
        monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")
    both = [Instance(pool, config(enforce_eager=way == "eager")) for _ in range(2)]
    assert all(each.runs.wait(LONG_S) for each in both)
    for each in both:
        each.end()
    assert not any(cache.iterdir())
