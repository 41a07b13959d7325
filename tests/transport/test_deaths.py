"""Peers that die or freeze, and what planes leave behind."""

import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import psutil
import pytest
import torch

from sterna.errors import TransportError
from sterna.transport.data_plane import Arrived, ReceiveFailed, SendFailed, Sent, Stopped
from sterna.transport.wires.channel import Spares
from sterna.transport.wires.frames import FrameStream
from sterna.transport.wires.gloo import _Helper
from sterna.types import MigrationId
from tests.transport.peer import Peer
from tests.transport.planes import KINDS, NEVER_S, WAIT_S, Gate, Node, stage

# So slow that a transfer of many chunks never ends within a test.
SLOW = {"bandwidth_share": 0.001, "timeout_s": NEVER_S}


class Cast:
    """Makes nodes here and peers elsewhere; ends them all."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._nodes: list[Node] = []
        self._peers: list[Peer] = []

    def node(self, **options: object) -> Node:
        node = Node(self.kind, **{"seed": len(self._nodes)} | options)  # type: ignore[arg-type]
        self._nodes.append(node)
        return node

    def peer(self, **options: object) -> Peer:
        peer = Peer(self.kind, **{"seed": 100} | options)
        self._peers.append(peer)
        return peer

    def close(self) -> None:
        for node in self._nodes:
            node.plane.close()
        for peer in self._peers:
            if peer.process.is_alive():
                peer.kill()


@pytest.fixture(params=KINDS)
def cast(request: pytest.FixtureRequest) -> Iterator[Cast]:
    cast = Cast(request.param)
    yield cast
    cast.close()


def _eventually(condition: Callable[[], bool]) -> bool:
    """Whether the condition comes true; for what has no event: descriptors, native threads."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.01)
    return True


# ---------------------------------------------------------------------------------- deaths


def test_a_source_killed_in_the_middle_fails_its_transfer_and_no_other(cast: Cast) -> None:
    doomed = cast.peer(**SLOW)
    source, destination = cast.node(), cast.node(timeout_s=NEVER_S)
    destination.receive(stage("doomed"), range(20))
    doomed.send(stage("doomed"), destination.plane.endpoint, list(range(20)), is_paced=True)
    assert destination.layout.first_scatter.wait(WAIT_S)
    gate = source.layout.gather_gate = Gate()
    destination.receive(stage("other"), range(20, 24))
    source.send(stage("other"), destination, range(4))
    gate.wait_for_arrival()

    doomed.kill()

    failed = destination.next_event()
    assert isinstance(failed, ReceiveFailed)
    assert failed.transfer == stage("doomed")
    assert failed.reason.startswith("the connection to the source failed: ")
    gate.open(10)
    assert isinstance(destination.next_event(), Arrived)
    assert torch.equal(destination.blocks(range(20, 24)), source.blocks(range(4)))
    assert len(destination.layout.scattered) <= 10


def test_a_destination_killed_in_the_middle_fails_its_transfer_and_no_other(cast: Cast) -> None:
    doomed = cast.peer()
    source, destination = cast.node(**SLOW), cast.node()
    doomed.receive(stage("doomed"), list(range(20)))
    gate = source.layout.gather_gate = Gate()
    source.send(stage("doomed"), doomed, range(20), is_paced=True)  # type: ignore[arg-type]
    gate.open()
    gate.wait_for_arrival()
    # The second chunk is held: one is through and many are left.
    gate.wait_for_arrival()
    destination.receive(stage("other"), range(4))
    source.send(stage("other"), destination, range(4, 8))

    doomed.kill()
    gate.open(100)

    events = source.next_events(2)
    assert {type(event) for event in events} == {SendFailed, Sent}
    (failed,) = [event for event in events if isinstance(event, SendFailed)]
    assert failed.transfer == stage("doomed")
    assert isinstance(destination.next_event(), Arrived)
    assert torch.equal(destination.blocks(range(4)), source.blocks(range(4, 8)))


def test_a_destination_killed_while_its_ack_is_awaited_fails_the_transfer(cast: Cast) -> None:
    doomed = cast.peer()
    source = cast.node(timeout_s=NEVER_S)
    doomed.freeze()
    # All of it fits into buffers on the way, so the source waits for the acknowledgement only.
    source.send(stage("m"), doomed, [0, 1])  # type: ignore[arg-type]
    doomed.kill()
    assert isinstance(source.next_event(), SendFailed)


