"""The contents of an instance's prefix cache, as its scheduler is to know them. Pure.

The scheduler gets all contents once, and the changes with each load report. All come again where it
could not have them: it is another scheduler, or a report could not be sent.
"""

from sterna.engine.cache_changes import CacheChanges, CacheRecorder
from sterna.messages.actors import CacheReport
from sterna.types import CacheLayout, InstanceId, packed


class CacheContents:
    """The keys of the blocks that can be found in one engine's prefix cache."""

    def __init__(self, instance_id: InstanceId, layout: CacheLayout) -> None:
        self._instance_id = instance_id
        self._layout = layout
        self._keys: set[int] = set()
        self._unsent = CacheRecorder()
        self._owes_all = True

    @property
    def keys(self) -> frozenset[int]:
        """The keys of all blocks."""
        return frozenset(self._keys)

    def on_changes(self, changes: CacheChanges) -> None:
        """The engine's cache has changed."""
        if changes.is_whole:
            self._keys.clear()
            self.owe_all()
        self._keys.update(changes.added)
        self._keys.difference_update(changes.removed)
        if self._owes_all:
            # Without a scheduler the changes would become ever more.
            return
        for key in changes.added:
            self._unsent.add(key)
        for key in changes.removed:
            self._unsent.remove(key)

    def owe_all(self) -> None:
        """The scheduler does not know what was reported: the next report has everything."""
        self._owes_all = True
        self._unsent = CacheRecorder()

    def next_report(self, listed_in: int = 0) -> CacheReport | None:
        """Return what is to be sent to the scheduler now, if anything; see `CacheReport`."""
        if self._owes_all:
            self._owes_all = False
            keys = packed(self._keys)
            return CacheReport(self._instance_id, keys, b"", self._layout, listed_in)
        if (changes := self._unsent.take()) is None:
            return None
        added, removed = packed(changes.added), packed(changes.removed)
        return CacheReport(self._instance_id, added, removed, None, listed_in)
