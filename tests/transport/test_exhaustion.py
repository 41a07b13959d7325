"""Without descriptors or memory a transfer fails, and says so; the next one goes as if nothing
had been."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sterna.transport.interface import ReceiveFailed, SendFailed, Stopped
from tests.transport.planes import KINDS, Node, stage


@contextmanager
def descriptors_left(number: int) -> Iterator[None]:
    """This process can open so many files more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    try:
        while True:
            try:
                taken.append(os.dup(0))
            except OSError:
                break
        for _ in range(number):
            os.close(taken.pop()) if taken else None
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in taken:
            os.close(each)


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """This process can make no file larger, memory files among them."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def two_nodes(kind: str) -> Iterator[tuple[Node, Node]]:
    nodes = Node(kind, seed=1, timeout_s=5.0), Node(kind, seed=2, timeout_s=5.0)
    try:
        yield nodes
    finally:
        for node in nodes:
            node.plane.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_transfer_without_a_descriptor_fails_and_the_next_one_goes(kind: str) -> None:
    with two_nodes(kind) as (source, destination):
        with descriptors_left(0):
            destination.plane.receive(stage("m"), [0, 1])
            source.send(stage("m"), destination, [0, 1])
            failed = source.next_event()
            assert isinstance(failed, SendFailed)
            assert "Too many open files" in failed.reason
        destination.plane.stop(stage("m").migration_id)
        assert destination.next_event() == Stopped(stage("m").migration_id)
        source.copy(stage("n"), destination, [2, 3], [4, 5])


@pytest.mark.slow
def test_shared_memory_that_cannot_be_had_fails_the_transfer_with_the_reason() -> None:
    with two_nodes("shm") as (source, destination):
        # The first connection has a ring that was made beforehand.
        source.copy(stage("a"), destination, [0], [0])
        with two_nodes("shm") as (other, _), file_size_limit(0):
            destination.plane.receive(stage("m"), [0, 1])
            # A second peer, for which another ring is to be made.
            source.send(stage("m"), other, [0, 1])
            failed = source.next_event()
            assert isinstance(failed, SendFailed)
            assert "File too large" in failed.reason
            late = destination.next_event()
            assert isinstance(late, ReceiveFailed)
        source.copy(stage("n"), destination, [2, 3], [4, 5])
