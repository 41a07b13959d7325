"""When an instance that is being emptied may end. Pure.

It may when nothing is on it and every front end has said farewell: that it has seen the end, or
the move, of everything that it had here, and will send nothing more. A farewell that was said
before the instance was told to serve on, and then to empty again, is void.
"""

from collections.abc import Iterable

from sterna.types import FrontendId


class Emptying:
    """Keeps the farewells of one instance's front ends."""

    def __init__(self) -> None:
        self._since_version: int | None = None
        self._farewells: dict[FrontendId, int] = {}
        self._told_version: int | None = None

    def on_membership(self, version: int, is_terminating: bool) -> None:
        """The newest membership says whether the instance is being emptied."""
        if not is_terminating:
            self._since_version = None
        elif self._since_version is None:
            self._since_version = version

    def on_farewell(self, frontend_id: FrontendId, version: int) -> None:
        """A front end said farewell, by this version of the membership.

        It may have heard before the instance itself that this one is being emptied.
        """
        self._farewells[frontend_id] = max(version, self._farewells.get(frontend_id, version))

    def to_tell(self, frontends: Iterable[FrontendId], version: int) -> int | None:
        """The version since which the instance is being emptied, if that is to be told now: all
        these front ends have left, and it was not told since the membership is of this version."""
        since = self._since_version
        if since is None or self._told_version == version:
            return None
        if any(self._farewells.get(each, -1) < since for each in frontends):
            return None
        self._told_version = version
        return since
