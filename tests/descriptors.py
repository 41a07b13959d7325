"""A process that can open no more files."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


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
