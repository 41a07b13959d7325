"""Keys of the API: which one opens which route."""

import asyncio
import logging
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from sterna.frontend.http.api_keys import LOOK_INTERVAL_S, ApiKeys, KeyCheck
from sterna.priority_classes import DEFAULT_CLASSES, ApiKey
from sterna.priority_files import KeyFile
from tests.clocks import SkippingLoop, run_skipping, stands
from tests.frontend.http.opened import opened

KEYS = (
    ApiKey("user", sha256(b"user").digest()),
    ApiKey("operator", sha256(b"operator").digest(), is_admin=True),
)


async def answer(request: Request) -> PlainTextResponse:
    return PlainTextResponse("inside")


async def connect(websocket: WebSocket) -> None:
    await websocket.accept()
    await websocket.send_text("inside")
    await websocket.close()


def client(root_path: str = "") -> TestClient:
    routes = [
        Route("/{path:path}", answer, methods=["GET", "POST", "OPTIONS"]),
        WebSocketRoute("/{path:path}", connect),
    ]
    return TestClient(opened(KeyCheck(Starlette(routes=routes)), KEYS), root_path=root_path)


def status(path: str, key: str | None, method: str = "POST") -> int:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return client().request(method, path, headers=headers).status_code


@pytest.mark.parametrize("path", ["/health", "/metrics", "/metrics/", "/ping", "/version"])
def test_probes_and_metrics_are_open(path: str) -> None:
    assert status(path, None) == 200


@pytest.mark.parametrize(
    "path", ["/docs", "/static/swagger-ui-bundle.js", "/static/swagger-ui.css", "/openapi.json"]
)
def test_the_description_of_the_api_is_open_with_all_that_its_page_loads(path: str) -> None:
    """Of --enable-offline-docs, too."""
    assert status(path, None, "GET") == 200


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/invocations", "/tokenize", "/v2/embed", "/inference/v1/x"]
)
def test_inference_asks_for_any_key(path: str) -> None:
    assert [status(path, key) for key in (None, "wrong", "user", "operator")] == [
        401,
        401,
        200,
        200,
    ]


@pytest.mark.parametrize(
    "path",
    [
        "/collective_rpc",
        "/pause",
        "/start_profile",
        "/v1/load_lora_adapter",
        "/what-a-later-vllm-adds",
        "//v1/models",
        "/V1/models",
        "/v1",
        "/health/",
        "/metricsx",
        "/adminX",
        "/admin",
    ],
)
def test_what_is_not_known_to_be_for_users_is_for_operators(path: str) -> None:
    assert [status(path, key) for key in (None, "user", "operator")] == [401, 401, 200]


def test_the_operators_api_checks_its_keys_itself() -> None:
    assert [status("/admin/instances", key) for key in (None, "user")] == [200, 200]


def test_a_browser_may_ask_without_a_key_whether_it_may_ask() -> None:
    assert status("/v1/models", None, "OPTIONS") == 200


def test_the_path_counts_without_the_root_path() -> None:
    http = client("/behind/proxy")
    assert http.get("/health").status_code == 200
    assert http.get("/v1/models").status_code == 401


def test_what_is_no_request_passes() -> None:
    passed: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        passed.append(scope["type"])

    async def unused(*_: Any) -> Any:
        raise AssertionError("something was said")

    asyncio.run(opened(KeyCheck(app), KEYS)({"type": "lifespan"}, unused, unused))
    assert passed == ["lifespan"]


def test_a_websocket_needs_a_key_as_well() -> None:
    with client().websocket_connect(
        "/v1/realtime", headers={"Authorization": "Bearer user"}
    ) as opened:
        assert opened.receive_text() == "inside"
    with pytest.raises(WebSocketDisconnect), client().websocket_connect("/v1/realtime"):
        pass


OWN = ApiKey("--api-key", sha256(b"own").digest(), is_admin=True)


def file_of(folder: Path, text: str) -> KeyFile:
    """A file with this content, new at its path."""
    new = folder / "new.yaml"
    new.write_text(text)
    return KeyFile(new.replace(folder / "keys.yaml"), DEFAULT_CLASSES, (OWN,))


