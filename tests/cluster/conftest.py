"""One Ray for all cluster tests, and one asyncio loop for each module's instances."""

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import ray

from sterna.cli.serve import engine_environment, parse
from tests.cluster.pair import InstancePair
from tests.cluster.requests import RequestBuilder

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    ray.init(include_dashboard=False, logging_level="warning", object_store_memory=80 << 20)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="session")
def run(loop: asyncio.AbstractEventLoop) -> Run:
    """Runs a coroutine on the loop that the instances' mailboxes belong to."""
    return loop.run_until_complete


@pytest.fixture(scope="session")
def make_pair(ray_cluster: None, run: Run) -> Iterator[Callable[..., InstancePair]]:
    """Starts instances with options of `sterna serve`; closed with the session at the latest."""
    pairs: list[InstancePair] = []

    def make(*options: str, **settings: Any) -> InstancePair:
        args = parse(["serve", *options])
        pair = InstancePair(args, engine_environment(), **settings)
        pairs.append(pair)
        run(pair.start())
        return pair

    yield make
    for pair in pairs:
        if not pair.is_closed:
            run(pair.close())


@pytest.fixture(scope="session")
def build() -> RequestBuilder:
    return RequestBuilder(parse(["serve"]))
