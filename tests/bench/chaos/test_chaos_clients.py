"""The clients of `sterna bench chaos`, against a real HTTP server that breaks connections."""

import asyncio
import json
from collections.abc import Sequence

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench.chaos.clients import Answer, Question, ask, session_of
from bench.serving.target import Target

NUM_TOKENS = 6
HANG_S = 60.0


class BreakingServer:
    """Answers so many events on each connection, then breaks it; or with a status.

    Attributes:
        asked: request id and last event of each connection.
    """

    def __init__(self, *turns: int | web.Response) -> None:
        self._turns = list(turns)
        self.asked: list[tuple[str | None, str | None]] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        last = request.headers.get("Last-Event-ID")
        self.asked.append((request.headers.get("X-Request-Id"), last))
        turn = self._turns.pop(0)
        if isinstance(turn, web.Response):
            return turn
        stream = web.StreamResponse()
        await stream.prepare(request)
        events = [self._event(number) for number in range(NUM_TOKENS)] + ["[DONE]"]
        begin = int(last or 0)
        for number, event in enumerate(events[begin : begin + turn], begin + 1):
            await stream.write(f"id: {number}\ndata: {event}\n\n".encode())
        if begin + turn <= NUM_TOKENS:
            # In the middle of an event.
            await stream.write(f"id: {begin + turn + 1}\ndata: {{".encode())
            assert request.transport is not None
            request.transport.close()
        return stream

    def _event(self, number: int) -> str:
        reason = "length" if number == NUM_TOKENS - 1 else None
        choice = {"index": 0, "token_ids": [number], "finish_reason": reason}
        return json.dumps({"id": "cmpl-tern-0", "choices": [choice]})


def asked(
    turns: Sequence[int | web.Response], request_id: str | None = "tern"
) -> tuple[Answer, BreakingServer]:
    """What comes of a request."""
    server = BreakingServer(*turns)

    async def scenario() -> Answer:
        application = web.Application()
        application.router.add_post("/v1/completions", server.answer)
        async with asyncio.timeout(HANG_S), TestServer(application) as listening:
            target = Target(str(listening.make_url("")).rstrip("/"), "terns", 2048)
            question = Question(0, "greedy", {"max_tokens": NUM_TOKENS})
            answer = Answer(question, asyncio.get_running_loop().time(), request_id)
            async with session_of(target) as session:
                await ask(session, target, answer)
            return answer

    return asyncio.run(scenario()), server


@pytest.mark.parametrize("before", range(NUM_TOKENS + 1))
def test_a_stream_is_read_on_where_its_connection_broke(before: int) -> None:
    undecided = web.json_response({"error": {"message": "try again"}}, status=503)
    answer, server = asked([before, undecided, NUM_TOKENS + 1])
    assert answer.error is None
    assert (answer.tokens, answer.num_breaks) == ({0: list(range(NUM_TOKENS))}, 2)
    assert server.asked == [("tern", None), ("tern", str(before)), ("tern", str(before))]


def test_a_stream_that_the_server_no_longer_has_has_failed() -> None:
    lost = web.json_response({"error": {"message": "no such stream"}}, status=404)
    answer, _ = asked([3, lost])
    assert answer.error == "404: no such stream"
    assert answer.tokens == {0: [0, 1, 2]}


def test_a_request_that_the_server_never_took_in_is_sent_anew() -> None:
    unknown = web.json_response({"error": {"message": "no such stream"}}, status=404)
    answer, server = asked([0, unknown, NUM_TOKENS + 1])
    assert (answer.error, answer.tokens) == (None, {0: list(range(NUM_TOKENS))})
    assert server.asked == [("tern", None), ("tern", "0"), ("tern", None)]


def test_a_stream_without_an_id_has_failed_where_its_connection_broke() -> None:
    answer, server = asked([3], request_id=None)
    assert answer.error is not None
    assert server.asked == [(None, None)]


def test_a_server_that_is_too_busy_for_a_new_request_has_failed_it() -> None:
    answer, _ = asked([web.json_response({"error": {"message": "full"}}, status=503)])
    assert answer.error == "503: full"
