"""Changes to the contents of a prefix cache, by the keys of its blocks. Pure.

An engine records them while it steps, and hands them over with its views. An instance sums them up
between two reports to the scheduler. Only the outcome counts: a block that has come and gone
between two looks is a removal of what may never have been there, which changes nothing.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheChanges:
    """What a prefix cache has got and lost.

    Attributes:
        added: keys of blocks that can be found now (`types.cache_key`).
        removed: keys of those that no longer can.
        is_whole: the cache was emptied before; `added` is all that it has.
    """

    added: tuple[int, ...]
    removed: tuple[int, ...]
    is_whole: bool = False


class CacheRecorder:
    """Sums changes up until they are taken."""

    def __init__(self) -> None:
        self._is_there: dict[int, bool] = {}
        self._is_whole = False

    def add(self, key: int) -> None:
        """The cache has got a block with this key."""
        self._is_there[key] = True

    def remove(self, key: int) -> None:
        """The cache has lost its last block with this key."""
        self._is_there[key] = False

    def clear(self) -> None:
        """The cache has lost everything."""
        self._is_there.clear()
        self._is_whole = True

    def take(self) -> CacheChanges | None:
        """Return the changes since the last call, or None without any."""
        if not self._is_there and not self._is_whole:
            return None
        added = tuple([key for key, is_there in self._is_there.items() if is_there])
        removed = tuple([key for key, is_there in self._is_there.items() if not is_there])
        changes = CacheChanges(added, () if self._is_whole else removed, self._is_whole)
        self._is_there.clear()
        self._is_whole = False
        return changes
