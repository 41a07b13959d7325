"""Which server and model `sterna bench serve` finds, and what it says of those that it does not."""

import asyncio

import pytest

from bench.serving.target import Target, find_target, refusal
from sterna.errors import ConfigurationError
from tests.bench.serving.sse_server import CompletionsServer, running


def found(
    server: CompletionsServer,
    *,
    api_key: str | None = None,
    model: str | None = None,
    end: str = "",
) -> Target:
    async def run() -> Target:
        async with running(server) as target:
            return await find_target(target.url + end, api_key, model)

    return asyncio.run(run())


def test_the_first_model_is_the_one_and_tells_its_length() -> None:
    target = found(CompletionsServer(models=("terns", "gulls")))
    assert (target.model, target.max_model_len) == ("terns", 2048)


@pytest.mark.parametrize("end", ["/", "/v1", "/v1/"])
def test_the_address_may_be_the_one_that_openais_clients_take(end: str) -> None:
    assert found(CompletionsServer(), end=end).url.count("/") == 2


def test_another_model_can_be_named() -> None:
    assert found(CompletionsServer(models=("terns", "gulls")), model="gulls").model == "gulls"


def test_a_model_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigurationError, match="--model must be one of terns, gulls"):
        found(CompletionsServer(models=("terns", "gulls")), model="auks")


def test_a_key_is_sent_where_it_is_given() -> None:
    assert found(CompletionsServer(api_key="sesame"), api_key="sesame").api_key == "sesame"


@pytest.mark.parametrize(
    ("key", "words"), [(None, "asks for an API key"), ("wrong", "does not accept this API key")]
)
def test_a_server_that_wants_a_key_says_so(key: str | None, words: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{words}: give --api-key, or set OPENAI_API_KEY"):
        found(CompletionsServer(api_key="sesame"), api_key=key)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "not an address"])
def test_where_no_server_is_the_message_says_what_to_do(url: str) -> None:
    with pytest.raises(ConfigurationError, match="start one with `sterna serve`"):
        asyncio.run(find_target(url))


def test_a_server_without_models_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="serves no model"):
        found(CompletionsServer(models=()))


def test_a_page_that_is_not_openais_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="does not list its models"):
        found(CompletionsServer(), end="/elsewhere")


def test_a_key_is_not_shown_where_a_target_is_printed() -> None:
    assert "sesame" not in repr(Target("http://terns", "terns", None, "sesame"))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"error": {"message": "too long", "code": 400}}', "400: too long"),
        (b'{"error": "Unauthorized"}', "status 400"),
        (b"<html>", "status 400"),
        (b"[]", "status 400"),
    ],
)
def test_a_refusal_is_told_in_the_servers_words(content: bytes, reason: str) -> None:
    assert refusal(400, content) == reason
