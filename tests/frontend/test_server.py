"""vLLM's own server, over HTTP, in front of scripted instances."""

import asyncio
import json
import socket
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
import numpy as np
import pytest

from bench.serving.ports import free_port

pytest.importorskip("vllm")

from vllm.v1.engine import FinishReason
from vllm.v1.outputs import LogprobsLists

from sterna.config import DoorConfig, FrontendConfig
from sterna.engine.vllm.payload import decode_request
from sterna.frontend.key_check import OPEN_PATHS
from sterna.frontend.server import FrontendServer, number_adapters_apart
from sterna.mailbox import Mailbox
from sterna.messages import AbortRequests, AddRequest
from sterna.types import FrontendId, RequestId
from tests.frontend.scripted import HANG_S, ME, ScriptedCluster, ready_response, within

pytestmark = pytest.mark.vllm

MAX_QUEUED = 10
CONFIG = FrontendConfig(
    scheduler_timeout_s=1.0,
    owner_timeout_s=0.05,
    gap_timeout_s=HANG_S,
    shutdown_timeout_s=1.0,
    door=DoorConfig(max_queued_requests=MAX_QUEUED, max_body_bytes=100_000),
)
API_KEY = "secret"
MESSAGES = [{"role": "user", "content": "Hello!"}]


class Served:
    """A front end that answers HTTP, and the cluster behind it."""

    def __init__(
        self, server: FrontendServer, mailbox: Mailbox, cluster: ScriptedCluster, url: str
    ) -> None:
        self.server, self.mailbox, self.cluster = server, mailbox, cluster
        headers = {"Authorization": f"Bearer {API_KEY}"}
        self.http = httpx.AsyncClient(base_url=url, headers=headers, timeout=60.0)
        from transformers import AutoTokenizer

        from tests.models import small_model

        self._tokenizer = AutoTokenizer.from_pretrained(small_model())

    def tokens(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def post(self, path: str, **body: Any) -> "asyncio.Task[httpx.Response]":
        """Send a request; the answer can be awaited when the instances have spoken."""
        return asyncio.create_task(self.http.post(path, json=body))

    def chat(self, **body: Any) -> "asyncio.Task[httpx.Response]":
        return self.post("/v1/chat/completions", model="small", messages=MESSAGES, **body)

    @asynccontextmanager
    async def streamed_chat(self, **body: Any) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """Yield the events of a streamed answer, without the final [DONE]."""
        body = {"model": "small", "messages": MESSAGES, "stream": True, **body}
        async with self.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200
            yield _events(answer)

    async def healthy(self, status: int) -> None:
        """Wait until `/health` answers so; each answer takes a turn of the server's loop."""
        while (await self.http.get("/health")).status_code != status:
            pass


async def _events(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in answer.aiter_lines():
        data = line.removeprefix("data: ")
        if data and data != "[DONE]":
            yield json.loads(data)


def _content(event: dict[str, Any]) -> str:
    return event["choices"][0]["delta"].get("content") or ""


def _options(port: int) -> Namespace:
    from sterna.cli.serve import parse
    from tests.models import small_model

    model = str(small_model())
    options = ["--served-model-name", "small", "--port", str(port), "--api-key", API_KEY]
    return parse(["serve", model, *options, "--max-model-len", "2048"])


async def _serve() -> Served:
    port = free_port()
    args = _options(port)
    mailbox = Mailbox("127.0.0.1")
    cluster = ScriptedCluster(mailbox.address)
    cluster.announce(cluster.i0, cluster.i1)
    server = FrontendServer(ME, args, CONFIG, mailbox, ready_response())
    await server.start()
    return Served(server, mailbox, cluster, f"http://127.0.0.1:{port}")


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def served(loop: asyncio.AbstractEventLoop) -> Iterator[Served]:
    served = loop.run_until_complete(_serve())
    yield served

    async def stop() -> None:
        await served.http.aclose()
        await served.server.stop()
        await served.server.wait()
        served.cluster.close()
        served.mailbox.close()

    loop.run_until_complete(within(stop()))


@pytest.fixture
def run(loop: asyncio.AbstractEventLoop, served: Served) -> Callable[..., None]:
    def run(test: Callable[[Served], Coroutine[Any, Any, None]]) -> None:
        served.cluster.announce(served.cluster.i0, served.cluster.i1)
        loop.run_until_complete(within(test(served)))

    return run


def test_a_chat_is_answered_by_the_instance_that_the_scheduler_named(run):
    async def test(served: Served) -> None:
        answering = served.chat(max_tokens=5)
        request = await served.cluster.i0.get_request()
        tokens = served.tokens("Terns fly far")
        served.cluster.i0.send_tokens(request.request_id, 0, tokens, FinishReason.LENGTH)
        answer = (await answering).json()
        assert answer["choices"][0]["message"]["content"] == "Terns fly far"
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == len(tokens)
        assert request.request_id.startswith(answer["id"])

    run(test)


def test_a_stream_is_in_order_and_whole_over_a_move(run):
    async def test(served: Served) -> None:
        i0, i1 = served.cluster.i0, served.cluster.i1
        async with served.streamed_chat() as events:
            request_id = (await i0.get_request()).request_id
            tokens = served.tokens("From the Arctic to the Antarctic and back")
            i0.send_tokens(request_id, 0, tokens[:2])
            i1.send_moved(request_id, 2)
            i1.send_tokens(request_id, 4, tokens[4:], FinishReason.LENGTH)
            i1.send_tokens(request_id, 1, tokens[1:4])
            received = [event async for event in events]
        text = "".join(map(_content, received))
        assert text == "From the Arctic to the Antarctic and back"
        reasons = [event["choices"][0]["finish_reason"] for event in received]
        assert [reason for reason in reasons if reason] == ["length"]

    run(test)


def test_several_choices_are_several_requests_of_one_answer(run):
    async def test(served: Served) -> None:
        answering = served.chat(n=2, temperature=1.0)
        for _ in range(2):
            request_id = (await served.cluster.i0.get_request()).request_id
            tokens = served.tokens(f"choice {request_id[0]}")
            served.cluster.i0.send_tokens(request_id, 0, tokens, FinishReason.LENGTH)
        choices = (await answering).json()["choices"]
        assert [each["message"]["content"] for each in choices] == ["choice 0", "choice 1"]

    run(test)


def test_large_arrays_beside_the_tokens_arrive(run):
    async def test(served: Served) -> None:
        answering = served.chat(logprobs=True, top_logprobs=20)
        request_id = (await served.cluster.i0.get_request()).request_id
        tokens = served.tokens("many words in one step")
        logprobs = LogprobsLists(
            # The sampled token comes first, then the likeliest ones.
            logprob_token_ids=np.array([[token, *range(20)] for token in tokens], dtype=np.int32),
            logprobs=np.tile(-np.arange(21, dtype=np.float32), (len(tokens), 1)),
            sampled_token_ranks=np.ones(len(tokens), dtype=np.int32),
        )
        served.cluster.i0.send_tokens(
            request_id, 0, tokens, FinishReason.LENGTH, new_logprobs=logprobs
        )
        content = (await answering).json()["choices"][0]["logprobs"]["content"]
        assert len(content) == len(tokens)
        assert [top["logprob"] for top in content[-1]["top_logprobs"]] == [-i for i in range(20)]

    run(test)


def test_a_disconnected_client_frees_its_request_where_it_is_by_then(run):
    async def test(served: Served) -> None:
        async with served.streamed_chat() as events:
            request_id = (await served.cluster.i0.get_request()).request_id
            served.cluster.i1.send_moved(request_id, 0)
            served.cluster.i1.send_tokens(request_id, 0, served.tokens("Hi"))
            assert "Hi" in [_content(await anext(events)), _content(await anext(events))]
        message, _ = await served.cluster.i1.get(AbortRequests)
        assert message.request_ids == (request_id,)

    run(test)


def test_a_stop_string_ends_the_answer_and_the_request(run):
    async def test(served: Served) -> None:
        answering = served.chat(stop=[" far"])
        request_id = (await served.cluster.i0.get_request()).request_id
        served.cluster.i0.send_tokens(request_id, 0, served.tokens("Terns fly far away"))
        choice = (await answering).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("Terns fly", "stop")
        message, _ = await served.cluster.i0.get(AbortRequests)
        assert message.request_ids == (request_id,)

    run(test)


def test_an_answer_with_which_two_instances_died_is_a_500_error(run):
    async def test(served: Served) -> None:
        answering = served.chat()
        await served.cluster.i0.get_request()
        served.cluster.announce(served.cluster.i1)
        await served.cluster.i1.get_request()
        served.cluster.announce()
        answer = await answering
        assert answer.status_code == 500
        error = answer.json()["error"]
        assert error["type"] == "InternalServerError"
        assert "killed_instances" in error["message"]

    run(test)


def test_a_stream_with_which_two_instances_died_ends_with_an_error_event(run):
    async def test(served: Served) -> None:
        async with served.streamed_chat() as events:
            request_id = (await served.cluster.i0.get_request()).request_id
            served.cluster.i0.send_tokens(request_id, 0, served.tokens("Hi"))
            while _content(await anext(events)) != "Hi":
                pass
            served.cluster.announce(served.cluster.i1)
            await served.cluster.i1.get_request()
            served.cluster.announce()
            received = [event async for event in events]
        (error,) = [event["error"] for event in received]
        assert error["code"] == 500
        assert "killed_instances" in error["message"]

    run(test)


def test_a_stream_goes_on_behind_the_tokens_that_its_client_has(run):
    async def test(served: Served) -> None:
        i0, i1 = served.cluster.i0, served.cluster.i1
        async with served.streamed_chat() as events:
            request_id = (await i0.get_request()).request_id
            i0.send_tokens(request_id, 0, served.tokens("Hi"))
            while _content(await anext(events)) != "Hi":
                pass
            served.cluster.announce(i1)
            message, (payload,) = await i1.get(AddRequest)
            assert message.output_token_ids == tuple(served.tokens("Hi"))
            attempt_id = decode_request(payload).request_id
            i1.send_tokens(attempt_id, 1, served.tokens(" there"), FinishReason.LENGTH)
            text = "".join([_content(event) async for event in events])
        assert text == " there"

    run(test)


def test_a_stream_goes_on_when_another_instance_has_adopted_it(run):
    async def test(served: Served) -> None:
        i0, i1 = served.cluster.i0, served.cluster.i1
        async with served.streamed_chat() as events:
            request_id = (await i0.get_request()).request_id
            i0.send_tokens(request_id, 0, served.tokens("Hi"))
            i1.claims.add(RequestId(request_id))
            served.cluster.announce(i1)
            i1.send_tokens(request_id, 1, served.tokens(" there"), FinishReason.LENGTH)
            text = "".join([_content(event) async for event in events])
        assert text == "Hi there"

    run(test)


def test_health_is_that_of_the_cluster(run):
    async def test(served: Served) -> None:
        await served.healthy(200)
        served.cluster.announce()
        await served.healthy(503)
        served.cluster.announce(served.cluster.i0)
        await served.healthy(200)

    run(test)


def test_metrics_keep_vllms_names(run):
    async def test(served: Served) -> None:
        answering = served.chat()
        request_id = (await served.cluster.i0.get_request()).request_id
        served.cluster.i0.send_tokens(request_id, 0, [1, 2, 3], FinishReason.STOP)
        await answering
        text = (await served.http.get("/metrics")).text
        (line,) = [
            line for line in text.splitlines() if line.startswith("vllm:generation_tokens_total")
        ]
        assert float(line.split()[-1]) >= 3
        assert 'vllm:request_success_total{engine="0",finished_reason="stop"' in text

    run(test)


def test_a_bad_request_gets_vllms_own_error(run):
    async def test(served: Served) -> None:
        answer = await served.chat(max_tokens=-1)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "BadRequestError")
        answer = await served.post("/v1/chat/completions", model="large", messages=MESSAGES)
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "NotFoundError")

    run(test)


