"""Transfers over two ranks, each with a data plane that does what a test says, on real sockets."""

import asyncio
from collections.abc import Awaitable, Callable
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from sterna.config import TransportConfig
from sterna.engine.vllm.plane_link import PlaneServer
from sterna.engine.vllm.transfers import Transfers
from sterna.errors import TransportError
from sterna.migration.messages import CopyEvent, CopyFailed, StageFailed, StageReceived
from sterna.transport.data_plane import (
    Arrived,
    BlockIds,
    DataPlane,
    Hop,
    Notify,
    PlaneEvent,
    ReceiveFailed,
    SendFailed,
    Sent,
    Stopped,
    Transfer,
)
from sterna.transport.memory.layout import KvCache
from sterna.transport.plane import make_data_plane
from sterna.transport.shards import Shards
from sterna.types import MigrationId
from tests.transport.planes import Gate, Node

NUM_RANKS = 2
TIMEOUT_S = 60
M, OTHER = MigrationId("m"), MigrationId("other")
LEAVING, COMING = Transfer(M, 1), Transfer(M, 2)
SENT, UNSENT = Sent(LEAVING, 4096, 0.25), SendFailed(LEAVING, "cut")
ARRIVED, LOST = Arrived(COMING, (1,), 4096, 0.25), ReceiveFailed(COMING, "silent")
HOP = Transfer(M, 2, Hop(0, 1))
FORWARDED, UNFORWARDED = Arrived(HOP, (1,), 4096, 0.25), SendFailed(HOP, "cut")
LOST_HOP = ReceiveFailed(HOP, "silent")
SHARDS, ALIKE = Shards(NUM_RANKS, (1,)), Shards(NUM_RANKS, (NUM_RANKS,))


class Plane:
    """Expects and sends in silence, but for a block that it does not have, and stops at once."""

    def __init__(self, rank: int, notify: Notify) -> None:
        self.endpoint = f"rank {rank}"
        self.notify = notify
        self.told: SimpleQueue[tuple[Any, ...]] = SimpleQueue()

    def send(
        self, transfer: Transfer, endpoint: str, block_ids: BlockIds, *, is_paced: bool
    ) -> None:
        self.told.put((transfer, endpoint, block_ids, is_paced))

    def receive(
        self, transfer: Transfer, block_ids: BlockIds, on_armed: Callable[[], None]
    ) -> None:
        self.told.put((transfer, block_ids))
        if [99] in block_ids:
            raise TransportError("there is no block 99")
        on_armed()

    def stop(self, migration_id: MigrationId) -> None:
        self.notify(Stopped(migration_id))

    def close(self) -> None:
        """There is nothing to give back."""


class Ranks:
    """The workers, and what the instance is told of their copies."""

    def __init__(self, make_plane: Callable[[int, Notify], DataPlane] = Plane) -> None:
        self.make_plane = make_plane
        self.servers: list[PlaneServer] = []
        self.told: list[CopyEvent] = []
        self.num_sent_bytes: list[int] = []
        self.failure: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self.transfers = Transfers(
            TransportConfig(),
            lambda _, event: self.told.append(event),
            self.num_sent_bytes.append,
            self.failure.set_result,
        )

    def collective_rpc(self, method: str, args: tuple[Any, str, str]) -> list[tuple[str, str]]:
        for rank in range(NUM_RANKS):
            self.servers.append(
                PlaneServer(rank, args[1], lambda notify, r=rank: self.make_plane(r, notify))
            )
        return [(each.command_address, each.plane.endpoint) for each in self.servers]

    async def report(self, *events: PlaneEvent | None) -> None:
        """Have each rank report its event, and wait until all that was reported has come."""
        for server, event in zip(self.servers, events, strict=True):
            if event is not None:
                server.plane.notify(event)
        await self.transfers.stop(OTHER)


def play(
    scenario: Callable[[Ranks], Awaitable[None]],
    shards: Shards = SHARDS,
    expected: BlockIds = ((4,),),
    *,
    is_last: bool = True,
) -> list[CopyEvent]:
    """Copy one stage from here and expect another, and play on; returns what was told."""

    async def run() -> list[CopyEvent]:
        ranks = Ranks()
        ranks.transfers.open(ranks, shards, "the KV format")
        ranks.transfers.start()
        try:
            ranks.transfers.send(M, 1, [[3]], ("theirs 0", "theirs 1"), is_paced=True)
            receivers = await ranks.transfers.expect(M, 2, expected, is_last=is_last)
            assert receivers == ("rank 0", "rank 1")
            await scenario(ranks)
            return ranks.told
        finally:
            await ranks.transfers.close()

    return asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


@pytest.mark.parametrize(
    ("events", "told"),
    [
        ((SENT, SENT), []),
        ((ARRIVED, ARRIVED), [StageReceived(2)]),
        ((ARRIVED, None), []),
        ((SENT, UNSENT), [CopyFailed(1)]),
        ((UNSENT, UNSENT), [CopyFailed(1)]),
        ((ARRIVED, LOST), [StageFailed(2)]),
        ((LOST, ARRIVED), [StageFailed(2)]),
    ],
)
def test_a_stage_is_received_when_all_ranks_have_it_and_failed_when_one_has_failed(
    events: tuple[PlaneEvent | None, ...], told: list[CopyEvent]
) -> None:
    assert play(lambda ranks: ranks.report(*events)) == told


def test_the_bytes_that_ranks_send_to_another_instance_are_counted() -> None:
    num_bytes: list[int] = []

    async def send(ranks: Ranks) -> None:
        await ranks.report(SENT, Sent(HOP, 7, 0.1))
        num_bytes.extend(ranks.num_sent_bytes)

    play(send)
    assert num_bytes == [SENT.copy_bytes], "what ranks of one instance send each other is not"


