"""An instance of real vLLM is killed under streams of every kind: their clients notice a pause.

Every answer is compared with the one that the same request gets alone, in float32, where what
shares a batch does not matter.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sterna.cli.operate.admin_commands import ServerError, ask
from tests.serve.cases import CITY_FORMAT
from tests.serve.raising import MESSAGE, VARIABLE, Raising
from tests.serve.server import (
    HANG_TIMEOUT_S,
    MODEL_NAME,
    START_TIMEOUT_S,
    ServerProcess,
    has_ended,
    start_sterna,
    until,
)

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(3000)]

ROOT = Path(__file__).parents[3]
NUM_TOKENS = 90
CUT = 15
"""The instance dies when every stream has so many tokens."""

TEXT = {"prompt": "Once upon a time, in a village by the sea,", "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "Name a city."}]}
RANDOM = {"temperature": 0.9, "seed": 17}
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {**TEXT, "temperature": 0},
    "seeded": {**TEXT, **RANDOM, "top_p": 0.95},
    "log probabilities": {**TEXT, **RANDOM, "logprobs": 2},
    "penalties": {**TEXT, "temperature": 0, "frequency_penalty": 0.8, "repetition_penalty": 1.2},
    "two choices": {**TEXT, **RANDOM, "n": 2},
    "JSON": {
        **CHAT,
        **RANDOM,
        "response_format": CITY_FORMAT,
        "min_tokens": 2 * CUT,
        "logprobs": True,
    },
    "chat": {**CHAT, **RANDOM, "ignore_eos": True, "presence_penalty": 1.0},
}


@dataclass
class Choice:
    """One choice of an answer, put together from its stream."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass
class Answer:
    """A stream's choices by index, and the pause that its client noticed."""

    choices: dict[int, Choice] = field(default_factory=dict)
    errors: list[Any] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    max_gap_s: float = 0.0

    def has_begun(self) -> bool:
        return bool(self.choices) and all(len(e.token_ids) >= CUT for e in self.choices.values())


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    server = start_sterna("--dtype", "float32", "--no-migration")
    yield server
    server.end()


def stream(
    server: ServerProcess, request: dict[str, Any], answer: Answer, request_id: str = "alone"
) -> Answer:
    path = "/v1/chat/completions" if "messages" in request else "/v1/completions"
    body = {
        "model": MODEL_NAME,
        "max_tokens": NUM_TOKENS,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
        **request,
    }
    last_s = None
    headers = {"X-Request-Id": request_id}
    with server.http() as http, http.stream("POST", path, json=body, headers=headers) as response:
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                answer.errors.append(event["error"])
                continue
            answer.usage = event.get("usage") or answer.usage
            now_s = time.monotonic()
            if last_s is not None:
                answer.max_gap_s = max(answer.max_gap_s, now_s - last_s)
            last_s = now_s
            for part in event["choices"]:
                add(answer.choices.setdefault(part["index"], Choice()), part)
    return answer


def add(choice: Choice, part: dict[str, Any]) -> None:
    choice.text += part["delta"].get("content") or "" if "delta" in part else part["text"]
    choice.token_ids += part.get("token_ids") or []
    choice.finish_reason = part["finish_reason"] or choice.finish_reason
    logprobs = part.get("logprobs") or {}
    choice.logprobs += logprobs.get("token_logprobs") or []
    choice.logprobs += [each["logprob"] for each in logprobs.get("content") or []]


def id_of(name: str) -> str:
    return f"killed-{name.replace(' ', '-')}-"


def are_all_on(server: ServerProcess, instance_id: str) -> bool:
    """Whether all live requests are there; those that are not are told to move."""
    elsewhere = [each["id"] for each in server.requests() if each["instance"] != instance_id]
    for request_id in elsewhere:
        # It may still compute its prompt.
        with contextlib.suppress(ServerError):
            body = {"request": request_id, "to": instance_id}
            ask(server.url, "POST", "/admin/migrate", None, body)
    return not elsewhere


