"""An instance's place comes back, also where Ray's GCS is away when the instance ends or fails to
start: what stays reserved is room that no other instance gets."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Collection, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from sterna.config import ClusterConfig, FrontendConfig, LlumletConfig, TransportConfig
from sterna.engine.interface import EngineFacts
from sterna.engine.vllm.guard import installed_versions
from sterna.errors import InstanceStartError
from sterna.messages.actors import Membership
from sterna.policy.presets import STERNA
from sterna.runtime.actors.actor_classes import EQUAL_PACKAGES
from sterna.runtime.actors.member_status import MemberStatus
from sterna.runtime.actors.packed_args import PackedArgs
from sterna.runtime.supervisor import instance_actors, placement, services, shell, watch
from sterna.runtime.supervisor.instance_actors import InstanceActors
from sterna.runtime.supervisor.recovery import FRONTEND, SCHEDULER, FoundMembers
from sterna.runtime.supervisor.shell import Supervisor
from sterna.runtime.supervisor.tasks import Tasks
from sterna.supervisor.core import HostedInstance, SupervisorState
from sterna.supervisor.failure_detector import ProcessIdentity
from sterna.supervisor.fleet import Fleet, Member, Phase
from sterna.types import InstanceId

I0, I1 = InstanceId("i0"), InstanceId("i1")
PROCESS = ProcessIdentity("node", 4711, 123456)
FACTS = EngineFacts(1000, b"kv", "")
CONFIG = ClusterConfig(LlumletConfig(STERNA), TransportConfig(), FrontendConfig())
HANG_TIMEOUT_S = 30.0
"""No wait of a test takes so long unless something hangs."""


NODES = {"aa": "10.0.0.1", "bb": "10.0.0.2"}
"""Addresses of nodes by Ray's ids."""


class Group:
    """A placement group with room for one instance.

    Args:
        nodes: those with room, of which it gets the first.
    """

    def __init__(self, name: str, nodes: list[str]) -> None:
        self.name = name
        self.bundle_specs = [{"CPU": 1.0}]
        self.nodes = nodes

    def wait(self, timeout_s: float) -> bool:
        return bool(self.nodes)


class Groups:
    """Ray's placement groups, and whether its GCS takes one back."""

    def __init__(self) -> None:
        self.there: dict[str, Group] = {}
        self.has_room = True
        self.nodes = dict(NODES)
        self.num_refused = 0
        self.num_attempts = 0
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.is_asked = asyncio.Event()
        self._has_changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def add(
        self,
        bundles: list[dict[str, float]],
        name: str,
        lifetime: str,
        bundle_label_selector: list[dict[str, str]] | None = None,
    ) -> Group:
        assert lifetime == "detached"
        assert name not in self.there
        (selector,) = bundle_label_selector or [{}]
        left_out = selector.get("ray.io/node-id", "!in()")[len("!in(") : -1].split(", ")
        nodes = [each for each in self.nodes if self.has_room and each not in left_out]
        self.there[name] = Group(name, nodes)
        return self.there[name]

    def remove(self, group: Group) -> None:
        self.num_attempts += 1
        self._loop.call_soon_threadsafe(self.is_asked.set)
        assert self.may_answer.wait(HANG_TIMEOUT_S)
        if self.num_attempts <= self.num_refused:
            raise ray.exceptions.GetTimeoutError("the GCS server is dead")
        self.there.pop(group.name, None)
        self._loop.call_soon_threadsafe(self._has_changed.set)

    def list_nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeID": node_id, "NodeManagerAddress": address, "Alive": True}
            for node_id, address in self.nodes.items()
        ]

    async def until_left(self, *names: str) -> None:
        """Wait until there are only these."""
        while set(self.there) != set(names):
            await self._has_changed.wait()
            self._has_changed.clear()

    def find(self, name: str) -> Group:
        if name not in self.there:
            raise ValueError(f"no placement group is called {name}")
        return self.there[name]

    def table(self, group: Group | None = None) -> dict[str, Any]:
        if group is not None:
            return {"bundles_to_node_id": {0: group.nodes[0]}}
        dead = {"name": "i99", "state": "REMOVED"}
        there = [{"name": each, "state": "CREATED"} for each in self.there]
        return {str(number): each for number, each in enumerate([dead, *there])}


