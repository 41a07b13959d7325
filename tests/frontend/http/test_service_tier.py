"""Tiers and keys in front of a real FastAPI application that answers as vLLM does."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from sterna.frontend.http.api_keys import ApiKeys
from sterna.frontend.http.routes import RESPONSES_PATH
from sterna.frontend.http.service_tier import (
    MAX_LENIENT_BYTES,
    TierMiddleware,
    admitted_priority,
    used_class,
)
from sterna.priority_classes import DEFAULT_CLASSES, ApiKey, PriorityClass, PriorityClasses
from sterna.types import Priority
from tests.frontend.http.opened import opened

CHAT = "/v1/chat/completions"
USAGE = {"service_tier": None}
NORMAL_KEY, BATCH_KEY, FULL_KEY = "sk-normal", "sk-batch", "sk-full"
TOO_DEEP = b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"

FOUR = PriorityClasses(
    tuple(
        PriorityClass(name, Priority(rank), Priority(rank))
        for name, rank in (("normal", 0), ("high", 1), ("gold", 2), ("batch", -1))
    )
)
KEYS = (
    ApiKey("n", sha256(NORMAL_KEY.encode()).digest(), FOUR.normal),
    ApiKey("b", sha256(BATCH_KEY.encode()).digest(), FOUR.named("batch")),
    ApiKey("f", sha256(FULL_KEY.encode()).digest()),
)


class Server:
    """An application whose engine notes the priority that a request reaches it with."""

    def __init__(self, classes: PriorityClasses = FOUR, keys: Sequence[ApiKey] = ()) -> None:
        self.priorities: list[int] = []
        self.used: list[str | None] = []
        self.bodies: list[bytes] = []
        self.lengths: list[int] = []
        self.disconnects: list[bool] = []
        self._classes = classes
        app = FastAPI()
        app.post(CHAT)(self._complete)
        app.post("/v1/completions")(self._complete)
        app.post("/v1/responses")(self._respond)
        app.post("/v1/embeddings")(self._embed)
        app.add_middleware(TierMiddleware, classes=classes)
        self.app = opened(app, keys)

    async def _complete(self, request: Request) -> Any:
        body = await self._read(request)
        if body.get("stream"):
            return StreamingResponse(self._chunks(), media_type="text/event-stream")
        # In a task of its own, as vLLM has it to notice clients that go away.
        await asyncio.create_task(self._generate(0))
        if "messages" not in body:
            return JSONResponse({"error": {"message": "messages?"}}, 400)
        choice = {"message": {"content": 'data: {"id":1,"service_tier":null}'}}
        return JSONResponse({"id": "c", "choices": [choice], "service_tier": None, "usage": USAGE})

    async def _chunks(self) -> AsyncIterator[str]:
        await self._generate(0)
        text = json.dumps('data: {"id":"x"}\n\n')
        for _ in range(3):
            yield f'data: {{"id":"c","choices":[{{"delta":{{"content":{text}}}}}]}}\n\n'
        yield ": keep-alive\n\n"
        yield 'data: {"error":{"message":"its instance died"}}\n\n'
        yield "data: [DONE]\n\n"

    async def _respond(self, request: Request) -> Any:
        body = await self._read(request)
        await self._generate(0)
        tier = body.get("service_tier", "auto")
        response = {"id": "r", "metadata": {"service_tier": "mine"}, "service_tier": tier}
        if not body.get("stream"):
            return JSONResponse(response)

        async def events() -> AsyncIterator[str]:
            for kind in ("created", "completed"):
                event = {"type": f"response.{kind}", "response": response}
                yield f"event: response.{kind}\ndata: {json.dumps(event)}\n\n"
            yield 'event: other\ndata: {"service_tier":null,"delta":"service_tier"}\n\n'

        return StreamingResponse(events(), media_type="text/event-stream")

    async def _embed(self, request: Request) -> Any:
        body = await self._read(request)
        await self._generate(body.get("priority", 0))
        return JSONResponse({"object": "list"})

    async def _read(self, request: Request) -> dict[str, Any]:
        self.bodies.append(await request.body())
        self.lengths.append(int(request.headers["Content-Length"]))
        try:
            return dict(json.loads(self.bodies[-1]))
        except (ValueError, TypeError, RecursionError):
            return {}

    async def _generate(self, vllm_priority: int) -> None:
        await asyncio.sleep(0)
        self.priorities.append(admitted_priority(vllm_priority, self._classes))
        used = used_class()
        self.used.append(None if used is None else used.name)

    def post(self, path: str, body: Any, root_path: str = "", **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()

        async def post() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, root_path=root_path)
            async with httpx.AsyncClient(transport=transport, base_url="http://s") as http:
                named = {name.replace("_", "-"): value for name, value in headers.items()}
                named["Content-Type"] = "application/json"
                return await http.post(path, content=content, headers=named)

        return asyncio.run(post())

    def chat(self, key: str | None = None, **fields: Any) -> httpx.Response:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return self.post(CHAT, {"messages": [], **fields}, **headers)


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


@contextmanager
def refused(answer: httpx.Response) -> Iterator[str]:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["param"], error["code"]) == (
        "BadRequestError", "service_tier", 400,
    )  # fmt: skip
    yield error["message"]


@pytest.mark.parametrize(
    ("fields", "priority", "tier"),
    [
        ({}, 0, "default"),
        ({"service_tier": None}, 0, "default"),
        ({"service_tier": "auto"}, 0, "default"),
        ({"service_tier": "default"}, 0, "default"),
        ({"service_tier": "priority"}, -1, "priority"),
        ({"service_tier": "high"}, -1, "priority"),
        ({"service_tier": "gold"}, -2, "gold"),
        ({"service_tier": "flex"}, 1, "flex"),
        ({"priority": -1}, -1, "priority"),
        ({"priority": -100}, -2, "gold"),
        ({"priority": "-1"}, -1, "priority"),
        ({"priority": " -1 "}, -1, "priority"),
        ({"priority": 7}, 1, "flex"),
        ({"service_tier": "auto", "priority": -2}, -2, "gold"),
        ({"service_tier": "priority", "priority": -1}, -1, "priority"),
    ],
)
def test_a_request_gets_the_class_that_it_asks_for_and_is_told(
    fields: dict[str, Any], priority: int, tier: str
) -> None:
    server = Server()
    answer = server.chat(**fields)
    assert answer.json()["service_tier"] == tier
    assert server.priorities == [priority]


def test_the_path_counts_without_the_root_path() -> None:
    server = Server()
    answer = server.post("/behind" + CHAT, {"messages": [], "service_tier": "flex"}, "/behind")
    assert answer.json()["service_tier"] == "flex"
    assert server.priorities == [1]


def test_an_answer_is_as_vllm_made_it_but_for_the_tier() -> None:
    server = Server()
    answer = server.chat(service_tier="priority")
    assert answer.json() == {
        "id": "c",
        "choices": [{"message": {"content": 'data: {"id":1,"service_tier":null}'}}],
        "service_tier": "priority",
        "usage": USAGE,
    }
    assert int(answer.headers["content-length"]) == len(answer.content)
    assert server.bodies == [b'{"messages": [], "service_tier": "priority"}']


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_every_chunk_of_a_stream_has_the_tier_and_nothing_else_changes(path: str) -> None:
    server = Server()
    answer = server.post(path, {"stream": True, "service_tier": "flex"})
    *chunks, error = events_of(answer)
    content = 'data: {"id":"x"}\n\n'
    assert (
        chunks
        == [{"id": "c", "service_tier": "flex", "choices": [{"delta": {"content": content}}]}] * 3
    )
    assert error == {"error": {"message": "its instance died"}}
    assert answer.text.endswith("data: [DONE]\n\n")
    assert ": keep-alive\n\n" in answer.text
    assert server.priorities == [1]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("asked", "known", "tier"),
    [
        ({}, "default", "default"),
        ({"service_tier": "auto"}, "default", "default"),
        ({"service_tier": "high"}, "priority", "priority"),
        ({"service_tier": "gold"}, "auto", "gold"),
        ({"service_tier": None}, "default", "default"),
    ],
)
def test_the_responses_api_is_told_as_well(
    asked: dict[str, Any], known: str, tier: str, is_stream: bool
) -> None:
    """vLLM takes OpenAI's tiers only, and says in its answer what it was asked for."""
    server = Server()
    answer = server.post("/v1/responses", {"input": "Terns", "stream": is_stream, **asked})
    assert json.loads(server.bodies[0])["service_tier"] == known
    assert server.lengths == [len(server.bodies[0])]
    responses = (
        [answer.json()]
        if not is_stream
        else [event["response"] for event in events_of(answer) if "response" in event]
    )
    if is_stream:
        assert events_of(answer)[-1] == {"service_tier": None, "delta": "service_tier"}
    expected = {"id": "r", "metadata": {"service_tier": "mine"}, "service_tier": tier}
    assert responses == [expected] * (2 if is_stream else 1)


