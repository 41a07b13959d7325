"""When an instance that is being emptied may end. Pure.

It may when nothing is on it and every front end has said farewell: that it has seen the end, or
the move, of everything that it had here, and will send nothing more. Each emptying has a number of
its own (`Instance.emptied_since`), and a farewell is for one of them: what was said before the
instance was told to serve on is void when it is emptied again.
"""

from collections.abc import Iterable

from sterna.types import FrontendId


class Emptying:
    """Keeps the farewells of one instance's front ends."""

    def __init__(self) -> None:
        self._since: int | None = None
        self._farewells: dict[FrontendId, int] = {}
        self._told_version: int | None = None

    def on_membership(self, emptied_since: int | None) -> None:
        """The newest membership says which emptying is under way, if one is."""
        self._since = emptied_since

    def on_farewell(self, frontend_id: FrontendId, emptied_since: int) -> None:
        """A front end said farewell; it may have heard of the emptying before the instance."""
        self._farewells[frontend_id] = emptied_since

    def to_tell(self, frontends: Iterable[FrontendId], version: int) -> int | None:
        """Which emptying is done, if that is to be told now: all these front ends have left, and
        it was not told since the membership is of this version."""
        since = self._since
        if since is None or self._told_version == version:
            return None
        if any(self._farewells.get(each) != since for each in frontends):
            return None
        self._told_version = version
        return since
