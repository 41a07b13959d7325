"""Streams of one length, and what their clients count."""

import asyncio

import pytest
from aiohttp import web

from bench.processes.equal_streams import Load, Sent, send
from tests.bench.serving.sse_server import (
    Answer,
    Body,
    CompletionsServer,
    Gate,
    finish,
    running,
    token,
)

NUM_STREAMS, NUM_TOKENS = 3, 4


def sent(answer: Answer, at_once: int) -> Sent:
    async def main() -> Sent:
        async with running(CompletionsServer(answer)) as target:
            return await send(target.url, Load("some", NUM_STREAMS, at_once, NUM_TOKENS))

    return asyncio.run(main())


async def merging(stream: web.StreamResponse, body: Body) -> None:
    """Two tokens in each chunk."""
    for _ in range(NUM_TOKENS // 2):
        await token(stream)
    await finish(stream, body["max_tokens"])


@pytest.mark.parametrize("at_once", [1, NUM_STREAMS])
def test_chunks_of_several_tokens_and_open_streams_are_counted(at_once: int) -> None:
    gate = Gate(NUM_STREAMS)

    async def answer(stream: web.StreamResponse, body: Body) -> None:
        if at_once == NUM_STREAMS:
            await gate.wait()
            for _ in range(100):
                # Until the clients have seen that all answers begin.
                await asyncio.sleep(0)
        await merging(stream, body)

    found = sent(answer, at_once)
    assert (found.num_failed, found.num_chunks) == (0, NUM_STREAMS * NUM_TOKENS // 2)
    assert found.most_open == at_once


def test_a_stream_without_all_of_its_tokens_has_failed() -> None:
    async def answer(stream: web.StreamResponse, body: Body) -> None:
        await token(stream)
        if body["prompt"][0] != 1_000:
            await finish(stream, 1)

    found = sent(answer, 1)
    assert (found.num_failed, found.num_chunks) == (NUM_STREAMS, NUM_STREAMS)
