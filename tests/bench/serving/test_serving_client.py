"""The client of `sterna bench serve`, against a real HTTP server."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from bench.serving.client import (
    ClientConfig,
    EventReader,
    Outcome,
    PriorityField,
    body_of,
    replay,
)
from bench.serving.prompts import PROMPT_TOKEN_IDS, prompt_of
from sterna.types import HIGH, NORMAL
from sterna.workload.prefix import PrefixBlocks
from sterna.workload.trace import Trace
from sterna.workload.turns import Turns
from tests.bench.serving.sse_server import (
    Answer,
    Body,
    CompletionsServer,
    Gate,
    all_tokens,
    event,
    finish,
    running,
    token,
)

CONFIG = ClientConfig(seed=7, timeout_s=60.0)


def trace_of(
    *output_tokens: int, arrival_s: Sequence[float] | None = None, high: Sequence[int] = ()
) -> Trace:
    """Requests that all arrive at once, unless it is said when."""
    num_requests = len(output_tokens)
    priority = np.full(num_requests, NORMAL, np.int64)
    priority[list(high)] = HIGH
    return Trace(
        "test",
        np.zeros(num_requests) if arrival_s is None else np.array(arrival_s),
        np.arange(3, 3 + num_requests),
        np.array(output_tokens, np.int64),
        priority,
    )


def outcomes_of(
    trace: Trace, answer: Answer = all_tokens, config: ClientConfig = CONFIG
) -> tuple[list[Outcome], CompletionsServer]:
    """What comes of the trace on a server that answers like this."""
    server = CompletionsServer(answer)

    async def run() -> list[Outcome]:
        async with running(server) as target:
            begin_s = asyncio.get_running_loop().time()
            return await replay(target, trace, config, begin_s=begin_s)

    return asyncio.run(run()), server


def test_all_tokens_of_a_request_make_it_complete() -> None:
    outcomes, _ = outcomes_of(trace_of(1, 5))
    assert [each.num_tokens for each in outcomes] == [1, 5]
    assert [each.error for each in outcomes] == [None, None]
    for each in outcomes:
        assert 0.0 <= each.sent_s <= each.first_token_s <= each.last_token_s
    assert math.isnan(outcomes[0].largest_gap_s), "one token has no gap"


def test_requests_ask_for_what_the_trace_says() -> None:
    _, server = outcomes_of(trace_of(4, 9, high=[1]))
    asked = sorted(server.bodies, key=lambda body: body["max_tokens"])
    assert [len(body.pop("prompt")) for body in asked] == [3, 4]
    common = {
        "model": "terns",
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert asked == [
        {**common, "max_tokens": 4, "priority": 0},
        {**common, "max_tokens": 9, "priority": -1},
    ]


def test_prompts_are_the_seeds_and_differ() -> None:
    trace = trace_of(1, 1)
    prompts = [body_of("m", trace, index, CONFIG)["prompt"] for index in (0, 1)]
    assert prompts[0] == body_of("m", trace, 0, CONFIG)["prompt"]
    assert prompts[0] != body_of("m", trace, 0, replace(CONFIG, seed=8))["prompt"]
    assert prompts[0] != prompts[1][:3]
    low, high = PROMPT_TOKEN_IDS
    assert all(low <= token_id < high for prompt in prompts for token_id in prompt)


def test_prompts_begin_alike_where_the_trace_has_the_same_blocks() -> None:
    trace = replace(
        trace_of(1, 1, 1),
        input_tokens=np.array([20, 25, 6]),
        prefix_blocks=PrefixBlocks(np.array([4, 5, 4, 6, 4]), np.array([2, 4, 5]), 8),
    )
    first, second, short = (prompt_of(trace, index, 7) for index in range(3))
    assert (len(first), len(second), len(short)) == (20, 25, 6)
    assert first[:8] == second[:8]
    assert short == first[:6]
    assert not set(first[8:]) & set(second[8:])


def session_of(*think_s: float) -> Trace:
    """One session, whose turns add as much to their prompts as they can."""
    num_turns = 1 + len(think_s)
    turns = Turns(np.arange(-1, num_turns - 1), np.array([0.0, *think_s]))
    return replace(
        trace_of(*[4] * num_turns), input_tokens=10 * np.arange(1, num_turns + 1), turns=turns
    )


def test_a_turn_has_the_prompt_and_the_answer_before_it_and_comes_after_it() -> None:
    async def answer(stream: web.StreamResponse, body: Body) -> None:
        assert body["return_token_ids"] is True
        for number in range(body["max_tokens"]):
            await token(stream, token_ids=[len(body["prompt"]) + number])
        await finish(stream, body["max_tokens"])

    outcomes, server = outcomes_of(session_of(0.05, 0.0), answer)
    prompts = [body["prompt"] for body in server.bodies]
    assert [len(each) for each in prompts] == [10, 20, 30]
    for before, after, outcome in zip(prompts, prompts[1:], outcomes, strict=False):
        assert outcome.tokens == [len(before) + number for number in range(4)]
        assert after[: len(before) + 4] == [*before, *outcome.tokens]
    assert outcomes[1].due_s == outcomes[0].last_token_s + 0.05
    assert outcomes[1].sent_s >= outcomes[1].due_s
    assert [each.error for each in outcomes] == [None] * 3


def test_a_session_ends_with_a_turn_that_fails() -> None:
    async def answer(stream: web.StreamResponse, body: Body) -> None:
        await token(stream)

    num_ended = 0

    def on_ended() -> None:
        nonlocal num_ended
        num_ended += 1

    async def run() -> list[Outcome]:
        async with running(CompletionsServer(answer)) as target:
            begin_s = asyncio.get_running_loop().time()
            return await replay(
                target, session_of(0.0, 0.0), CONFIG, begin_s=begin_s, on_ended=on_ended
            )

    outcomes = asyncio.run(run())
    assert outcomes[0].error is not None
    assert [each.error for each in outcomes[1:]] == ["a turn before it failed"] * 2
    assert num_ended == 3


def test_the_urgency_can_be_asked_for_by_either_field() -> None:
    assert [PriorityField.PRIORITY.of(each) for each in (NORMAL, HIGH)] == [
        {"priority": 0},
        {"priority": -1},
    ]
    assert [PriorityField.SERVICE_TIER.of(each) for each in (NORMAL, HIGH)] == [
        {"service_tier": "default"},
        {"service_tier": "priority"},
    ]


def test_nobody_waits_for_answers() -> None:
    """The loop is open: the server answers nobody before all have asked."""
    gate = Gate(20)

    async def answer(stream: web.StreamResponse, body: Body) -> None:
        await gate.wait()
        await all_tokens(stream, body)

    outcomes, _ = outcomes_of(trace_of(*[2] * 20), answer)
    assert [each.error for each in outcomes] == [None] * 20


def test_a_request_is_sent_when_it_is_due() -> None:
    outcomes, _ = outcomes_of(trace_of(1, 1, arrival_s=[0.0, 0.1]))
    assert outcomes[1].sent_s >= 0.1
    assert outcomes[0].sent_s < outcomes[1].sent_s


def test_a_request_with_fewer_tokens_is_cut() -> None:
    async def answer(stream: web.StreamResponse, body: Body) -> None:
        await token(stream)
        await finish(stream, 1)

    outcomes, _ = outcomes_of(trace_of(3), answer)
    assert outcomes[0].error == "cut: 1 of 3 tokens came"
    assert not math.isnan(outcomes[0].first_token_s)


def test_a_stream_without_usage_is_not_taken_for_complete() -> None:
    async def answer(stream: web.StreamResponse, body: Body) -> None:
        await token(stream)

    outcomes, _ = outcomes_of(trace_of(1), answer)
    assert outcomes[0].error == "cut: an unknown number of 1 tokens came"


def test_an_error_within_a_stream_is_the_requests_error() -> None:
    async def answer(stream: web.StreamResponse, body: Body) -> None:
        await token(stream)
        await event(stream, {"error": {"message": "the instance died", "code": 500}})

    outcomes, _ = outcomes_of(trace_of(3), answer)
    assert outcomes[0].error == "the instance died"


def test_a_connection_that_breaks_fails_its_request_only() -> None:
    async def answer(stream: web.StreamResponse, body: Body) -> None:
        if body["max_tokens"] == 2:
            await token(stream)
            raise ConnectionResetError
        await all_tokens(stream, body)

    outcomes, _ = outcomes_of(trace_of(2, 3), answer)
    assert outcomes[0].error is not None
    assert outcomes[1].error is None


def test_a_refused_request_has_the_servers_reason() -> None:
    async def answer(stream: web.StreamResponse, body: Body) -> None:
        raise AssertionError

    server = CompletionsServer(answer)

    async def run() -> list[Outcome]:
        async with running(server) as target:
            elsewhere = replace(target, url=f"{target.url}/nowhere")
            begin_s = asyncio.get_running_loop().time()
            return await replay(elsewhere, trace_of(1), CONFIG, begin_s=begin_s)

    assert [each.error for each in asyncio.run(run())] == ["status 404"]


def test_a_silent_server_does_not_hold_the_run_forever() -> None:
    gate = Gate(2)

    async def answer(stream: web.StreamResponse, body: Body) -> None:
        await token(stream)
        await asyncio.wait_for(gate.wait(), 0.5)

    outcomes, _ = outcomes_of(trace_of(2), answer, replace(CONFIG, timeout_s=0.05))
    assert outcomes[0].error == "nothing came for 0.05 s"


def test_the_largest_gap_is_the_longest_wait_between_two_tokens() -> None:
    outcome = Outcome()
    for now_s in (1.0, 1.5, 4.0, 4.25):
        outcome.on_token(now_s)
    assert outcome == Outcome(
        sent_s=outcome.sent_s, first_token_s=1.0, last_token_s=4.25, largest_gap_s=2.5
    )


@given(st.lists(st.integers(1, 40), max_size=12))
def test_events_do_not_depend_on_how_their_bytes_come(cuts: list[int]) -> None:
    whole = (
        b': hello\r\n\r\nid: 1\ndata: {"a": 1}\n\nid:2-1\ndata:{"b": 2}\r\n\r\n'
        b"id: 3-1\ndata: [DONE]\n\nid: 4"
    )
    reader = EventReader()
    found: list[bytes] = []
    for length in [*cuts, len(whole)]:
        found += reader.feed(whole[:length])
        assert reader.last_id == ("", "1", "2-1", "3-1")[len(found)]
        whole = whole[length:]
    assert found == [b'{"a": 1}', b'{"b": 2}', b"[DONE]"]


@pytest.mark.slow
def test_a_thousand_streams_are_open_at_once() -> None:
    gate = Gate(1000)

    async def answer(stream: web.StreamResponse, body: Body) -> None:
        await token(stream)
        await gate.wait()
        await token(stream)
        await finish(stream, 2)

    outcomes, _ = outcomes_of(trace_of(*[2] * 1000), answer)
    assert {each.error for each in outcomes} == {None}
