"""Requests move between emulated engines by the production handshake, and their streams stay."""

import asyncio
import itertools
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import msgspec
import pytest

from sterna.engine.emulated.copies import DROPPED, LENGTH_BYTES, MAX_STRANGERS, Copies
from sterna.engine.emulated.durations import CopyTime
from sterna.engine.emulated.engine_messages import FinishReason
from sterna.migration.messages import (
    CopyFailed,
    Event,
    Mode,
    Reason,
    StageFailed,
    StageReceived,
)
from sterna.types import InstanceId, MigrationId
from tests.engine.emulated.clusters import (
    HANG_TIMEOUT_S,
    HOST,
    EmulatedCluster,
    emulated_cluster,
    expected_tokens,
    options,
)

PROMPT = [5, 17, 400, 3, 8]
ROOMY = 10_000
LONG = 5_000
"""Tokens of a request that does not end during a test; that many fit into a roomy engine."""
SLOW_COPY = CopyTime(block_s=0.001, stage_s=20.0)
"""With stages that a test can be sure to interrupt."""

Test = Callable[[EmulatedCluster], Coroutine[Any, Any, None]]


def run(test: Test, **settings: Any) -> None:
    """Run the test against a cluster of its own."""

    async def main() -> None:
        async with emulated_cluster(**settings) as cluster:
            await test(cluster)

    asyncio.run(main())


@pytest.mark.parametrize("mode", list(Mode))
def test_a_moved_request_goes_on_where_it_was(mode: Mode) -> None:
    async def test(cluster: EmulatedCluster) -> None:
        cluster.send("i0", "r1", PROMPT, max_tokens=LONG, seed=4)
        for destination in ("i1", "i0", "i1"):
            num_tokens = len(cluster.answers["r1"].token_ids)
            await cluster.until(lambda n=num_tokens: len(cluster.answers["r1"].token_ids) > n + 6)
            reply = await cluster.migrate("r1", destination, mode)
            assert reply.error is None
            assert cluster.owners["r1"] == destination
        await check_and_leave(cluster, {"r1": PROMPT}, seed=4)

    run(test, engine_options=options(ROOMY))


async def check_and_leave(
    cluster: EmulatedCluster, prompts: Mapping[str, Sequence[int]], seed: int | None = None
) -> None:
    """Each gets some more tokens, all of which are right; then the clients go away."""
    nums = {name: len(cluster.answers[name].token_ids) + 5 for name in prompts}
    await cluster.until(
        lambda: all(len(cluster.answers[name].token_ids) >= num for name, num in nums.items())
    )
    for name, prompt in prompts.items():
        tokens = cluster.answers[name].token_ids
        assert tokens == expected_tokens(prompt, len(tokens), seed)
        cluster.abort(name)
    await cluster.until_empty()


def test_streams_stay_right_while_everything_moves_at_random_under_little_memory() -> None:
    """Moves, preemptions, refusals and aborts at once; every stream is right to its end."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    numbers = itertools.count()
    outcomes: Counter[str | None] = Counter()

    async def client(cluster: EmulatedCluster) -> None:
        """One request after the other, until all clients together have seen enough."""
        while outcomes[None] < 40:
            number = next(numbers)
            name, prompt = f"r{number}", [number] * rng.randint(1, 9)
            cluster.send(f"i{number % 3}", name, prompt, max_tokens=60, arrival_s=number)
            answer = cluster.answers[name]
            is_leaving = rng.random() < 0.2
            while answer.finish_reason is None:
                num_tokens = len(answer.token_ids) + rng.randint(1, 8)
                await cluster.until(
                    lambda answer=answer, n=num_tokens: (
                        len(answer.token_ids) >= n or answer.finish_reason is not None
                    )
                )
                if is_leaving and num_tokens > 20:
                    cluster.abort(name)
                    break
                others = {"i0", "i1", "i2"} - {str(cluster.owners[name])}
                mode = rng.choice([Mode.LIVE, Mode.LIVE, Mode.RECOMPUTE])
                reply = await cluster.migrate(name, rng.choice(sorted(others)), mode)
                outcomes[reply.error] += 1
            expected = expected_tokens(prompt, 60)
            assert answer.token_ids == expected[: len(answer.token_ids)]
            assert is_leaving or len(answer.token_ids) == 60

    async def test(cluster: EmulatedCluster) -> None:
        await asyncio.gather(*(client(cluster) for _ in range(18)))
        print(outcomes)
        await cluster.until_empty()
        assert sum(load.num_preemptions for load in cluster.loads.values()) > 0

    run(test, num_instances=3, engine_options=options(70))


def test_a_terminating_instance_is_emptied() -> None:
    """Section 4.4.2: "When an instance is terminating, [...] the remaining requests will be
    migrated to other instances"."""

    async def test(cluster: EmulatedCluster) -> None:
        prompts = {f"r{n}": [n, 9] for n in range(5)}
        for name, prompt in prompts.items():
            cluster.send("i0", name, prompt, max_tokens=LONG)
        await cluster.until(lambda: all(a.token_ids for a in cluster.answers.values()))
        cluster.empty("i0", into="i1")
        await cluster.until(lambda: all(owner == "i1" for owner in cluster.owners.values()))
        await cluster.until(lambda: cluster.loads[InstanceId("i0")].used_tokens == 0)
        assert cluster.loads[InstanceId("i0")].is_terminating
        await check_and_leave(cluster, prompts)

    run(test, engine_options=options(ROOMY))


