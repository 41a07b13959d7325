"""Actors in their processes: garbage collection, and the environment of vLLM."""

import asyncio
import gc
import os
from collections.abc import Iterator

import pytest

from bench.scheduling.made_cluster import MadeCluster
from sterna.policy.presets import STERNA
from sterna.runtime.actors import actor_classes
from sterna.runtime.actors.actor_classes import _SchedulerActor
from sterna.scheduler.core import SchedulerCore


@pytest.fixture(autouse=True)
def _process_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(actor_classes, "configure_logging", lambda level: None)
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)


def test_the_schedulers_process_seldom_looks_for_garbage_in_what_it_knows_of_prefix_caches() -> (
    None
):
    """Requests wait meanwhile."""

    async def scenario() -> None:
        # Without `__init__`, which asks Ray for the process.
        actor = _SchedulerActor.__new__(_SchedulerActor)
        await actor.start(STERNA, "127.0.0.1", "INFO", None)
        actor._serving.cancel()
        await asyncio.wait({actor._serving})
        actor._mailbox.close()

    cluster = MadeCluster(256, seed=1)
    reports = [*cluster.caches(), *cluster.loads()]
    requests = [cluster.request() for _ in range(1_000)]
    core = SchedulerCore(STERNA, now_s=0.0)
    collections: list[dict[str, int]] = []

    def on_collection(phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            collections.append(info)

    asyncio.run(scenario())
    gc.callbacks.append(on_collection)
    try:
        core.on_membership(cluster.membership(), 0.0)
        for message in (*reports, *requests):
            core.on_message(message, 0.0)
    finally:
        gc.callbacks.remove(on_collection)
    # By default there are 20.
    assert len(collections) <= 6


def test_a_node_has_the_servers_variables_unless_it_has_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What Sterna itself sets holds everywhere."""
    monkeypatch.setattr(actor_classes, "drop_noise", lambda: None)
    monkeypatch.setattr(
        os, "environ", {"VLLM_CACHE_ROOT": "/disk", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    )
    of_server = {"VLLM_CACHE_ROOT": "/home/vllm", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    actor_classes._engine_environment({"VLLM_USE_V2_MODEL_RUNNER": "0"}, of_server)
    assert os.environ == {
        "VLLM_CACHE_ROOT": "/disk",
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }
