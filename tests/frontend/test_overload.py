"""What a full queue refuses, in front of an application that answers whatever it is asked."""

import pytest

pytest.importorskip("starlette")

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from sterna.classes import DEFAULT_CLASSES
from sterna.frontend.overload import OverloadMiddleware
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