def test_a_request_stays_where_its_destination_is_full() -> None:
    async def test(cluster: EmulatedCluster) -> None:
        cluster.send("i1", "big", [1] * 4 * (ROOMY - 50), max_tokens=LONG)
        cluster.send("i0", "r1", [2] * 1000, max_tokens=LONG)
        await cluster.until(lambda: all(a.token_ids for a in cluster.answers.values()))
        reply = await cluster.migrate("r1", "i1")
        assert reply.error == Reason.NO_MEMORY.value
        assert cluster.owners["r1"] == "i0"
        cluster.abort("big")
        await check_and_leave(cluster, {"r1": [2] * 1000})

    run(test, engine_options=options(ROOMY, watermark=0.0))


def test_a_request_that_finishes_while_its_blocks_travel_ends_at_its_source() -> None:
    async def test(cluster: EmulatedCluster) -> None:
        # More blocks than a last stage may have, for which the request would have to pause.
        prompt = PROMPT * 10
        cluster.send("i0", "r1", prompt, max_tokens=300)
        await cluster.until(lambda: bool(cluster.answers["r1"].token_ids))
        reply = await cluster.migrate("r1", "i1")
        assert reply.error == Reason.REQUEST_FINISHED.value
        assert cluster.answers["r1"].token_ids == expected_tokens(prompt, 300)
        assert cluster.answers["r1"].finish_reason is FinishReason.LENGTH
        await cluster.until_empty()

    run(test, engine_options=options(ROOMY, copy_time=SLOW_COPY))


def test_a_request_stays_when_its_destination_dies_while_blocks_travel() -> None:
    async def test(cluster: EmulatedCluster) -> None:
        prompt = PROMPT * 10
        cluster.send("i0", "r1", prompt, max_tokens=LONG)
        await cluster.until(lambda: len(cluster.answers["r1"].token_ids) >= 10)
        moving = asyncio.create_task(cluster.migrate("r1", "i1"))
        await cluster.until(lambda: cluster.num_migrating_in("i1") == 1)
        await cluster.end(InstanceId("i1"))
        cluster.announce()
        assert (await moving).error is not None
        await check_and_leave(cluster, {"r1": prompt})

    run(test, engine_options=options(ROOMY, copy_time=SLOW_COPY))


# ------------------------------------------------------------------------------------ copies

MIGRATION = MigrationId("i0-1")