def opens(keys: ApiKeys, key: str) -> bool:
    return keys.find(f"Bearer {key}") is not None


def test_a_key_that_is_taken_out_of_the_file_opens_nothing_and_a_new_one_does(
    tmp_path: Path,
) -> None:
    file = file_of(tmp_path, "- {name: old, key: old}\n- {name: shop, key: shop}")
    keys = ApiKeys(file.read(), file)
    file_of(tmp_path, "- {name: new, key: new}\n- {name: shop, key: shop, highest_class: normal}")
    asyncio.run(keys.look())
    assert [opens(keys, each) for each in ("own", "old", "new")] == [True, False, True]
    shop = keys.find("Bearer shop")
    assert shop is not None
    assert shop.highest == DEFAULT_CLASSES.normal


def test_without_a_thread_to_read_the_file_the_keys_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def to_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    file = file_of(tmp_path, "- {name: shop, key: shop}")
    keys = ApiKeys(file.read(), file)
    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    asyncio.run(keys.look())
    assert opens(keys, "shop")


def test_a_file_that_cannot_be_used_changes_no_key_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = file_of(tmp_path, "- {name: shop, key: shop}")
    keys = ApiKeys(file.read(), file)

    async def test() -> None:
        await keys.look()
        wrong_tag = "- {name: shop, key: !!bool s3cret}"
        for text in ("- {name: shop, key: [s3cret]}", "[]", wrong_tag, None):
            if text is None:
                file.path.unlink()
            else:
                file_of(tmp_path, text)
            for _ in range(3):
                await keys.look()
            assert [opens(keys, each) for each in ("own", "shop")] == [True, True]
        file_of(tmp_path, "- {name: other, key: other}")
        await keys.look()
        assert [opens(keys, each) for each in ("own", "shop", "other")] == [True, False, True]

    with caplog.at_level(logging.ERROR, "sterna.frontend.http.api_keys"):
        asyncio.run(test())
    failed = "API keys stay as they were reason=--api-keys"
    assert [each.startswith(failed) for each in caplog.messages] == [True] * 4
    assert "s3cret" not in caplog.text


def test_a_file_that_could_not_be_read_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For want of descriptors, say: the file is the same at the next look."""
    file = file_of(tmp_path, "- {name: shop, key: shop}")
    keys = ApiKeys((OWN,), file)
    refusals = [OSError("too many open files")]
    read_text = Path.read_text

    def reluctant(path: Path, encoding: str) -> str:
        if refusals:
            raise refusals.pop()
        return read_text(path, encoding)

    monkeypatch.setattr(Path, "read_text", reluctant)
    asyncio.run(keys.look())
    assert not opens(keys, "shop")
    asyncio.run(keys.look())
    assert opens(keys, "shop")


def test_the_file_is_looked_at_again_and_again(tmp_path: Path) -> None:
    file = file_of(tmp_path, "- {name: shop, key: shop}")
    keys = ApiKeys((OWN,), file)

    async def test(loop: SkippingLoop) -> None:
        following = asyncio.create_task(keys.follow())
        for name in ("shop", "other"):
            file_of(tmp_path, f"- {{name: {name}, key: {name}}}")
            while not opens(keys, name):
                loop.skipped_s += LOOK_INTERVAL_S
                await asyncio.sleep(0)
        following.cancel()

    run_skipping(test, stands)


def test_there_is_a_pause_before_each_look() -> None:
    class CountingLooks(ApiKeys):
        num_looks = 0

        async def look(self) -> None:
            self.num_looks += 1

    async def test(loop: SkippingLoop) -> None:
        keys = CountingLooks()
        following = asyncio.create_task(keys.follow())
        for number in range(4):
            for _ in range(10):
                await asyncio.sleep(0)
            assert keys.num_looks == number
            loop.skipped_s += LOOK_INTERVAL_S
        following.cancel()

    run_skipping(test, stands)


def test_keys_without_a_file_do_not_change() -> None:
    keys = ApiKeys(KEYS)
    asyncio.run(keys.look())
    assert opens(keys, "user")
