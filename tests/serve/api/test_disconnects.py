"""A client that goes away frees its request's blocks, wherever the request is by then."""

import http.client
import json
import random
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from sterna.cli.operate.admin_commands import ServerError, ask
from tests.serve.cases import LONG
from tests.serve.mover import Mover
from tests.serve.server import MODEL_NAME, ServerProcess, until

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(1800)]

MAX_TOKENS = 600


@contextmanager
def long_stream(
    server: ServerProcess, name: str, prompt: str = "Once upon a time,"
) -> Iterator[Iterator[str]]:
    """Yield the lines of an endless stream; the client goes away at the end of the block."""
    body = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "stream": True,
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
    }
    headers = {"X-Request-Id": name}
    with (
        server.http() as client,
        client.stream("POST", "/v1/completions", json=body, headers=headers) as answer,
    ):
        assert answer.status_code == 200
        yield (line for line in answer.iter_lines() if line)


def post_and_leave(server: ServerProcess, prompt: str | list[str]) -> None:
    """Ask for an answer, and go away when an instance has the request."""
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": MAX_TOKENS, "ignore_eos": True}
    with closing(http.client.HTTPConnection("127.0.0.1", server.port)) as connection:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        until(lambda: bool(server.requests()), "an instance has the request")


def read(lines: Iterator[str], count: int) -> None:
    for _ in range(count):
        next(lines)


def migrate(server: ServerProcess, name: str) -> None:
    """Move the request to the instance where it is not."""
    (request,) = (each for each in server.requests() if name in each["id"])
    destination = "i1" if request["instance"] == "i0" else "i0"
    ask(server.url, "POST", "/admin/migrate", None, {"request": request["id"], "to": destination})


def test_a_client_that_stops_reading_its_stream_frees_the_request(sterna: ServerProcess):
    with long_stream(sterna, "gone") as lines:
        read(lines, 3)
        assert not sterna.is_empty()
    sterna.until_freed(MAX_TOKENS)


def test_a_client_that_goes_away_before_its_answer_frees_the_request(sterna: ServerProcess):
    post_and_leave(sterna, "So")
    sterna.until_freed(MAX_TOKENS)


def test_a_client_that_goes_away_during_prefill_frees_the_request(sterna: ServerProcess):
    """Of several prompts, the last ones are not computed yet when the first is there."""
    post_and_leave(sterna, [LONG] * 8)
    sterna.until_freed(MAX_TOKENS)


def test_a_client_that_goes_away_right_after_a_migration_frees_the_request(sterna: ServerProcess):
    with long_stream(sterna, "moved") as lines:
        read(lines, 3)
        migrate(sterna, "moved")
    sterna.until_freed(MAX_TOKENS)


def test_a_client_that_goes_away_during_a_migration_frees_the_request(sterna: ServerProcess):
    moved: list[int] = []

    def move(num_lines: int) -> None:
        try:
            migrate(sterna, "moving")
        except (ServerError, ValueError):
            # It may have ended before its move.
            return
        moved.append(num_lines)

    for num_lines in (0, 1, 2, 3, 4, 5, 20, 80):
        with long_stream(sterna, "moving", LONG) as lines:
            read(lines, 2)
            mover = threading.Thread(target=move, args=(num_lines,))
            mover.start()
            read(lines, num_lines)
        mover.join()
        sterna.until_freed(MAX_TOKENS)
    assert moved, "no migration has succeeded"


def test_clients_that_go_away_while_their_requests_move_to_and_fro_free_them_all(
    sterna: ServerProcess,
):
    chance = random.Random(5)

    def begin_and_leave(number: int, num_lines: int) -> None:
        with long_stream(sterna, f"many-{number}") as lines:
            read(lines, num_lines)

    clients = [
        threading.Thread(target=begin_and_leave, args=(number, chance.randint(2, 40)))
        for number in range(10)
    ]
    with Mover(sterna, seed="many", num_threads=2) as mover:
        for client in clients:
            client.start()
        for client in clients:
            client.join()
    assert mover.total >= 5, mover.refusals
    sterna.until_freed(MAX_TOKENS)
