"""Copies of KV blocks under way, and the links that they share. Pure.

Every instance has one outgoing and one incoming link. The copies on a link share it evenly; the
slower one of its two links limits a copy. The work of a copy is the time in seconds that it takes
alone.
"""

from collections import defaultdict
from dataclasses import dataclass

from sterna.types import InstanceId, MigrationId


@dataclass(slots=True, eq=False)
class Copy:
    """One stage under way.

    Attributes:
        work_s: the work left at `since_s`.
        rate: its speed from then on; 1 when it is alone.
        end_s: its end if no other copy begins or ends.
    """

    migration_id: MigrationId
    source: InstanceId
    destination: InstanceId
    stage: int
    work_s: float
    since_s: float
    rate: float = 1.0
    end_s: float = 0.0


class Links:
    """All copies of the cluster; at most one at a time of each migration."""

    def __init__(self) -> None:
        self._copies: dict[MigrationId, Copy] = {}
        self._leaving: defaultdict[InstanceId, list[Copy]] = defaultdict(list)
        self._coming: defaultdict[InstanceId, list[Copy]] = defaultdict(list)

    def begin(
        self,
        migration_id: MigrationId,
        source: InstanceId,
        destination: InstanceId,
        stage: int,
        work_s: float,
        now_s: float,
    ) -> list[Copy]:
        """Begin a copy; returns it and the other copies whose end has changed."""
        assert migration_id not in self._copies
        copy = Copy(migration_id, source, destination, stage, work_s, now_s)
        self._copies[migration_id] = copy
        self._leaving[source].append(copy)
        self._coming[destination].append(copy)
        return self._share(copy, now_s)

    def end(self, migration_id: MigrationId, now_s: float) -> list[Copy]:
        """The migration's copy is done or given up; returns the copies whose end has changed.

        A migration without a copy is ignored.
        """
        copy = self._copies.pop(migration_id, None)
        if copy is None:
            return []
        self._leaving[copy.source].remove(copy)
        self._coming[copy.destination].remove(copy)
        return self._share(copy, now_s)

    def copy_of(self, migration_id: MigrationId) -> Copy | None:
        """The migration's copy under way, or None."""
        return self._copies.get(migration_id)

    def _share(self, changed: Copy, now_s: float) -> list[Copy]:
        """Divide the links of a copy again after it has begun or ended."""
        leaving, coming = self._leaving[changed.source], self._coming[changed.destination]
        touched = [*leaving, *(each for each in coming if each.source != changed.source)]
        moved = []
        for copy in touched:
            num_sharing = max(len(self._leaving[copy.source]), len(self._coming[copy.destination]))
            rate = 1.0 / num_sharing
            if rate == copy.rate and copy is not changed:
                continue
            # By rounding, a copy that ends now may have negative work, and its end in the past.
            copy.work_s = max(0.0, copy.work_s - (now_s - copy.since_s) * copy.rate)
            copy.since_s = now_s
            copy.rate = rate
            copy.end_s = now_s + copy.work_s / rate
            moved.append(copy)
        return moved