class Method:
    """A method of an actor's handle."""

    def __init__(self, method: Callable[..., Awaitable[Any]]) -> None:
        self.remote = method


class Handle:
    """An instance's handle.

    Args:
        is_sound: whether it comes up.
        versions: what its node has; None: what the server has.
    """

    def __init__(self, *, is_sound: bool, versions: dict[str, str] | None = None) -> None:
        self._is_sound = is_sound
        self._its_versions = versions or installed_versions(*EQUAL_PACKAGES)
        self.start, self.process = Method(self._start), Method(self._process)
        self.versions = Method(self._versions)

    async def _versions(self) -> tuple[str, dict[str, str]]:
        return "10.0.0.2", self._its_versions

    async def _start(self, *_: object) -> tuple[str, EngineFacts]:
        if not self._is_sound:
            raise ray.exceptions.ActorDiedError
        return "mailbox", FACTS

    async def _process(self) -> ProcessIdentity:
        return PROCESS


class Lasting(Handle):
    """An instance that a supervisor's successor finds up."""

    def __init__(self) -> None:
        super().__init__(is_sound=True)
        self.run, self.close = Method(self._run), Method(self._close)

    async def _run(self) -> str:
        await asyncio.Event().wait()
        return ""

    async def _close(self) -> None:
        """There is nothing to give back."""


class DoomedAtOnce:
    """A watch of members that end as soon as they are up."""

    async def until_started(
        self, member: str, process: ProcessIdentity, start: Awaitable[Any]
    ) -> Any:
        return await start

    async def until_ended(self, *_: object) -> str:
        return "it was killed"


def actor_class(handle: Handle) -> Any:
    """What all instances are started by: they are this one."""
    return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda _: handle))


def instances(
    handle: Handle,
    tasks: Tasks,
    monkeypatch: pytest.MonkeyPatch,
    drained: Collection[str] = frozenset(),
) -> InstanceActors:
    monkeypatch.setattr(instance_actors, "InstanceActor", actor_class(handle))
    emulated: Any = object()
    watching: Any = DoomedAtOnce()
    return InstanceActors(CONFIG, b"args", emulated, {}, watching, tasks, lambda: drained)


Scenario = Callable[[Groups, Tasks], Coroutine[Any, Any, None]]
Run = Callable[[Scenario], Groups]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a scenario over these placement groups, without Ray; returns them."""
    monkeypatch.setattr(placement, "RETRY_DELAY_S", 0.0)
    monkeypatch.setattr(placement, "PENDING_AFTER_S", 0.0)
    monkeypatch.setattr(placement, "is_gcs_up", lambda: True)
    monkeypatch.setattr(instance_actors, "is_gcs_up", lambda: True)
    monkeypatch.setattr(instance_actors, "own_node", lambda: "node")
    monkeypatch.setattr(ray, "kill", lambda _: None)
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 0.0})

    async def over_groups(scenario: Scenario) -> Groups:
        groups, tasks = Groups(), Tasks()
        monkeypatch.setattr(placement, "placement_group", groups.add)
        monkeypatch.setattr(placement, "remove_placement_group", groups.remove)
        monkeypatch.setattr(placement, "get_placement_group", groups.find)
        monkeypatch.setattr(placement, "placement_group_table", groups.table)
        monkeypatch.setattr(ray, "nodes", groups.list_nodes)
        async with asyncio.timeout(HANG_TIMEOUT_S):
            await scenario(groups, tasks)
        tasks.cancel()
        return groups

    return lambda scenario: asyncio.run(over_groups(scenario))


def ignore(_: str) -> None:
    """That an instance waits for a place, or where it has one, is not the matter."""


def test_the_place_of_an_instance_that_has_ended_comes_back_whenever_rays_gcs_does(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(groups: Groups, tasks: Tasks) -> None:
        hosted = instances(Handle(is_sound=True), tasks, monkeypatch)
        groups.num_refused = 2
        await hosted.start(I0, (), ignore, ignore)
        await hosted.ended(I0)
        await groups.until_left()

    assert run(scenario).num_attempts == 3


def test_nothing_is_left_of_an_instance_whose_start_has_failed_while_rays_gcs_was_away(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(groups: Groups, tasks: Tasks) -> None:
        hosted = instances(Handle(is_sound=False), tasks, monkeypatch)
        groups.num_refused = 2
        with pytest.raises(InstanceStartError):
            await hosted.start(I0, (), ignore, ignore)
        assert groups.there == {}

    assert run(scenario).num_attempts == 3


@pytest.mark.parametrize("package", EQUAL_PACKAGES)
def test_no_instance_starts_on_a_node_with_other_versions(
    package: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its options are not the reason, so that the start is tried again: the node may be mended."""
    own = installed_versions(*EQUAL_PACKAGES)
    theirs = {**own, package: "0.0.1"}

    async def scenario(groups: Groups, tasks: Tasks) -> None:
        hosted = instances(Handle(is_sound=True, versions=theirs), tasks, monkeypatch)
        with pytest.raises(InstanceStartError) as raised:
            await hosted.start(I0, (), ignore, ignore)
        assert not raised.value.is_of_options
        reason = str(raised.value)
        assert reason.startswith(f"instance i0: node 10.0.0.2 has sterna {theirs['sterna']}")
        assert f"{package} 0.0.1" in reason.partition(", and the server ")[0]
        assert f"sterna {own['sterna']}" in reason.partition(", and the server ")[2]
        assert groups.there == {}
        assert hosted.hosted() == {}

    run(scenario)


