"""Order in which an interpreter begins the effects of migrations. Pure.

Rules 1 and 2 of the interpreter's contract (`sterna.migration.messages`): an effect that has an
outcome delays the later effects of its migration until that outcome has been reported, and the
effects that follow from the outcome are queued behind them. Effects of different migrations do not
wait for each other.
"""

from collections import deque
from collections.abc import Iterator
from typing import get_args

from sterna.migration.messages import AbortRequest, Effect, EffectWithOutcome, Send
from sterna.types import MigrationId

# `isinstance` is faster with a tuple than with a union.
WITH_OUTCOME = get_args(EffectWithOutcome)


class EffectQueue:
    """Effects of all migrations of one instance that wait for outcomes."""

    def __init__(self) -> None:
        # Has a key for each migration of which an outcome is due.
        self._waiting: dict[MigrationId, deque[Effect]] = {}

    def __len__(self) -> int:
        """Number of migrations of which an outcome is due."""
        return len(self._waiting)

    def push(self, effect: Effect) -> bool:
        """Queue the next effect that was returned; returns whether it begins at once."""
        migration_id = migration_of(effect)
        if migration_id is None:
            return True
        if (waiting := self._waiting.get(migration_id)) is not None:
            waiting.append(effect)
            return False
        if isinstance(effect, WITH_OUTCOME):
            self._waiting[migration_id] = deque()
        return True

    def done(self, migration_id: MigrationId) -> Iterator[Effect]:
        """Yield the effects that begin after the outcome due was reported and the effects that
        followed from it were pushed; the last one may have an outcome itself.

        Each is to be begun before the next one is taken: effects that are pushed meanwhile,
        because one of them failed at once, wait behind them.

        Raises:
            KeyError: no outcome is due.
        """
        waiting = self._waiting[migration_id]
        while waiting:
            effect = waiting.popleft()
            yield effect
            if isinstance(effect, WITH_OUTCOME):
                return
        del self._waiting[migration_id]


def migration_of(effect: Effect) -> MigrationId | None:
    """Return the migration that the effect belongs to.

    AbortRequest belongs to none, and never waits. No machine returns it while an effect that
    changes its request waits or is under way.
    """
    if isinstance(effect, Send):
        return effect.message.migration_id
    if isinstance(effect, AbortRequest):
        return None
    return effect.migration_id
