"""Bulk copies leave the memory bus to the engine for part of the time, and go behind copies for
which requests wait."""

import socket
import threading
from dataclasses import replace

import pytest
import torch

from sterna.transport.ledger import Copy, Side
from sterna.transport.pacer import Pacer
from sterna.transport.sender import Peer, _Connection
from sterna.transport.wires.frames import Chunk, FrameStream
from sterna.transport.wires.waiting import Waker
from tests.transport.planes import NEVER_S, WAIT_S, Node, stage
from tests.transport.world import BLOCK_BYTES


@pytest.mark.parametrize(("share", "pause_s"), [(0.5, 3.0), (0.25, 9.0), (0.75, 1.0), (1.0, 0.0)])
def test_a_chunk_is_followed_by_a_pause_that_makes_up_its_share(
    share: float, pause_s: float
) -> None:
    pacer = Pacer(share, max_pause_s=100)
    # The first chunk counts as late by the largest lateness; the second begins when it may.
    pacer.chunk_done(begun_s=10.0, now_s=10.0)
    begun_s = 10.0 + pacer.pause_s(10.0)
    pacer.chunk_done(begun_s, begun_s + 3)
    assert pacer.pause_s(begun_s + 3) == pytest.approx(pause_s, abs=0.0021)
    assert pacer.pause_s(begun_s + 3 + pause_s) == 0


def test_the_first_chunk_may_begin_at_once() -> None:
    assert Pacer(0.1, max_pause_s=100).pause_s(5.0) == 0


def test_pauses_of_chunks_to_different_peers_add_up() -> None:
    pacer = Pacer(0.5, max_pause_s=100)
    pacer.chunk_done(begun_s=10.0, now_s=11.0)
    one = pacer.pause_s(11.0)
    pacer.chunk_done(begun_s=10.0, now_s=11.0)
    assert pacer.pause_s(11.0) == pytest.approx(one + 1.0)


def test_chunks_to_different_peers_at_full_share_never_pause() -> None:
    pacer = Pacer(1.0, max_pause_s=100)
    for _ in range(3):
        pacer.chunk_done(begun_s=10.0, now_s=13.0)
        assert pacer.pause_s(13.0) == 0


def test_a_late_wakeup_shortens_the_next_pause_by_at_most_two_milliseconds() -> None:
    pacer = Pacer(0.5, max_pause_s=100)
    pacer.chunk_done(begun_s=10.0, now_s=11.0)
    ready_s = 11.0 + pacer.pause_s(11.0)
    pacer.chunk_done(ready_s + 0.001, ready_s + 0.011)
    assert pacer.pause_s(ready_s + 0.011) == pytest.approx(0.009)
    ready_s += 0.011 + 0.009
    pacer.chunk_done(ready_s + 5, ready_s + 5.01)
    assert pacer.pause_s(ready_s + 5.01) == pytest.approx(0.008)


def test_no_pause_is_long_enough_to_look_like_death() -> None:
    pacer = Pacer(0.01, max_pause_s=1.5)
    pacer.chunk_done(begun_s=10.0, now_s=12.0)
    assert pacer.pause_s(12.0) == pytest.approx(1.5, abs=0.0021)


@pytest.mark.parametrize(("timeout_s", "first"), [(NEVER_S, "last"), (0.0, "bulk")])
def test_a_last_stage_goes_first_unless_a_bulk_transfer_has_waited_too_long(
    timeout_s: float, first: str
) -> None:
    """Prefixes are sent like last stages; they may be large and follow each other."""
    node = Node("tcp")
    ours, theirs = (FrameStream(each, WAIT_S) for each in socket.socketpair())
    waker = Waker()
    context = replace(node.plane._context, timeout_s=timeout_s)  # type: ignore[attr-defined]
    ids = (torch.tensor([0]),)
    copies = [
        Copy(Side.SOURCE, stage(name), ids, (BLOCK_BYTES,), None, name == "bulk", 0.0, None)
        for name in ("bulk", "last")
    ]

    def send() -> None:
        # A connection has a thread of its own, whose settings of OpenMP it changes.
        connection = _Connection(ours, Peer("", ""), context, waker)
        connection.admit(copies)
        connection.turn()
        connection.close()

    sending = threading.Thread(target=send)
    sending.start()
    *_, chunk = (theirs.wait_frame() for _ in range(len(copies) + 1))
    assert isinstance(chunk, Chunk)
    assert copies[chunk.stream].transfer == stage(first)
    sending.join(WAIT_S)
    for each in (ours, theirs, waker, node.plane):
        each.close()
