"""The first instances: auto-scaling may call off a start that waits for a place, and the warm pool
comes after them."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import pytest

from sterna.config import ClusterConfig, FrontendConfig, LlumletConfig, TransportConfig
from sterna.engine.interface import EngineFacts
from sterna.messages.actors import TerminateInstance
from sterna.policy.presets import STERNA
from sterna.runtime.actors.packed_args import PackedArgs
from sterna.runtime.supervisor.instance_actors import InstanceActors
from sterna.runtime.supervisor.services import Services
from sterna.runtime.supervisor.shell import Supervisor
from sterna.supervisor.core import HostedInstance
from sterna.supervisor.failure_detector import ProcessIdentity
from sterna.types import InstanceId

CONFIG = ClusterConfig(LlumletConfig(STERNA), TransportConfig(), FrontendConfig(), num_instances=2)
I0, I1, I2 = InstanceId("i0"), InstanceId("i1"), InstanceId("i2")
UP = HostedInstance("tcp://127.0.0.1:4711", "kv", ProcessIdentity("node", 4711, 123456))
FACTS = EngineFacts(1000, b"kv", "")
HANG_TIMEOUT_S = 30.0


def play(
    monkeypatch: pytest.MonkeyPatch,
    start: Callable[..., Awaitable[EngineFacts]],
    up: Sequence[InstanceId],
) -> None:
    """Play the actors: instances start like this, and those that are up never end."""

    async def nothing(*_: object) -> None:
        pass

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(InstanceActors, "start", start)
    monkeypatch.setattr(InstanceActors, "ended", never)
    monkeypatch.setattr(InstanceActors, "close_all", nothing)
    monkeypatch.setattr(InstanceActors, "hosted", lambda _: dict.fromkeys(up, UP))
    for each in ("prepare", "start_scheduler", "start_frontends"):
        monkeypatch.setattr(Services, each, nothing)


def test_a_first_start_that_is_called_off_ends_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits = asyncio.Event()
    called_off: list[InstanceId] = []

    async def start(
        actors: InstanceActors,
        instance_id: InstanceId,
        options: tuple[str, ...],
        on_pending: Callable[[str], None],
        on_placed: Callable[[str], None],
    ) -> EngineFacts:
        if instance_id == I1:
            on_pending("no node has 2 GPUs free")
            waits.set()
            try:
                await asyncio.Event().wait()
            finally:
                called_off.append(instance_id)
        return FACTS

    play(monkeypatch, start, [I0])

    async def scenario() -> None:
        supervisor = Supervisor({}, "metrics", is_successor=True)
        async with asyncio.timeout(HANG_TIMEOUT_S):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(supervisor.start(CONFIG, PackedArgs(b"a", b"a")))
                await waits.wait()
                supervisor._on_message(TerminateInstance(I0), [])
            assert list(supervisor._fleet.members) == [I0]
            await supervisor.close()

    asyncio.run(scenario())
    assert called_off == [I1]


def test_a_warm_instance_starts_after_the_first_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[InstanceId] = []
    is_warming = asyncio.Event()

    async def start(_: InstanceActors, instance_id: InstanceId, *__: object) -> EngineFacts:
        begun.append(instance_id)
        if instance_id == I2:
            is_warming.set()
        return FACTS

    play(monkeypatch, start, begun)

    async def scenario() -> None:
        supervisor = Supervisor({}, "metrics", is_successor=True)
        async with asyncio.timeout(HANG_TIMEOUT_S):
            config = replace(CONFIG, num_warm_instances=1)
            await supervisor.start(config, PackedArgs(b"a", b"a"))
            assert begun == [I0, I1]
            await is_warming.wait()
        assert begun == [I0, I1, I2]
        await supervisor.close()

    asyncio.run(scenario())
