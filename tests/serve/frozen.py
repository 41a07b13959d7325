"""A process all of whose threads stand still, although it is not stopped."""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

from tests.needed_tools import skip

_ATTACH, _DETACH = 16, 17
_ALL_THREADS = 0x40000000
"""Of waitpid: threads of others, too (__WALL)."""


@contextlib.contextmanager
def frozen(process_id: int) -> Iterator[None]:
    """Hold all its threads as a debugger does, until it has ended or the context is left.

    Skips the test where this user may not (`needed_tools`).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    held: list[int] = []
    try:
        # Those that begin meanwhile are seen the next time.
        while begun := sorted(_threads(process_id) - set(held)):
            for thread_id in begun:
                if libc.ptrace(_ATTACH, thread_id, None, None) != 0:
                    if _threads(process_id) >= {thread_id}:
                        skip(f"no debugger may be here: {os.strerror(ctypes.get_errno())}")
                    continue
                os.waitpid(thread_id, _ALL_THREADS)
                held.append(thread_id)
        yield
    finally:
        for thread_id in held:
            if libc.ptrace(_DETACH, thread_id, None, None) != 0:
                # It was killed: who holds it is the first to be told.
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(thread_id, _ALL_THREADS | os.WNOHANG)


def _threads(process_id: int) -> set[int]:
    try:
        return {int(each.name) for each in Path(f"/proc/{process_id}/task").iterdir()}
    except FileNotFoundError:
        return set()
