"""An emulated engine on the wall clock answers what it must, whatever happens to its requests."""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from sterna.engine.emulated.config import Preemption, StepMode
from sterna.engine.emulated.durations import StepTime
from sterna.engine.emulated.emulated_engine import MAX_LAG_S
from sterna.engine.emulated.engine_messages import FinishReason
from sterna.engine.emulated.tokens import (
    Vocabulary,
    block_hashes,
    first_stop,
    stream_key,
    token_at,
)
from sterna.engine.payload_parts import EventType
from sterna.types import InstanceId
from tests.engine.emulated.clusters import (
    VOCABULARY,
    EmulatedCluster,
    emulated_cluster,
    expected_tokens,
    options,
)

INSTANCE = InstanceId("i0")
PROMPT = [5, 17, 400, 3, 8]
DOCUMENTED = [2278, 2088, 2106, 2322]
"""The example of docs/emulated_engine.md."""

ROOMY = 10_000
LONG = 5_000
"""Tokens of a request that does not end during a test; that many fit into a roomy engine."""

PREFIX_CACHING = {
    "step_mode": StepMode.CHUNKED,
    "preemption": Preemption.LAST_ADMITTED,
    "prefix_caching": True,
}

Test = Callable[[EmulatedCluster], Coroutine[Any, Any, None]]


def run(test: Test, **settings: Any) -> None:
    """Run the test against a cluster of its own."""

    async def main() -> None:
        async with emulated_cluster(**settings) as cluster:
            await test(cluster)

    asyncio.run(main())


# ------------------------------------------------------------------------------------ tokens


def test_tokens_are_those_that_the_documentation_gives() -> None:
    """Clients compute them by themselves: the function must never change."""
    key = stream_key([1, 2, 3], None)
    assert [token_at(key, i, Vocabulary(1928, 439)) for i in range(4)] == DOCUMENTED
    assert stream_key([1, 2, 3], 7) != key
    assert stream_key([1, 2], None) != key


def test_block_hashes_are_the_same_where_all_tokens_and_the_salt_are() -> None:
    key = stream_key(PROMPT, None)
    hashes = block_hashes(PROMPT, key, 9, VOCABULARY, 4)
    assert len(hashes) == 3 * 8
    # A prompt that goes on where the answer ended.
    longer = [*PROMPT, *expected_tokens(PROMPT, 9), 1, 2, 3]
    assert block_hashes(longer, stream_key(longer, 5), 1, VOCABULARY, 4)[:24] == hashes
    other = block_hashes([6, *PROMPT[1:]], key, 9, VOCABULARY, 4)
    salted = block_hashes(PROMPT, key, 9, VOCABULARY, 4, "tenant")
    assert len({each[n : n + 8] for each in (hashes, other, salted) for n in (0, 8, 16)}) == 9


def test_tokens_lie_in_the_vocabulary_and_all_of_it_is_used() -> None:
    vocabulary = Vocabulary(30, 8)
    tokens = {token_at(stream_key([n], None), 0, vocabulary) for n in range(200)}
    assert tokens == set(range(30, 38))


def test_a_stop_token_counts_from_min_tokens_on() -> None:
    key = stream_key(PROMPT, None)
    tokens = expected_tokens(PROMPT, 30)
    assert first_stop(key, [tokens[4]], 0, 30, VOCABULARY) == tokens.index(tokens[4])
    assert first_stop(key, [tokens[4], tokens[9]], 5, 30, VOCABULARY) == 9
    assert first_stop(key, [tokens[9]], 0, 9, VOCABULARY) is None
    assert first_stop(key, [VOCABULARY.first_id - 1], 0, 30, VOCABULARY) is None


# ------------------------------------------------------------------------------------ alone


