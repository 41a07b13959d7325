"""`sterna explain`, whole: a server of two front ends and two instances tells what it did."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from tests.otlp_receiver import Receiver, receiving
from tests.serve.emulated.quick import completion, many_connections, num_tokens, quick_server
from tests.serve.server import ServerProcess, until

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

NUM_STREAMS = 40
TIMING = re.compile(
    r"(scheduler;dur=[\d.]+, (queue;dur=[\d.]+, )?(prefill;dur=[\d.]+, )?instance;desc=\"i\d\")?"
)
"""What is known after a second: nothing, if the request is held."""
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TRACE = f"00-{TRACE_ID}-b7ad6b7169203331-01"
PROMPT_TOKENS = 700


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver) -> Iterator[ServerProcess]:
    """Each of two instances has memory for nine of the prompts."""
    tracing = ("--otlp-traces-endpoint", receiver.endpoint)
    options = ("--instances", "2", "--frontends", "2", *tracing)
    with quick_server(tmp_path_factory.mktemp("explain"), *options) as server:
        yield server


def explained(server: ServerProcess, name: str, *options: str) -> str:
    command = [sys.executable, "-m", "sterna.cli.main", "explain", name, "--url", server.url]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else done.stderr


def history(server: ServerProcess, name: str) -> dict[str, Any]:
    (found,) = json.loads(explained(server, name, "--json"))
    return dict(found)


async def answer(
    http: aiohttp.ClientSession, url: str, name: str, max_tokens: int
) -> tuple[int, str]:
    """The number of tokens, and the Server-Timing header."""
    body = {**completion(0, max_tokens), "prompt": [1000 + hash(name) % 1000] * PROMPT_TOKENS}
    headers = {"X-Request-Id": name, "traceparent": TRACE}
    async with http.post(f"{url}/v1/completions", json=body, headers=headers) as response:
        assert response.status == 200
        timing = response.headers.get("Server-Timing", "")
        assert TIMING.fullmatch(timing), response.headers
        return await num_tokens(response), timing


def test_a_crowd_of_requests_is_explained(server: ServerProcess) -> None:
    async def run() -> list[tuple[int, str]]:
        async with many_connections() as http:
            names = [f"crowd{number}" for number in range(NUM_STREAMS)]
            return await asyncio.gather(*(answer(http, server.url, each, 60) for each in names))

    answers = asyncio.run(run())
    assert [num for num, _ in answers] == [60] * NUM_STREAMS
    assert any(timing for _, timing in answers)
    histories = [history(server, f"crowd{number}") for number in range(NUM_STREAMS)]
    assert {each["frontend"] for each in histories} == {0, 1}
    for each in histories:
        events = {event["event"]: event for event in each["events"]}
        assert (each["state"], each["output_tokens"]) == ("finished", 60)
        assert {"arrived", "dispatched", "scheduled", "first token", "finished"} <= events.keys()
        why = events["dispatched"]["why"]
        assert (why["rule"], why["chosen"]["instance"]) == (
            "soonest",
            events["dispatched"]["instance"],
        )
        assert why["num_instances"] == 2
        assert (why["next_best"] is None) == (why["num_eligible"] == 1)
        times = [event["at_s"] for event in each["events"]]
        assert times == sorted(times)
    every = [event for each in histories for event in each["events"]]
    dispatches = [event for event in every if event["event"] == "dispatched"]
    assert any(event["event"] == "held" for event in every), "there is memory for eighteen of forty"
    assert any(event["why"]["next_best"] for event in dispatches)
    assert "by the rule soonest, of" in explained(server, "crowd39")


def test_an_order_and_a_death_are_explained(server: ServerProcess) -> None:
    async def run() -> int:
        async with many_connections() as http:
            stream = asyncio.create_task(answer(http, server.url, "lone", 400))
            while not (live := await asyncio.to_thread(server.requests)):
                assert not stream.done()
            (request,) = live
            source = request["instance"]
            other = {"i0": "i1", "i1": "i0"}[source]
            order = {"request": "lone", "to": other}
            async with http.post(f"{server.url}/admin/migrate", json=order) as moved:
                assert moved.status == 200, await moved.text()
            server.instance_process(other).kill()
            return (await stream)[0]

    assert asyncio.run(run()) == 400
    lone = history(server, "lone")
    kinds = [each["event"] for each in lone["events"]]
    assert kinds.count("dispatched") == 2
    assert "moved" in kinds
    assert kinds.index("moved") < kinds.index("lost")
    text = explained(server, "lone")
    assert "because an operator ordered it" in text
    assert "sent again behind the" in text
    until(server.is_empty, "every instance is empty")
    assert "Traceback" not in server.log


def test_its_spans_are_in_the_trace_of_the_client(receiver: Receiver) -> None:
    every = receiver.until("request", "scheduler", "queue", "decode", "migration", "loss")
    # vLLM exports spans of its own start.
    spans = [each for each in every if each.service == "sterna"]
    assert {each.trace_id for each in spans} == {TRACE_ID}
    requests = {each.span_id for each in spans if each.name == "request"}
    within = {each.parent_id for each in spans if each.name != "request"}
    assert within <= requests


def test_a_request_that_never_was_is_unknown(server: ServerProcess) -> None:
    assert "no front end remembers a request called gull" in explained(server, "gull")
