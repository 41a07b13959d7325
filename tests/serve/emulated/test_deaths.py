"""Instances that are killed under streams: no token is missing, repeated or changed.

An emulated engine's answers are known beforehand, and it refuses a request that comes with others
than its own.
"""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from sterna.cli.serve.emulated_options import plain_vocabulary
from sterna.engine.emulated.tokens import stream_key, token_at
from tests.models import small_model
from tests.serve.emulated.test_emulated import PROFILE
from tests.serve.mover import Mover
from tests.serve.server import (
    HANG_TIMEOUT_S,
    ServerProcess,
    start_emulated,
    until,
)

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_STREAMS = 20
NUM_TOKENS = 400
"""Eight seconds of a stream."""
INSTANCE_TIMEOUT_S = 60
MAX_GAP_S = INSTANCE_TIMEOUT_S / 2
"""Nobody waits until the silence of a dead instance is noticed."""


@dataclass
class Answer:
    """What a client got, and when."""

    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)
    reason: str | None = None

    @property
    def max_gap_s(self) -> float:
        later, earlier = self.times_s[1:], self.times_s[:-1]
        return max(b - a for a, b in zip(earlier, later, strict=True))


def started(profile: Path, *options: str) -> ServerProcess:
    return start_emulated("--profile", str(profile), *options)


@pytest.fixture
def servers() -> Iterator[list[ServerProcess]]:
    running: list[ServerProcess] = []
    yield running
    for server in running:
        server.end()


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    file = tmp_path / "quick.yaml"
    file.write_text(PROFILE)
    return file


def prompt_ids(number: int) -> list[int]:
    return [2000 + number] * (20 + 7 * number)


def expected(number: int) -> list[int]:
    key, vocabulary = stream_key(prompt_ids(number), number), plain_vocabulary(small_model())
    return [token_at(key, index, vocabulary) for index in range(NUM_TOKENS)]


def stream(server: ServerProcess, number: int, answer: Answer) -> Answer:
    body = {
        "model": "SmolLM2-135M-Instruct",
        "prompt": prompt_ids(number),
        "seed": number,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    with server.http() as http, http.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                answer.errors.append(event["error"])
                continue
            (choice,) = event["choices"]
            answer.token_ids += choice.get("token_ids") or []
            answer.times_s.append(time.monotonic())
            answer.reason = choice["finish_reason"] or answer.reason
    return answer


def kill(server: ServerProcess, instance_id: str) -> None:
    ready = server.until_line(rf"instance {instance_id} pid=(\d+)", HANG_TIMEOUT_S)
    psutil.Process(int(ready[1])).kill()


def test_twenty_streams_are_right_although_two_instances_die_one_after_the_other(
    servers: list[ServerProcess], profile: Path
) -> None:
    """Requests move all the time, so that the deaths find some under way. How long clients wait is
    printed; that nobody waits for a time-out is asserted."""
    server = started(
        profile,
        *("--instances", "3", "--migration-concurrency", "4"),
        *("--instance-timeout", str(INSTANCE_TIMEOUT_S)),
    )
    servers.append(server)
    answers = [Answer() for _ in range(NUM_STREAMS)]
    with (
        Mover(server, "deaths", num_threads=2) as mover,
        ThreadPoolExecutor(NUM_STREAMS) as pool,
    ):
        running = [pool.submit(stream, server, n, answers[n]) for n in range(NUM_STREAMS)]
        until(lambda: all(len(each.token_ids) > 30 for each in answers), "all have begun")
        num_moves = [mover.total]
        kill(server, "i0")
        until(lambda: all(len(each.token_ids) > 200 for each in answers), "all go on")
        num_moves.append(mover.total)
        kill(server, "i1")
        for each in running:
            each.result()
    for number, answer in enumerate(answers):
        assert answer.errors == []
        assert answer.token_ids == expected(number)
        assert answer.reason == "length"
    assert 0 < num_moves[0] < num_moves[1], mover.refusals
    gaps_s = sorted(answer.max_gap_s for answer in answers)
    print("longest gaps in s:", [round(gap_s, 2) for gap_s in gaps_s])
    assert gaps_s[-1] < MAX_GAP_S
    until(lambda: "request sent again" in server.log, "what was sent again is logged")
    assert "Traceback" not in server.log
    until(server.is_empty, "every instance is empty")


def test_without_another_instance_streams_wait_for_the_replacement(
    servers: list[ServerProcess], profile: Path
) -> None:
    server = started(profile, "--instances", "1")
    servers.append(server)
    answer = Answer()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream, server, 3, answer)
        until(lambda: len(answer.token_ids) > 30, "it has begun")
        kill(server, "i0")
        running.result()
    assert answer.errors == []
    assert answer.token_ids == expected(3)


def test_streams_end_with_an_error_where_nothing_is_to_be_continued(
    servers: list[ServerProcess], profile: Path
) -> None:
    server = started(profile, "--instances", "1", "--on-instance-failure", "abort")
    servers.append(server)
    answer = Answer()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream, server, 3, answer)
        until(lambda: len(answer.token_ids) > 30, "it has begun")
        kill(server, "i0")
        running.result()
    (error,) = answer.errors
    assert error["code"] == 503
    assert "owner_died" in error["message"]
    assert answer.token_ids == expected(3)[: len(answer.token_ids)]