def test_a_request_gets_its_tokens_one_at_a_time_and_ends_by_its_length() -> None:
    async def test(cluster: EmulatedCluster) -> None:
        cluster.send("i0", "r1", PROMPT, max_tokens=9, ignore_eos=True)
        cluster.send("i0", "r2", PROMPT, max_tokens=9, seed=-3)
        # Not all of vLLM's routes limit seeds.
        cluster.send("i0", "r3", PROMPT, max_tokens=9, seed=1 << 63)
        await cluster.until_finished()
        for name, seed in (("r1", None), ("r2", -3), ("r3", 1 << 63)):
            answer = cluster.answers[name]
            assert answer.token_ids == expected_tokens(PROMPT, 9, seed)
            assert len(answer.times_s) == 9
            assert answer.finish_reason is FinishReason.LENGTH
            assert answer.events == [EventType.QUEUED, EventType.SCHEDULED]
        assert cluster.answers["r1"].token_ids != cluster.answers["r2"].token_ids
        await cluster.until_empty()

    run(test, num_instances=1)


def test_a_stop_token_ends_a_request_and_is_named() -> None:
    async def test(cluster: EmulatedCluster) -> None:
        stop = expected_tokens(PROMPT, 7)[6]
        cluster.send("i0", "r1", PROMPT, max_tokens=30, min_tokens=2, stop_token_ids=[stop])
        await cluster.until_finished()
        answer = cluster.answers["r1"]
        assert answer.token_ids == expected_tokens(PROMPT, 7)
        assert (answer.finish_reason, answer.stop_reason) == (FinishReason.STOP, stop)

    run(test, num_instances=1)


def test_a_request_without_max_tokens_ends_when_the_model_is_at_its_end() -> None:
    async def test(cluster: EmulatedCluster) -> None:
        cluster.send("i0", "r1", PROMPT, max_tokens=None)
        await cluster.until_finished()
        assert cluster.answers["r1"].token_ids == expected_tokens(PROMPT, 20 - len(PROMPT))

    run(test, num_instances=1, engine_options=options(max_model_len=20))


@pytest.mark.parametrize(
    "request_with",
    [{"prompt": []}, {"prompt": [1] * 40}, {"prompt": PROMPT, "mm_features": ["an image"]}],
    ids=["no_prompt", "too_long_a_prompt", "an_image"],
)
def test_what_cannot_be_served_ends_with_an_error(request_with: dict[str, Any]) -> None:
    """The front end refuses such requests; one that came here must not hang its client."""

    async def test(cluster: EmulatedCluster) -> None:
        cluster.send("i0", "r1", **request_with)
        await cluster.until_finished()
        assert cluster.answers["r1"].finish_reason is FinishReason.ERROR
        assert cluster.answers["r1"].token_ids == []

    run(test, num_instances=1, engine_options=options(max_model_len=40))


def test_the_next_turn_finds_the_turn_before_where_that_has_moved() -> None:
    """Prompt and answer, but with the same salt only."""

    async def test(cluster: EmulatedCluster) -> None:
        cluster.send("i0", "turn1", PROMPT, max_tokens=100)
        await cluster.until(lambda: len(cluster.answers["turn1"].token_ids) >= 10)
        assert (await cluster.migrate("turn1", "i1")).error is None
        await cluster.until_finished()
        prompt = [*PROMPT, *cluster.answers["turn1"].token_ids, 7, 7]
        cluster.send("i1", "turn2", prompt, max_tokens=3)
        cluster.send("i1", "stranger", prompt, max_tokens=3, cache_salt="tenant")
        await cluster.until_finished()
        answers = cluster.answers
        assert answers["turn1"].num_cached_tokens == answers["stranger"].num_cached_tokens == 0
        # The KV of the last token of an answer is not computed: 104 of 105.
        assert answers["turn2"].num_cached_tokens == 104
        assert answers["turn2"].token_ids == expected_tokens(prompt, 3)

    run(test, engine_options=options(200, **PREFIX_CACHING))


