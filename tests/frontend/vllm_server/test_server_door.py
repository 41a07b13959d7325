"""Whom vLLM's own server lets in: its queue, its limits and its key."""

import asyncio
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

pytest.importorskip("vllm")

from vllm.v1.engine import FinishReason

from sterna.frontend.http import api_keys
from sterna.messages.actors import AbortRequests
from tests.frontend import served
from tests.frontend.scripted import HANG_S
from tests.frontend.served import (
    API_KEY,
    CONFIG,
    MAX_QUEUED,
    Scenario,
    Served,
    one_server,
    options_of_vllm,
)

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[Scenario], None]]:
    with one_server() as run:
        yield run


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


def test_a_request_for_more_than_a_front_end_begins_in_a_moment_is_a_bad_one(run):
    """Although nothing else waits; and none of it is left behind."""

    async def test(served: Served) -> None:
        body = {"prompt": ["Hello"] * 64, "n": 65, "max_tokens": 2, "temperature": 1.0}
        refused = await served.post("/v1/completions", model="small", **body)
        assert refused.status_code == 400, refused.text
        assert "prompts and choices" in refused.json()["error"]["message"]
        many = served.post("/v1/completions", model="small", prompt="Hello", n=5_000)
        assert (await many).status_code == 400
        answering = served.chat()
        i0 = served.cluster.i0
        request = await i0.get_request()
        i0.send_tokens(request.request_id, 0, served.tokens("Hello"), FinishReason.STOP)
        assert (await answering).status_code == 200

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
        for path in ("/health", "/metrics/", "/docs", "/openapi.json"):
            answer = await served.http.get(path, headers={"Authorization": ""})
            assert answer.status_code == 200, path

    run(test)


async def server_timing(served: Served) -> str | None:
    answering = served.chat()
    request_id = (await served.cluster.i0.get_request()).request_id
    served.cluster.i0.send_tokens(request_id, 0, served.tokens("Terns"), FinishReason.STOP)
    return (await answering).headers.get("Server-Timing")


def test_answers_have_a_server_timing_header_unless_it_is_turned_off(run):
    async def timed(served: Served) -> None:
        assert 'instance;desc="i0"' in (await server_timing(served) or "")

    async def untimed(served: Served) -> None:
        assert await server_timing(served) is None

    run(timed)
    without = replace(CONFIG, door=replace(CONFIG.door, has_server_timing=False))
    with one_server(without) as run_without:
        run_without(untimed)


async def status_of(served: Served, key: str) -> int:
    headers = {"Authorization": f"Bearer {key}"}
    return (await served.http.get("/v1/models", headers=headers)).status_code


def test_a_clients_key_is_revoked_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_keys, "LOOK_INTERVAL_S", 0.01)
    path, new = tmp_path / "keys.yaml", tmp_path / "new.yaml"
    path.write_text("- {name: shop, key: sk-shop}\n- {name: other, key: sk-other}")

    async def test(served: Served) -> None:
        keys = ("sk-shop", "sk-other", API_KEY)
        assert [await status_of(served, key) for key in keys] == [200, 200, 200]
        new.write_text("- {name: other, key: sk-other}")
        new.replace(path)
        while await status_of(served, "sk-shop") == 200:
            pass
        assert [await status_of(served, key) for key in keys] == [401, 200, 200]

    with one_server(CONFIG, "--api-keys", str(path)) as run:
        run(test)


def test_a_front_end_that_starts_later_has_the_keys_that_the_file_has_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_keys, "LOOK_INTERVAL_S", HANG_S)
    path = tmp_path / "keys.yaml"
    path.write_text("- {name: revoked, key: sk-revoked}")

    def parsed_earlier(port: int, *more: str) -> Namespace:
        args = options_of_vllm(port, *more)
        path.write_text("- {name: shop, key: sk-shop}")
        return args

    monkeypatch.setattr(served, "options_of_vllm", parsed_earlier)

    async def test(served: Served) -> None:
        keys = ("sk-revoked", "sk-shop", API_KEY)
        assert [await status_of(served, key) for key in keys] == [401, 200, 200]

    with one_server(CONFIG, "--api-keys", str(path)) as run:
        run(test)
