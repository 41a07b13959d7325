"""Transfers between planes of one process, over every wire."""

import random

import torch

from sterna.transport.data_plane import Arrived, ReceiveFailed, SendFailed, Sent, Stopped, Transfer
from sterna.types import MigrationId
from tests.transport.planes import WAIT_S, Gate, stage
from tests.transport.world import BLOCK_BYTES, NUM_BLOCKS, World

# ---------------------------------------------------------------------------------- bytes


def test_blocks_arrive_byte_for_byte_under_other_ids(world: World) -> None:
    source, destination = world.node(), world.node()
    before = destination.kv.clone()
    from_ids = random.Random(1).sample(range(NUM_BLOCKS), 13)
    to_ids = random.Random(2).sample(range(NUM_BLOCKS), 13)
    others = [block for block in range(NUM_BLOCKS) if block not in to_ids]
    transfer = stage("m")

    destination.receive(transfer, to_ids)
    source.send(transfer, destination, from_ids)
    arrived, sent = destination.next_event(), source.next_event()

    assert isinstance(arrived, Arrived)
    assert arrived == Arrived(transfer, (13,), 13 * BLOCK_BYTES, arrived.duration_s)
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
            destination.receive(transfer, to_ids)
            source.send(transfer, destination, ids, is_paced=source_index == 1)
    for node in nodes:
        kinds = sorted(type(event).__name__ for event in node.next_events(4))
        assert kinds == ["Arrived", "Arrived", "Sent", "Sent"]
    for destination, to_ids, blocks in expected:
        assert torch.equal(destination.blocks(to_ids), blocks)


def test_many_stages_of_many_migrations_share_one_connection(world: World) -> None:
    source, destination = world.node(num_blocks=60), world.node(num_blocks=60)
    transfers = [stage(f"m{index % 5}", index // 5) for index in range(20)]
    for index, transfer in enumerate(transfers):
        destination.receive(transfer, [3 * index + 2, 3 * index + 1, 3 * index])
        ids = [3 * index, 3 * index + 1, 3 * index + 2]
        source.send(transfer, destination, ids, is_paced=index % 2 == 0)
    arrived = [event.transfer for event in destination.next_events(20)]  # type: ignore[union-attr]
    sent = source.next_events(20)
    assert sorted(map(str, arrived)) == sorted(map(str, transfers))
    assert all(isinstance(event, Sent) for event in sent)
    swapped = [3 * (index // 3) + 2 - index % 3 for index in range(60)]
    assert torch.equal(destination.blocks(swapped), source.kv)


def test_a_block_may_be_sent_twice_in_one_transfer(world: World) -> None:
    source, destination = world.node(), world.node()
    source.copy(stage("m"), destination, [4, 4], [1, 2])
    assert torch.equal(destination.blocks([1, 2]), source.blocks([4, 4]))


def test_transfers_are_told_apart_by_migration_and_stage(world: World) -> None:
    source, destination = world.node(), world.node()
    transfers = [Transfer(MigrationId(m), s) for m in ("a", "b") for s in (0, 1)]
    for index, transfer in enumerate(transfers):
        destination.receive(transfer, [index])
    for index, transfer in reversed(list(enumerate(transfers))):
        source.send(transfer, destination, [10 + index])
    destination.next_events(4)
    assert torch.equal(destination.blocks(range(4)), source.blocks(range(10, 14)))


# ---------------------------------------------------------------------------------- order


def test_a_last_stage_overtakes_a_paced_bulk_transfer_at_the_next_chunk(world: World) -> None:
    source, destination = world.node(bandwidth_share=1.0), world.node()
    gate = source.layout.gather_gate = Gate()
    bulk, last = stage("bulk"), stage("last")
    destination.receive(bulk, range(8))
    destination.receive(last, [20, 21, 22])
    source.send(bulk, destination, range(8), is_paced=True)
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
    destination.receive(stage("a"), range(6))
    destination.receive(stage("b"), range(6, 12))
    source.send(stage("a"), destination, range(6), is_paced=True)
    gate.wait_for_arrival()
    source.send(stage("b"), destination, range(6, 12), is_paced=True)
    gate.open(10)
    destination.next_events(2)
    assert source.layout.gathered == [[0, 1], [2, 3], [6, 7], [4, 5], [8, 9], [10, 11]]


def test_bulk_chunks_take_no_more_than_their_share_of_the_time(world: World) -> None:
    shape = {"num_layers": 1, "page_bytes": 1 << 18, "chunk_bytes": 1 << 20}
    source, destination = world.node(**shape, bandwidth_share=0.05), world.node(**shape)
    destination.receive(stage("m"), range(20))
    source.send(stage("m"), destination, range(20), is_paced=True)
    assert isinstance(source.next_event(), Sent)
    times = source.layout.gather_times
    busy_s = sum(end - begin for begin, end in times[:-1])
    # The first chunk's pause may be shorter by what counts as a late start.
    assert times[-1][0] - times[0][0] >= busy_s / 0.05 - 0.0021


# ---------------------------------------------------------------------------------- stopping


def test_nothing_is_read_after_a_source_was_stopped_in_mid_chunk(world: World) -> None:
    source, destination = world.node(), world.node()
    gate = source.layout.gather_gate = Gate()
    destination.receive(stage("m"), range(8))
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
    destination.receive(stage("m"), range(8))
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
        destination.receive(stage(name), ids)
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
    destination.receive(stage("m"), range(4))
    destination.plane.stop(MigrationId("m"))
    source.send(stage("m"), destination, range(4))
    assert destination.next_event() == Stopped(MigrationId("m"))
    assert source.next_event() == SendFailed(
        stage("m"), "refused by the destination: this transfer is not expected"
    )
    assert torch.equal(destination.kv, before)
    assert not destination.has_events()