def test_a_prefix_cache_is_emptied_while_no_request_uses_it() -> None:
    async def test(cluster: EmulatedCluster) -> None:
        engine = cluster.engines[INSTANCE]
        cluster.send("i0", "r1", PROMPT, max_tokens=LONG)
        await cluster.until(lambda: len(cluster.answers["r1"].token_ids) >= 10)
        assert await cluster.call_utility("i0", "reset_prefix_cache") is False
        cluster.abort("r1")
        await cluster.until_empty()
        assert list(engine._core.cached_hashes())
        assert await cluster.call_utility("i0", "reset_prefix_cache") is True
        assert not list(engine._core.cached_hashes())

    run(test, num_instances=1, engine_options=options(ROOMY, **PREFIX_CACHING))


def test_an_aborted_request_gives_its_memory_back_and_others_go_on() -> None:
    async def test(cluster: EmulatedCluster) -> None:
        cluster.send("i0", "gone", PROMPT, max_tokens=200)
        cluster.send("i0", "stays", PROMPT[1:], max_tokens=30)
        await cluster.until(lambda: len(cluster.answers["gone"].token_ids) >= 5)
        cluster.abort("gone")
        await cluster.until_finished("stays")
        await cluster.until_empty()
        assert cluster.answers["stays"].token_ids == expected_tokens(PROMPT[1:], 30)
        assert cluster.answers["gone"].finish_reason is None

    run(test, num_instances=1)


@pytest.mark.parametrize("step_mode", list(StepMode))
def test_preempted_requests_go_on_where_they_were(step_mode: StepMode) -> None:
    async def test(cluster: EmulatedCluster) -> None:
        prompts = {f"r{n}": [n, n + 1, n + 2] for n in range(6)}
        for number, (name, prompt) in enumerate(prompts.items()):
            cluster.send("i0", name, prompt, max_tokens=30, arrival_s=number)
        await cluster.until_finished()
        for name, prompt in prompts.items():
            assert cluster.answers[name].token_ids == expected_tokens(prompt, 30)
        assert cluster.loads[INSTANCE].num_preemptions > 0
        events = [event for answer in cluster.answers.values() for event in answer.events]
        assert events.count(EventType.PREEMPTED) == cluster.loads[INSTANCE].num_preemptions
        await cluster.until_empty()

    run(test, num_instances=1, engine_options=options(14, step_mode=step_mode))


def test_urgent_requests_are_admitted_first() -> None:
    async def test(cluster: EmulatedCluster) -> None:
        cluster.send("i0", "first", PROMPT, max_tokens=LONG)
        await cluster.until(lambda: bool(cluster.answers["first"].token_ids))
        cluster.send("i0", "normal", PROMPT, max_tokens=5, arrival_s=1.0)
        cluster.send("i0", "high", PROMPT, max_tokens=5, arrival_s=2.0, priority=-1)
        await cluster.until(lambda: cluster.num_queuing("i0") == 2)
        cluster.abort("first")
        await cluster.until_finished("normal", "high")
        assert cluster.answers["high"].times_s[-1] < cluster.answers["normal"].times_s[0]

    run(test, num_instances=1, engine_options=options(ROOMY, max_num_seqs=1))


# ------------------------------------------------------------------------------------ time


def test_a_step_takes_the_time_of_its_model() -> None:
    """Section 6.6: "we replace the real GPU execution in vLLM with a simple sleep command"."""

    async def test(cluster: EmulatedCluster) -> None:
        began_s = time.monotonic()
        cluster.send("i0", "r1", PROMPT, max_tokens=11)
        await cluster.until_finished()
        assert time.monotonic() - began_s >= 0.03 + 10 * 0.01

    step_time = StepTime(0.03, 0.0, 0.0, 0.03, 0.01, 0.0, 0.0)
    run(test, num_instances=1, engine_options=options(step_time=step_time))