@pytest.mark.slow
def test_a_source_killed_inside_a_gloo_message_is_noticed_before_gloo_notices() -> None:
    """Gloo itself notices at its timeout only, and its thread cannot be woken before."""
    gloo_timeout_s = 40.0
    shape = {"num_layers": 1, "num_blocks": 4, "page_bytes": 16 << 20, "chunk_bytes": 16 << 20}
    doomed, destination = Peer("gloo", **shape), Node("gloo", **shape, timeout_s=gloo_timeout_s)
    destination.receive(stage("m"), range(4))
    doomed.send(stage("m"), destination.plane.endpoint, list(range(4)), is_paced=False)
    assert destination.layout.first_scatter.wait(WAIT_S)
    begun_s = time.monotonic()
    doomed.kill()
    assert isinstance(destination.next_event(), ReceiveFailed)
    destination.plane.close()
    assert time.monotonic() - begun_s < gloo_timeout_s / 2
    assert _eventually(lambda: "sterna-kv-gloo" not in _plane_threads())


def test_a_helper_is_left_behind_when_the_peer_hangs_up() -> None:
    ours, theirs = socket.socketpair()
    stream, helper, release = FrameStream(ours, WAIT_S), _Helper(), threading.Event()
    threading.Timer(0.01, theirs.close).start()
    with pytest.raises(TransportError, match="the peer closed the connection"):
        helper.run(lambda: release.wait(WAIT_S), stream)
    helper.end()
    assert "sterna-kv-gloo" in _plane_threads()
    release.set()
    assert _eventually(lambda: "sterna-kv-gloo" not in _plane_threads())
    stream.close()


@pytest.mark.slow
def test_a_frozen_destination_fails_its_transfers_after_the_timeout(cast: Cast) -> None:
    frozen = cast.peer()
    source, destination = cast.node(timeout_s=5.0), cast.node()
    frozen.receive(stage("frozen"), list(range(20)))
    source.copy(stage("warm"), destination, [0], [0])
    frozen.freeze()
    source.send(stage("frozen"), frozen, range(20))  # type: ignore[arg-type]
    source.copy(stage("other"), destination, [1], [1])
    failed = source.next_event()
    assert isinstance(failed, SendFailed)
    assert failed.transfer == stage("frozen")


@pytest.mark.slow
def test_a_frozen_source_fails_its_transfers_after_the_timeout(cast: Cast) -> None:
    frozen = cast.peer(bandwidth_share=0.001)
    source, destination = cast.node(), cast.node(timeout_s=5.0)
    destination.receive(stage("frozen"), range(20))
    frozen.send(stage("frozen"), destination.plane.endpoint, list(range(20)), is_paced=True)
    assert destination.layout.first_scatter.wait(WAIT_S)
    frozen.freeze()
    source.copy(stage("other"), destination, [1], [21])
    assert isinstance(destination.next_event(), ReceiveFailed)


# ---------------------------------------------------------------------------------- leftovers


def _plane_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("sterna-kv")]


def _leftovers() -> dict[str, Any]:
    """What the process holds that a plane might have left."""
    process = psutil.Process()
    with open("/proc/self/maps") as maps:
        num_rings = sum("sterna-kv" in line for line in maps)
    return {
        "fds": process.num_fds(),
        "rings": num_rings,
        "threads": _plane_threads(),
        "native threads": process.num_threads(),
        # Other processes come and go there meanwhile: torch names its files by the process.
        "shared memory": sorted(
            each
            for each in os.listdir("/dev/shm")
            if f"_{os.getpid()}_" in each or "sterna-kv" in each
        ),
    }


