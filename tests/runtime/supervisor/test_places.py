"""Whoever clients ask, or replaces the dead, stays on the node of `sterna serve`, though Ray would
start it on any node that has joined."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sterna.runtime.home.supervisor_handle import SupervisorHandle
from sterna.runtime.supervisor.services import Services
from sterna.runtime.supervisor.tasks import Tasks

HOME = "5e" * 28
"""As Ray names a node."""


class ActorClass:
    """A class of actors, of which some are begun: these options had the last of them."""

    def __init__(self) -> None:
        self.last_options: dict[str, Any] = {}

    def options(self, **options: Any) -> "ActorClass":
        self.last_options = options
        return self

    def remote(self, *_: object, **__: object) -> Any:
        return SimpleNamespace(process=SimpleNamespace(remote=lambda: None))


def begin_frontend() -> None:
    services()._import_frontend()


def begin_scheduler() -> None:
    services()._begin_scheduler()


def begin_supervisor() -> None:
    SupervisorHandle.begin({}, "metrics", is_successor=True)


def services() -> Services:
    async def make() -> Services:
        return Services({}, "metrics", Tasks(), lambda: None)

    return asyncio.run(make())


@pytest.mark.parametrize(
    ("actor_class", "begin"),
    [
        ("sterna.runtime.supervisor.services.FrontendActor", begin_frontend),
        ("sterna.runtime.supervisor.services.SchedulerActor", begin_scheduler),
        ("sterna.runtime.home.supervisor_handle.SupervisorActor", begin_supervisor),
    ],
    ids=["front end", "scheduler", "supervisor"],
)
def test_who_is_begun_comes_up_on_the_node_where_it_was_begun_or_not_at_all(
    actor_class: str, begin: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first ones and those that replace them are begun in the same way."""
    actors = ActorClass()
    monkeypatch.setattr(actor_class, actors)
    monkeypatch.setattr("sterna.runtime.actors.addresses.own_node", lambda: HOME)
    begin()
    place = actors.last_options["scheduling_strategy"]
    assert (place.node_id, place.soft) == (HOME, False)
