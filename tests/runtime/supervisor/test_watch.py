"""Members on other nodes count as dead when they have ended for certain, whatever Ray says."""

import asyncio
import signal
import subprocess
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import ray

from sterna.config import WatchConfig
from sterna.runtime.processes.process import identity_of
from sterna.runtime.supervisor import watch
from sterna.runtime.supervisor.tasks import Tasks
from sterna.runtime.supervisor.watch import NotStartedError, Watch, process_of
from sterna.supervisor.failure_detector import ProcessIdentity, ProcessState
from sterna.supervisor.lease import DRIFT, MARGIN_S
from tests.clocks import SkippingLoop, run_skipping, stands

LEASE_S = 20.0
CERTAIN_S = LEASE_S * (1 + DRIFT) + MARGIN_S
THERE = ProcessIdentity("another node", 4711, 123456)

HANG_TIMEOUT_S = 30.0

NUM_TURNS = 20
"""More turns of the loop than anything here takes."""


class Method:
    """A method of an actor's handle."""

    def __init__(self, method: Callable[..., Awaitable[Any]]) -> None:
        self.remote = method


class LostInstance:
    """The handle of an instance whose node Ray has given up."""

    def __init__(self) -> None:
        self.run = Method(self._run)

    async def _run(self) -> str:
        raise ray.exceptions.NodeDiedError("its node is dead")


class NodeActor:
    """What looks at the processes of another node, and ends them there, while it can be reached."""

    def __init__(self, *, is_within_reach: bool) -> None:
        self._is_within_reach = is_within_reach
        self.look, self.end = Method(self._look), Method(self._end)

    async def _look(self, processes: list[ProcessIdentity]) -> list[ProcessState]:
        self._answer()
        return [ProcessState.RUNNING] * len(processes)

    async def _end(self, process: ProcessIdentity) -> None:
        self._answer()

    def _answer(self) -> None:
        if not self._is_within_reach:
            raise ray.exceptions.NodeDiedError("its node is dead")


class WatchOf(Watch):
    """One that asks this actor about other nodes; Ray has lost those that cannot be reached."""

    def __init__(self, actor: NodeActor, tasks: Tasks) -> None:
        super().__init__(WatchConfig(lease_s=LEASE_S), tasks)
        self._actor = actor

    def _node_actor(self, node_id: str) -> Any:
        self._nodes[node_id] = self._actor
        return self._actor

    async def _is_back(self, node_id: str, error: ray.exceptions.RayError) -> bool:
        return False


def ended_after(
    monkeypatch: pytest.MonkeyPatch,
    *looks_s: float,
    is_within_reach: bool,
    actor: LostInstance | None,
) -> list[bool]:
    """Whether an instance counts as dead these times after it was lost.

    Args:
        actor: None if it did not answer a successor of its supervisor.
    """
    monkeypatch.setattr(watch, "own_node", lambda: "this node")
    monkeypatch.setattr(watch, "node_address", lambda _: "10.0.0.2")

    async def scenario(loop: SkippingLoop) -> list[bool]:
        tasks = Tasks()
        watching = WatchOf(NodeActor(is_within_reach=is_within_reach), tasks)
        ended = asyncio.ensure_future(watching.until_ended("i1", actor, THERE))
        found = []
        for look_s in looks_s:
            loop.skipped_s = look_s
            for _ in range(NUM_TURNS):
                await asyncio.sleep(0)
            found.append(ended.done())
        ended.cancel()
        tasks.cancel()
        return found

    return run_skipping(scenario, clock=stands)


lost_or_silent = pytest.mark.parametrize(
    "actor",
    [
        pytest.param(LostInstance(), id="Ray has given its node up"),
        pytest.param(None, id="it does not answer a successor of its supervisor"),
    ],
)


@lost_or_silent
def test_an_instance_out_of_reach_is_dead_when_its_lease_has_ended(
    monkeypatch: pytest.MonkeyPatch, actor: LostInstance | None
) -> None:
    """It may be cut off, and live: its requests would be computed in two places."""
    looks_s = (0.0, LEASE_S, CERTAIN_S - 0.1, CERTAIN_S + 0.1)
    found = ended_after(monkeypatch, *looks_s, is_within_reach=False, actor=actor)
    assert found == [False, False, False, True]


