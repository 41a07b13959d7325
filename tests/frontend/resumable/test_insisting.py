"""What a mailbox refuses is sent again, in order, until it is taken."""

import asyncio
from collections.abc import Sequence

from sterna.frontend.resumable.relays import RETRY_S, RetryingSender
from sterna.messages.streams import StopReading, StreamMessage
from sterna.types import FrontendId
from tests.clocks import SkippingLoop, run_skipping, stands

ME, A, B = FrontendId(1), FrontendId(2), FrontendId(3)


class Mailbox:
    """Takes what is for those that are not stuck."""

    def __init__(self, *stuck: FrontendId) -> None:
        self.stuck = set(stuck)
        self.num_asked = 0
        self.taken: list[tuple[FrontendId, int, list[bytes]]] = []

    def send_to(
        self, frontend_id: FrontendId, message: StreamMessage, frames: Sequence[bytes]
    ) -> bool:
        self.num_asked += 1
        if frontend_id in self.stuck:
            return False
        assert isinstance(message, StopReading)
        self.taken.append((frontend_id, message.query_id, list(frames)))
        return True


def message(number: int) -> StopReading:
    return StopReading(ME, number)


async def later(loop: SkippingLoop, seconds: float) -> None:
    loop.skipped_s += seconds
    for _ in range(3):
        await asyncio.sleep(0)


def test_what_is_taken_is_sent_once_and_at_once() -> None:
    async def scenario(loop: SkippingLoop) -> Mailbox:
        mailbox = Mailbox()
        RetryingSender(mailbox.send_to).send(A, message(1), [b"frame"])
        await later(loop, 2 * RETRY_S)
        return mailbox

    mailbox = run_skipping(scenario, clock=stands)
    assert mailbox.taken == [(A, 1, [b"frame"])]
    assert mailbox.num_asked == 1


def test_what_is_refused_comes_later_in_order_and_holds_up_nobody_else() -> None:
    async def scenario(loop: SkippingLoop) -> None:
        mailbox = Mailbox(A)
        sending = RetryingSender(mailbox.send_to)
        sending.send(A, message(1))
        mailbox.stuck.clear()
        # It must not overtake the first.
        sending.send(A, message(2), [b"frame"])
        sending.send(B, message(3))
        assert mailbox.taken == [(B, 3, [])]
        await later(loop, RETRY_S - 0.01)
        assert len(mailbox.taken) == 1
        await later(loop, 0.01)
        assert mailbox.taken == [(B, 3, []), (A, 1, []), (A, 2, [b"frame"])]
        sending.send(A, message(4))
        assert mailbox.taken[-1] == (A, 4, [])

    run_skipping(scenario, clock=stands)


def test_a_mailbox_that_refuses_again_is_asked_again() -> None:
    async def scenario(loop: SkippingLoop) -> None:
        mailbox = Mailbox(A, B)
        sending = RetryingSender(mailbox.send_to)
        sending.send(A, message(1))
        sending.send(B, message(2))
        mailbox.stuck.remove(B)
        await later(loop, RETRY_S)
        assert mailbox.taken == [(B, 2, [])]
        mailbox.stuck.clear()
        await later(loop, RETRY_S)
        assert mailbox.taken == [(B, 2, []), (A, 1, [])]
        num_asked = mailbox.num_asked
        await later(loop, 2 * RETRY_S)
        assert mailbox.num_asked == num_asked

    run_skipping(scenario, clock=stands)


def test_who_is_stuck_is_asked_once_each_time() -> None:
    async def scenario(loop: SkippingLoop) -> int:
        mailbox = Mailbox(A)
        sending = RetryingSender(mailbox.send_to)
        for number in (1, 2, 3):
            sending.send(A, message(number))
        await later(loop, RETRY_S)
        await later(loop, RETRY_S)
        return mailbox.num_asked

    assert run_skipping(scenario, clock=stands) == 3


def test_what_is_refused_after_the_end_is_not_sent_again() -> None:
    async def scenario(loop: SkippingLoop) -> Mailbox:
        mailbox = Mailbox(A)
        sending = RetryingSender(mailbox.send_to)
        sending.close()
        sending.send(A, message(1))
        mailbox.stuck.clear()
        await later(loop, 2 * RETRY_S)
        return mailbox

    assert run_skipping(scenario, clock=stands).taken == []


def test_nothing_is_sent_again_after_the_end() -> None:
    async def scenario(loop: SkippingLoop) -> Mailbox:
        mailbox = Mailbox(A)
        sending = RetryingSender(mailbox.send_to)
        sending.send(A, message(1))
        sending.close()
        sending.send(A, message(2))
        mailbox.stuck.clear()
        await later(loop, 2 * RETRY_S)
        return mailbox

    assert run_skipping(scenario, clock=stands).taken == []
