"""Instances wait for a place, requests for memory: what operators see, and how it ends."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sterna.cli.operate.admin_commands import ask
from tests.serve.server import ServerProcess, start_emulated, until

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_TOKENS = 1450
"""With its prompt, as many as an instance holds, nearly."""


@pytest.fixture
def servers() -> Iterator[list[ServerProcess]]:
    running: list[ServerProcess] = []
    yield running
    for server in running:
        server.end()


def by_id(server: ServerProcess) -> dict[str, dict[str, Any]]:
    return {each["id"]: each for each in server.instances()}


def state(server: ServerProcess, instance_id: str) -> str | None:
    return by_id(server).get(instance_id, {}).get("state")


def test_an_instance_without_a_place_is_pending_until_another_one_leaves_its_own(
    servers: list[ServerProcess],
) -> None:
    """Each takes half of the machine's cores."""
    cores = str((os.cpu_count() or 2) / 2)
    server = start_emulated("--instances", "2", "--cpus-per-instance", cores)
    servers.append(server)
    ask(server.url, "POST", "/admin/start", None, {"instances": 1})
    until(lambda: state(server, "i2") == "pending", "the third one is pending")
    assert "CPUs free" in by_id(server)["i2"]["note"]
    ask(server.url, "POST", "/admin/drain", None, {"instance": "i0"})
    until(lambda: state(server, "i2") == "running", "it has the place of the first")
    assert sorted(by_id(server)) == ["i1", "i2"]


def test_a_drain_without_room_elsewhere_waits_says_so_and_ends_after_the_limit(
    servers: list[ServerProcess],
) -> None:
    """Two streams fill an instance each: neither has the memory for the other's. After the limit
    the one goes on elsewhere, from its tokens, when there is room."""
    server = start_emulated(
        *("--instances", "2", "--num-gpu-blocks-override", "100", "--drain-timeout", "8")
    )
    servers.append(server)

    def answer(_: int) -> int:
        chunks = server.client().completions.create(
            model="SmolLM2-135M-Instruct",
            prompt=[2000] * 100,
            max_tokens=NUM_TOKENS,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        # A slow machine has several tokens in one chunk.
        (usage,) = (chunk.usage for chunk in chunks if chunk.usage is not None)
        return usage.completion_tokens

    with ThreadPoolExecutor(2) as threads:
        streams = threads.map(answer, range(2))
        until(
            lambda: all(each["used_tokens"] > 900 for each in server.instances()),
            "both instances are more than half full",
        )
        ask(server.url, "POST", "/admin/drain", None, {"instance": "i0"})
        until(
            lambda: "waiting for an instance with room" in str(by_id(server)["i0"]["note"]),
            "the drain says what it waits for",
        )
        until(lambda: "i0" not in by_id(server), "the instance has ended")
        assert list(streams) == [NUM_TOKENS, NUM_TOKENS]