@lost_or_silent
def test_an_instance_that_is_killed_on_its_node_is_dead_at_once(
    monkeypatch: pytest.MonkeyPatch, actor: LostInstance | None
) -> None:
    assert ended_after(monkeypatch, 0.0, is_within_reach=True, actor=actor) == [True]


def test_a_node_that_is_lost_is_named_by_its_address(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As `sterna instances` shows it."""
    addresses = {THERE.node_id: "10.0.0.2"}
    monkeypatch.setattr(watch, "own_node", lambda: "this node")
    monkeypatch.setattr(watch, "node_address", addresses.__getitem__)

    async def scenario() -> None:
        tasks = Tasks()
        watching = WatchOf(NodeActor(is_within_reach=False), tasks)
        ended = asyncio.ensure_future(watching.until_ended("i1", LostInstance(), THERE))
        await asyncio.sleep(0)
        async with asyncio.timeout(HANG_TIMEOUT_S):
            await watching._look_at(THERE.node_id)
        ended.cancel()
        tasks.cancel()

    asyncio.run(scenario())
    assert "node lost node=10.0.0.2 ray_id=another node" in caplog.text


def test_an_instance_of_this_node_that_does_not_answer_a_successor_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "own_node", lambda: "this node")
    silent = subprocess.Popen(["sleep", "1000"])

    async def scenario() -> None:
        tasks = Tasks()
        process = identity_of(silent.pid, "this node")
        assert process is not None
        watching = Watch(WatchConfig(), tasks)
        async with asyncio.timeout(HANG_TIMEOUT_S):
            await watching.until_ended("i1", None, process)
        tasks.cancel()

    try:
        asyncio.run(scenario())
    finally:
        silent.kill()
    assert silent.wait() == -signal.SIGKILL


def test_a_node_without_members_is_no_longer_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[Any] = []

    async def forget(actor: Any) -> None:
        forgotten.append(actor)

    monkeypatch.setattr(watch, "own_node", lambda: "this node")
    monkeypatch.setattr(watch, "forget", forget)

    async def scenario(loop: SkippingLoop) -> None:
        tasks, actor = Tasks(), NodeActor(is_within_reach=True)
        watching = WatchOf(actor, tasks)
        for num_ended in (1, 2):
            await watching.until_ended("i1", LostInstance(), THERE)
            loop.skipped_s += 1.0
            for _ in range(NUM_TURNS):
                await asyncio.sleep(0)
            assert watching._nodes == {}
            assert forgotten == [actor] * num_ended
        tasks.cancel()

    run_skipping(scenario, clock=stands)


class Silent:
    """The handle of an actor that never says which process it has."""

    def __init__(self) -> None:
        self.process = Method(self._process)

    async def _process(self) -> ProcessIdentity:
        await asyncio.Event().wait()
        raise AssertionError


def test_one_that_hangs_while_it_starts_is_ended_after_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "own_node", lambda: "this node")
    hanging = subprocess.Popen(["sleep", "1000"])

    async def scenario() -> None:
        tasks = Tasks()
        process = identity_of(hanging.pid, "this node")
        assert process is not None
        watching = Watch(WatchConfig(), tasks)
        with pytest.raises(NotStartedError, match=r"^scheduler did not start: it took 0 s$"):
            await watching.until_started(
                "scheduler", process, asyncio.Event().wait(), timeout_s=0.0
            )
        tasks.cancel()

    asyncio.run(scenario())
    assert hanging.wait() == -signal.SIGKILL


def test_a_start_ends_as_what_was_started_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "own_node", lambda: "this node")

    async def fail() -> str:
        raise ray.exceptions.ActorDiedError

    async def scenario() -> None:
        tasks = Tasks()
        watching = WatchOf(NodeActor(is_within_reach=True), tasks)
        with pytest.raises(ray.exceptions.ActorDiedError):
            await watching.until_started("i1", THERE, fail())
        # It can be watched again: its lease begins when it is up.
        assert await watching.until_started("i1", THERE, asyncio.sleep(0, "up")) == "up"
        tasks.cancel()

    asyncio.run(scenario())


def test_an_actor_that_does_not_say_which_process_it_has_has_not_started() -> None:
    with pytest.raises(NotStartedError, match=r"^i1 did not start: it has not answered within 0 s"):
        asyncio.run(process_of("i1", Silent(), 0.0))
