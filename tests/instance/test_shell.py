"""An instance's driver: messages that its mailbox drops, and its lease."""

import asyncio
from types import SimpleNamespace

import pytest

from sterna.config import LlumletConfig
from sterna.engine.interface import EngineActivity, EngineFacts
from sterna.instance import shell
from sterna.messages.actors import (
    Emptied,
    FinalAck,
    FrontendMember,
    Heartbeat,
    HeartbeatAnswer,
    InstanceMember,
    Membership,
    MigrationMessage,
    TokenBatch,
    TokenSpan,
    WireMessage,
)
from sterna.migration.messages import Abort, Reason
from sterna.policy.presets import STERNA
from sterna.types import FrontendId, InstanceId, MigrationId, RequestId

I0, I1 = InstanceId("i0"), InstanceId("i1")
F0 = FrontendId(0)
HEARTBEAT = Heartbeat(I0, num_ended=3, is_busy=True)
ABORT = Abort(MigrationId("i0-1"), Reason.REQUEST_FINISHED)


class FullOutbox:
    """A mailbox that drops tokens, and keeps everything else that is sent."""

    def __init__(self) -> None:
        self.sent: list[WireMessage] = []
        self.addresses: list[str] = []
        self.arriving: asyncio.Queue[WireMessage] = asyncio.Queue()

    def send(self, address: str, message: WireMessage, frames: object = ()) -> bool:
        self.sent.append(message)
        self.addresses.append(address)
        return not isinstance(message, TokenBatch)

    async def deliver(self, handle: object) -> None:
        while True:
            handle(await self.arriving.get(), [])
            self.arriving.task_done()

    def keep_only(self, addresses: set[str]) -> None:
        """Connections are not its matter."""

    def close(self) -> None:
        """Nor is their end."""


class Ended(Exception):
    """The end of the process, in place of the real one."""


class Lease:
    """An instance's lease, and the times by which it was extended."""

    def __init__(self, *, has_ended: bool) -> None:
        self._has_ended = has_ended
        self.asked_s: list[float] = []

    def check(self) -> None:
        if self._has_ended:
            raise Ended

    def on_answer(self, asked_s: float) -> None:
        self.asked_s.append(asked_s)


class IdleEngine:
    async def start(self) -> EngineFacts:
        return EngineFacts(1000, b"", "")

    def set_terminating(self, is_terminating: bool) -> None:
        """There is nothing to be told of."""

    async def close(self) -> None:
        """There is nothing to give back."""


def test_no_final_ack_is_waited_for_that_tells_of_dropped_tokens() -> None:
    """They will never be heard; the instance that is being emptied ends all the same."""

    async def scenario() -> list[WireMessage]:
        mailbox = FullOutbox()
        under_test = shell.Instance(I0, LlumletConfig(policy=STERNA), mailbox)
        await under_test.start(IdleEngine())
        itself = InstanceMember(I0, "i0", is_terminating=True, emptied_since=3)
        frontends = (FrontendMember(F0, "front end"),)
        membership = Membership(3, (itself,), frontends, None, supervisor="supervisor")
        under_test.on_membership(membership)
        under_test.on_outputs(F0, (TokenSpan(RequestId("r"), 0, 1, True),), [b"token"])
        mailbox.arriving.put_nowait(FinalAck(F0, 3))
        await mailbox.arriving.join()
        await under_test.close()
        return mailbox.sent

    assert asyncio.run(scenario())[-1] == Emptied(I0, 3)


def test_an_instance_whose_lease_has_ended_sends_nothing_to_others() -> None:
    """Its requests may go on elsewhere: a process that was stopped must not act before it ends."""

    async def scenario() -> list[WireMessage]:
        mailbox = FullOutbox()
        under_test = shell.Instance(I0, LlumletConfig(policy=STERNA), mailbox)
        await under_test.start(IdleEngine())
        others = (InstanceMember(I1, "i1"),)
        frontends = (FrontendMember(F0, "front end"),)
        membership = Membership(3, others, frontends, None, supervisor="supervisor")
        under_test.on_membership(membership)
        num_sent = len(mailbox.sent)
        under_test.hold(Lease(has_ended=True))
        with pytest.raises(Ended):
            under_test.on_outputs(F0, (TokenSpan(RequestId("r"), 0, 1, True),), [b"token"])
        with pytest.raises(Ended):
            under_test.send_to_supervisor(HEARTBEAT)
        with pytest.raises(Ended):
            under_test._send_to_peer(I1, MigrationMessage(I0, ABORT))
        await under_test.close()
        return mailbox.sent[num_sent:]

    assert asyncio.run(scenario()) == []


def test_a_late_answer_of_a_dead_supervisor_turns_no_heartbeat_away_from_its_successor() -> None:
    """The link was slow, and the successor's first messages were not."""

    async def scenario() -> str:
        mailbox = FullOutbox()
        under_test = shell.Instance(I0, LlumletConfig(policy=STERNA), mailbox)
        await under_test.start(IdleEngine())
        under_test.hold(Lease(has_ended=False))
        mailbox.arriving.put_nowait(HeartbeatAnswer("first", None))
        under_test.on_membership(Membership(3, (), (), None, supervisor="successor"))
        mailbox.arriving.put_nowait(HeartbeatAnswer("successor", None))
        mailbox.arriving.put_nowait(HeartbeatAnswer("first", 12.5))
        await mailbox.arriving.join()
        under_test.send_to_supervisor(HEARTBEAT)
        await under_test.close()
        return mailbox.addresses[mailbox.sent.index(HEARTBEAT)]

    assert asyncio.run(scenario()) == "successor"


def test_the_answer_to_a_heartbeat_extends_the_lease_from_when_the_heartbeat_was_sent() -> None:
    async def scenario() -> list[float]:
        mailbox, lease = FullOutbox(), Lease(has_ended=False)
        under_test = shell.Instance(I0, LlumletConfig(policy=STERNA), mailbox)
        await under_test.start(IdleEngine())
        under_test.hold(lease)
        # The first one answers no heartbeat: a supervisor asks for one.
        for asked_s in (None, 12.5):
            mailbox.arriving.put_nowait(HeartbeatAnswer("supervisor", asked_s))
        await mailbox.arriving.join()
        under_test.send_to_supervisor(HEARTBEAT)
        await under_test.close()
        assert mailbox.sent[-1] == HEARTBEAT
        return lease.asked_s

    assert asyncio.run(scenario()) == [12.5]


def test_a_heartbeat_has_the_activity_of_the_engine() -> None:
    activity = EngineActivity(3, is_busy=True, weight_updates="updated")

    async def scenario() -> WireMessage:
        mailbox = FullOutbox()
        under_test = shell.Instance(I0, LlumletConfig(policy=STERNA), mailbox)
        await under_test.start(IdleEngine())
        under_test.on_membership(Membership(3, (), (), None, supervisor="supervisor"))
        engine = SimpleNamespace(activity=lambda: activity)
        beating = asyncio.create_task(shell.beat(I0, under_test, engine, None))
        await asyncio.sleep(0)
        beating.cancel()
        await under_test.close()
        return mailbox.sent[-1]

    sent = Heartbeat(I0, num_ended=3, is_busy=True, weight_updates="updated")
    assert asyncio.run(scenario()) == sent
