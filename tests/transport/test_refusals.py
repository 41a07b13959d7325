"""Transfers that are refused or fail between planes of one process, and what their owners hear."""

from dataclasses import replace

import pytest
import torch

from sterna.errors import ProtocolError, TransportError
from sterna.transport.data_plane import Arrived, Hop, ReceiveFailed, SendFailed, Sent, Stopped
from sterna.transport.ledger import Copy
from sterna.transport.wires.waiting import Waker
from sterna.types import MigrationId
from tests.transport.planes import WAIT_S, Gate, stage
from tests.transport.world import BLOCK_BYTES, NUM_BLOCKS, World

# ---------------------------------------------------------------------------------- refusals


def test_a_transfer_that_nobody_expects_is_refused(world: World) -> None:
    source, destination = world.node(), world.node()
    before = destination.kv.clone()
    destination.receive(stage("m", 1), range(4))
    for transfer in (stage("m", 0), stage("other", 1)):
        source.send(transfer, destination, range(4))
        assert source.next_event() == SendFailed(
            transfer, "refused by the destination: this transfer is not expected"
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
    destination.receive(stage("m"), range(4))
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
    destination.receive(stage("m"), range(4))
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
        ({"num_layers": 4, "chunk_bytes": 384}, "the number of layers differ: [3] here, [4] at"),
        ({"page_bytes": 32, "chunk_bytes": 384}, "the page bytes differ"),
        ({"chunk_bytes": 1000}, "the chunk_bytes differ: 384 here, 1000 at the source"),
    ],
)
def test_a_source_whose_blocks_mean_something_else_is_rejected(
    world: World, options: dict[str, object], message: str
) -> None:
    source, destination = world.node(**options), world.node()
    before = destination.kv.clone()
    destination.receive(stage("m"), range(4))
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
    destination.receive(stage("m"), range(4))
    source.plane.send(stage("m"), f"{address}/{'0' * 32}", [range(4)], is_paced=False)
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
    source.plane.send(stage("m"), endpoint, [range(4)], is_paced=False)
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
    (receiver,) = destination.plane._receivers  # type: ignore[attr-defined]
    (sender,) = source.plane._senders.values()  # type: ignore[attr-defined]
    receiver.close()
    sender.thread.join(timeout=WAIT_S)
    source.copy(stage("m", 1), destination, [2], [2])


def test_a_broken_connection_fails_both_ends_of_its_transfers(world: World) -> None:
    source, destination = world.node(), world.node()
    gate = source.layout.gather_gate = Gate()
    destination.receive(stage("m"), range(8))
    source.send(stage("m"), destination, range(8, 16))
    gate.open()
    assert destination.layout.first_scatter.wait(WAIT_S)
    (receiver,) = destination.plane._receivers  # type: ignore[attr-defined]
    receiver.close()
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
        destination.receive(stage("m"), [-1])
    with pytest.raises(TransportError, match="scatter twice"):
        destination.receive(stage("m"), [4, 5, 4])
    destination.receive(stage("m"), [4, 5])
    with pytest.raises(ProtocolError, match="already in flight"):
        destination.receive(stage("m"), [6, 7])
    gate = source.layout.gather_gate = Gate()
    source.send(stage("m"), destination, [0, 1])
    gate.wait_for_arrival()
    with pytest.raises(ProtocolError, match="already in flight"):
        source.send(stage("m"), destination, [0, 1])
    gate.open()
    assert isinstance(destination.next_event(), Arrived)
    assert isinstance(source.next_event(), Sent)


def test_a_transfer_that_nobody_sends_fails_after_the_timeout(world: World) -> None:
    destination = world.node(timeout_s=0.1, begin_timeout_s=0.1)
    destination.receive(stage("m"), range(4))
    late = ReceiveFailed(stage("m"), "its source did not begin it in time")
    assert destination.next_event() == late


def test_a_transfer_may_begin_later_than_it_may_pause(world: World) -> None:
    """Nothing is due of a last stage while its source finishes its steps."""
    destination = world.node(timeout_s=0.1)
    destination.receive(stage("expected"), [0])
    destination.receive(stage("begun"), [1])
    waker = Waker()
    ledger = destination.plane._context.ledger  # type: ignore[attr-defined]
    assert isinstance(ledger.claim(stage("begun"), (1,), BLOCK_BYTES, waker), Copy)
    assert destination.next_event() == ReceiveFailed(stage("begun"), "no progress for 0.1 s")
    assert not destination.has_events()
    waker.close()


def test_a_hop_may_begin_at_any_time(world: World) -> None:
    """It is due when its lead has the stage, and a bulk stage may take longer than the timeout."""
    destination = world.node(timeout_s=0.1, begin_timeout_s=0.1)
    destination.receive(replace(stage("m"), hop=Hop(0, 1)), [0])
    destination.receive(stage("late"), [1])
    failed = destination.next_event()
    assert isinstance(failed, ReceiveFailed)
    assert failed.transfer == stage("late")
    assert not destination.has_events()


@pytest.mark.slow
def test_a_transfer_that_the_destination_does_not_place_fails_after_the_timeout(
    world: World,
) -> None:
    source, destination = world.node(timeout_s=2.5), world.node()
    source.copy(stage("m"), destination, [0], [0])
    gate = destination.layout.scatter_gate = Gate()
    destination.receive(stage("m", 1), range(2))
    source.send(stage("m", 1), destination, range(2))
    gate.wait_for_arrival()
    failed = source.next_event()
    assert isinstance(failed, SendFailed)
    assert "2.5 s" in failed.reason


def test_an_owner_that_fails_on_an_event_hears_the_next_one(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    node = world.node()
    heard = node.plane._context.ledger  # type: ignore[attr-defined]
    original = heard._notify

    def fail_once(event: object) -> None:
        heard._notify = original
        raise ValueError("the owner's own mistake")

    heard._notify = fail_once
    node.plane.stop(MigrationId("a"))
    node.plane.stop(MigrationId("b"))
    assert node.next_event() == Stopped(MigrationId("b"))
    assert "the owner's own mistake" in caplog.text
