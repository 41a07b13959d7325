"""Tiers and keys of `sterna serve --engine emulated`, asked for by OpenAI's own client."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.serving.ports import free_port
from sterna.cli.operate.admin_commands import ServerError
from tests.models import small_model
from tests.serve.server import START_TIMEOUT_S, STERNA_IS_READY, ServerProcess, serve_command, until

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

MODEL = "SmolLM2-135M-Instruct"
MESSAGES = [{"role": "user", "content": "Hello!"}]
CLASSES = """
- {name: high, rank: 1, target_load: 1200}
- {name: gold, rank: 2, target_load: 800}
- {name: normal, rank: 0}
- {name: batch, rank: -1}
"""
KEYS = """
- {name: shop, key: sk-shop, highest_class: high}
- {name: guests, key: sk-guests, highest_class: normal}
- {name: nightly, key: sk-nightly, highest_class: batch}
- {name: operators, key: sk-operators, admin: true}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    small_model()
    folder: Path = tmp_path_factory.mktemp("tiers")
    (folder / "classes.yaml").write_text(CLASSES)
    (folder / "keys.yaml").write_text(KEYS)
    port = free_port()
    command = serve_command(
        *("--engine", "emulated", "--instances", "2", "--port", str(port)),
        *("--priority-classes", str(folder / "classes.yaml")),
        *("--api-keys", str(folder / "keys.yaml"), "--api-key", "sk-own"),
    )
    server = ServerProcess(command, port=port)
    try:
        server.until_line(STERNA_IS_READY, START_TIMEOUT_S)
        yield server
    finally:
        server.end()


@pytest.mark.parametrize(
    ("key", "asked", "tier"),
    [
        ("sk-own", "gold", "gold"),
        ("sk-operators", "priority", "priority"),
        ("sk-shop", "priority", "priority"),
        ("sk-shop", "gold", "priority"),
        ("sk-guests", "priority", "default"),
        ("sk-guests", "auto", "default"),
        ("sk-guests", "flex", "flex"),
        ("sk-nightly", "default", "flex"),
    ],
)
def test_the_tier_that_a_key_really_got_is_in_the_answer_and_in_every_chunk(
    server: ServerProcess, key: str, asked: Any, tier: str
) -> None:
    client = server.client(api_key=key)
    settings: dict[str, Any] = {"model": MODEL, "service_tier": asked}
    chat = client.chat.completions.create(messages=MESSAGES, max_tokens=3, **settings)
    assert chat.service_tier == tier
    chunks = client.chat.completions.create(
        messages=MESSAGES, max_tokens=3, stream=True, **settings
    )
    assert {chunk.service_tier for chunk in chunks} == {tier}
    assert client.responses.create(
        input="Hello!", max_output_tokens=3, **settings
    ).service_tier == tier  # fmt: skip


def test_vllms_integer_asks_for_a_class(server: ServerProcess) -> None:
    client = server.client(api_key="sk-own")
    answer = client.completions.create(
        model=MODEL, prompt="Terns", max_tokens=3, extra_body={"priority": -1}
    )
    assert answer.service_tier == "priority"


def test_a_tier_that_there_is_not_is_a_bad_request(server: ServerProcess) -> None:
    import openai

    client = server.client(api_key="sk-own")
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=3, service_tier="silver"
        )
    assert refused.value.param == "service_tier"
    known = "default, auto, priority, flex, batch, normal, high, gold"
    assert f"service_tier must be one of {known}" in str(refused.value)


def test_a_key_that_nobody_has_is_refused(server: ServerProcess) -> None:
    import openai

    with pytest.raises(openai.AuthenticationError):
        server.client(api_key="sk-unknown").models.list()


def test_operators_see_the_class_of_a_request_and_others_see_nothing(
    server: ServerProcess,
) -> None:
    client = server.client(api_key="sk-own")
    stream = client.completions.create(
        model=MODEL,
        prompt="Terns",
        max_tokens=2000,
        stream=True,
        extra_body={"service_tier": "gold", "ignore_eos": True},
    )
    next(iter(stream))
    for key in ("sk-own", "sk-operators"):
        (request,) = server.requests(key)
        assert (request["class"], request["priority"]) == ("gold", 2)
    stream.close()
    until(lambda: not server.requests("sk-own"), "the request is gone")
    for stranger in ("sk-shop", "sk-unknown", None):
        with pytest.raises(ServerError, match="need a valid API key of an operator"):
            server.requests(stranger)


def test_requests_are_counted_by_class_and_no_key_is_shown(server: ServerProcess) -> None:
    def counted() -> bool:
        with server.http() as http:
            text = http.get("/metrics").text
        names = ("requests_total", "request_latency_seconds_count")
        return all(f'sterna_{name}{{class="gold"}}' in text for name in names)

    server.client(api_key="sk-own").completions.create(
        model=MODEL, prompt="Terns", max_tokens=3, extra_body={"service_tier": "gold"}
    )
    until(counted, "a request of the class is counted")
    assert "sk-" not in server.log
    assert "Traceback" not in server.log
