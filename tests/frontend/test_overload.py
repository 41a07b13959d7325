"""What a full queue refuses, in front of an application that answers whatever it is asked."""

import pytest

pytest.importorskip("starlette")

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from sterna.classes import DEFAULT_CLASSES
from sterna.frontend.overload import OverloadMiddleware, reserved
from sterna.frontend.queue_limit import QueueLimit


async def answer(request: Request) -> PlainTextResponse:
    return PlainTextResponse("inside")


def status(path: str, method: str = "POST") -> int:
    """Return the answer's status while the only place of the queue is taken."""
    limit = QueueLimit(1, 0.0)
    limit.enter(0.0, is_urgent=False)
    app = Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])
    client = TestClient(OverloadMiddleware(app, limit, DEFAULT_CLASSES))
    return client.request(method, path).status_code


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/embeddings",
        "/v2/rerank",
        "/inference/v1/generate",
        "/cohere/v2/chat",
        "/invocations",
    ],
)
def test_inference_is_refused(path: str) -> None:
    assert status(path) == 429


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/v1/responses/resp_1/cancel", "POST"),
        ("/inference/v1/abort_requests", "POST"),
        ("/v1/messages/count_tokens", "POST"),
        ("/v1/chat/completions/render", "POST"),
        ("/v1/completions/derender", "POST"),
        ("/v1/load_lora_adapter", "POST"),
        ("/v1/unload_lora_adapter", "POST"),
        ("/tokenize", "POST"),
        ("/v1/models", "GET"),
        ("/v1/responses/resp_1", "GET"),
    ],
)
def test_what_brings_the_engines_no_request_is_answered(path: str, method: str) -> None:
    assert status(path, method) == 200


def test_a_request_is_refused_by_what_it_asks_of_the_engines_whatever_the_application_says() -> (
    None
):
    limit = QueueLimit(10, 0.0)
    limit.enter(0.0, is_urgent=False)

    async def ask(request: Request) -> PlainTextResponse:
        while reserved(limit, 3) is None:
            pass
        return PlainTextResponse("an error", 503)

    app = Starlette(routes=[Route("/v1/completions", ask, methods=["POST"])])
    answer = TestClient(OverloadMiddleware(app, limit, DEFAULT_CLASSES)).post("/v1/completions")
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "5")
    assert answer.json()["error"] == {
        "message": "too many requests wait (1); try again in 5 s, or with fewer prompts and "
        "choices at once: of this one 12 or more would wait, where 10 may, unless nothing else "
        "waits",
        "type": "RateLimitError",
        "param": None,
        "code": 429,
    }
    assert limit.num_waiting == 1


def test_what_is_asked_for_when_the_answer_has_begun_does_not_change_it() -> None:
    limit = QueueLimit(10, 0.0)
    limit.enter(0.0, is_urgent=False)

    async def ask(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        assert reserved(limit, 20) is not None
        await send({"type": "http.response.body", "body": b"an error event"})

    answer = TestClient(OverloadMiddleware(ask, limit, DEFAULT_CLASSES)).post("/v1/completions")
    assert (answer.status_code, answer.text) == (200, "an error event")