class Told:
    """What an engine's copies said."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[tuple[MigrationId, Event]] = asyncio.Queue()

    def __call__(self, migration_id: MigrationId, event: Event) -> None:
        self.events.put_nowait((migration_id, event))

    async def next(self) -> tuple[MigrationId, Event]:
        async with asyncio.timeout(HANG_TIMEOUT_S):
            return await self.events.get()


async def _two_ends(copy_time: CopyTime) -> tuple[Copies, Told, Copies, Told]:
    source_told, destination_told = Told(), Told()
    source = Copies(HOST, copy_time, source_told)
    destination = Copies(HOST, copy_time, destination_told)
    await source.open()
    await destination.open()
    return source, source_told, destination, destination_told


def hello(receiver: str, stage: int, token: str | None = None) -> bytes:
    """What a peer begins with, or somebody who knows another token, or none."""
    if token is None:
        token = receiver.rpartition("/")[2]
    content = msgspec.msgpack.encode([token, [MIGRATION, stage]])
    return len(content).to_bytes(4, "big") + content


async def _dial(receiver: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = receiver.partition("/")[0].rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def _say(receiver: str, content: bytes) -> asyncio.StreamWriter:
    _, writer = await _dial(receiver)
    writer.write(content)
    return writer


@pytest.mark.parametrize("token", ["", "0" * 32])
def test_a_stranger_ends_no_stage_and_is_hung_up_on(token: str) -> None:
    """It may know the names of migrations, which are easily guessed."""

    async def test() -> None:
        source, _, destination, told = await _two_ends(CopyTime(block_s=0.001, stage_s=0.001))
        (receiver,) = destination.expect(MIGRATION, 0, 5)
        reader, writer = await _dial(receiver)
        writer.write(hello(receiver, 0, token))
        async with asyncio.timeout(HANG_TIMEOUT_S):
            # It says no more, and a peer would be waited for.
            assert await reader.read() == b""
        writer.close()
        source.send(MIGRATION, 0, 5, (receiver,))
        assert await told.next() == (MIGRATION, StageReceived(0))
        assert told.events.empty()
        await source.close()
        await destination.close()

    asyncio.run(test())


@pytest.mark.parametrize(
    "garbage",
    [b"\xc1", b"\x92\xa1\xff\xc0", b"\x91" * 3000, b"\x80"],
    ids=["no message", "no text", "deep", "of another kind"],
)
def test_garbage_is_hung_up_on_without_a_word(
    garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        _, _, destination, _ = await _two_ends(CopyTime(block_s=0.001, stage_s=0.001))
        (receiver,) = destination.expect(MIGRATION, 0, 5)
        reader, writer = await _dial(receiver)
        writer.write(len(garbage).to_bytes(LENGTH_BYTES, "big") + garbage)
        async with asyncio.timeout(HANG_TIMEOUT_S):
            assert await reader.read() == b""
        writer.close()
        await destination.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(test())
    assert not caplog.records


def test_strangers_that_say_nothing_keep_no_peer_out() -> None:
    """There are at most so many; the oldest goes first."""

    async def test() -> None:
        source, _, destination, told = await _two_ends(CopyTime(block_s=0.001, stage_s=0.001))
        (receiver,) = destination.expect(MIGRATION, 0, 5)
        strangers = [await _dial(receiver) for _ in range(MAX_STRANGERS + 3)]
        source.send(MIGRATION, 0, 5, (receiver,))
        assert await told.next() == (MIGRATION, StageReceived(0))
        async with asyncio.timeout(HANG_TIMEOUT_S):
            # The peer came after them, and cost another one its place.
            for reader, _ in strangers[:4]:
                assert await reader.read() == b""
        assert destination.num_strangers == MAX_STRANGERS - 1
        await source.close()
        await destination.close()
        for _, writer in strangers:
            writer.close()

    asyncio.run(test())


def test_a_stage_takes_the_time_of_its_blocks_and_stages_follow_each_other() -> None:
    async def test() -> None:
        source, _, destination, told = await _two_ends(CopyTime(block_s=0.005, stage_s=0.02))
        other = MigrationId("i0-2")
        began_s = time.monotonic()
        source.send(MIGRATION, 0, 4, destination.expect(MIGRATION, 0, 4))
        source.send(other, 0, 8, destination.expect(other, 0, 8))
        assert {await told.next(), await told.next()} == {
            (MIGRATION, StageReceived(0)),
            (other, StageReceived(0)),
        }
        assert time.monotonic() - began_s >= 0.04 + 0.06
        await source.close()
        await destination.close()

    asyncio.run(test())


def test_a_connection_that_breaks_fails_its_stage_and_a_dropped_stage_is_silent() -> None:
    async def test() -> None:
        source, _, destination, told = await _two_ends(CopyTime(block_s=0.001, stage_s=0.001))
        (receiver,) = destination.expect(MIGRATION, 0, 5)
        destination.expect(MIGRATION, 1, 5)
        for stage, ending in ((0, DROPPED), (1, b"")):
            writer = await _say(receiver, hello(receiver, stage) + ending)
            writer.close()
            await writer.wait_closed()
        assert await told.next() == (MIGRATION, StageFailed(1))
        assert told.events.empty()
        await source.close()
        await destination.close()

    asyncio.run(test())


def test_a_copy_that_is_stopped_arrives_nowhere_and_frees_its_link() -> None:
    async def test() -> None:
        source, _, destination, told = await _two_ends(CopyTime(block_s=10.0, stage_s=0.001))
        other = MigrationId("i0-2")
        source.send(MIGRATION, 0, 5, destination.expect(MIGRATION, 0, 5))
        source.stop_sending(MIGRATION)
        source.send(other, 0, 0, (*destination.expect(other, 0, 1),))
        assert await told.next() == (other, StageReceived(0))
        assert told.events.empty()
        await source.close()
        await destination.close()

    asyncio.run(test())


def test_a_copy_to_nobody_fails_at_its_source() -> None:
    async def test() -> None:
        source, told, destination, _ = await _two_ends(CopyTime(block_s=0.001, stage_s=0.001))
        receivers = destination.expect(MIGRATION, 3, 1)
        await destination.close()
        source.send(MIGRATION, 3, 1, receivers)
        assert await told.next() == (MIGRATION, CopyFailed(3))
        await source.close()

    asyncio.run(test())
