"""Everything that arrives at a socket is received, in order, and the loop rests in between."""

import asyncio
import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from sterna.messaging.inbox import BURST, Inbox
from tests.loops import HANG_S, NewLoop, on_both_loops, run_on


@contextmanager
def a_pair(address: str = "inproc://pair") -> Iterator[tuple[Inbox, "zmq.Socket[bytes]"]]:
    """An inbox, and a socket that sends to it."""
    with zmq.Context() as context:
        pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        for each in (pull, push):
            each.setsockopt(zmq.LINGER, 0)
        pull.bind(address)
        inbox = Inbox(pull)
        push.connect(pull.getsockopt_string(zmq.LAST_ENDPOINT))
        try:
            yield inbox, push
        finally:
            inbox.close()
            push.close()


def sent(push: "zmq.Socket[bytes]", *numbers: int) -> None:
    for number in numbers:
        push.send_multipart([b"%d" % number, b"frame"])


async def received(inbox: Inbox, count: int) -> list[int]:
    found = [await inbox.receive() for _ in range(count)]
    assert {each[1] for each in found} <= {b"frame"}
    return [int(each[0]) for each in found]


@on_both_loops
@pytest.mark.parametrize("count", [1, BURST - 1, BURST, BURST + 1, 5 * BURST])
def test_what_has_come_before_the_first_look_is_received(new_loop: NewLoop, count: int) -> None:
    with a_pair() as (inbox, push):

        async def test() -> None:
            sent(push, *range(count))
            assert await received(inbox, count) == list(range(count))
            # There is nothing more, and what comes then is received as well.
            receiving = asyncio.create_task(received(inbox, 1))
            await asyncio.sleep(0)
            assert not receiving.done()
            sent(push, count)
            assert await receiving == [count]

        run_on(new_loop, test)


@on_both_loops
def test_what_another_thread_sends_meanwhile_is_received(new_loop: NewLoop) -> None:
    """Over a real connection, whose events come at any moment."""
    count = 5_000
    with a_pair("tcp://127.0.0.1:*") as (inbox, push):
        thread = threading.Thread(target=sent, args=(push, *range(count)), daemon=True)

        async def test() -> None:
            thread.start()
            assert await received(inbox, count) == list(range(count))

        try:
            run_on(new_loop, test)
        finally:
            # The socket is the thread's until then.
            thread.join(HANG_S)


@on_both_loops
def test_the_loop_is_not_woken_again_and_again_by_what_no_task_receives(
    new_loop: NewLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_events = 0
    on_event = Inbox._on_event

    def counted(inbox: Inbox) -> None:
        nonlocal num_events
        num_events += 1
        on_event(inbox)

    monkeypatch.setattr(Inbox, "_on_event", counted)
    count = 10 * BURST
    with a_pair("tcp://127.0.0.1:*") as (inbox, push):

        async def test() -> None:
            sent(push, 0)
            assert await received(inbox, 1) == [0]
            sent(push, *range(count))
            for _ in range(50 * count):
                await asyncio.sleep(0)
            assert num_events <= 2 * count
            assert await received(inbox, count) == list(range(count))

        run_on(new_loop, test)


@on_both_loops
def test_a_wait_that_is_given_up_loses_nothing(new_loop: NewLoop) -> None:
    with a_pair() as (inbox, push):

        async def test() -> None:
            for number in range(3):
                waiting = asyncio.create_task(inbox.receive())
                await asyncio.sleep(0)
                # It may have come before the task hears of its end.
                sent(push, number)
                waiting.cancel()
                await asyncio.wait([waiting])
                if waiting.cancelled():
                    assert await received(inbox, 1) == [number]
                else:
                    assert int(waiting.result()[0]) == number

        run_on(new_loop, test)


@given(steps=st.lists(st.one_of(st.integers(1, 40), st.just("receive"), st.just("rest"))))
def test_nothing_is_lost_or_changes_its_place(steps: list[int | str]) -> None:
    """Some are sent, one is received, or the loop runs once."""
    with a_pair() as (inbox, push):

        async def test() -> None:
            num_sent, found = 0, list[int]()
            for step in steps:
                if isinstance(step, int):
                    sent(push, *range(num_sent, num_sent + step))
                    num_sent += step
                elif step == "rest":
                    await asyncio.sleep(0)
                elif len(found) < num_sent:
                    found += await received(inbox, 1)
            found += await received(inbox, num_sent - len(found))
            assert found == list(range(num_sent))

        run_on(asyncio.new_event_loop, test)


def test_it_can_be_used_in_a_second_loop() -> None:
    with a_pair() as (inbox, push):
        for number in range(2):

            async def test(number: int = number) -> None:
                receiving = asyncio.create_task(received(inbox, 1))
                await asyncio.sleep(0)
                sent(push, number)
                assert await receiving == [number]

            run_on(asyncio.new_event_loop, test)


@on_both_loops
def test_a_task_can_take_the_place_of_one_that_has_just_been_cancelled(new_loop: NewLoop) -> None:
    with a_pair() as (inbox, push):

        async def test() -> None:
            waiting = asyncio.create_task(inbox.receive())
            await asyncio.sleep(0)
            waiting.cancel()
            asyncio.get_running_loop().call_later(0.01, sent, push, 7)
            assert await received(inbox, 1) == [7]
            assert waiting.cancelled()

        run_on(new_loop, test)


def test_two_tasks_cannot_wait_at_once() -> None:
    with a_pair() as (inbox, push):

        async def test() -> None:
            waiting = asyncio.create_task(inbox.receive())
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="another task waits"):
                await inbox.receive()
            sent(push, 1)
            assert (await waiting)[0] == b"1"

        run_on(asyncio.new_event_loop, test)


class Broken(zmq.Socket[bytes]):
    """Its first message cannot be read."""

    def recv_multipart(self, *args: object, **settings: object) -> list[bytes]:
        first, *_ = super().recv_multipart(*args, **settings)
        raise zmq.ZMQError(errno.ENOMEM, f"no memory for {first.decode()}")


def test_an_error_of_the_socket_reaches_the_task(caplog: pytest.LogCaptureFixture) -> None:
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        broken = Broken(context, zmq.PULL)
        broken.bind("inproc://broken")
        push.connect("inproc://broken")
        inbox = Inbox(broken)

        async def test() -> None:
            receiving = asyncio.create_task(inbox.receive())
            await asyncio.sleep(0)
            # The loop's handler gets the error of the first, and the task that of the second.
            sent(push, 1, 2)
            with pytest.raises(zmq.ZMQError, match="no memory for 2"):
                await receiving

        try:
            run_on(asyncio.new_event_loop, test)
        finally:
            inbox.close()


def test_a_closed_one_gives_nothing_and_ends_a_wait() -> None:
    async def test() -> None:
        with a_pair() as (inbox, push):
            sent(push, *range(BURST))
            await received(inbox, 1)
            inbox.close()
            with pytest.raises(RuntimeError, match="closed"):
                await inbox.receive()
        with a_pair() as (inbox, push):
            waiting = asyncio.create_task(inbox.receive())
            await asyncio.sleep(0)
            inbox.close()
            await asyncio.wait([waiting])
            assert waiting.cancelled()

    run_on(asyncio.new_event_loop, test)


def test_a_closed_one_is_watched_no_longer() -> None:
    async def test() -> None:
        with a_pair() as (inbox, _):
            waiting = asyncio.create_task(inbox.receive())
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
            descriptor = inbox._descriptor
        assert inbox.is_closed
        assert not asyncio.get_running_loop().remove_reader(descriptor)

    run_on(asyncio.new_event_loop, test)