def test_time_in_which_the_loop_was_busy_is_made_up() -> None:
    """A step begins where the last one ended, not when the loop noticed: whatever ended meanwhile
    is sent at once. No stretch of steps could take half of its time otherwise."""
    step_s, num_made_up = 0.05, 7

    async def test(cluster: EmulatedCluster) -> None:
        began_s = time.monotonic()
        cluster.send("i0", "r1", PROMPT, max_tokens=LONG)
        answer = cluster.answers["r1"]
        await cluster.until(lambda: len(answer.token_ids) >= 3)
        # Ten steps end meanwhile.
        keep_the_loop_busy(MAX_LAG_S / 2)
        num_tokens = len(answer.token_ids) + 15
        await cluster.until(lambda: len(answer.token_ids) >= num_tokens)
        times_s = answer.times_s
        stretches = zip(times_s, times_s[num_made_up:], strict=False)
        assert min(b - a for a, b in stretches) < step_s * num_made_up / 2
        # Never early: so many steps have had their time.
        assert times_s[-1] - began_s >= step_s * len(times_s)
        cluster.abort("r1")

    step_time = StepTime(0.0, 0.0, 0.0, step_s, step_s, 0.0, 0.0)
    run(test, num_instances=1, engine_options=options(ROOMY, step_time=step_time))


def test_an_engine_gives_up_more_than_a_second_of_lost_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its machine slept, say: steps that nobody could follow are not hurried through."""
    step_s, num_steps = 0.01, 20

    async def test(cluster: EmulatedCluster) -> None:
        cluster.send("i0", "r1", PROMPT, max_tokens=LONG)
        answer = cluster.answers["r1"]
        await cluster.until(lambda: len(answer.token_ids) >= 3)
        keep_the_loop_busy(MAX_LAG_S + 0.1)
        began_s = time.monotonic()
        await cluster.until(lambda: "engine gives up lost time instance=i0" in caplog.text)
        # As many tokens from before may still be on their way.
        num_tokens = len(answer.token_ids) + 2 * num_steps
        await cluster.until(lambda: len(answer.token_ids) >= num_tokens)
        assert time.monotonic() - began_s >= step_s * num_steps
        cluster.abort("r1")

    step_time = StepTime(0.0, 0.0, 0.0, step_s, step_s, 0.0, 0.0)
    run(test, num_instances=1, engine_options=options(ROOMY, step_time=step_time))


COUNTS = re.compile(
    r"stalls counted instance=i0 steps=(\d+) seconds=([\d.]+) following=(\d+)"
    r" stalled_seconds=([\d.]+)"
)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_the_time_between_two_steps_is_counted(
    caplog: pytest.LogCaptureFixture, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """Hardware would wait meanwhile. Not counted: steps that make the time up afterwards, idle
    time, and lost time that is given up."""
    caplog.set_level(logging.DEBUG, "sterna")
    step_s, busy_s, idle_s = 0.02, 0.5, 0.6

    async def main() -> None:
        step_time = StepTime(0.0, 0.0, 0.0, step_s, step_s, 0.0, 0.0)
        engine_options = options(ROOMY, step_time=step_time)
        async with emulated_cluster(num_instances=1, engine_options=engine_options) as cluster:
            cluster.send("i0", "r1", PROMPT, max_tokens=40)
            answer = cluster.answers["r1"]
            await cluster.until(lambda: len(answer.token_ids) >= 3)
            keep_the_loop_busy(busy_s)
            await cluster.until_finished()
            # A step that follows no other one.
            keep_the_loop_busy(idle_s)
            cluster.send("i0", "r2", PROMPT, max_tokens=20)
            answer = cluster.answers["r2"]
            await cluster.until(lambda: len(answer.token_ids) >= 3)
            keep_the_loop_busy(MAX_LAG_S + 0.2)
            await cluster.until_finished()

    began_s = time.monotonic()
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())
    lasted_s = time.monotonic() - began_s
    steps, seconds, followed, stalled = COUNTS.findall(caplog.text)[-1]
    assert int(steps) == 60
    assert float(seconds) == pytest.approx(60 * step_s, abs=0.001)
    # Of each request the first step follows none, and one stall is given up.
    assert int(followed) == 57
    assert busy_s - step_s <= float(stalled) < lasted_s - idle_s - MAX_LAG_S


def keep_the_loop_busy(duration_s: float) -> None:
    deadline_s = time.monotonic() + duration_s
    while time.monotonic() < deadline_s:
        pass
