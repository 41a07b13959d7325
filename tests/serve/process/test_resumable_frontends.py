"""A front end is killed under streams of real vLLM: at the other one they say what they would have
said, in float32, where what shares a batch does not matter.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from tests.serve.resuming import Reader, connected, front_ends
from tests.serve.server import HANG_TIMEOUT_S, MODEL_NAME, ServerProcess, start_sterna, until

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(3000)]

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
NUM_TOKENS = 120
NUM_KNOWN = 10
MESSAGES = [{"role": "user", "content": "Name a city, and say why you like it."}]
RANDOM = {"temperature": 0.9, "seed": 17}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (TEXT, {"prompt": "Once upon a time", "temperature": 0}),
    "seeded": (CHAT, {"messages": MESSAGES, **RANDOM}),
    "text-logprobs": (TEXT, {"prompt": "Once upon a time", "logprobs": 2, **RANDOM}),
    "chat-logprobs": (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, **RANDOM}),
    "two-choices": (CHAT, {"messages": MESSAGES, "n": 2, **RANDOM}),
}


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    # Connections are made before they are needed, which takes long on a busy machine.
    patient = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": f"{HANG_TIMEOUT_S:.0f}"}
    options = ("--dtype", "float32", "--frontends", "2", "--resumable-streams")
    server = start_sterna(*options, environment=patient)
    yield server
    server.end()


def reader(server: ServerProcess, name: str, request_id: str) -> Reader:
    path, body = REQUESTS[name]
    common = {"model": MODEL_NAME, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
    return Reader(server, path, {**common, **body}, request_id)


def test_streams_of_every_kind_say_what_they_say_alone_although_their_front_end_is_killed(
    server: ServerProcess,
) -> None:
    """Those of the other front end are read in one go meanwhile."""
    alone = {name: reader(server, name, f"alone-{name}") for name in REQUESTS}
    for each in alone.values():
        each.read()
    victim, other = front_ends(server)
    broken = {name: reader(server, name, f"broken-{name}") for name in REQUESTS}
    beside = {name: reader(server, name, f"beside-{name}") for name in REQUESTS}
    with ExitStack() as stack, ThreadPoolExecutor(2 * len(REQUESTS)) as pool:
        # Which front end gets a connection takes tries: none of them is time of a stream.
        victims, others = (
            [stack.enter_context(connected(server, each)) for _ in REQUESTS]
            for each in (victim, other)
        )
        unbroken = [
            pool.submit(each.read, to=other, over=http)
            for each, http in zip(beside.values(), others, strict=True)
        ]
        first = [
            pool.submit(each.read, NUM_KNOWN, victim, http)
            for each, http in zip(broken.values(), victims, strict=True)
        ]
        assert [each.result() for each in first] == [victim] * len(first)
        until(lambda: all(each.events for each in beside.values()), "the others have begun")
        assert not any(each.is_over for each in beside.values())
        victim.kill()
        list(pool.map(Reader.read_to_the_end, broken.values()))
        assert [each.result() for each in unbroken] == [other] * len(unbroken)
    for name, each in (*broken.items(), *beside.items()):
        said, said_alone = each.said(), alone[name].said()
        assert said.keys() == said_alone.keys()
        for index, choice in said.items():
            expected = said_alone[index]
            assert choice.logprobs == pytest.approx(expected.logprobs, abs=1e-3), name
            assert replace(choice, logprobs=[]) == replace(expected, logprobs=[]), name
    until(lambda: "streams taken over" in server.log, "the taking over is logged")
    assert "Traceback" not in server.log
    until(server.is_empty, "every instance is empty")
