"""Transfers between planes of one process, over every wire."""

import random
from collections.abc import Iterator

import pytest
import torch

from sterna.errors import ProtocolError, TransportError
from sterna.transport.interface import (
    Arrived,
    ReceiveFailed,
    SendFailed,
    Sent,
    Stopped,
    Transfer,
)
from sterna.types import MigrationId
from tests.transport.planes import KINDS, WAIT_S, Gate, Node, stage

NUM_BLOCKS = 24
BLOCK_BYTES = 3 * 64


class World:
    """Makes nodes of one kind and closes them."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._nodes: list[Node] = []

    def node(self, **options: object) -> Node:
        node = Node(self.kind, **{"seed": len(self._nodes)} | options)  # type: ignore[arg-type]
        self._nodes.append(node)
        return node

    def close(self) -> None:
        for node in self._nodes:
            for gate in (node.layout.gather_gate, node.layout.scatter_gate):
                if gate is not None:
                    gate.open(1000)
            node.plane.close()


@pytest.fixture(params=KINDS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(request.param)
    yield world
    world.close()


# ---------------------------------------------------------------------------------- bytes


def test_blocks_arrive_byte_for_byte_under_other_ids(world: World) -> None:
    source, destination = world.node(), world.node()
    before = destination.kv.clone()
    from_ids = random.Random(1).sample(range(NUM_BLOCKS), 13)
    to_ids = random.Random(2).sample(range(NUM_BLOCKS), 13)
    others = [block for block in range(NUM_BLOCKS) if block not in to_ids]
    transfer = stage("m")

    destination.plane.receive(transfer, to_ids)
    source.send(transfer, destination, from_ids)
    arrived, sent = destination.next_event(), source.next_event()

    assert isinstance(arrived, Arrived)
    assert arrived == Arrived(transfer, 13 * BLOCK_BYTES, arrived.duration_s)
    assert isinstance(sent, Sent)
    assert sent == Sent(transfer, 13 * BLOCK_BYTES, sent.duration_s)
    assert 0 <= arrived.duration_s <= sent.duration_s < WAIT_S
    assert torch.equal(destination.blocks(to_ids), source.blocks(from_ids))
    assert torch.equal(destination.blocks(others), before[:, others])
    assert not source.has_events()
    assert not destination.has_events()


def test_a_long_transfer_travels_in_many_chunks(world: World) -> None:
    source = world.node(num_blocks=120)
    destination = world.node(num_blocks=120)
    ids, to_ids = list(range(119)), list(range(119, 0, -1))
    source.copy(stage("m"), destination, ids, to_ids)
    assert torch.equal(destination.blocks(to_ids), source.blocks(ids))
    assert len(source.layout.gathered) == len(destination.layout.scattered) == 60


def test_chunks_of_several_sizes_follow_each_other_in_the_same_slots(world: World) -> None:
    """A slot may hold the rest of a larger chunk; none of it may leak into a smaller one."""
    source, destination = world.node(), world.node()
    for number, count in enumerate([2, 1, 3, 1, 2, 5]):
        ids = random.Random(number).sample(range(NUM_BLOCKS), count)
        to_ids = random.Random(-number).sample(range(NUM_BLOCKS), count)
        before = destination.kv.clone()
        source.copy(stage("m", number), destination, ids, to_ids)
        before[:, to_ids] = source.blocks(ids)
        assert torch.equal(destination.kv, before)


def test_a_transfer_without_blocks_arrives(world: World) -> None:
    source, destination = world.node(), world.node()
    source.copy(stage("m"), destination, [], [])


def test_llama_7b_shaped_blocks_are_cut_between_layers_and_arrive(world: World) -> None:
    """Section 5: "the block size of a 16-bit LLaMA-7B model is 128 KB (for key or value tensors
    of 16 tokens in each layer)"; with 32 layers of keys and values a block has 8 MiB."""
    shape = {"num_layers": 32, "page_bytes": 2 * 128 << 10, "num_blocks": 2}
    source = world.node(**shape, chunk_bytes=4 << 20)
    destination = world.node(**shape, chunk_bytes=4 << 20)
    source.copy(stage("m"), destination, [0, 1], [1, 0])
    assert torch.equal(destination.blocks([1, 0]), source.kv)
    assert destination.layout.scattered == [[1], [1], [0], [0]]