def test_streams_of_every_kind_say_what_they_say_alone_although_their_instance_is_killed(
    server: ServerProcess,
) -> None:
    requests = dict(REQUESTS)
    alone = {name: stream(server, request, Answer()) for name, request in requests.items()}
    # A stop string behind the cut: its beginning was seen before the death, or not at all.
    stop = alone["greedy"].choices[0].text[-60:-52]
    requests["stop string"] = {**requests["greedy"], "stop": [stop]}
    alone["stop string"] = stream(server, requests["stop string"], Answer())

    answers = {name: Answer() for name in requests}
    with ThreadPoolExecutor(len(requests)) as pool:
        running = [
            pool.submit(stream, server, requests[name], answers[name], id_of(name))
            for name in requests
        ]
        until(lambda: all(each.choices for each in answers.values()), "all have a first token")
        until(
            lambda: are_all_on(server, "i0") and all(each.has_begun() for each in answers.values()),
            "all have begun, and are together",
        )
        server.instance_process("i0").kill()
        for each in running:
            each.result()
    print("longest pauses:", {name: round(a.max_gap_s, 2) for name, a in answers.items()})
    again = [line for line in server.lines if "request sent again" in line]
    for name, answer in answers.items():
        choices = alone[name].choices
        assert sum(id_of(name) in line for line in again) == len(choices), name
        assert answer.errors == [], name
        assert answer.usage == alone[name].usage, name
        for index, expected in choices.items():
            found = answer.choices[index]
            assert found.token_ids == expected.token_ids, name
            assert found.text == expected.text, name
            assert found.finish_reason == expected.finish_reason, name
            assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4), name
    assert alone["stop string"].choices[0].finish_reason == "stop"
    assert json.loads(answers["JSON"].choices[0].text)
    until(server.is_empty, "all blocks are free again", START_TIMEOUT_S)


def test_streams_say_what_they_say_alone_although_a_step_of_their_engine_raises(
    tmp_path: Path,
) -> None:
    """The instance whose engine failed ends, without another step, and is replaced."""
    raising = tmp_path / "raising"
    server = start_sterna(
        *("--dtype", "float32", "--logits-processors", f"{Raising.__module__}:{Raising.__name__}"),
        environment={
            VARIABLE: str(raising),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        },
    )
    try:
        requests = {name: REQUESTS[name] for name in ("greedy", "seeded", "penalties", "JSON")}
        alone = {name: stream(server, request, Answer()) for name, request in requests.items()}
        answers = {name: Answer() for name in requests}
        with ThreadPoolExecutor(len(requests)) as pool:
            running = [
                pool.submit(stream, server, requests[name], answers[name], id_of(name))
                for name in requests
            ]
            until(lambda: all(each.has_begun() for each in answers.values()), "all have begun")
            processes = {each: server.instance_process(each) for each in ("i0", "i1")}
            raising.touch()
            for each in running:
                each.result()
        assert not raising.exists()
        lost = server.until_line(
            rf"instance lost instance=(i\d) reason=.*{MESSAGE}", HANG_TIMEOUT_S
        )
        assert has_ended(processes[lost[1]])
        assert "request sent again" in server.log
        for name, answer in answers.items():
            assert answer.errors == [], name
            assert answer.usage == alone[name].usage, name
            assert answer.choices[0].token_ids == alone[name].choices[0].token_ids, name
        (other,) = {"i0", "i1"} - {lost[1]}
        replaced = {other: "running", "i2": "running"}
        until(
            lambda: {each["id"]: each["state"] for each in server.instances()} == replaced,
            "it is replaced",
            START_TIMEOUT_S,
        )
    finally:
        server.end()


def test_a_client_that_leaves_during_a_death_leaves_nothing_behind(server: ServerProcess) -> None:
    """Its request may be in doubt, on its way to another instance, or there."""
    max_tokens = 1800
    streams = [server.stream(max_tokens=max_tokens) for _ in range(6)]
    for each in streams:
        next(iter(each))
    server.instance_process("i0").kill()
    # At six moments around the news of the death.
    leaving = [threading.Timer(0.15 * number, each.close) for number, each in enumerate(streams)]
    for timer in leaving:
        timer.start()
    for timer in leaving:
        timer.join()
    server.until_freed(max_tokens)