def test_the_place_that_a_start_waited_for_comes_back_when_it_is_called_off(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(groups: Groups, tasks: Tasks) -> None:
        hosted = instances(Handle(is_sound=True), tasks, monkeypatch)
        groups.has_room, groups.num_refused = False, 2
        is_pending = asyncio.Event()
        start = asyncio.ensure_future(hosted.start(I0, (), lambda _: is_pending.set(), ignore))
        await is_pending.wait()
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        await groups.until_left()

    assert run(scenario).num_attempts == 3


def test_the_place_comes_back_of_an_instance_that_ray_cannot_be_asked_for(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's GCS dies between the two."""

    def refuse(_: str) -> Any:
        raise ray.exceptions.GetTimeoutError("the GCS server is dead")

    async def scenario(groups: Groups, tasks: Tasks) -> None:
        hosted = instances(Handle(is_sound=True), tasks, monkeypatch)
        deaf = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=refuse))
        monkeypatch.setattr(instance_actors, "InstanceActor", deaf)
        with pytest.raises(InstanceStartError):
            await hosted.start(I0, (), ignore, ignore)
        assert groups.there == {}

    run(scenario)


def test_a_supervisors_successor_gives_back_every_place_that_no_instance_has(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its predecessor may have died before it could give back the place of one that the fleet had
    forgotten."""
    monkeypatch.setattr(watch, "own_node", lambda: "node")
    monkeypatch.setattr(services, "is_gcs_up", lambda: False)
    monkeypatch.setattr(instance_actors, "is_gcs_up", lambda: False)
    up = HostedInstance("tcp://127.0.0.1:4711", "kv", PROCESS)
    fleet = Fleet(2, members={I0: Member(0, Phase.SERVING), I1: Member(0, Phase.SERVING)})
    state = SupervisorState(fleet, {0: ()}, {}, 1, 1, b"ready", {I0: up})
    membership = Membership(3, (), (), None, state=state.encode())

    async def find_members() -> FoundMembers:
        status = MemberStatus(up.address, membership, PROCESS, FACTS)
        found = FoundMembers(numbers={FRONTEND: [], SCHEDULER: []})
        found.instances[I0] = Lasting(), status
        return found

    monkeypatch.setattr(shell, "find_members", find_members)

    async def scenario(groups: Groups, tasks: Tasks) -> None:
        for name in ("i0", "i1", "i7"):
            groups.add([], name, "detached")
        groups.num_refused = 1
        successor = Supervisor({}, "metrics", is_successor=True)
        await successor.take_over(CONFIG, PackedArgs(b"args", b"args"))
        await groups.until_left("i0")
        await successor.close()

    run(scenario)


@pytest.mark.parametrize("is_sound", [True, False], ids=["ended", "not started"])
def test_everything_else_goes_on_while_ray_is_asked_to_take_a_place_back(
    is_sound: bool, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Instances on other nodes end themselves where the supervisor does not answer them."""

    async def scenario(groups: Groups, tasks: Tasks) -> None:
        hosted = instances(Handle(is_sound=is_sound), tasks, monkeypatch)
        groups.may_answer.clear()
        start = asyncio.ensure_future(hosted.start(I0, (), ignore, ignore))
        if is_sound:
            await start
            await hosted.ended(I0)
        await groups.is_asked.wait()
        # A loop that is held up does not come here.
        assert set(groups.there) == {"i0"}
        groups.may_answer.set()
        await groups.until_left()
        await asyncio.wait((start,))

    run(scenario)


def test_everything_else_goes_on_while_ray_is_asked_for_room(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers when its GCS is there again."""
    may_answer = threading.Event()

    async def scenario(groups: Groups, tasks: Tasks) -> None:
        loop, is_asked = asyncio.get_running_loop(), asyncio.Event()

        def available_resources() -> dict[str, float]:
            loop.call_soon_threadsafe(is_asked.set)
            assert may_answer.wait(HANG_TIMEOUT_S)
            return {"CPU": 0.0}

        monkeypatch.setattr(ray, "available_resources", available_resources)
        hosted = instances(Handle(is_sound=True), tasks, monkeypatch)
        groups.has_room = False
        is_pending = asyncio.Event()
        start = asyncio.ensure_future(hosted.start(I0, (), lambda _: is_pending.set(), ignore))
        await is_asked.wait()
        may_answer.set()
        await is_pending.wait()
        start.cancel()
        await asyncio.wait((start,))

    run(scenario)


def test_an_instance_finds_its_place_beside_the_drained_nodes(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(groups: Groups, tasks: Tasks) -> None:
        placed: list[str] = []
        hosted = instances(Handle(is_sound=True), tasks, monkeypatch, {"10.0.0.1"})
        await hosted.start(I0, (), ignore, placed.append)
        assert placed == ["10.0.0.2"]

    run(scenario)


def test_a_start_that_waits_is_placed_by_the_nodes_that_are_drained_meanwhile(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is drained while it waits for any, and another one no longer."""

    async def scenario(groups: Groups, tasks: Tasks) -> None:
        drained, reasons, placed = {"10.0.0.1"}, asyncio.Queue(), []
        hosted = instances(Handle(is_sound=True), tasks, monkeypatch, drained)
        groups.has_room = False
        start = asyncio.ensure_future(hosted.start(I0, (), reasons.put_nowait, placed.append))
        assert (await reasons.get()).startswith("no node but drained ones (10.0.0.1) has room free")
        groups.has_room = True
        drained |= {"10.0.0.2"}
        both = "no node but drained ones (10.0.0.1, 10.0.0.2) has room free"
        assert (await reasons.get()).startswith(both)
        drained -= {"10.0.0.1"}
        await start
        assert placed == ["10.0.0.1"]
        assert set(groups.there) == {"i0"}

    run(scenario)


def test_a_place_on_a_node_that_joins_with_the_address_of_a_drained_one_is_given_back(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request could not leave it out."""

    async def scenario(groups: Groups, tasks: Tasks) -> None:
        placed: list[str] = []
        hosted = instances(Handle(is_sound=True), tasks, monkeypatch, {"10.0.0.3"})
        add = groups.add

        def add_on_new_node(*args: Any, **options: Any) -> Group:
            group = add(*args, **options)
            if "cc" not in groups.nodes:
                groups.nodes = {"cc": "10.0.0.3", **groups.nodes}
                group.nodes = ["cc"]
            return group

        monkeypatch.setattr(placement, "placement_group", add_on_new_node)
        await hosted.start(I0, (), ignore, placed.append)
        assert placed == ["10.0.0.1"]
        assert groups.num_attempts == 1

    run(scenario)
