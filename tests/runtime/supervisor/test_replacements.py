"""Another instance starts in place of one that died: at once, unless its start takes the cores on
which the streams of the dead one are to go on."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from sterna.config import ClusterConfig, FrontendConfig, LlumletConfig, TransportConfig
from sterna.engine.interface import EngineFacts
from sterna.messages.actors import Heartbeat, Membership
from sterna.policy.presets import STERNA
from sterna.runtime.actors.member_status import MemberStatus
from sterna.runtime.actors.packed_args import PackedArgs
from sterna.runtime.supervisor import instance_actors, services, shell, watch
from sterna.runtime.supervisor.instance_actors import InstanceActors
from sterna.runtime.supervisor.recovery import FRONTEND, SCHEDULER, FoundMembers
from sterna.runtime.supervisor.shell import Supervisor
from sterna.supervisor.core import HostedInstance, SupervisorCore, SupervisorState
from sterna.supervisor.failure_detector import ProcessIdentity
from sterna.supervisor.fleet import Fleet
from sterna.types import InstanceId

PROCESS = ProcessIdentity("node", 4711, 123456)
FACTS = EngineFacts(1000, b"kv", "")
UP = HostedInstance("tcp://127.0.0.1:4711", "kv", PROCESS)
ON_CPU = ClusterConfig(LlumletConfig(STERNA), TransportConfig(), FrontendConfig())
ON_GPU = replace(ON_CPU, num_gpus_per_instance=1)
RECOVERY_S = 0.05
NUM_TURNS = 20
"""More turns of the loop than a takeover needs to start an instance."""

HANG_TIMEOUT_S = 30.0
"""No wait of a test takes so long unless something hangs."""


class Instances:
    """What the instances of a cluster do, in place of their actors: the last one is dead."""

    def __init__(self, num_up: int) -> None:
        self.up = [InstanceId(f"i{number}") for number in range(num_up)]
        self.hosted = dict.fromkeys(self.up, UP)
        self.ended_s = float("nan")
        self.starts: asyncio.Queue[InstanceId] = asyncio.Queue()

    async def find_members(self) -> FoundMembers:
        fleet = Fleet(len(self.up))
        fleet.begin(0.0)
        for each in self.up:
            fleet.on_started(each, 0.0)
        state = SupervisorState(fleet, {0: ()}, {}, 1, 1, b"ready", self.hosted)
        membership = Membership(3, (), (), None, state=state.encode())
        found = FoundMembers(numbers={FRONTEND: [], SCHEDULER: []})
        for each in self.up:
            status = MemberStatus(UP.address, membership, PROCESS, FACTS)
            found.instances[each] = SimpleNamespace(), status
        return found

    async def ended(self, actors: InstanceActors, instance_id: InstanceId) -> str:
        if instance_id != self.up[-1]:
            await asyncio.Event().wait()
        del actors._hosted[instance_id]
        self.ended_s = asyncio.get_running_loop().time()
        return "it was killed"

    async def start(self, instance_id: InstanceId, *_: object) -> EngineFacts:
        self.starts.put_nowait(instance_id)
        await asyncio.Event().wait()
        return FACTS


class SilentInstances(Instances):
    """Instances of which the last one does not answer a successor of its supervisor.

    Args:
        node: the node of the last one.
    """

    def __init__(self, num_up: int, node: str) -> None:
        super().__init__(num_up)
        process = ProcessIdentity(node, PROCESS.process_id, PROCESS.started_ticks)
        self.hosted[self.up[-1]] = HostedInstance(UP.address, UP.kv_format, process)
        self.may_end = asyncio.Event()

    async def find_members(self) -> FoundMembers:
        found = await super().find_members()
        del found.instances[self.up[-1]]
        return found

    async def ended(self, actors: InstanceActors, instance_id: InstanceId) -> str:
        if instance_id == self.up[-1]:
            await self.may_end.wait()
        return await super().ended(actors, instance_id)


def successor_over(instances: Instances, monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    """The supervisor that takes these instances over."""
    place = SimpleNamespace(give_back=lambda: asyncio.sleep(0))
    places = dict.fromkeys(instances.up, place)
    monkeypatch.setattr(watch, "own_node", lambda: "node")
    monkeypatch.setattr(services, "is_gcs_up", lambda: False)
    monkeypatch.setattr(instance_actors, "is_gcs_up", lambda: False)
    monkeypatch.setattr(shell, "find_members", instances.find_members)
    monkeypatch.setattr(shell, "find_places", lambda: places)
    monkeypatch.setattr(InstanceActors, "ended", lambda *of: instances.ended(*of))
    monkeypatch.setattr(InstanceActors, "start", lambda _, *of: instances.start(*of))
    monkeypatch.setattr(InstanceActors, "close_all", lambda _: asyncio.sleep(0))
    return Supervisor({}, "metrics", is_successor=True)


@pytest.mark.parametrize(
    ("num_up", "config", "emulated", "delay_s"),
    [
        pytest.param(2, ON_CPU, None, RECOVERY_S, id="streams compute on these cores"),
        pytest.param(1, ON_CPU, None, 0.0, id="streams have nowhere to go"),
        pytest.param(2, ON_GPU, None, 0.0, id="they compute on a GPU"),
        pytest.param(2, ON_CPU, object(), 0.0, id="nothing is computed"),
    ],
)
def test_a_replacement_leaves_the_cores_to_the_streams_of_the_dead_instance_first(
    num_up: int,
    config: ClusterConfig,
    emulated: Any,
    delay_s: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shell, "RECOVERY_S", RECOVERY_S)
    slept_s: list[float] = []
    sleep = asyncio.sleep

    async def noted(duration_s: float) -> None:
        slept_s.append(duration_s)
        await sleep(duration_s)

    async def scenario() -> None:
        instances = Instances(num_up)
        successor = successor_over(instances, monkeypatch)
        async with asyncio.timeout(HANG_TIMEOUT_S):
            await successor.take_over(config, PackedArgs(b"args", b"args"), emulated)
            started = await instances.starts.get()
            waited_s = asyncio.get_running_loop().time() - instances.ended_s
            await successor.close()
        assert started == f"i{num_up}"
        assert waited_s >= delay_s
        assert slept_s.count(RECOVERY_S) == bool(delay_s)

    monkeypatch.setattr(asyncio, "sleep", noted)
    asyncio.run(scenario())


@pytest.mark.parametrize("node", ["node", "another node"])
def test_a_silent_instance_is_replaced_when_it_has_ended_and_the_takeover_does_not_wait_for_that(
    node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may compute on until it has been killed, which the kernel may put off, or its lease
    ends."""

    async def scenario() -> None:
        instances = SilentInstances(2, node)
        successor = successor_over(instances, monkeypatch)
        try:
            await successor.take_over(ON_GPU, PackedArgs(b"args", b"args"), None)
            for has_ended in (False, True):
                if has_ended:
                    instances.may_end.set()
                for _ in range(NUM_TURNS):
                    await asyncio.sleep(0)
                assert instances.starts.qsize() == has_ended
            assert instances.starts.get_nowait() == "i2"
        finally:
            await successor.close()

    asyncio.run(scenario())


