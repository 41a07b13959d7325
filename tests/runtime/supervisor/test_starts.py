"""Whoever works no more before it has started has a successor, as if it had been up: its start
would be waited for, for good."""

import asyncio
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sterna.config import ClusterConfig, FrontendConfig, LlumletConfig, TransportConfig
from sterna.engine.vllm.guard import installed_versions
from sterna.errors import InstanceStartError
from sterna.policy.presets import STERNA
from sterna.runtime.actors.actor_classes import EQUAL_PACKAGES
from sterna.runtime.processes.process import identity_of
from sterna.runtime.supervisor import instance_actors, services, watch
from sterna.runtime.supervisor.instance_actors import InstanceActors, server_variables
from sterna.runtime.supervisor.services import Services
from sterna.runtime.supervisor.tasks import Tasks
from sterna.runtime.supervisor.watch import Watch
from sterna.supervisor.failure_detector import ProcessIdentity
from sterna.types import FrontendId, InstanceId

NODE = "node"
CONFIG = ClusterConfig(LlumletConfig(STERNA), TransportConfig(), FrontendConfig())
HANG_TIMEOUT_S = 30.0
"""No wait of a test takes so long unless something hangs."""


class Method:
    """A method of an actor's handle."""

    def __init__(self, method: Callable[..., Awaitable[Any]]) -> None:
        self.remote = method


class Handle:
    """An actor's handle.

    Args:
        process: None: it does not come so far that it says which one it has.
        is_sound: whether it starts.
    """

    def __init__(self, process: ProcessIdentity | None, *, is_sound: bool) -> None:
        self._process, self._is_sound = process, is_sound
        self.has_started = asyncio.Event()
        self.process, self.start = Method(self._tell_process), Method(self._start)
        self.prepare, self.versions = Method(self._start), Method(self._versions)

    async def _tell_process(self) -> ProcessIdentity:
        if self._process is None:
            await asyncio.Event().wait()
        assert self._process is not None
        return self._process

    async def _versions(self) -> tuple[str, dict[str, str]]:
        return "127.0.0.1", installed_versions(*EQUAL_PACKAGES)

    async def _start(self, *_: object) -> str:
        if not self._is_sound:
            await asyncio.Event().wait()
        self.has_started.set()
        return "mailbox"


class WatchOfStarts(Watch):
    """One for which nobody ends who is up."""

    async def until_ended(self, *_: object, **__: object) -> str:
        await asyncio.Event().wait()
        return ""


class ServicesOf(Services):
    """Services whose actors are these, one after the other."""

    def __init__(self, handles: list[Handle], tasks: Tasks) -> None:
        super().__init__({}, "metrics", tasks, lambda: None)
        self.configure(CONFIG, b"args", WatchOfStarts(CONFIG.watch, tasks))
        self.ready = b"ready"
        self._handles = handles

    def _begin_scheduler(self) -> Any:
        return self._handles.pop(0)

    def _import_frontend(self) -> tuple[FrontendId, Any]:
        return FrontendId(7), self._handles.pop(0)

    async def replace(self, what: str) -> None:
        """Replace one of these."""
        start = self.start_scheduler if what == "scheduler" else self._replace_frontend
        await self._replace(what, start)


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (instance_actors, services):
        monkeypatch.setattr(module, "is_gcs_up", lambda: True)
    for module in (instance_actors, watch):
        monkeypatch.setattr(module, "own_node", lambda: NODE)
    monkeypatch.setattr("ray.kill", lambda _: None)
    monkeypatch.setattr(services, "RETRY_DELAYS_S", (0.0,))


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes that do nothing."""
    begun = [subprocess.Popen(["sleep", "1000"]) for _ in range(2)]
    yield begun
    for each in begun:
        each.kill()
        each.wait()


def identity(process: subprocess.Popen[bytes]) -> ProcessIdentity:
    found = identity_of(process.pid, NODE)
    assert found is not None
    return found


def halt(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send the signal; returns when it has stopped or ended, and nobody has waited for it."""
    process.send_signal(number)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize("what", ["scheduler", "front end"])
def test_one_that_is_stopped_or_gone_while_it_starts_is_replaced(
    what: str, number: signal.Signals, processes: list[subprocess.Popen[bytes]]
) -> None:
    """Ray may tell of an end late, and never of a stop."""

    async def scenario() -> None:
        tasks = Tasks()
        doomed, successor = (
            Handle(identity(each), is_sound=is_sound)
            for each, is_sound in zip(processes, (False, True), strict=True)
        )
        halt(processes[0], number)
        async with asyncio.timeout(HANG_TIMEOUT_S):
            await ServicesOf([doomed, successor], tasks).replace(what)
        assert successor.has_started.is_set()
        tasks.cancel()

    asyncio.run(scenario())
    assert processes[0].wait(HANG_TIMEOUT_S) == -signal.SIGKILL


@pytest.mark.parametrize("what", ["scheduler", "front end"])
def test_one_that_never_says_which_process_it_has_is_replaced(
    what: str, processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "START_TIMEOUT_S", 0.0)

    async def scenario() -> None:
        tasks = Tasks()
        silent = Handle(None, is_sound=False)
        successor = Handle(identity(processes[1]), is_sound=True)
        async with asyncio.timeout(HANG_TIMEOUT_S):
            await ServicesOf([silent, successor], tasks).replace(what)
        assert successor.has_started.is_set()
        tasks.cancel()

    asyncio.run(scenario())


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_an_instance_that_is_stopped_or_gone_while_it_starts_has_not_started(
    number: signal.Signals,
    processes: list[subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its place is free again."""
    has_given_back = []

    async def give_back() -> None:
        has_given_back.append(True)

    async def find_place(*_: object) -> Any:
        return SimpleNamespace(options=dict, give_back=give_back), "10.0.0.1"

    async def scenario() -> None:
        tasks = Tasks()
        doomed = Handle(identity(processes[0]), is_sound=False)
        actors = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda _: doomed))
        monkeypatch.setattr(instance_actors, "InstanceActor", actors)
        monkeypatch.setattr(instance_actors, "find_place", find_place)
        emulated: Any = object()
        watching = WatchOfStarts(CONFIG.watch, tasks)
        hosted = InstanceActors(CONFIG, b"args", emulated, {}, watching, tasks, tuple)
        halt(processes[0], number)
        async with asyncio.timeout(HANG_TIMEOUT_S):
            with pytest.raises(InstanceStartError, match=r"^instance i0 did not start: its proc"):
                await hosted.start(InstanceId("i0"), (), lambda _: None, lambda _: None)
        tasks.cancel()

    asyncio.run(scenario())
    assert has_given_back == [True]
    assert processes[0].wait(HANG_TIMEOUT_S) == -signal.SIGKILL


def test_instances_on_other_nodes_get_vllms_variables_without_secrets_and_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1", "VLLM_PLUGINS": "terns"}
    own = {
        **{"VLLM_API_KEY": "secret", "VLLM_HOST_IP": "10.0.0.1", "VLLM_PORT": "9000"},
        **{"VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.1", "HF_TOKEN": "secret", "PATH": "/bin"},
    }
    assert server_variables({**given, **own}) == given
    for name, value in {**given, **own}.items():
        monkeypatch.setenv(name, value)

    async def scenario() -> None:
        tasks = Tasks()
        unused: Any = None
        hosted = InstanceActors(CONFIG, b"args", unused, {}, unused, tasks, tuple)
        found = hosted._spec(InstanceId("i0"), ()).server_variables
        assert found.items() >= given.items()
        assert not found.keys() & own.keys()
        tasks.cancel()

    asyncio.run(scenario())
