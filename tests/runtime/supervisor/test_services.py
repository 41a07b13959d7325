"""The front ends of a cluster that is told to end."""

import asyncio
import os
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from sterna.config import ClusterConfig, FrontendConfig, LlumletConfig, TransportConfig
from sterna.policy.presets import STERNA
from sterna.runtime.supervisor import services
from sterna.runtime.supervisor.recovery import FoundMembers
from sterna.runtime.supervisor.services import Services
from sterna.runtime.supervisor.tasks import Tasks
from sterna.runtime.supervisor.watch import NotStartedError
from sterna.supervisor.failure_detector import ProcessIdentity
from sterna.types import FrontendId


class Method:
    """A method of an actor's handle."""

    def __init__(self, method: Callable[..., Awaitable[Any]]) -> None:
        self.remote = method


class FrontendHandle:
    """A front end that comes up when it is let."""

    def __init__(self) -> None:
        self.may_prepare, self.may_start = asyncio.Event(), asyncio.Event()
        self.is_starting = asyncio.Event()
        self.drains_s: list[float] = []
        self.prepare, self.process = Method(self._prepare), Method(self._process)
        self.start, self.finish_requests = Method(self._start), Method(self._finish_requests)

    async def _prepare(self, *_: object) -> str:
        await self.may_prepare.wait()
        return "mailbox"

    async def _process(self) -> ProcessIdentity:
        return ProcessIdentity("node", 4711, 123456)

    async def _start(self, *_: object) -> None:
        self.is_starting.set()
        await self.may_start.wait()

    async def _finish_requests(self, timeout_s: float) -> int:
        # What does not listen yet has no door that could be closed.
        if self.may_start.is_set():
            self.drains_s.append(timeout_s)
        return 0


class OneEnds:
    """A watch of a member that has been killed."""

    async def until_ended(self, *_: object, **__: object) -> str:
        return "killed"


class NobodyEnds:
    """A watch of members that live."""

    async def until_ended(self, *_: object, **__: object) -> str:
        await asyncio.Event().wait()
        return ""

    async def until_started(
        self, member: str, process: ProcessIdentity, start: Awaitable[Any], **_: object
    ) -> Any:
        return await start


@pytest.fixture(autouse=True)
def gcs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether Ray's GCS is up, for each time that somebody looks; the last one holds on."""
    is_up = [True]
    monkeypatch.setattr(services, "is_gcs_up", lambda: is_up.pop(0) if is_up[1:] else is_up[0])
    return is_up


class ServicesWith(Services):
    """Services whose next front end is this one."""

    def __init__(
        self, handle: FrontendHandle, tasks: Tasks, metrics_folder: str = "metrics"
    ) -> None:
        super().__init__({}, metrics_folder, tasks, lambda: None)
        config = ClusterConfig(LlumletConfig(STERNA), TransportConfig(), FrontendConfig())
        self.configure(config, b"args", NobodyEnds())  # type: ignore[arg-type]
        self.ready = b"ready"
        self._handle = handle

    def _import_frontend(self) -> tuple[FrontendId, Any]:
        return FrontendId(7), self._handle


def test_a_front_end_that_comes_up_while_the_server_drains_lets_nobody_in() -> None:
    """It takes the place of one that died just before: it would answer `/health` with 200, and what
    it took in would be cut."""

    async def scenario() -> list[float]:
        handle, tasks = FrontendHandle(), Tasks()
        services = ServicesWith(handle, tasks)
        replacing = tasks.begin(services._replace("front end", services._replace_frontend))
        handle.may_prepare.set()
        await handle.is_starting.wait()
        assert await services.finish_requests(25.0) == 0
        handle.may_start.set()
        await replacing
        tasks.cancel()
        return handle.drains_s

    assert asyncio.run(scenario()) == [0.0]


