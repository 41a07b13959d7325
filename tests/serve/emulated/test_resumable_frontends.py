"""Streams of `sterna serve --resumable-streams --frontends 2`, read on at any front end, also after
the one that had them was killed."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from tests.serve.emulated.quick import MODEL, quick_server
from tests.serve.resuming import Reader, front_ends, read_elsewhere
from tests.serve.server import START_TIMEOUT_S, ServerProcess, until

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
NUM_TOKENS = 250
"""Five seconds of a stream."""
COMMON = {"model": MODEL, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
MESSAGES = [{"role": "user", "content": "What do terns eat?"}]
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "text": (TEXT, {"prompt": "Terns"}),
    "chat": (CHAT, {"messages": MESSAGES}),
    "two-choices": (CHAT, {"messages": MESSAGES, "n": 2, "seed": 7}),
    "two-prompts": (TEXT, {"prompt": ["Terns", "Gulls"], "seed": 3}),
    "usage": (TEXT, {"prompt": "Skuas", "stream_options": {"include_usage": True}}),
}


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("resumable")
    with quick_server(folder, "--frontends", "2", "--resumable-streams") as server:
        yield server


def reader(server: ServerProcess, name: str, request_id: str) -> Reader:
    path, body = REQUESTS[name]
    return Reader(server, path, {**COMMON, **body}, request_id)


def test_streams_of_every_kind_go_on_when_the_front_end_that_has_them_is_killed(
    server: ServerProcess,
) -> None:
    undisturbed = {name: reader(server, name, f"whole-{name}") for name in REQUESTS}
    broken = {
        f"{name}-{n}": reader(server, name, f"broken-{name}-{n}")
        for name in REQUESTS
        for n in range(2)
    }
    with ThreadPoolExecutor(len(broken)) as pool:
        list(pool.map(Reader.read, undisturbed.values()))
        # Some come back to a stream that was read nearly whole, some to one that had just begun.
        victim = front_ends(server)[0]
        first = [
            pool.submit(each.read, at_most, victim)
            for each, at_most in zip(broken.values(), [3, 40] * len(REQUESTS), strict=True)
        ]
        assert [each.result() for each in first] == [victim] * len(broken)
        victim.kill()
        # At once: nobody knows of the death.
        list(pool.map(Reader.read_to_the_end, broken.values()))
    for name, each in broken.items():
        assert each.said() == undisturbed[name[:-2]].said(), name
    until(lambda: "streams taken over" in server.log, "the taking over is logged")
    assert "Traceback" not in server.log
    until(server.is_empty, "every instance is empty")


def test_a_stream_is_read_on_at_the_other_front_end_while_its_own_lives(
    server: ServerProcess,
) -> None:
    whole, broken = reader(server, "text", "whole"), reader(server, "text", "broken")
    whole.read()
    holder = broken.read(at_most=5)
    assert isinstance(holder, psutil.Process)
    read_elsewhere(broken, holder, at_most=20)
    read_elsewhere(broken, holder, at_most=1000)
    assert broken.is_over
    assert broken.said() == whole.said()


def test_a_stream_outlives_two_front_ends_and_can_be_read_when_it_is_over(
    server: ServerProcess,
) -> None:
    whole, broken = reader(server, "chat", "whole"), reader(server, "chat", "broken")
    whole.read()
    before = front_ends(server)
    holder = broken.read(at_most=20)
    assert isinstance(holder, psutil.Process)
    (other,) = set(before) - {holder}
    holder.kill()
    until(
        lambda: len(set(front_ends(server)) - {holder}) == 2,
        "there is another front end",
        START_TIMEOUT_S,
    )
    # When it can read the stream at the one that has it, the two know each other.
    probe = reader(server, "chat", "broken")
    probe.events, probe.last_id = [(0, "")], "0"
    read_elsewhere(probe, other, at_most=5)
    other.kill()
    broken.read_to_the_end()
    assert broken.said() == whole.said()