@pytest.mark.parametrize("tier", ["scale", "", "Priority", 5, ["priority"], {"a": 1}])
def test_a_tier_that_there_is_not_is_a_400_that_names_those_there_are(tier: Any) -> None:
    server = Server()
    with refused(server.chat(service_tier=tier)) as message:
        assert "one of default, auto, priority, flex, batch, normal, high, gold" in message
        assert json.dumps(tier) in message
    assert server.priorities == []


def test_a_tier_and_a_priority_of_two_classes_are_a_400() -> None:
    server = Server()
    with refused(server.chat(service_tier="priority", priority=3)) as message:
        assert message == (
            'service_tier "priority" and priority 3 ask for different classes, high and batch; '
            "leave one out"
        )


@pytest.mark.parametrize(("header", "priority"), [("-2", -2), ("0", 0), ("urgent", 1), ("", 1)])
def test_vllms_header_holds_in_place_of_the_bodys_priority(header: str, priority: int) -> None:
    """As in vLLM, which ignores a header that is no integer."""
    server = Server()
    body = {"messages": [], "priority": 1}
    assert server.post(CHAT, body, X_Vllm_Priority=header).status_code == 200
    assert server.priorities == [priority]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", TOO_DEEP, TOO_DEEP.decode().encode("utf-16")],
    ids=lambda body: repr(body[:10]),
)
def test_a_body_that_is_no_object_is_left_to_vllm(body: bytes) -> None:
    server = Server()
    assert server.post(CHAT, body).status_code == 400
    assert server.bodies == [body]


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [], "temperature": NaN, "service_tier": "gold"}',
        '{"messages": [], "service_tier": "gold"}'.encode("utf-16"),
        b'{"messages": [], "service_tier": "default", "service_tier": "gold"}',
        b'{"messages": [], "service\\u005ftier": "gold"}',
    ],
)
def test_what_only_python_takes_for_json_is_read_as_vllm_reads_it(body: bytes) -> None:
    server = Server()
    assert server.post(CHAT, body).json()["service_tier"] == "gold"
    assert server.priorities == [-2]