def test_a_front_end_that_has_not_begun_to_listen_when_the_server_drains_does_not() -> None:
    async def scenario() -> FrontendHandle:
        handle, tasks = FrontendHandle(), Tasks()
        services = ServicesWith(handle, tasks)
        replacing = tasks.begin(services._replace("front end", services._replace_frontend))
        assert await services.finish_requests(25.0) == 0
        handle.may_prepare.set()
        handle.may_start.set()
        await replacing
        tasks.cancel()
        assert services.others().frontends == ()
        return handle

    assert not asyncio.run(scenario()).is_starting.is_set()


def test_gauges_of_a_front_end_that_has_ended_go_and_its_counts_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def forget(_: object) -> None:
        pass

    monkeypatch.setattr(services, "forget", forget)
    names = ["counter_4711.db", "gauge_livemostrecent_4711.db", "gauge_livemostrecent_4712.db"]
    for name in names:
        (tmp_path / name).touch()

    async def scenario() -> None:
        tasks = Tasks()
        ending = Services({}, str(tmp_path), tasks, lambda: None)
        config = ClusterConfig(LlumletConfig(STERNA), TransportConfig(), FrontendConfig())
        ending.configure(config, b"args", OneEnds())  # type: ignore[arg-type]
        # It is not replaced then.
        await ending.finish_requests(0.0)
        process = ProcessIdentity("node", 4711, 123456)
        member = services._Member(FrontendHandle(), "mailbox", process)
        ending._frontends[FrontendId(7)] = member
        await ending._watch_frontend(FrontendId(7), member)
        tasks.cancel()

    asyncio.run(scenario())
    assert sorted(each.name for each in tmp_path.iterdir()) == [names[0], names[2]]


def test_gauges_of_a_front_end_that_ends_during_its_start_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is announced before it has started, so it has shown the scheduler's statistics."""
    files = [tmp_path / name for name in ("counter_4711.db", "gauge_livemostrecent_4711.db")]
    handle = FrontendHandle()
    handle.may_prepare.set()

    async def forget(_: object) -> None:
        pass

    async def start(*_: object) -> None:
        for file in files:
            file.touch()
        raise NotStartedError("it was killed")

    monkeypatch.setattr(services, "forget", forget)
    handle.start = Method(start)

    async def scenario() -> None:
        starting = ServicesWith(handle, Tasks(), str(tmp_path))
        with pytest.raises(NotStartedError):
            await starting._replace_frontend()
        assert starting.others().frontends == ()

    asyncio.run(scenario())
    assert [each.exists() for each in files] == [True, False]


def test_nobody_is_replaced_before_rays_gcs_is_there(
    monkeypatch: pytest.MonkeyPatch, gcs: list[bool]
) -> None:
    """To ask for an actor would hold the supervisor up, and all that it has to answer."""
    monkeypatch.setattr(services, "RETRY_DELAYS_S", (0.0,))
    gcs[:] = [False, False, True]

    async def scenario() -> list[list[bool]]:
        starts: list[list[bool]] = []

        async def start() -> None:
            starts.append(list(gcs))

        await ServicesWith(FrontendHandle(), Tasks())._replace("front end", start)
        return starts

    assert asyncio.run(scenario()) == [[True]]


def test_a_supervisor_that_takes_over_hides_the_gauges_of_front_ends_that_died_before(
    tmp_path: Path,
) -> None:
    """They would show instances of that time for ever; counts stay, since they are added up."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    gone = [f"gauge_livemostrecent_{ended.pid}.db"]
    staying = [
        *(f"counter_{ended.pid}.db", f"histogram_{ended.pid}.db"),
        f"gauge_livemostrecent_{os.getpid()}.db",
    ]
    for name in (*gone, *staying):
        (tmp_path / name).touch()

    async def test() -> None:
        tasks = Tasks()
        under_test = ServicesWith(FrontendHandle(), tasks, str(tmp_path))
        under_test.take_over(FoundMembers())
        tasks.cancel()

    asyncio.run(test())
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(staying)
