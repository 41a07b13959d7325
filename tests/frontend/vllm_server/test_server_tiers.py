"""How urgent requests are, from HTTP to their instance, and what vLLM's answers say of it."""

import asyncio
import json
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("vllm")

from vllm.v1.engine import FinishReason

from tests.frontend.served import MESSAGES, Scenario, Served, events_of, one_server

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[Scenario], None]]:
    with one_server() as run:
        yield run


def test_an_urgent_chat_reaches_its_instance_as_such_and_its_answer_says_so(run):
    async def test(served: Served) -> None:
        answering = served.chat(service_tier="priority")
        request = await served.cluster.i0.get_request()
        assert request.priority == -1
        tokens = served.tokens("Terns")
        served.cluster.i0.send_tokens(request.request_id, 0, tokens, FinishReason.LENGTH)
        answer = (await answering).json()
        assert answer["service_tier"] == "priority"
        assert answer["choices"][0]["message"]["content"] == "Terns"

    run(test)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_every_chunk_of_vllms_streams_says_which_tier_it_has(run, path: str):
    async def test(served: Served) -> None:
        asked = {"messages": MESSAGES} if "chat" in path else {"prompt": "Terns"}
        options = {"stream": True, "stream_options": {"include_usage": True}, "priority": -4}
        answering = served.post(path, model="small", **asked, **options)
        request = await served.cluster.i0.get_request()
        assert request.priority == -1
        tokens = served.tokens("fly far")
        served.cluster.i0.send_tokens(request.request_id, 0, tokens[:1])
        served.cluster.i0.send_tokens(request.request_id, 1, tokens[1:], FinishReason.STOP)
        chunks = [event async for event in events_of(await answering)]
        assert len(chunks) >= 2
        assert {chunk["service_tier"] for chunk in chunks} == {"priority"}

    run(test)


@pytest.mark.parametrize("is_stream", [False, True])
def test_vllms_responses_say_which_tier_they_have(run, is_stream: bool):
    async def test(served: Served) -> None:
        fields = {"model": "small", "input": "Terns", "stream": is_stream}
        answering = served.post("/v1/responses", service_tier="flex", **fields)
        request = await served.cluster.i0.get_request()
        assert request.priority == 0
        tokens = served.tokens("fly")
        served.cluster.i0.send_tokens(request.request_id, 0, tokens, FinishReason.STOP)
        answer = await answering
        if not is_stream:
            assert answer.json()["service_tier"] == "default"
            return
        events = [json.loads(line[6:]) for line in answer.text.split("\n") if line[:6] == "data: "]
        tiers = [event["response"]["service_tier"] for event in events if "response" in event]
        assert set(tiers) == {"default"}

    run(test)


def test_a_message_of_another_api_has_the_class_of_vllms_header(run):
    """It has no tiers that could be asked for; the engine's client sees to the class."""

    async def test(served: Served) -> None:
        fields = {"model": "small", "messages": MESSAGES, "max_tokens": 4}
        headers = {"X-Vllm-Priority": "-20"}
        answering = asyncio.create_task(
            served.http.post("/v1/messages", json=fields, headers=headers)
        )
        request = await served.cluster.i0.get_request()
        assert request.priority == -1
        tokens = served.tokens("fly")
        served.cluster.i0.send_tokens(request.request_id, 0, tokens, FinishReason.STOP)
        assert (await answering).status_code == 200

    run(test)


def test_a_tier_that_there_is_not_is_a_400_for_those_who_may_ask(run):
    async def test(served: Served) -> None:
        refused = await served.chat(service_tier="gold")
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert (error["param"], error["type"]) == ("service_tier", "BadRequestError")
        headers = {"Authorization": "Bearer unknown"}
        body = {"model": "small", "messages": MESSAGES, "service_tier": "gold"}
        unknown = await served.http.post("/v1/chat/completions", json=body, headers=headers)
        assert (unknown.status_code, unknown.json()) == (401, {"error": "Unauthorized"})

    run(test)