def test_what_only_python_takes_for_json_is_told_to_vllm_as_it_knows_it() -> None:
    server = Server()
    body = '{"input": "Terns", "service_tier": "gold"}'.encode("utf-16")
    assert server.post(RESPONSES_PATH, body).json()["service_tier"] == "gold"
    assert [json.loads(each) for each in server.bodies] == [
        {"input": "Terns", "service_tier": "auto"}
    ]
    assert server.lengths == [len(server.bodies[0])]


def test_a_body_of_just_the_length_that_python_may_read_is_read() -> None:
    server = Server()
    body = b'{"messages": [], "x": NaN, "y": "%s"}'
    body %= b"y" * (MAX_LENIENT_BYTES - len(body % b""))
    assert server.post(CHAT, body).status_code == 200


@pytest.mark.parametrize("path", [CHAT, RESPONSES_PATH])
def test_a_long_body_that_only_python_takes_for_json_is_refused(path: str) -> None:
    """Python's reader would have the loop to itself for as long as it takes."""
    server = Server()
    body = b'{"messages": [], "input": "", "x": NaN, "y": "%s"}' % (b"y" * MAX_LENIENT_BYTES)
    refused = server.post(path, body)
    assert refused.status_code == 400
    assert "must be strict JSON in UTF-8" in refused.json()["error"]["message"]
    assert server.bodies == []
    assert server.post(path, body.replace(b"NaN", b"1")).status_code == 200


@pytest.mark.parametrize(
    ("key", "asked", "priority", "tier"),
    [
        (NORMAL_KEY, {"service_tier": "priority"}, 0, "default"),
        (NORMAL_KEY, {"priority": -5}, 0, "default"),
        (NORMAL_KEY, {"service_tier": "flex"}, 1, "flex"),
        (BATCH_KEY, {}, 1, "flex"),
        (BATCH_KEY, {"service_tier": "gold"}, 1, "flex"),
        (FULL_KEY, {"service_tier": "gold"}, -2, "gold"),
        ("unknown", {"service_tier": "gold"}, 0, "default"),
        (None, {"service_tier": "gold"}, 0, "default"),
    ],
)
def test_a_request_above_the_class_of_its_key_is_clamped_and_told(
    key: str | None, asked: dict[str, Any], priority: int, tier: str
) -> None:
    """vLLM refuses keys that it does not know; on routes where it asks for none, they give no
    precedence."""
    server = Server(keys=KEYS)
    assert server.chat(key, **asked).json()["service_tier"] == tier
    assert server.priorities == [priority]