async def forward(ranks: Ranks) -> tuple[Any, ...]:
    """Let what both ranks hold arrive at the first; returns its command to forward it."""
    first, second = (server.plane for server in ranks.servers)
    # Both ranks are ready, so that nothing waits for steps once the source has sent.
    assert second.told.get_nowait() == (HOP, [[4, 5]])
    assert [first.told.get_nowait(), first.told.get_nowait()] == [
        (LEAVING, "theirs 0", [[3]], True),
        (COMING, [[4, 5]]),
    ]
    await ranks.report(ARRIVED, None)
    # Fewer blocks came than were expected.
    command: tuple[Any, ...] = await asyncio.to_thread(first.told.get)
    assert second.told.empty()
    return command


@pytest.mark.parametrize("is_last", [False, True])
def test_what_ranks_hold_alike_is_sent_to_the_first_which_forwards_it(is_last: bool) -> None:
    """A bulk stage leaves the memory bus to the engine there, too."""

    async def scenario(ranks: Ranks) -> None:
        assert await forward(ranks) == (HOP, "rank 1", [[4]], not is_last)
        assert ranks.told == []
        await ranks.report(Sent(HOP, 4096, 0.25), FORWARDED)
        # The only rank that sends has sent.
        await ranks.report(SENT, None)

    assert play(scenario, ALIKE, [[4, 5]], is_last=is_last) == [StageReceived(2)]


@pytest.mark.parametrize("events", [(UNFORWARDED, LOST_HOP), (None, LOST_HOP), (UNFORWARDED, None)])
def test_a_stage_whose_hop_has_failed_has_failed(events: tuple[PlaneEvent | None, ...]) -> None:
    async def scenario(ranks: Ranks) -> None:
        await forward(ranks)
        await ranks.report(*events)

    assert play(scenario, ALIKE, [[4, 5]]) == [StageFailed(2)]


def test_a_stage_that_was_stopped_is_not_forwarded() -> None:
    async def scenario(ranks: Ranks) -> None:
        told = ranks.servers[0].plane.told
        told.get_nowait(), told.get_nowait()
        await ranks.transfers.stop(M)
        await ranks.report(ARRIVED, None)
        assert told.empty()

    assert play(scenario, ALIKE) == []


def test_a_stage_that_has_failed_is_not_forwarded_and_expected_until_it_is_stopped() -> None:
    """Other ranks wait for their part, and must do so no longer when its request is adopted."""

    async def scenario(ranks: Ranks) -> None:
        told = ranks.servers[0].plane.told
        told.get_nowait(), told.get_nowait()
        await ranks.report(LOST, None)
        await ranks.report(ARRIVED, LOST_HOP)
        assert told.empty()
        assert ranks.transfers.is_expecting(M)
        await ranks.transfers.stop(M)
        assert not ranks.transfers.is_expecting(M)

    assert play(scenario, ALIKE) == [StageFailed(2)]


def test_nothing_is_told_of_a_migration_that_was_stopped() -> None:
    async def scenario(ranks: Ranks) -> None:
        await ranks.transfers.stop(M)
        assert not ranks.transfers.is_expecting(M)
        await ranks.report(ARRIVED, LOST)

    assert play(scenario) == []


def test_nothing_is_told_of_a_copy_that_is_not_to_be_sent_any_more() -> None:
    async def scenario(ranks: Ranks) -> None:
        ranks.transfers.stop_sending(M)
        await ranks.report(UNSENT, SENT)

    assert play(scenario) == []


def test_a_copy_to_an_instance_of_other_ranks_fails_at_once() -> None:
    async def scenario(ranks: Ranks) -> None:
        ranks.transfers.send(OTHER, 5, [[3]], ("their only one",), is_paced=True)

    assert play(scenario) == [CopyFailed(5)]


def test_a_stage_is_reserved_when_the_steps_that_may_write_to_its_blocks_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else they would have to end within the time in which a transfer must move bytes."""
    config, steps = TransportConfig(kind="tcp"), Gate()
    source = Node("tcp", chunk_bytes=config.chunk_bytes)
    cache = KvCache([source.layout])
    fence = SimpleNamespace(synchronize=steps.pass_through)
    monkeypatch.setattr(cache, "fence", lambda: fence)

    async def run() -> list[CopyEvent]:
        ranks = Ranks(lambda _, notify: make_data_plane(config, cache, notify))
        ranks.transfers.open(ranks, SHARDS, "the KV format")
        ranks.transfers.start()
        try:
            expecting = asyncio.create_task(ranks.transfers.expect(M, 2, [[4]], is_last=True))
            await asyncio.sleep(0)
            # The ranks have heard of the stage, and carry out what comes after it.
            await ranks.transfers.stop(OTHER)
            assert not expecting.done()
            steps.open(NUM_RANKS)
            for endpoint in await expecting:
                source.plane.send(COMING, endpoint, [[3]], is_paced=False)
                assert isinstance(await asyncio.to_thread(source.next_event), Sent)
            # What was reported before has come.
            await ranks.transfers.stop(OTHER)
            return ranks.told
        finally:
            await ranks.transfers.close()

    assert asyncio.run(asyncio.wait_for(run(), TIMEOUT_S)) == [StageReceived(2)]
    source.plane.close()


def test_a_plane_that_breaks_is_a_failure_of_the_engine() -> None:
    async def scenario(ranks: Ranks) -> None:
        expecting = asyncio.create_task(ranks.transfers.expect(OTHER, 1, [[99]], is_last=True))
        failure = await ranks.failure
        assert "failed: TransportError('there is no block 99')" in str(failure)
        expecting.cancel()

    assert play(scenario) == []
