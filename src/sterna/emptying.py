"""When an instance that is being emptied may end. Pure.

It may when nothing is on it and every front end has said farewell: that it has seen the end, or
the move, of everything that it had here, and will send nothing more. Each emptying has a number of
its own (`Instance.emptied_since`), and a farewell is for one of them: what was said before the
instance was told to serve on is void when it is emptied again. So is one that was said before a
request of that front end arrived, by a migration that was under way: each says how many had.
"""

from collections import Counter
from collections.abc import Iterable

from sterna.types import FrontendId


class Emptying:
    """Keeps the farewells of one instance's front ends."""

    def __init__(self) -> None:
        self._since: int | None = None
        # The emptying that each is of, and how many requests had arrived.
        self._farewells: dict[FrontendId, tuple[int, int]] = {}
        self._num_arrived: Counter[FrontendId] = Counter()
        self._told_version: int | None = None

    def on_membership(self, emptied_since: int | None) -> None:
        """The newest membership says which emptying is under way, if one is."""
        self._since = emptied_since

    def on_arrival(self, frontend_id: FrontendId) -> None:
        """A request of this front end has moved here."""
        self._num_arrived[frontend_id] += 1

    def on_farewell(self, frontend_id: FrontendId, emptied_since: int, num_moved: int = 0) -> None:
        """A front end said farewell; it may have heard of the emptying before the instance.

        Args:
            num_moved: how many of its requests it knows to have moved here, ever.
        """
        self._farewells[frontend_id] = (emptied_since, num_moved)

    def to_tell(self, frontends: Iterable[FrontendId], version: int) -> int | None:
        """Which emptying is done, if that is to be told now: all these front ends have left, and
        it was not told since the membership is of this version."""
        since = self._since
        if since is None or self._told_version == version:
            return None
        for each in frontends:
            if self._farewells.get(each) != (since, self._num_arrived[each]):
                return None
        self._told_version = version
        return since