def test_operators_need_the_servers_key(run):
    async def test(served: Served) -> None:
        answer = await served.http.get("/admin/requests", headers={"Authorization": ""})
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == 401

    run(test)


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
        chunks = [event async for event in _events(await answering)]
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


def test_a_full_queue_answers_at_once_and_those_inside_are_answered(run):
    async def test(served: Served) -> None:
        i0 = served.cluster.i0
        waiting = [served.chat(max_tokens=3) for _ in range(MAX_QUEUED)]
        inside = [(await i0.get_request()).request_id for _ in waiting]
        refused = await served.chat()
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["Retry-After"]) <= 30
        error = refused.json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("RateLimitError", 429, None)
        assert f"too many requests wait ({MAX_QUEUED})" in error["message"]
        # What is no inference is answered, and who shows no key is told that first.
        tokens = await served.http.post("/tokenize", json={"model": "small", "prompt": "Hello"})
        assert tokens.status_code == 200
        assert (await served.http.get("/health")).status_code == 200
        unknown = await served.http.post("/v1/completions", headers={"Authorization": ""})
        assert unknown.status_code == 401
        # High priority has a reserve.
        high = served.chat(service_tier="priority")
        inside.append((await i0.get_request()).request_id)
        assert (await served.chat(service_tier="priority")).status_code == 429
        # Nor is anybody let in now whose body has not come.
        reader, writer = await asyncio.open_connection("127.0.0.1", served.http.base_url.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n"
            b"Content-Length: 90000\r\n\r\n" % API_KEY.encode()
        )
        assert (await reader.readline()).startswith(b"HTTP/1.1 429 ")
        writer.close()
        # A first token makes room, although its request goes on.
        hello = served.tokens("Hello")
        for request_id in inside[:2]:
            i0.send_tokens(request_id, 0, hello)
        while (await served.post("/v1/completions", model="small")).status_code == 429:
            pass
        more = served.chat()
        inside.append((await i0.get_request()).request_id)
        for place, request_id in enumerate(inside):
            first = len(hello) if place < 2 else 0
            i0.send_tokens(request_id, first, hello, FinishReason.STOP)
        for answering in (*waiting, high, more):
            assert (await answering).status_code == 200

    run(test)


