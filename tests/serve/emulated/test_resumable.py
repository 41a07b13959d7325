"""Streams of `sterna serve --resumable-streams` that lose their connection and are read on."""

import json
from collections.abc import Iterator

import httpx
import pytest

from bench.serving.ports import free_port
from tests.models import small_model
from tests.serve.server import (
    HANG_TIMEOUT_S,
    START_TIMEOUT_S,
    STERNA_IS_READY,
    ServerProcess,
    serve_command,
)

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

BODY = {
    "model": "SmolLM2-135M-Instruct",
    "prompt": "Terns",
    "max_tokens": 60,
    "ignore_eos": True,
    "stream": True,
}
PATH = "/v1/completions"
LEFT_TOKENS = 6000
"""Of a stream that takes minutes."""


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    small_model()
    port = free_port()
    options = ("--engine", "emulated", "--port", str(port), "--resumable-streams")
    server = ServerProcess(serve_command(*options, "--resume-window", "10"), port=port)
    try:
        server.until_line(STERNA_IS_READY, START_TIMEOUT_S)
        yield server
    finally:
        server.end()


def events_of(http: httpx.Client, headers: dict[str, str], at_most: int) -> list[tuple[int, str]]:
    """The events that come, by number, until the stream ends or there are so many; then the
    connection is dropped."""
    found: list[tuple[int, str]] = []
    number = 0
    with http.stream("POST", PATH, json=BODY, headers=headers) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            name, _, value = line.partition(": ")
            if name == "id":
                number = int(value)
            elif name == "data":
                found.append((number, value))
                if len(found) == at_most:
                    break
    return found


def text(events: list[tuple[int, str]]) -> str:
    """What is said; how it is cut into events is chance."""
    chunks = [json.loads(data) for _, data in events if data != "[DONE]"]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


def test_a_stream_that_loses_its_connection_again_and_again_is_whole(
    server: ServerProcess,
) -> None:
    with httpx.Client(base_url=server.url, timeout=HANG_TIMEOUT_S) as http:
        whole = events_of(http, {"X-Request-Id": "whole"}, at_most=1000)
        assert len(text(whole).split()) > 20
        assert whole[-1][1] == "[DONE]"
        headers = {"X-Request-Id": "broken"}
        events = events_of(http, headers, at_most=7)
        while events[-1][1] != "[DONE]":
            last = {**headers, "Last-Event-ID": str(events[-1][0])}
            events += events_of(http, last, at_most=7)
    assert [number for number, _ in events] == list(range(1, len(events) + 1))
    assert text(events) == text(whole)


def test_a_stream_to_which_nobody_comes_back_is_freed(server: ServerProcess) -> None:
    with httpx.Client(base_url=server.url, timeout=HANG_TIMEOUT_S) as http:
        body = {**BODY, "max_tokens": LEFT_TOKENS}
        with http.stream("POST", PATH, json=body, headers={"X-Request-Id": "left"}) as answer:
            assert answer.status_code == 200
            next(answer.iter_lines())
        server.until_freed(LEFT_TOKENS)
        back = {"X-Request-Id": "left", "Last-Event-ID": "1"}
        answer = http.post(PATH, json=body, headers=back)
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "NotFoundError")
        assert "no stream of this X-Request-Id" in answer.json()["error"]["message"]
