"""`sterna serve --engine emulated`, whole: four instances, vLLM's server in front of them."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bench.serving.ports import free_port, is_port_free
from sterna.cli.serve.emulated_options import plain_vocabulary
from sterna.engine.emulated.tokens import stream_key, token_at
from tests.models import small_model
from tests.serve.mover import Mover
from tests.serve.server import (
    END_TIMEOUT_S,
    START_TIMEOUT_S,
    STERNA_IS_READY,
    ServerProcess,
    serve_command,
    until,
)

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_INSTANCES = 4
NUM_STREAMS = 50
SHUTDOWN_TIMEOUT_S = 300
PROFILE = """
name: quick
description: an engine with steps of some milliseconds
source: made up for this test
engine:
  num_blocks: 400
  step_mode: chunked
  max_num_batched_tokens: 512
step_time:
  prefill_s: 0.002
  prefill_token_s: 1.0e-5
  prefill_pair_s: 0.0
  prefill_min_s: 0.004
  decode_s: 0.02
  decode_request_s: 1.0e-5
  decode_token_s: 1.0e-8
copy_time:
  block_s: 0.0002
  stage_s: 0.004
"""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(small_model())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    small_model()
    profile: Path = tmp_path_factory.mktemp("profile") / "quick.yaml"
    profile.write_text(PROFILE)
    port = free_port()
    options = ("--engine", "emulated", "--profile", str(profile), "--port", str(port))
    server = ServerProcess(
        serve_command(
            *(*options, "--instances", str(NUM_INSTANCES), "--migration-concurrency", "4"),
            *("--shutdown-timeout", str(SHUTDOWN_TIMEOUT_S)),
        ),
        port=port,
    )
    try:
        server.until_line(STERNA_IS_READY, START_TIMEOUT_S)
        yield server
    finally:
        server.end()


def stream(server: ServerProcess, **body: Any) -> tuple[list[int], list[int], str, str]:
    """Return prompt and answer in token ids, the answer's text, and why it ended."""
    body = {"stream": True, "return_token_ids": True, "model": "SmolLM2-135M-Instruct", **body}
    prompt_ids, token_ids, text, reason = [], [], "", ""
    with server.http() as http, http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            data = line.removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            event = json.loads(data)
            assert "error" not in event, event
            (choice,) = event["choices"]
            prompt_ids += choice.get("prompt_token_ids") or []
            token_ids += choice.get("token_ids") or []
            text += choice["text"]
            reason = choice["finish_reason"] or reason
    return prompt_ids, token_ids, text, reason


def test_fifty_streams_are_right_while_their_requests_move(
    server: ServerProcess, tokenizer: Any
) -> None:
    """Section 6.6 runs 64 emulated instances; here each token is checked as well."""
    vocabulary = plain_vocabulary(small_model())

    def check(number: int) -> None:
        prompt = f"Terns, number {number}: " + "they fly far, " * (number % 13)
        num_tokens = 60 + 5 * (number % 17)
        prompt_ids, token_ids, text, reason = stream(
            server, prompt=prompt, max_tokens=num_tokens, seed=number, temperature=0.7
        )
        key = stream_key(tokenizer(prompt)["input_ids"], number)
        assert prompt_ids == tokenizer(prompt)["input_ids"]
        assert token_ids == [token_at(key, i, vocabulary) for i in range(num_tokens)]
        assert text == tokenizer.decode(token_ids)
        assert reason == "length"

    with Mover(server, "fifty streams", num_threads=4) as mover, ThreadPoolExecutor(50) as pool:
        # A machine that moves few requests while they run needs more rounds.
        while mover.total < NUM_STREAMS:
            list(pool.map(check, range(NUM_STREAMS)))
    until(server.is_empty, "every instance is empty")
    assert {each["id"] for each in server.instances()} == {"i0", "i1", "i2", "i3"}
    assert "Traceback" not in server.log


def test_choices_and_chats_are_answered(server: ServerProcess, tokenizer: Any) -> None:
    """`n` asks for several answers, which differ where a seed makes them."""
    client = server.client()
    answer = client.chat.completions.create(
        model="SmolLM2-135M-Instruct",
        messages=[{"role": "user", "content": "Hello!"}],
        max_tokens=8,
        n=3,
        seed=5,
    )
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) == 3
    assert answer.usage.completion_tokens == 24


def test_a_stop_string_ends_a_stream(server: ServerProcess) -> None:
    whole = stream(server, prompt="Gulls", max_tokens=40)
    words = whole[2].split()
    stop = words[len(words) // 2]
    text, reason = stream(server, prompt="Gulls", max_tokens=40, stop=[stop])[2:]
    assert (text, reason) == (whole[2][: whole[2].index(stop)], "stop")


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"logprobs": 2}, "log probabilities"),
        ({"logit_bias": {"7": 1}}, "logit_bias"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "structured outputs"),
        ({"response_format": {"type": "json_object"}}, "structured outputs"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_the_engine_cannot_do_is_refused(
    server: ServerProcess, asked: dict[str, Any], words: str, is_stream: bool
) -> None:
    body = {"model": "SmolLM2-135M-Instruct", "prompt": "Terns", "stream": is_stream, **asked}
    with server.http() as http:
        answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert words in error["message"]
    assert error["type"] == "BadRequestError"


def test_a_server_of_emulated_instances_ends_cleanly(server: ServerProcess) -> None:
    """The last test of this module: it ends the server, in the middle of a stream of two minutes,
    for which Ctrl-C does not wait."""
    family = server.processes()
    client = server.client()
    chunks = client.completions.create(
        model="SmolLM2-135M-Instruct", prompt="Terns", max_tokens=6000, stream=True
    )
    next(iter(chunks))
    server.interrupt()
    assert server.until_end() == 0
    until(
        lambda: not any(process.is_running() for process in family),
        "all have ended",
        END_TIMEOUT_S,
    )
    assert is_port_free(server.port)
    assert "Traceback" not in server.log