def test_transfers_in_both_directions_and_to_several_peers_run_at_once(world: World) -> None:
    nodes = [world.node() for _ in range(3)]
    rng = random.Random(3)
    halves = [rng.sample(range(NUM_BLOCKS), NUM_BLOCKS) for _ in nodes]
    expected = []
    for source_index, source in enumerate(nodes):
        for destination_index, destination in enumerate(nodes):
            if source is destination:
                continue
            # Every node sends from one half of its cache and receives into the other.
            ids = rng.sample(halves[source_index][:12], 6)
            first = 12 + 6 * ((source_index - destination_index) % 3 - 1)
            to_ids = halves[destination_index][first : first + 6]
            expected.append((destination, to_ids, source.blocks(ids)))
            transfer = stage(f"{source_index}-{destination_index}")
            destination.plane.receive(transfer, to_ids)
            source.send(transfer, destination, ids, paced=source_index == 1)
    for node in nodes:
        kinds = sorted(type(event).__name__ for event in node.next_events(4))
        assert kinds == ["Arrived", "Arrived", "Sent", "Sent"]
    for destination, to_ids, blocks in expected:
        assert torch.equal(destination.blocks(to_ids), blocks)


def test_many_stages_of_many_migrations_share_one_connection(world: World) -> None:
    source, destination = world.node(num_blocks=60), world.node(num_blocks=60)
    transfers = [stage(f"m{index % 5}", index // 5) for index in range(20)]
    for index, transfer in enumerate(transfers):
        destination.plane.receive(transfer, [3 * index + 2, 3 * index + 1, 3 * index])
        ids = [3 * index, 3 * index + 1, 3 * index + 2]
        source.send(transfer, destination, ids, paced=index % 2 == 0)
    arrived = [event.transfer for event in destination.next_events(20)]  # type: ignore[union-attr]
    sent = source.next_events(20)
    assert sorted(map(str, arrived)) == sorted(map(str, transfers))
    assert all(isinstance(event, Sent) for event in sent)
    swapped = [3 * (index // 3) + 2 - index % 3 for index in range(60)]
    assert torch.equal(destination.blocks(swapped), source.kv)


# ---------------------------------------------------------------------------------- order


def test_a_last_stage_overtakes_a_paced_bulk_transfer_at_the_next_chunk(world: World) -> None:
    source, destination = world.node(bandwidth_share=1.0), world.node()
    gate = source.layout.gather_gate = Gate()
    bulk, last = stage("bulk"), stage("last")
    destination.plane.receive(bulk, range(8))
    destination.plane.receive(last, [20, 21, 22])
    source.send(bulk, destination, range(8), paced=True)
    gate.wait_for_arrival()
    source.send(last, destination, [10, 11, 12])
    gate.open(10)
    first, second = destination.next_events(2)
    assert source.layout.gathered == [[0, 1], [10, 11], [12], [2, 3], [4, 5], [6, 7]]
    assert isinstance(first, Arrived)
    assert isinstance(second, Arrived)
    assert (first.transfer, second.transfer) == (last, bulk)


def test_bulk_transfers_to_one_peer_take_turns(world: World) -> None:
    source, destination = world.node(bandwidth_share=1.0), world.node()
    gate = source.layout.gather_gate = Gate()
    destination.plane.receive(stage("a"), range(6))
    destination.plane.receive(stage("b"), range(6, 12))
    source.send(stage("a"), destination, range(6), paced=True)
    gate.wait_for_arrival()
    source.send(stage("b"), destination, range(6, 12), paced=True)
    gate.open(10)
    destination.next_events(2)
    assert source.layout.gathered == [[0, 1], [2, 3], [6, 7], [4, 5], [8, 9], [10, 11]]


def test_bulk_chunks_take_no_more_than_their_share_of_the_time(world: World) -> None:
    shape = {"num_layers": 1, "page_bytes": 1 << 18, "chunk_bytes": 1 << 20}
    source, destination = world.node(**shape, bandwidth_share=0.05), world.node(**shape)
    destination.plane.receive(stage("m"), range(20))
    source.send(stage("m"), destination, range(20), paced=True)
    assert isinstance(source.next_event(), Sent)
    times = source.layout.gather_times
    busy_s = sum(end - begin for begin, end in times[:-1])
    # The first chunk's pause may be shorter by what counts as a late start.
    assert times[-1][0] - times[0][0] >= busy_s / 0.05 - 0.0021


# ---------------------------------------------------------------------------------- stopping


def test_nothing_is_read_after_a_source_was_stopped_in_mid_chunk(world: World) -> None:
    source, destination = world.node(), world.node()
    gate = source.layout.gather_gate = Gate()
    destination.plane.receive(stage("m"), range(8))
    source.send(stage("m"), destination, range(8))
    gate.wait_for_arrival()

    source.plane.stop(MigrationId("m"))
    assert not source.has_events(), "told stopped while a chunk was being read"
    gate.open(10)

    assert source.next_event() == Stopped(MigrationId("m"))
    failed = destination.next_event()
    assert failed == ReceiveFailed(stage("m"), "cancelled by the source: the migration was stopped")
    assert source.layout.gathered == [[0, 1]]
    assert not source.has_events()


def test_nothing_is_written_after_a_destination_was_stopped_in_mid_chunk(world: World) -> None:
    source, destination = world.node(), world.node()
    gate = destination.layout.scatter_gate = Gate()
    destination.plane.receive(stage("m"), range(8))
    source.send(stage("m"), destination, range(8, 16))
    gate.wait_for_arrival()

    destination.plane.stop(MigrationId("m"))
    assert not destination.has_events(), "told stopped while a chunk was being written"
    gate.open(10)

    assert destination.next_event() == Stopped(MigrationId("m"))
    after_stop = destination.kv.clone()
    assert source.next_event() == SendFailed(
        stage("m"), "refused by the destination: the migration was stopped"
    )
    # The connection is alive and all that was on its way has been thrown away by now.
    source.copy(stage("next"), destination, [0], [23])
    after_stop[:, 23] = source.kv[:, 0]
    assert torch.equal(destination.kv, after_stop)
    assert destination.layout.scattered == [[0, 1], [23]]


def test_stopping_one_migration_leaves_the_others_alone(world: World) -> None:
    source, destination = world.node(), world.node()
    gate = source.layout.gather_gate = Gate()
    for name, ids in (("a", range(4)), ("b", range(4, 8))):
        destination.plane.receive(stage(name), ids)
        source.send(stage(name), destination, ids)
    gate.wait_for_arrival()
    source.plane.stop(MigrationId("a"))
    destination.plane.stop(MigrationId("a"))
    gate.open(10)
    events = source.next_events(2) + destination.next_events(2)
    assert sorted(type(event).__name__ for event in events) == [
        "Arrived",
        "Sent",
        "Stopped",
        "Stopped",
    ]
    assert torch.equal(destination.blocks(range(4, 8)), source.blocks(range(4, 8)))


def test_stopping_an_unknown_migration_is_told_all_the_same(world: World) -> None:
    node = world.node()
    node.plane.stop(MigrationId("nobody"))
    assert node.next_event() == Stopped(MigrationId("nobody"))


def test_a_send_after_its_destination_was_stopped_is_refused(world: World) -> None:
    source, destination = world.node(), world.node()
    before = destination.kv.clone()
    destination.plane.receive(stage("m"), range(4))
    destination.plane.stop(MigrationId("m"))
    source.send(stage("m"), destination, range(4))
    assert destination.next_event() == Stopped(MigrationId("m"))
    assert source.next_event() == SendFailed(
        stage("m"), "refused by the destination: nobody expects this transfer"
    )
    assert torch.equal(destination.kv, before)
    assert not destination.has_events()


# ---------------------------------------------------------------------------------- refusals


def test_a_transfer_that_nobody_expects_is_refused(world: World) -> None:
    source, destination = world.node(), world.node()
    before = destination.kv.clone()
    destination.plane.receive(stage("m", 1), range(4))
    for transfer in (stage("m", 0), stage("other", 1)):
        source.send(transfer, destination, range(4))
        assert source.next_event() == SendFailed(
            transfer, "refused by the destination: nobody expects this transfer"
        )
    assert torch.equal(destination.kv, before)
    assert not destination.has_events()


def test_a_transfer_that_has_arrived_is_not_expected_again(world: World) -> None:
    source, destination = world.node(), world.node()
    source.copy(stage("m"), destination, [0, 1], [2, 3])
    before = destination.kv.clone()
    source.send(stage("m"), destination, [4, 5])
    assert isinstance(source.next_event(), SendFailed)
    assert torch.equal(destination.kv, before)


def test_a_second_sender_of_a_transfer_in_progress_is_refused(world: World) -> None:
    source, impostor, destination = world.node(), world.node(), world.node()
    gate = destination.layout.scatter_gate = Gate()
    destination.plane.receive(stage("m"), range(4))
    source.send(stage("m"), destination, range(4))
    gate.wait_for_arrival()
    impostor.send(stage("m"), destination, range(4))
    assert impostor.next_event() == SendFailed(
        stage("m"), "refused by the destination: this transfer is being received already"
    )
    gate.open(10)
    assert isinstance(destination.next_event(), Arrived)
    assert torch.equal(destination.blocks(range(4)), source.blocks(range(4)))


def test_another_number_of_blocks_is_refused_and_the_right_one_still_expected(
    world: World,
) -> None:
    source, destination = world.node(), world.node()
    before = destination.kv.clone()
    destination.plane.receive(stage("m"), range(4))
    source.send(stage("m"), destination, range(5))
    assert source.next_event() == SendFailed(
        stage("m"),
        "refused by the destination: 4 blocks of 768 bytes in all are expected, not 5 of 960",
    )
    assert torch.equal(destination.kv, before)
    source.send(stage("m"), destination, range(4))
    assert isinstance(destination.next_event(), Arrived)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label": "bf16"}, "the label differ: '' here, 'bf16' at the source"),
        ({"num_layers": 4, "chunk_bytes": 384}, "the number of layers differ: 3 here, 4 at"),
        ({"page_bytes": 32, "chunk_bytes": 384}, "the page bytes differ"),
        ({"chunk_bytes": 1000}, "the chunk_bytes differ: 384 here, 1000 at the source"),
    ],
)
def test_a_source_whose_blocks_mean_something_else_is_rejected(
    world: World, options: dict[str, object], message: str
) -> None:
    source, destination = world.node(**options), world.node()
    before = destination.kv.clone()
    destination.plane.receive(stage("m"), range(4))
    source.send(stage("m"), destination, range(4))
    failed = source.next_event()
    assert isinstance(failed, SendFailed)
    assert "it was rejected: " in failed.reason
    assert message in failed.reason
    assert torch.equal(destination.kv, before)
    assert not destination.has_events()


def test_a_source_without_the_endpoints_token_is_rejected(world: World) -> None:
    source, destination = world.node(), world.node()
    address, _, token = destination.plane.endpoint.rpartition("/")
    assert len(token) == 32
    destination.plane.receive(stage("m"), range(4))
    source.plane.send(stage("m"), f"{address}/{'0' * 32}", range(4), paced=False)
    failed = source.next_event()
    assert isinstance(failed, SendFailed)
    assert failed.reason.endswith("the endpoint belongs to an earlier instance: wrong token")
    source.send(stage("m"), destination, range(4))
    assert isinstance(destination.next_event(), Arrived)


@pytest.mark.parametrize("endpoint", ["", "nonsense", "pigeon://roof/1", "tcp://", "shm:///x"])
def test_an_endpoint_of_another_kind_fails_the_send_and_nothing_else(
    world: World, endpoint: str
) -> None:
    source = world.node()
    source.plane.send(stage("m"), endpoint, range(4), paced=False)
    assert source.next_event() == SendFailed(
        stage("m"),
        f"endpoint {endpoint!r} is not one of transport {world.kind!r}: all instances must use "
        "the same transport",
    )


def test_an_endpoint_whose_plane_is_gone_fails_the_send(world: World) -> None:
    source, destination, survivor = world.node(), world.node(), world.node()
    source.copy(stage("m"), destination, [1], [1])
    destination.plane.close()
    source.send(stage("m", 1), destination, range(4))
    failed = source.next_event()
    assert isinstance(failed, SendFailed)
    assert "failed: " in failed.reason
    source.copy(stage("m", 2), survivor, [1], [1])


def test_a_connection_that_broke_is_replaced_by_the_next_send(world: World) -> None:
    source, destination = world.node(), world.node()
    source.copy(stage("m"), destination, [1], [1])
    (incoming,) = destination.plane._incoming  # type: ignore[attr-defined]
    (outgoing,) = source.plane._outgoing.values()  # type: ignore[attr-defined]
    incoming.close()
    outgoing.thread.join(timeout=WAIT_S)
    source.copy(stage("m", 1), destination, [2], [2])


def test_a_broken_connection_fails_both_ends_of_its_transfers(world: World) -> None:
    source, destination = world.node(), world.node()
    gate = source.layout.gather_gate = Gate()
    destination.plane.receive(stage("m"), range(8))
    source.send(stage("m"), destination, range(8, 16))
    gate.open()
    assert destination.layout.first_scatter.wait(WAIT_S)
    (incoming,) = destination.plane._incoming  # type: ignore[attr-defined]
    incoming.close()
    received = destination.next_event()
    assert isinstance(received, ReceiveFailed)
    assert received.reason.startswith("the connection to the source failed: ")
    gate.open(10)
    failed = source.next_event()
    assert isinstance(failed, SendFailed)
    assert failed.reason.startswith("the connection to ")
    assert len(destination.layout.scattered) == 1


# ---------------------------------------------------------------------------------- the owner


def test_the_owners_mistakes_are_errors_and_change_nothing(world: World) -> None:
    source, destination = world.node(), world.node()
    with pytest.raises(TransportError, match="names block 24, but the cache has 24 blocks"):
        source.send(stage("m"), destination, [0, NUM_BLOCKS])
    with pytest.raises(TransportError, match="names block -1"):
        destination.plane.receive(stage("m"), [-1])
    with pytest.raises(TransportError, match="scatter twice"):
        destination.plane.receive(stage("m"), [4, 5, 4])
    destination.plane.receive(stage("m"), [4, 5])
    with pytest.raises(ProtocolError, match="already in flight"):
        destination.plane.receive(stage("m"), [6, 7])
    gate = source.layout.gather_gate = Gate()
    source.send(stage("m"), destination, [0, 1])
    gate.wait_for_arrival()
    with pytest.raises(ProtocolError, match="already in flight"):
        source.send(stage("m"), destination, [0, 1])
    gate.open()
    assert isinstance(destination.next_event(), Arrived)
    assert isinstance(source.next_event(), Sent)


def test_a_block_may_be_sent_twice_in_one_transfer(world: World) -> None:
    source, destination = world.node(), world.node()
    source.copy(stage("m"), destination, [4, 4], [1, 2])
    assert torch.equal(destination.blocks([1, 2]), source.blocks([4, 4]))


def test_a_transfer_that_nobody_sends_fails_after_the_timeout(world: World) -> None:
    destination = world.node(timeout_s=0.1)
    destination.plane.receive(stage("m"), range(4))
    assert destination.next_event() == ReceiveFailed(stage("m"), "no progress for 0.1 s")


@pytest.mark.slow
def test_a_transfer_that_the_destination_does_not_place_fails_after_the_timeout(
    world: World,
) -> None:
    source, destination = world.node(timeout_s=2.5), world.node()
    source.copy(stage("m"), destination, [0], [0])
    gate = destination.layout.scatter_gate = Gate()
    destination.plane.receive(stage("m", 1), range(2))
    source.send(stage("m", 1), destination, range(2))
    gate.wait_for_arrival()
    failed = source.next_event()
    assert isinstance(failed, SendFailed)
    assert "2.5 s" in failed.reason


def test_an_owner_that_fails_on_an_event_hears_the_next_one(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    node = world.node()
    heard = node.plane._parts.ledger  # type: ignore[attr-defined]
    original = heard._notify

    def fail_once(event: object) -> None:
        heard._notify = original
        raise ValueError("the owner's own mistake")

    heard._notify = fail_once
    node.plane.stop(MigrationId("a"))
    node.plane.stop(MigrationId("b"))
    assert node.next_event() == Stopped(MigrationId("b"))
    assert "the owner's own mistake" in caplog.text


def test_transfers_are_told_apart_by_migration_and_stage(world: World) -> None:
    source, destination = world.node(), world.node()
    transfers = [Transfer(MigrationId(m), s) for m in ("a", "b") for s in (0, 1)]
    for index, transfer in enumerate(transfers):
        destination.plane.receive(transfer, [index])
    for index, transfer in reversed(list(enumerate(transfers))):
        source.send(transfer, destination, [10 + index])
    destination.next_events(4)
    assert torch.equal(destination.blocks(range(4)), source.blocks(range(10, 14)))
