"""A world of nodes for each transport."""

from collections.abc import Iterator

import pytest

from tests.transport.planes import KINDS
from tests.transport.world import World


@pytest.fixture(params=KINDS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(request.param)
    yield world
    world.close()
