"""Models of several kinds of KV cache, and adapters, through the whole server: requests move under
load, and no client notices a drain, a rolling restart or a death."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.kinds.tiny_adapters import build_adapter
from bench.kinds.tiny_models import build
from tests.serve.nodes import states
from tests.serve.process.test_coming_and_going import sterna
from tests.serve.server import (
    HANG_TIMEOUT_S,
    MODEL_NAME,
    ServerProcess,
    start_sterna,
    until,
)

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_STREAMS = 8
NUM_TOKENS = 500
KINDS = {"windows": "gemma3", "states": "granite4", "adapters": "llama"}
OPTIONS = (
    *("--dtype", "float32"),
    *("--num-gpu-blocks-override", "260"),
    "--no-enable-prefix-caching",
    # An instance with all streams is below it whatever their lengths (16,576 tokens / 8 streams for
    # the states), and an empty one above.
    *("--migration-threshold", "2100"),
)


@dataclass(frozen=True)
class Served:
    """A server, and the names of its models."""

    server: ServerProcess
    models: tuple[str, ...]

    def answer(self, number: int) -> list[int]:
        """Read one stream to its end."""
        chunks = self.server.client(timeout=HANG_TIMEOUT_S).completions.create(
            model=self.models[number % len(self.models)],
            prompt=f"Terns number {number} flew" * (1 + 3 * number),
            max_tokens=NUM_TOKENS,
            temperature=1.0,
            seed=number,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        return [
            token
            for chunk in chunks
            for choice in chunk.choices
            for token in choice.token_ids or ()
        ]

    def begin(self, threads: ThreadPoolExecutor) -> list[Future[list[int]]]:
        """Begin all streams, and wait until they run."""
        streams = [threads.submit(self.answer, number) for number in range(NUM_STREAMS)]
        until(
            lambda: sum(each["running"] for each in self.server.instances()) == NUM_STREAMS,
            "all streams run",
        )
        return streams


@pytest.fixture(scope="module", params=KINDS)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("models")
    model = build(KINDS[request.param], folder / "model")
    models: tuple[str, ...] = (MODEL_NAME,)
    options: tuple[str, ...] = ()
    if request.param == "adapters":
        first, second = (
            f"{name}={build_adapter(model, folder / name, seed=seed)}"
            for seed, name in enumerate(("first", "second"))
        )
        # Not without an adapter: vLLM's CPU kernels compute such a request wrong beside these.
        models = ("first", "second")
        options = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8")
        options += ("--lora-modules", first, second)
    server = start_sterna(*OPTIONS, *options, model=model)
    yield Served(server, models)
    server.end()


@pytest.fixture(scope="module")
def expected(served: Served) -> list[list[int]]:
    """What the same streams say when nothing happens to the instances."""
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        answers = [each.result() for each in served.begin(threads)]
    assert all(len(set(answer)) > 50 for answer in answers)
    assert all(len(answer) == NUM_TOKENS for answer in answers)
    return answers


@contextmanager
def load(served: Served, expected: list[list[int]]) -> Iterator[None]:
    """Streams that begin again whenever they end, and must say the same each time."""
    is_ending = threading.Event()

    def repeat(number: int) -> None:
        while not is_ending.is_set():
            assert served.answer(number) == expected[number]

    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        clients = [threads.submit(repeat, number) for number in range(NUM_STREAMS)]
        try:
            yield
        finally:
            is_ending.set()
        for client in clients:
            client.result()


@contextmanager
def until_moved(server: ServerProcess) -> Iterator[None]:
    """Watch during the block, and wait after it, until a request is on another instance than
    before: dispatch alone may keep the instances so even that nothing moves afterwards.
    """
    seen: dict[str, str] = {}

    def has_moved() -> bool:
        places = {each["id"]: each["instance"] for each in server.requests()}
        found = any(seen.get(name, place) != place for name, place in places.items())
        seen.update(places)
        return found

    with ThreadPoolExecutor(1) as threads:
        moved = threads.submit(until, has_moved, "a pairing round moves requests")
        yield
        moved.result()


def test_streams_say_the_same_over_pairings_a_drain_and_a_rolling_restart(
    served: Served, expected: list[list[int]]
) -> None:
    server = served.server
    with load(served, expected):
        assert "has ended" in sterna(server, "drain", "i0")
        with until_moved(server):
            assert "can serve" in sterna(server, "start")
        said = sterna(server, "restart", "--rolling", "--", "--max-num-seqs", "12")
        assert "restarted: i3, i4 serve" in said
    assert states(server) == {"i3": "running", "i4": "running"}
    until(server.is_empty, "all blocks are free again")


def test_streams_say_the_same_over_the_death_of_an_instance(
    served: Served, expected: list[list[int]]
) -> None:
    server = served.server
    (victim, *_) = states(server)
    with load(served, expected):
        until(
            lambda: any(each["instance"] == victim for each in server.requests()),
            "the instance has requests",
        )
        server.instance_process(victim).kill()
        until(lambda: len(states(server)) == 2 and victim not in states(server), "it is replaced")
    until(server.is_empty, "all blocks are free again")
