"""`sterna serve --late-binding`: more requests than there is memory for wait at the scheduler."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.emulated.quick import (
    MODEL,
    completion,
    many_connections,
    num_tokens,
    quick_server,
)
from tests.serve.server import ServerProcess, start_sterna, until

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

NUM_STREAMS = 60
PROMPT_TOKENS = 700
MAX_TOKENS = 60


@pytest.fixture(scope="module", params=["emulated", "vllm"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """Each of two instances has memory for nine of the prompts."""
    options = ("--instances", "2", "--frontends", "2", "--late-binding")
    if request.param == "emulated":
        with quick_server(tmp_path_factory.mktemp("late"), *options) as server:
            yield server
        return
    memory = ("--block-size", "32", "--num-gpu-blocks-override", "220", "--max-model-len", "1024")
    server = start_sterna(*options, *memory, "--served-model-name", MODEL)
    yield server
    server.end()


def body(number: int) -> dict[str, Any]:
    return {**completion(number, MAX_TOKENS), "prompt": [1000 + number] * PROMPT_TOKENS}


async def answers(server: ServerProcess) -> list[int]:
    async def answer(http: Any, number: int) -> int:
        async with http.post(f"{server.url}/v1/completions", json=body(number)) as response:
            assert response.status == 200
            return await num_tokens(response)

    async with many_connections() as http:
        return await asyncio.gather(*(answer(http, number) for number in range(NUM_STREAMS)))


def num_held(server: ServerProcess) -> int:
    with server.http() as http:
        lines = http.get("/metrics").text.splitlines()
    return int(sum(float(each.split()[-1]) for each in lines if each.startswith("sterna_held")))


def test_requests_wait_at_the_scheduler_and_not_on_instances(server: ServerProcess) -> None:
    async def run() -> tuple[list[int], int, int]:
        answering = asyncio.create_task(answers(server))
        most_held = most_queuing = 0
        while not answering.done():
            most_held = max(most_held, await asyncio.to_thread(num_held, server))
            instances = await asyncio.to_thread(server.instances)
            most_queuing = max(most_queuing, *(each["queuing"] for each in instances))
        return await answering, most_held, most_queuing

    tokens, most_held, most_queuing = asyncio.run(run())
    assert tokens == [MAX_TOKENS] * NUM_STREAMS
    assert most_held > 10
    # What was sent in the middle of a step queues until the next one.
    assert most_queuing < 10
    until(server.is_empty, "every instance is empty")
    until(lambda: num_held(server) == 0, "none is held")


def test_what_is_held_survives_the_scheduler(server: ServerProcess) -> None:
    async def run() -> list[int]:
        answering = asyncio.create_task(answers(server))
        while await asyncio.to_thread(num_held, server) == 0:
            assert not answering.done()
        assert not answering.done()
        server.at_work("ray::_SchedulerActor")[0].kill()
        return await answering

    assert asyncio.run(run()) == [MAX_TOKENS] * NUM_STREAMS
    until(server.is_empty, "every instance is empty")
    assert "Traceback" not in server.log
