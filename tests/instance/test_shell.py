"""An instance's driver: what its mailbox does not take."""

import asyncio

from sterna.config import LlumletConfig
from sterna.engine.interface import EngineFacts
from sterna.instance import shell
from sterna.messages.actors import (
    Emptied,
    FinalAck,
    FrontendMember,
    InstanceMember,
    Membership,
    TokenBatch,
    TokenSpan,
    WireMessage,
)
from sterna.policy.presets import STERNA
from sterna.types import FrontendId, InstanceId, RequestId

I0 = InstanceId("i0")
F0 = FrontendId(0)


class FullOutbox:
    """A mailbox that drops tokens, and keeps everything else that is sent."""

    def __init__(self) -> None:
        self.sent: list[WireMessage] = []
        self.arriving: asyncio.Queue[WireMessage] = asyncio.Queue()

    def send(self, address: str, message: WireMessage, frames: object = ()) -> bool:
        self.sent.append(message)
        return not isinstance(message, TokenBatch)

    async def deliver(self, handle: object) -> None:
        while True:
            handle(await self.arriving.get(), [])
            self.arriving.task_done()

    def keep_only(self, addresses: set[str]) -> None:
        """Connections are not its matter."""

    def close(self) -> None:
        """Nor is their end."""


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