@pytest.mark.parametrize(("key", "priority"), [(NORMAL_KEY, 0), (BATCH_KEY, 1), (FULL_KEY, -2)])
def test_a_key_holds_on_routes_without_tiers(key: str, priority: int) -> None:
    server = Server(keys=KEYS)
    body = {"input": "Terns", "priority": -9}
    answer = server.post("/v1/embeddings", body, Authorization=f"Bearer {key}")
    assert answer.json() == {"object": "list"}
    assert server.priorities == [priority]
    assert server.used == [None], "only vLLM knows it"


def test_the_class_of_a_request_is_known_while_it_is_answered_and_no_longer() -> None:
    server = Server(keys=KEYS)
    server.chat(BATCH_KEY, service_tier="gold")
    server.chat(FULL_KEY, service_tier="gold")
    assert server.used == ["batch", "gold"]

    async def answer() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            used = used_class()
            assert used is not None
            assert used.name == "gold"

        scope = {"type": "http", "method": "POST", "path": CHAT, "headers": []}
        body = {"type": "http.request", "body": b'{"service_tier":"gold"}'}
        await opened(TierMiddleware(app, FOUR))(scope, messages(body), unsent)
        assert used_class() is None

    asyncio.run(answer())


def messages(*given: Any) -> Any:
    """A `receive` that gives these, one after the other."""
    left = list(given)

    async def receive() -> Any:
        return left.pop(0)

    return receive


async def unsent(message: Any) -> None:
    raise AssertionError(f"{message} was sent")


@pytest.mark.parametrize(
    "scope",
    [
        {"type": "lifespan"},
        {"type": "websocket", "path": CHAT, "headers": []},
        {"type": "http", "method": "GET", "path": CHAT, "headers": []},
    ],
    ids=lambda scope: scope["type"],
)
def test_what_has_no_body_of_a_request_passes_once_and_unread(scope: dict[str, Any]) -> None:
    passed: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append((scope, receive, send))

    receive = messages()
    asyncio.run(opened(TierMiddleware(app, FOUR))(scope, receive, unsent))
    assert passed == [(scope, receive, unsent)]


def test_a_client_that_goes_away_before_its_body_is_there_reaches_nobody() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("the application was called")

    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": []}
    begun = {"type": "http.request", "body": b"{", "more_body": True}
    receive = messages(begun, {"type": "http.disconnect"})
    asyncio.run(opened(TierMiddleware(app, FOUR))(scope, receive, unsent))


def test_where_priorities_are_off_every_answer_says_default() -> None:
    server = Server(PriorityClasses(FOUR.classes, are_honoured=False))
    assert server.chat(service_tier="gold").json()["service_tier"] == "default"
    assert server.priorities == [0]


def test_a_request_outside_of_http_has_the_priority_that_vllm_gives_it() -> None:
    assert admitted_priority(-7, DEFAULT_CLASSES) == -1


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_a_key_is_found_by_its_header(scheme: str) -> None:
    found = ApiKeys(KEYS).find(f"{scheme} {BATCH_KEY}")
    assert found is not None
    assert found.name == "b"


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", f"Basic {FULL_KEY}", FULL_KEY, f"Bearer {FULL_KEY} "]
)
def test_nothing_else_is_a_key(header: str | None) -> None:
    assert ApiKeys(KEYS).find(header) is None


def test_chunks_are_not_held_back() -> None:
    """A chunk leaves before the next one is there, and a client that goes away is noticed."""

    async def run() -> list[bytes]:
        sent: list[bytes] = []
        gone = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            assert (await receive())["body"] == b'{"service_tier":"gold"}'
            headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b'data: {"id":1}', "more_body": True})
            assert sent == [b'data: {"service_tier":"gold","id":1}']
            gone.set()
            assert (await receive())["type"] == "http.disconnect"

        given = iter([b'{"service_tier"', b':"gold"}'])

        async def receive() -> Any:
            if (part := next(given, None)) is not None:
                return {"type": "http.request", "body": part, "more_body": part.endswith(b'"')}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                sent.append(message["body"])

        scope = {"type": "http", "method": "POST", "path": CHAT, "headers": []}
        await opened(TierMiddleware(app, FOUR))(scope, receive, send)
        return sent

    assert asyncio.run(run()) == [b'data: {"service_tier":"gold","id":1}']