def _is_no_more(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    counted = ("fds", "native threads")
    others = [each for each in before if each not in counted]
    return all(now[each] <= before[each] for each in counted) and all(
        now[each] == before[each] for each in others
    )


def _use_planes(kind: str) -> None:
    source, destination = Node(kind), Node(kind, seed=1)
    source.copy(stage("m"), destination, [0, 1, 2], [3, 4, 5])
    destination.copy(stage("back"), source, [0, 1, 2], [3, 4, 5])
    source.plane.send(stage("x"), "nonsense", [[0]], is_paced=False)
    source.send(stage("y"), destination, [0])
    source.next_events(2)
    source.plane.close()
    destination.plane.close()


@pytest.mark.parametrize("kind", KINDS)
def test_closed_planes_leave_nothing_behind(kind: str) -> None:
    # The first use starts things that live as long as the process, in torch and in Gloo.
    _use_planes(kind)
    gc.collect()
    assert _eventually(lambda: not _plane_threads())
    before = _leftovers()
    for _ in range(3):
        _use_planes(kind)
    gc.collect()
    # Threads that were told to end take a moment; those of Gloo are not Python's, and some of the
    # first use may have ended only now, with their descriptors.
    assert _eventually(lambda: _is_no_more(_leftovers(), before)), (before, _leftovers())


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_peer_leaves_nothing_behind(kind: str) -> None:
    """Neither here, while this plane lives on, nor in the host's shared memory."""
    node = Node(kind, timeout_s=10.0)
    gc.collect()
    fds, shared = psutil.Process().num_fds(), _leftovers()["shared memory"]
    doomed = Peer(kind, **SLOW)
    node.receive(stage("to"), range(10))
    doomed.send(stage("to"), node.plane.endpoint, list(range(10)), is_paced=True)
    assert node.layout.first_scatter.wait(WAIT_S)
    doomed.receive(stage("from"), [0, 1])
    node.send(stage("from"), doomed, [0, 1])  # type: ignore[arg-type]
    assert isinstance(node.next_event(), Sent)
    doomed.kill()
    assert isinstance(node.next_event(), ReceiveFailed)
    doomed.process.close()
    idle = ["sterna-kv-fence", "sterna-kv-listen", "sterna-kv-notify"]
    assert _eventually(lambda: sorted(_plane_threads()) == idle)
    gc.collect()
    assert _eventually(lambda: psutil.Process().num_fds() <= fds)
    with open("/proc/self/maps") as maps:
        # The source's first ring is used up by the dead peer; a spare is not made again.
        assert sum("sterna-kv" in line for line in maps) == 0
    assert _leftovers()["shared memory"] == shared
    node.plane.close()


def test_an_idle_connection_ends_and_is_opened_again(cast: Cast) -> None:
    source, destination = cast.node(idle_timeout_s=0.05), cast.node()
    idle = sorted(_plane_threads())
    for number in range(3):
        source.copy(stage("m", number), destination, [0, 1], [3, 4])
        # What the next connection needs has been made by then, as for the first one.
        assert _eventually(lambda: sorted(_plane_threads()) == idle)
        wire: Any = source.plane._context.wire  # type: ignore[attr-defined]
        (stock,) = [each for each in vars(wire).values() if isinstance(each, Spares)]
        assert len(stock._spares) == stock._num_spares > 0


def test_a_copy_that_comes_when_its_connection_ends_is_sent(cast: Cast) -> None:
    source, destination = cast.node(idle_timeout_s=1e-6), cast.node()
    for number in range(50):
        source.copy(stage("m", number), destination, [0, 1], [3, 4])


def test_closing_in_mid_transfer_waits_for_no_timeout_and_is_silent_and_final(cast: Cast) -> None:
    source, destination = cast.node(**SLOW), cast.node(timeout_s=NEVER_S)
    destination.receive(stage("m"), range(20))
    source.send(stage("m"), destination, range(20), is_paced=True)
    assert destination.layout.first_scatter.wait(WAIT_S)
    begun_s = time.monotonic()
    destination.plane.close()
    after = destination.kv.clone()
    assert time.monotonic() - begun_s < NEVER_S / 2
    assert isinstance(source.next_event(), SendFailed)
    assert torch.equal(destination.kv, after)
    assert not destination.has_events()
    source.plane.close()
    assert not source.has_events()


def test_closing_waits_for_the_chunk_in_progress(cast: Cast) -> None:
    source, destination = cast.node(), cast.node()
    gate = destination.layout.scatter_gate = Gate()
    destination.receive(stage("m"), range(4))
    source.send(stage("m"), destination, range(4))
    gate.wait_for_arrival()
    closing = threading.Thread(target=destination.plane.close)
    closing.start()
    assert _eventually(lambda: destination.plane._is_closed)  # type: ignore[attr-defined]
    gate.open(10)
    closing.join(WAIT_S)
    assert destination.layout.scattered == [[0, 1]]
    assert not destination.has_events()


def test_a_closed_plane_takes_no_orders_and_may_be_closed_again(cast: Cast) -> None:
    node, other = cast.node(), cast.node()
    node.plane.close()
    node.plane.close()
    node.plane.stop(MigrationId("m"))
    with pytest.raises(TransportError, match="closed"):
        node.receive(stage("m"), [0])
    with pytest.raises(TransportError, match="closed"):
        node.send(stage("m"), other, [0])
    assert not node.has_events()


def test_a_plane_may_be_closed_by_the_one_it_notifies(cast: Cast) -> None:
    node = cast.node()
    ledger = node.plane._context.ledger  # type: ignore[attr-defined]
    closed = threading.Event()

    def close(event: object) -> None:
        node.plane.close()
        closed.set()

    ledger._notify = close
    node.plane.stop(MigrationId("m"))
    assert closed.wait(WAIT_S)
    assert _eventually(lambda: not ledger._thread.is_alive())


def test_stopping_all_the_migrations_of_a_dead_peer_is_told(cast: Cast) -> None:
    doomed = cast.peer()
    source = cast.node(**SLOW)
    doomed.receive(stage("m"), list(range(20)))
    source.send(stage("m"), doomed, range(20), is_paced=True)  # type: ignore[arg-type]
    doomed.kill()
    failed = source.next_event()
    assert isinstance(failed, SendFailed)
    source.plane.stop(MigrationId("m"))
    assert source.next_event() == Stopped(MigrationId("m"))