def test_each_prompt_and_each_choice_waits_for_its_own_first_token(run):
    async def test(served: Served) -> None:
        i0 = served.cluster.i0
        hello = served.tokens("Hello")

        def post(num_prompts: int, n: int) -> "asyncio.Task[httpx.Response]":
            body = {"prompt": ["Hello"] * num_prompts, "n": n, "max_tokens": 2}
            return served.post("/v1/completions", model="small", **body)

        # Where nothing else waits, one request may have more than the limit.
        num_many = 2 * MAX_QUEUED
        many = post(num_many // 2, 2)
        inside = [(await i0.get_request()).request_id for _ in range(num_many)]
        refused = await served.chat()
        assert f"too many requests wait ({num_many})" in refused.json()["error"]["message"]
        num_begun = num_many - MAX_QUEUED + 1
        for request_id in inside[:num_begun]:
            i0.send_tokens(request_id, 0, hello)
        while (await served.post("/v1/completions", model="small")).status_code == 429:
            pass
        refused = await post(3, 2)
        assert (refused.status_code, "Retry-After" in refused.headers) == (429, True)
        error = refused.json()["error"]
        assert error["type"] == "RateLimitError"
        assert "with fewer prompts and choices" in error["message"]
        one = post(1, 1)
        inside.append((await i0.get_request()).request_id)
        for place, request_id in enumerate(inside):
            first = len(hello) if place < num_begun else 0
            i0.send_tokens(request_id, first, hello, FinishReason.STOP)
        for answering in (many, one):
            assert (await answering).status_code == 200
        # Whatever has been refused left nothing behind.
        again = post(num_many, 1)
        for _ in range(num_many):
            request = await i0.get_request()
            i0.send_tokens(request.request_id, 0, hello, FinishReason.STOP)
        assert (await again).status_code == 200

    run(test)


def test_requests_whose_clients_have_gone_do_not_wait(run):
    async def test(served: Served) -> None:
        for _ in range(2):
            leaving = [served.chat() for _ in range(MAX_QUEUED)]
            ids = {(await served.cluster.i0.get_request()).request_id for _ in leaving}
            for each in leaving:
                each.cancel()
            while ids:
                abort, _ = await served.cluster.i0.get(AbortRequests)
                ids -= set(abort.request_ids)

    run(test)


def test_a_body_that_is_too_large_is_refused(run):
    async def test(served: Served) -> None:
        refused = await served.chat(user="x" * 100_000)
        assert refused.status_code == 413
        assert refused.json()["error"]["type"] == "ContentTooLargeError"

    run(test)


def test_without_a_key_only_probes_metrics_and_the_description_of_the_api_answer(run):
    async def test(served: Served) -> None:
        paths = (await served.http.get("/openapi.json")).json()["paths"]
        assert {"/invocations", "/tokenize", "/v1/models", "/admin/drain"} <= paths.keys()
        opened = set()
        for path, methods in paths.items():
            for method in methods:
                answer = await served.http.request(method, path, headers={"Authorization": ""})
                if answer.status_code != 401:
                    opened.add(path)
        assert opened == {"/health", "/ping", "/load", "/version", "/metrics"} & paths.keys()
        for path in OPEN_PATHS & {"/health", "/metrics/", "/docs", "/openapi.json"}:
            answer = await served.http.get(path, headers={"Authorization": ""})
            assert answer.status_code == 200, path

    run(test)


def test_adapters_that_two_front_ends_load_have_different_numbers():
    """The second one stands in for the first, which died, and whose engines live on."""
    from vllm.entrypoints.openai.models.protocol import LoRAModulePath
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest

    class Engine:
        model_config = renderer = input_processor = None

        def __init__(self) -> None:
            self.adapters: dict[str, int] = {}

        async def add_lora(self, lora_request: Any) -> bool:
            self.adapters[lora_request.lora_name] = lora_request.lora_int_id
            return True

    async def adapters_of(frontend_id: FrontendId, loaded: str) -> dict[str, int]:
        engine = Engine()
        modules = [LoRAModulePath(name="of-the-start", path="/adapters/0")]
        models = OpenAIServingModels(engine, [], lora_modules=modules)
        await models.init_static_loras()
        number_adapters_apart(models, frontend_id)
        path = f"/adapters/{loaded}"
        await models.load_lora_adapter(LoadLoRAAdapterRequest(lora_name=loaded, lora_path=path))
        return engine.adapters

    async def test() -> None:
        one = await adapters_of(FrontendId(1), "terns")
        other = await adapters_of(FrontendId(2), "gulls")
        assert one["of-the-start"] == other["of-the-start"]
        assert len({*one.values(), *other.values()}) == 3

    asyncio.run(within(test()))


def test_operators_see_instances_and_requests(run):
    async def test(served: Served) -> None:
        served.cluster.scheduler.described = [{"id": "i0", "state": "running"}]
        served.cluster.i0.described = [{"id": "chatcmpl-tern-9f86d081", "priority": 1}]
        served.cluster.i1.described = []
        answer = await served.http.get("/admin/instances")
        assert answer.json() == [{"id": "i0", "state": "running"}]
        answer = await served.http.get("/admin/requests")
        assert answer.json() == [
            {"id": "chatcmpl-tern-9f86d081", "priority": 1, "instance": "i0", "class": "high"}
        ]

    run(test)


def test_an_operator_moves_every_choice_of_a_response(run):
    async def test(served: Served) -> None:
        served.cluster.i0.described = [
            {"id": "0_chatcmpl-gull-0a1b2c3d", "priority": 0},
            {"id": "1_chatcmpl-gull-0a1b2c3d", "priority": 0},
        ]
        served.cluster.i1.described = [{"id": "2_chatcmpl-gull-0a1b2c3d", "priority": 0}]
        answer = await served.post("/admin/migrate", request="gull", to="i1")
        assert [each["request"][0] for each in answer.json()] == ["0", "1"]
        assert {each["from"] for each in answer.json()} == {"i0"}

    run(test)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"request": "tern", "to": "i9"}, 404, "no instance is called i9; there are: i0, i1"),
        ({"request": "gull", "to": "i1"}, 404, "no live request is called gull"),
        ({"request": "tern", "to": "i0"}, 409, "tern is on i0 already"),
        ({"request": "tern", "to": "i1"}, 409, "chatcmpl-tern-9f86d081: its batch is full"),
    ],
)
def test_an_operator_is_told_why_a_request_does_not_move(
    run, body: dict[str, str], status: int, message: str
):
    async def test(served: Served) -> None:
        served.cluster.i0.described = [{"id": "chatcmpl-tern-9f86d081", "priority": 0}]
        served.cluster.i1.described = []
        served.cluster.i0.refusal = "its batch is full"
        answer = await served.post("/admin/migrate", **body)
        assert answer.status_code == status
        assert answer.json()["error"]["message"] == message

    run(test)


@contextmanager
def _unstarted(port: int) -> Iterator[FrontendServer]:
    mailbox = Mailbox("127.0.0.1")
    yield FrontendServer(ME, _options(port), CONFIG, mailbox, ready_response())
    mailbox.close()


def test_a_server_whose_port_is_taken_says_so():
    async def test(port: int) -> None:
        with (
            _unstarted(port) as server,
            pytest.raises(OSError, match="Address already in use"),
        ):
            await server.start()

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        asyncio.run(within(test(taken.getsockname()[1])))


def test_a_server_can_be_stopped_while_it_waits_for_the_first_instance():
    async def test() -> None:
        port = free_port()
        with _unstarted(port) as server:
            starting = asyncio.create_task(server.start())
            await asyncio.sleep(0)
            await server.stop()
            with pytest.raises(asyncio.CancelledError):
                await starting
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))

    asyncio.run(within(test()))
