"""When an instance that is being emptied may end. Pure.

It may when nothing is on it and every front end has said farewell: that it has seen the end, or
the move, of everything that it had here, and will send nothing more. Each emptying has a number of
its own (`Instance.emptied_since`), and a farewell is for one of them: what was said before the
instance was told to serve on is void when it is emptied again.

What an instance has told a front end, and that has not heard, ends with the instance. A front end
cannot know what is on its way: news that a request has moved on comes over another connection than
the tokens from before, a migration that was under way may still bring a request, and one may come
back from a destination that has died. So both count what the instance tells, and a farewell that
was said before the front end had heard all of it is void, too.
"""

from collections import Counter
from collections.abc import Iterable

from sterna.types import FrontendId


class Termination:
    """Keeps the farewells of one instance's front ends."""

    def __init__(self) -> None:
        self._since: int | None = None
        # The emptying that each is of, and how many messages had been heard.
        self._farewells: dict[FrontendId, tuple[int, int]] = {}
        self._num_told: Counter[FrontendId] = Counter()
        self._told_version: int | None = None

    def on_membership(self, emptied_since: int | None) -> None:
        """The newest membership says which emptying is under way, if one is."""
        self._since = emptied_since

    def on_told(self, frontend_id: FrontendId) -> None:
        """The front end is told something of its requests."""
        self._num_told[frontend_id] += 1

    def on_untold(self, frontend_id: FrontendId) -> None:
        """What it was to be told last could not be sent, and will never arrive."""
        self._num_told[frontend_id] -= 1

    def on_farewell(self, frontend_id: FrontendId, emptied_since: int, num_heard: int = 0) -> None:
        """A front end said farewell; it may have heard of the emptying before the instance.

        Args:
            num_heard: how much it has been told, ever, and has heard.
        """
        self._farewells[frontend_id] = (emptied_since, num_heard)

    def to_tell(self, frontends: Iterable[FrontendId], version: int) -> int | None:
        """Which emptying is done, if that is to be told now: all these front ends have left, and
        it was not told since the membership is of this version."""
        since = self._since
        if since is None or self._told_version == version:
            return None
        for each in frontends:
            if self._farewells.get(each) != (since, self._num_told[each]):
                return None
        self._told_version = version
        return since