def test_the_members_know_the_instances_whose_weights_were_updated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They exchange no KV with others: neither with one that has started later from the files."""

    async def scenario() -> None:
        instances = Instances(3)
        successor = successor_over(instances, monkeypatch)
        announced: list[list[bool]] = []

        def note(
            _: SupervisorCore, hosted: dict[InstanceId, HostedInstance], *__: object
        ) -> list[object]:
            formats = [each.kv_format for each in hosted.values()]
            announced.append([each == formats[0] for each in formats])
            return []

        await successor.take_over(ON_GPU, PackedArgs(b"args", b"args"), None)
        monkeypatch.setattr(SupervisorCore, "announce", note)
        # Those that come in half a second are announced together.
        for updates in ((("i0", "a"), ("i1", "a")), (("i1", "a"),), (("i0", "b"),)):
            for member, weight_updates in updates:
                beat = Heartbeat(member, 0, is_busy=False, weight_updates=weight_updates)
                successor._on_message(beat, [])
            successor._on_message(Heartbeat("scheduler", 0, is_busy=False), [])
            if (timer := successor._announcement) is not None:
                assert timer.when() <= asyncio.get_running_loop().time() + shell.WEIGHTS_DELAY_S
                timer.cancel()
                successor._announce_now()
        await successor.close()
        assert announced == [[True, True, False], [True, False, False]]

    asyncio.run(scenario())


def test_what_changes_while_a_long_announcement_is_rested_from_is_announced_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when a thousand instances come up one after the other."""
    clock_s = 100.0
    monkeypatch.setattr(shell, "_now_s", lambda: clock_s)

    async def scenario() -> None:
        nonlocal clock_s
        successor = successor_over(Instances(2), monkeypatch)
        await successor.take_over(ON_GPU, PackedArgs(b"args", b"args"), None)
        announced: list[float] = []

        def take_long(*_: object) -> list[object]:
            nonlocal clock_s
            announced.append(clock_s)
            clock_s += duration_s
            return []

        monkeypatch.setattr(SupervisorCore, "announce", take_long)
        duration_s = 0.01
        successor._announce()
        successor._announce()
        assert announced == pytest.approx([100.0, 100.01])
        duration_s = 0.5
        for _ in range(3):
            successor._announce()
        assert announced[2:] == pytest.approx([100.02])
        assert successor._announcement is not None
        # By hand: it ended at 100.52, and four times as long is left to all else.
        assert successor._announcement.when() == pytest.approx(102.52)
        await successor.close()

    asyncio.run(scenario())


def test_an_announcement_that_is_nearly_due_can_be_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray's actors run on uvloop, whose timers of less than half a millisecond know no time."""
    uvloop = pytest.importorskip("uvloop")

    async def scenario() -> None:
        successor = successor_over(Instances(2), monkeypatch)
        await successor.take_over(ON_GPU, PackedArgs(b"args", b"args"), None)
        successor._announces_from_s = asyncio.get_running_loop().time() + 0.0003
        successor._announce()
        successor._announce()
        await successor.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())


class UpdatedInstances(Instances):
    """Instances of which the first has got other weights."""

    async def find_members(self) -> FoundMembers:
        found = await super().find_members()
        actor, status = found.instances[self.up[0]]
        found.instances[self.up[0]] = actor, replace(status, weight_updates="a")
        return found


def test_a_successor_knows_whose_weights_were_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first membership on: no request moves to an instance with other weights."""

    async def scenario() -> None:
        successor = successor_over(UpdatedInstances(2), monkeypatch)
        await successor.take_over(ON_GPU, PackedArgs(b"args", b"args"), None)
        i0, i1 = (each.kv_format for each in successor._instances.hosted().values())
        assert i0 == i1 + "a"
        await successor.close()

    asyncio.run(scenario())
