"""Without descriptors or memory a transfer fails, and says so; the next one goes as if nothing
had been."""

import errno
import logging
import mmap
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from sterna.transport.data_plane import ReceiveFailed, SendFailed, Stopped
from tests.descriptors import descriptors_left
from tests.small_disk import with_small_disk
from tests.transport.planes import KINDS, WAIT_S, Node, stage


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
def two_nodes(kind: str, timeout_s: float = 5.0) -> Iterator[tuple[Node, Node]]:
    timeouts = {"timeout_s": timeout_s, "begin_timeout_s": timeout_s}
    nodes = Node(kind, seed=1, **timeouts), Node(kind, seed=2, **timeouts)
    try:
        yield nodes
    finally:
        for node in nodes:
            node.plane.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_transfer_without_a_descriptor_fails_and_the_next_one_goes(kind: str) -> None:
    with two_nodes(kind) as (source, destination):
        with descriptors_left(0):
            destination.receive(stage("m"), [0, 1])
            source.send(stage("m"), destination, [0, 1])
            failed = source.next_event()
            assert isinstance(failed, SendFailed)
            assert "Too many open files" in failed.reason
        destination.plane.stop(stage("m").migration_id)
        assert destination.next_event() == Stopped(stage("m").migration_id)
        source.copy(stage("n"), destination, [2, 3], [4, 5])


@contextmanager
def no_thread(name: str) -> Iterator[None]:
    """No thread of this name can be started."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        yield


def holdings() -> dict[str, int]:
    """What this process has of threads, rings and descriptors."""
    with open("/proc/self/maps") as maps:
        num_rings = sum("sterna-kv" in line for line in maps)
    num_fds = len(os.listdir("/proc/self/fd"))
    return {"rings": num_rings, "fds": num_fds, "threads": threading.active_count()}


def wait_until_released(before: dict[str, int]) -> None:
    """Wait until this process has no more of anything than before."""
    deadline_s = time.monotonic() + WAIT_S
    while any(number > before[what] for what, number in holdings().items()):
        assert time.monotonic() < deadline_s, (before, holdings())
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("tcp", "sterna-kv-send"), ("tcp", "sterna-kv-receive"), ("gloo", "sterna-kv-gloo")],
)
def test_a_transfer_without_a_thread_fails_and_the_next_one_goes(kind: str, name: str) -> None:
    with two_nodes(kind) as (source, destination):
        before = holdings()
        with no_thread(name):
            destination.receive(stage("m"), [0, 1])
            source.send(stage("m"), destination, [0, 1])
            assert isinstance(source.next_event(), SendFailed)
        wait_until_released(before)
        destination.plane.stop(stage("m").migration_id)
        assert destination.next_event() == Stopped(stage("m").migration_id)
        source.copy(stage("n"), destination, [2, 3], [4, 5])


@pytest.mark.parametrize("side", ["sender", "receiver"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_connection_without_device_memory_for_its_copies_leaves_nothing(
    kind: str, side: str
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("CUDA out of memory")

    with two_nodes(kind) as (source, destination):
        before = holdings()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"sterna.transport.{side}.make_copier", refuse)
            # What pytest keeps of a log holds tracebacks, and with them what it counts here.
            patch.setattr(logging.getLogger(f"sterna.transport.{side}"), "disabled", True)
            # Beyond the buffers that were made beforehand.
            for number in range(4):
                source.send(stage("m", number), destination, [0, 1])
                assert isinstance(source.next_event(), SendFailed)
            # A receiver logs its end after the sender has heard of it.
            wait_until_released(before)
        source.copy(stage("n"), destination, [2, 3], [4, 5])


@contextmanager
def no_pages() -> Iterator[None]:
    """There is no memory for files; a page that was not asked for before would be touched in
    vain, and that ends a process."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        yield


@pytest.mark.parametrize(
    ("exhausted", "reason"),
    [(lambda: file_size_limit(0), "File too large"), (no_pages, "No space left on device")],
    ids=["file_size", "pages"],
)
def test_shared_memory_that_cannot_be_had_fails_the_transfer_with_the_reason(
    exhausted: Callable[[], AbstractContextManager[None]], reason: str
) -> None:
    with two_nodes("shm") as (source, destination):
        # The first connection has a ring that was made beforehand.
        source.copy(stage("a"), destination, [0], [0])
        # Nothing will come to it: its time-out is what is waited for.
        with two_nodes("shm", timeout_s=0.1) as (other, _), exhausted():
            other.receive(stage("m"), [0, 1])
            # A second peer, for which another ring is to be made.
            source.send(stage("m"), other, [0, 1])
            failed = source.next_event()
            assert isinstance(failed, SendFailed)
            assert reason in failed.reason
            late = other.next_event()
            assert isinstance(late, ReceiveFailed)
        source.copy(stage("n"), destination, [2, 3], [4, 5])


def test_a_ring_has_all_of_its_pages_before_it_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapping says nothing of pages that it did not get: the first touch ends the process."""
    num_mapped = 0
    before = mmap.mmap

    def map_whole(fd: int, num_bytes: int, *args: Any, **kwargs: Any) -> mmap.mmap:
        nonlocal num_mapped
        num_mapped += 1
        assert os.fstat(fd).st_blocks * 512 >= num_bytes
        return before(fd, num_bytes, *args, **kwargs)

    monkeypatch.setattr(mmap, "mmap", map_whole)
    with two_nodes("shm") as (source, destination):
        source.copy(stage("m"), destination, [0, 1], [2, 3])
    # One for each plane beforehand, and the destination's.
    assert num_mapped == 3


COPY = """
from pathlib import Path
from tests.small_disk import fill
from tests.transport.planes import stage
from tests.transport.test_exhaustion import two_nodes

fill(Path("/dev/shm"))
with two_nodes("shm") as (source, destination), two_nodes("shm") as (other, _):
    for number, node in enumerate((destination, other)):
        source.copy(stage("m", number), node, [0, 1], [2, 3])
print("copied")
"""


def test_a_full_dev_shm_is_none_of_the_rings_business() -> None:
    """Files without a name are in memory that is no file system's."""
    ended = subprocess.run(
        with_small_disk(Path("/dev/shm"), "1m", [sys.executable, "-c", COPY]),
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
    )
    assert ended.stdout == "copied\n", ended.stderr
