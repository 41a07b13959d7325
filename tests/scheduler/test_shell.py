"""The global scheduler's driver: instances that start, wait in the warm pool, serve and leave."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
import uvloop
from msgspec import structs

from sterna.config import ScalingConfig
from sterna.messages.actors import (
    Absent,
    AddInstances,
    AdminReply,
    Dispatched,
    DispatchRequest,
    FrontendMember,
    Heartbeat,
    InstanceMember,
    ListRequests,
    LoadReport,
    Membership,
    SetDestination,
    TerminateInstance,
    WireMessage,
)
from sterna.messaging.send_effects import ToMailbox
from sterna.policy.presets import LLUMNIX, STERNA
from sterna.scheduler.core import SchedulerCore
from sterna.scheduler.shell import Scheduler
from sterna.types import NORMAL, FrontendId, InstanceId, InstanceLoad, RequestId

I0, I1 = InstanceId("i0"), InstanceId("i1")
FRONTEND = FrontendMember(FrontendId(0), "front end")


class Outbox:
    """A mailbox that keeps what is sent."""

    address = "scheduler"

    def __init__(self) -> None:
        self.sent: list[tuple[str, WireMessage]] = []
        self.has_beaten = asyncio.Event()
        self.has_held_round = asyncio.Event()
        self.dispatched: asyncio.Queue[RequestId] = asyncio.Queue()

    def send(self, address: str, message: WireMessage) -> None:
        self.sent.append((address, message))
        if isinstance(message, Heartbeat):
            self.has_beaten.set()
        if isinstance(message, SetDestination):
            self.has_held_round.set()
        if isinstance(message, Dispatched):
            self.dispatched.put_nowait(message.request_id)

    async def deliver(self, handle: object) -> None:
        """Nothing comes."""
        await asyncio.Event().wait()

    def keep_only(self, addresses: set[str]) -> None:
        """Connections are not its matter."""


def membership(version: int, *serving: InstanceId, absent: tuple[Absent, ...] = ()) -> Membership:
    members = tuple(InstanceMember(each, f"mailbox of {each}") for each in serving)
    return Membership(version, members, (FRONTEND,), "scheduler", absent, "supervisor")


def report(instance_id: InstanceId, used_tokens: int = 0) -> LoadReport:
    free = float(1000 - used_tokens)
    return LoadReport(
        InstanceLoad(instance_id, 1, 1000, used_tokens, free, free, num_running=0, num_queuing=0)
    )


def test_an_instance_out_of_the_warm_pool_gets_requests() -> None:
    """It starts, waits without being known to anybody, and then serves."""
    outbox = Outbox()

    async def scenario() -> None:
        scheduler = Scheduler(LLUMNIX, outbox)
        scheduler.on_membership(membership(1, I0, absent=(Absent(I1, "starting"),)))
        scheduler.on_membership(membership(2, I0, absent=(Absent(I1, "warm"),)))
        scheduler.on_membership(membership(3, I0, I1))
        ask = DispatchRequest(FRONTEND.frontend_id, RequestId("r"), 64, 0.0, NORMAL, NORMAL)
        for message in (report(I0, used_tokens=900), report(I1), ask):
            scheduler.on_message(message, [])

    asyncio.run(scenario())
    (dispatched,) = [message for _, message in outbox.sent if isinstance(message, Dispatched)]
    assert dispatched.instance_id == I1


def test_an_instance_that_waits_for_a_place_does_not_keep_the_idle_ones() -> None:
    """With the cool-down that `sterna serve` has by default. The supervisor gives up what waits
    first."""
    scaling = ScalingConfig(max_instances=8, high_freeness_steps=900, cooldown_s=30.0)

    def ended(*absent: Absent) -> list[ToMailbox]:
        core = SchedulerCore(LLUMNIX, now_s=0.0, scaling=scaling)
        core.on_membership(membership(1, I0, absent=absent), 0.0)
        core.on_message(report(I0), 0.0)
        effects = [each for at_s in range(60) for each in core.on_tick(float(at_s))]
        return [
            each for each in effects if isinstance(each, ToMailbox) and each.address == "supervisor"
        ][:1]

    terminate = ToMailbox("supervisor", TerminateInstance(I0))
    assert ended(Absent(I1, "pending", "no GPU")) == [terminate]
    assert ended(Absent(I1, "starting")) == ended(Absent(I1, "warm")) == ended() == []


def test_the_supervisor_hears_that_everything_of_its_loop_gets_its_turn() -> None:
    outbox = Outbox()

    async def scenario() -> None:
        scheduler = Scheduler(LLUMNIX, outbox)
        scheduler.on_membership(membership(1, I0))
        running = asyncio.create_task(scheduler.run())
        beating = asyncio.create_task(outbox.has_beaten.wait())
        await asyncio.wait({running, beating}, return_when=asyncio.FIRST_COMPLETED)
        assert not running.done(), running.exception()
        running.cancel()
        await asyncio.wait({running})

    asyncio.run(scenario())
    first = next(each for each in outbox.sent if isinstance(each[1], Heartbeat))
    assert first == ("supervisor", Heartbeat("scheduler", 0, is_busy=False))


def test_an_instance_that_starts_counts_where_more_are_asked_for_and_a_warm_one_does_not() -> None:
    """One instance has too little; two more would be enough, of which one starts already."""
    scaling = ScalingConfig(max_instances=8, low_freeness_steps=500, high_freeness_steps=990)

    def asked(*absent: Absent) -> list[int]:
        outbox = Outbox()

        async def scenario() -> None:
            policy = replace(LLUMNIX, round_interval_s=0.01)
            scheduler = Scheduler(policy, outbox, scaling)
            scheduler.on_membership(membership(1, I0, absent=absent))
            full = structs.replace(
                report(I0, used_tokens=1000).load,
                num_queuing=1,
                head_demand_tokens=500,
                free_tokens=-500.0,
                normal_free_tokens=-500.0,
            )
            scheduler.on_message(LoadReport(full), [])
            # Whatever is to be asked for at once is asked for in the first round, which tells the
            # instance besides that it has no destination.
            await outbox.has_held_round.wait()

        asyncio.run(scenario())
        asks = [message for _, message in outbox.sent if isinstance(message, AddInstances)]
        return [each.num_instances for each in asks][:1]

    assert asked() == asked(Absent(I1, "warm")) == [2]
    # It waits for the period: somebody comes already.
    assert asked(Absent(I1, "starting")) == asked(Absent(I1, "pending", "no GPU")) == []


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_the_end_of_a_wait_may_be_due_before_the_next_round(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """Ray's actors have uvloop, whose handle of a call that is due at once has no time."""
    policy = replace(STERNA, round_interval_s=3_600.0, hold_limit_s=1e-4)

    async def scenario() -> None:
        outbox = Outbox()
        scheduler = Scheduler(policy, outbox)
        async with asyncio.timeout(20):
            scheduler.on_membership(membership(1, I0))
            serving = asyncio.create_task(scheduler.run())
            await outbox.has_beaten.wait()
            scheduler.on_message(report(I0, used_tokens=1000), [])
            names = [RequestId(name) for name in ("r0", "r1", "r2")]
            for name in names:
                ask = DispatchRequest(FRONTEND.frontend_id, name, 64, 0.0, NORMAL, NORMAL)
                scheduler.on_message(ask, [])
            assert [await outbox.dispatched.get() for _ in names] == names
            serving.cancel()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(scenario())


def test_operators_see_the_requests_that_it_holds() -> None:
    outbox = Outbox()

    async def scenario() -> None:
        scheduler = Scheduler(LLUMNIX, outbox)
        ask = DispatchRequest(FRONTEND.frontend_id, RequestId("r"), 64, 0.0, NORMAL, NORMAL)
        for message in (ask, ListRequests("operator", 7)):
            scheduler.on_message(message, [])

    asyncio.run(scenario())
    ((address, reply),) = outbox.sent
    assert address == "operator"
    assert isinstance(reply, AdminReply)
    assert reply.query_id == 7
    assert [each["id"] for each in msgspec.json.decode(reply.body)] == ["r"]
