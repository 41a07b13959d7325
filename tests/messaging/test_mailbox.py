"""Mailboxes on real sockets: messages of one run, and bytes of strangers, which end nothing."""

import asyncio
import contextlib
import ctypes
import fcntl
import logging
import os
import resource
import socket
import struct
import termios
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import msgspec
import psutil
import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from sterna.config import MailboxKeys
from sterna.messages.actors import CancelDispatch, Heartbeat, WireMessage
from sterna.messaging import mailbox as mailbox_module
from sterna.messaging.framing import PART_BYTES
from sterna.messaging.mailbox import BURST, HANDSHAKE_TIMEOUT_MS, TICK_S, Mailbox, draw_keys
from sterna.messaging.reliable_channel import MESSAGE, PERIODIC, PROBE, RECEIPT, Head
from sterna.runtime.processes.limits import raise_limit
from sterna.types import RequestId
from tests.descriptors import descriptors_left

HANG_S = 60.0
"""No wait of a test takes so long unless something hangs."""

HOST = "127.0.0.1"


@asynccontextmanager
async def a_pair(keys: MailboxKeys | None) -> AsyncIterator[tuple[Mailbox, Mailbox]]:
    pair = Mailbox(HOST, keys), Mailbox(HOST, keys)
    try:
        async with asyncio.timeout(HANG_S):
            yield pair
    finally:
        for each in pair:
            each.close()


@contextmanager
def a_push_socket(address: str, **options: object) -> Iterator[zmq.Socket[bytes]]:
    """A socket as a stranger would open it; `options` are ZeroMQ's."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.setsockopt(zmq.LINGER, 0)
        for name, value in options.items():
            push.setsockopt(getattr(zmq, name), value)
        push.connect(address)
        yield push


def a_message(name: str = "r1") -> CancelDispatch:
    return CancelDispatch(RequestId(name))


def numbered(number: int, content: bytes) -> list[bytes]:
    """What another mailbox would send as its message of this number."""
    return [Head(MESSAGE, b"another mailbox.", number).encode() + content]


ENCODED = msgspec.msgpack.encode(a_message("stranger"))


@pytest.mark.parametrize("keys", [None, draw_keys()], ids=["plain", "keys"])
def test_a_message_arrives_with_its_frames(keys: MailboxKeys | None) -> None:
    async def test() -> None:
        async with a_pair(keys) as (one, other):
            one.send(other.address, a_message(), [b"payload", b""])
            assert await other.receive() == (a_message(), [b"payload", b""])

    asyncio.run(test())


def test_a_heartbeat_is_a_periodic_message_and_arrives_as_others_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Messages keep their order whatever their kind is."""
    kinds: list[int] = []
    decode = Head.decode

    def decoded(content: bytes) -> Head:
        head = decode(content)
        kinds.append(head.kind)
        return head

    async def test() -> None:
        async with a_pair(None) as (one, other):
            sent: list[WireMessage] = [a_message(), Heartbeat("a", 1, False), a_message("r2")]
            for each in sent:
                one.send(other.address, each)
            assert [(await other.receive())[0] for _ in sent] == sent

    monkeypatch.setattr(Head, "decode", decoded)
    asyncio.run(test())
    assert [each for each in kinds if each in (MESSAGE, PERIODIC)] == [MESSAGE, PERIODIC, MESSAGE]


@pytest.mark.parametrize("keys", [None, draw_keys()], ids=["plain", "keys"])
def test_a_message_that_is_larger_than_a_part_arrives_whole(keys: MailboxKeys | None) -> None:
    """The message itself, or its frames; and what comes after it."""
    large = a_message("l" * 3 * PART_BYTES)
    frames = [bytes(range(256)) * (PART_BYTES // 100), b"", b"small"]

    async def test() -> None:
        async with a_pair(keys) as (one, other):
            one.send(other.address, a_message(), frames)
            one.send(other.address, large)
            one.send(other.address, a_message("next"))
            assert await other.receive() == (a_message(), frames)
            assert await other.receive() == (large, [])
            assert await other.receive() == (a_message("next"), [])

    asyncio.run(test())


@contextmanager
def watched(mailbox: Mailbox, events: int) -> Iterator[zmq.asyncio.Socket]:
    """What ZeroMQ tells of the connections to this mailbox."""
    # A peer that is turned away shows nowhere else: that is the point of it.
    watched_socket, address = mailbox._inbox._socket, "inproc://events"
    watched_socket.monitor(address, events)
    monitor = zmq.asyncio.Context.shadow(mailbox._context).socket(zmq.PAIR)
    monitor.connect(address)
    try:
        yield monitor
    finally:
        watched_socket.disable_monitor()
        monitor.close()


FAILED_HANDSHAKE = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


def _nothing(run: MailboxKeys) -> dict[str, object]:
    return {}


def _other_keys(run: MailboxKeys) -> dict[str, object]:
    stranger = draw_keys()
    return {
        "CURVE_PUBLICKEY": stranger.public,
        "CURVE_SECRETKEY": stranger.secret,
        "CURVE_SERVERKEY": stranger.public,
    }


def _only_the_public_key(run: MailboxKeys) -> dict[str, object]:
    stranger = draw_keys()
    return {
        "CURVE_PUBLICKEY": stranger.public,
        "CURVE_SECRETKEY": stranger.secret,
        "CURVE_SERVERKEY": run.public,
    }


@pytest.mark.parametrize("options", [_nothing, _other_keys, _only_the_public_key])
def test_a_stranger_gets_nothing_through(
    options: Callable[[MailboxKeys], dict[str, object]],
) -> None:
    async def test() -> None:
        keys = draw_keys()
        async with a_pair(keys) as (one, other):
            with (
                watched(other, FAILED_HANDSHAKE) as failures,
                a_push_socket(other.address, **options(keys)) as stranger,
            ):
                # ZeroMQ keeps it until it is let in.
                stranger.send_multipart(numbered(0, ENCODED), zmq.NOBLOCK)
                await failures.recv_multipart()
                one.send(other.address, a_message("member"))
                assert await other.receive() == (a_message("member"), [])

    asyncio.run(test())


def test_a_mailbox_with_keys_sends_nothing_to_one_that_does_not_have_them() -> None:
    """Whoever listens at the address of a dead member learns nothing."""

    async def test() -> None:
        sender, listener = Mailbox(HOST, draw_keys()), Mailbox(HOST)
        try:
            with watched(listener, FAILED_HANDSHAKE) as failures:
                sender.send(listener.address, a_message())
                await failures.recv_multipart()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await listener.receive()
        finally:
            sender.close()
            listener.close()

    asyncio.run(test())


def test_the_keys_do_not_show_where_they_are_printed() -> None:
    keys = draw_keys()
    assert keys.secret.decode() not in repr(keys)


async def delivered(mailbox: Mailbox, num_messages: int) -> list[WireMessage]:
    """So many messages that `deliver` hands over."""
    messages: list[WireMessage] = []
    is_enough = asyncio.Event()

    def handle(message: WireMessage, frames: list[bytes]) -> None:
        messages.append(message)
        if len(messages) == num_messages:
            is_enough.set()

    delivery = asyncio.create_task(mailbox.deliver(handle))
    await asyncio.wait(
        {delivery, asyncio.create_task(is_enough.wait())}, return_when="FIRST_COMPLETED"
    )
    if delivery.done():
        delivery.result()
    delivery.cancel()
    return messages


@given(
    garbage=st.lists(
        st.one_of(
            st.binary(max_size=200),
            # Nested deeper than any decoder follows.
            st.just(b"\x91" * 50_000),
            # Texts that are not UTF-8, where a message has texts.
            st.binary(max_size=20).map(
                lambda text: (
                    b"\x82\xa4type\xaeCancelDispatch\xaarequest_id"
                    + bytes([0xA0 + len(text)])
                    + text
                )
            ),
        ),
        max_size=20,
    )
)
def test_what_does_not_decode_is_dropped_and_ends_nothing(garbage: list[bytes]) -> None:
    def is_message(content: bytes) -> bool:
        try:
            msgspec.msgpack.decode(content, type=WireMessage)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False
        return True

    async def test() -> None:
        mailbox = Mailbox(HOST)
        try:
            async with asyncio.timeout(HANG_S):
                with a_push_socket(mailbox.address) as push:
                    for number, each in enumerate(garbage):
                        push.send(each)
                        push.send_multipart(numbered(number, each))
                    last = msgspec.msgpack.encode(a_message("last"))
                    push.send_multipart(numbered(len(garbage), last))
                    expected = 1 + sum(map(is_message, garbage))
                    assert (await delivered(mailbox, expected))[-1] == a_message("last")
        finally:
            mailbox.close()

    logging.disable(logging.ERROR)
    try:
        asyncio.run(test())
    finally:
        logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    "address", [b"", b"tcp://host", b"ipc://file:1", b"tcp://a/b:1", b"tcp://a:1 ", b"tcp://\xe4:1"]
)
def test_a_probe_without_the_address_of_a_mailbox_is_dropped_and_ends_nothing(
    address: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with a_pair(None) as (_, other):
            with a_push_socket(other.address) as push:
                push.send(Head(PROBE, b"another mailbox.", 0).encode() + address)
                push.send_multipart(numbered(0, ENCODED))
                assert await delivered(other, 1) == [a_message("stranger")]

    asyncio.run(test())
    assert "message dropped, undecodable" in caplog.text


def test_a_closed_mailbox_sends_nothing_and_says_so() -> None:
    async def test() -> None:
        async with a_pair(None) as (one, other):
            assert one.send(other.address, a_message())
            one.close()
            assert not one.send(other.address, a_message())

    asyncio.run(test())


def test_what_is_too_much_for_a_peer_that_does_not_read_is_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mailbox_module, "SEND_QUEUE_LIMIT", 2)

    async def test() -> None:
        async with a_pair(None) as (one, other):
            assert one.send(other.address, a_message("1"))
            assert one.send(other.address, a_message("2"))
            for name in ("3", "4", "5"):
                assert not one.send(other.address, a_message(name))

    asyncio.run(test())
    # A line for each would fill a disk.
    assert caplog.text.count("message dropped, queue full") == 1


def test_bytes_that_are_too_many_for_a_peer_that_does_not_read_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mailbox_module, "SEND_QUEUE_BYTES", 1000)

    async def test() -> None:
        async with a_pair(None) as (one, other):
            assert one.send(other.address, a_message("1"), [bytes(900)])
            assert not one.send(other.address, a_message("2"), [bytes(900)])

    asyncio.run(test())


@asynccontextmanager
async def a_mailbox_by_hand() -> AsyncIterator[tuple[str, zmq.asyncio.Socket]]:
    """The address of a socket to which mailboxes can write, and the socket."""
    with zmq.asyncio.Context() as context, context.socket(zmq.PULL) as pull:
        port = pull.bind_to_random_port(f"tcp://{HOST}")
        yield f"tcp://{HOST}:{port}", pull


def test_a_mailbox_that_only_reads_confirms_what_it_has_got() -> None:
    """A while after the last message, in one receipt for all."""

    async def test() -> list[Head]:
        async with a_pair(None) as (mailbox, _), a_mailbox_by_hand() as (address, pull):
            channel = b"another mailbox."
            with a_push_socket(mailbox.address) as push:
                push.send(Head(PROBE, channel, 0).encode() + address.encode())
                for number in range(3):
                    push.send_multipart(numbered(number, ENCODED))
                await delivered(mailbox, 3)
                reading = asyncio.create_task(mailbox.deliver(lambda message, frames: None))
                heads = [Head.decode((await pull.recv_multipart())[0]) for _ in range(3)]
                reading.cancel()
            return [head for head in heads if head.channel == channel]

    receipts = asyncio.run(test())
    assert receipts[0] == Head(RECEIPT, b"another mailbox.", 0)
    assert receipts[-1] == Head(RECEIPT, b"another mailbox.", 3)


def test_connections_to_mailboxes_that_are_not_kept_are_closed() -> None:
    """Else each that has ever been there would keep a descriptor."""

    async def test() -> None:
        async with a_pair(None) as (one, other):
            one.send(other.address, a_message())
            assert await other.receive() == (a_message(), [])
            with watched(other, zmq.EVENT_DISCONNECTED) as cuts:
                one.keep_only(set())
                await cuts.recv_multipart()

    asyncio.run(test())


@contextmanager
def kernel_socket(address: str, *, is_accepted: bool) -> Iterator[socket.socket]:
    """The kernel's socket of the one connection to this mailbox: its own, or that of its peer, both
    of which are this process's."""
    port = int(address.rpartition(":")[2])
    (fd,) = [
        each.fd
        for each in psutil.Process().net_connections("tcp")
        if each.raddr and port == (each.laddr if is_accepted else each.raddr).port
    ]
    with socket.socket(fileno=os.dup(fd)) as found:
        yield found


SO_ATTACH_FILTER = 26
"""Linux: a socket option for a program that returns how many bytes of each packet are kept."""

KEEP_NOTHING = struct.pack("HBBI", 0x06, 0, 0, 0)
"""The program `return 0` (classic BPF)."""


async def silence(connection: socket.socket) -> None:
    """Drop all that comes for this connection, as if this end's node had lost power: the kernel
    confirms nothing, and closes nothing."""
    # Unconfirmed bytes would be sent again.
    while any(fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4))):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    program = ctypes.create_string_buffer(KEEP_NOTHING)
    connection.setsockopt(
        socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program))
    )


@pytest.mark.slow
def test_a_peer_that_vanishes_after_a_message_leaves_no_connection_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The message ends ZeroMQ's own wait for a ping (HEARTBEAT_TTL), and no further one comes."""
    monkeypatch.setattr(mailbox_module, "KEEPALIVE_IDLE_S", 1)
    monkeypatch.setattr(mailbox_module, "KEEPALIVE_INTERVAL_S", 1)
    monkeypatch.setattr(mailbox_module, "VANISHED_MS", 2000)

    async def test() -> None:
        async with a_pair(None) as (_, other):
            with (
                watched(other, zmq.EVENT_DISCONNECTED) as cuts,
                a_push_socket(other.address) as push,
            ):
                push.send_multipart(numbered(0, ENCODED))
                assert await other.receive() == (a_message("stranger"), [])
                with kernel_socket(other.address, is_accepted=False) as connection:
                    await silence(connection)
                await cuts.recv_multipart()

    asyncio.run(test())


def test_the_kernel_probes_idle_connections_and_closes_them_after_half_a_minute() -> None:
    """Those that a mailbox has accepted."""

    async def test() -> None:
        async with a_pair(None) as (one, other):
            one.send(other.address, a_message())
            assert await other.receive() == (a_message(), [])
            with kernel_socket(other.address, is_accepted=True) as connection:
                tcp = socket.IPPROTO_TCP
                assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                assert connection.getsockopt(tcp, socket.TCP_KEEPIDLE) == 10
                assert connection.getsockopt(tcp, socket.TCP_KEEPINTVL) == 5
                assert connection.getsockopt(tcp, socket.TCP_USER_TIMEOUT) == 30_000

    asyncio.run(test())


def test_other_tasks_get_their_turns_while_many_messages_come() -> None:
    num_messages = 8 * BURST

    async def test() -> int:
        num_turns = 0
        turns: list[int] = []

        async def take_turns() -> None:
            nonlocal num_turns
            while True:
                num_turns += 1
                await asyncio.sleep(0)

        async with a_pair(None) as (one, other):
            for number in range(num_messages):
                one.send(other.address, a_message(str(number)))
            # The first has come, and the others are close behind it.
            await other.receive()
            is_enough = asyncio.Event()

            def handle(message: WireMessage, frames: list[bytes]) -> None:
                turns.append(num_turns)
                if len(turns) == num_messages - 1:
                    is_enough.set()

            tasks = [asyncio.create_task(each) for each in (take_turns(), other.deliver(handle))]
            await is_enough.wait()
            for task in tasks:
                task.cancel()
        return max(Counter(turns).values())

    assert asyncio.run(test()) <= BURST


def test_bytes_that_are_not_zeromq_end_nothing() -> None:
    async def test() -> None:
        async with a_pair(draw_keys()) as (one, other):
            port = int(other.address.rpartition(":")[2])
            for content in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 10_000):
                with socket.create_connection((HOST, port)) as stranger:
                    stranger.sendall(content)
            one.send(other.address, a_message())
            assert await other.receive() == (a_message(), [])

    asyncio.run(test())


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
"""How a peer begins, before it shows a key."""

LARGE_COMMAND = b"\x06" + (200 << 20).to_bytes(8, "big")
"""The head of a frame of its handshake, which announces 200 MiB."""


async def cut_after(address: str, *contents: bytes) -> None:
    """Speak as a stranger, and wait until the connection is cut."""
    reader, writer = await asyncio.open_connection(HOST, int(address.rpartition(":")[2]))
    with contextlib.closing(writer), contextlib.suppress(ConnectionError):
        for content in contents:
            writer.write(content)
            await writer.drain()
        await reader.read()


def test_a_stranger_that_announces_much_is_cut_at_once() -> None:
    """Else what it sends is kept until it has shown its key."""

    async def test() -> None:
        async with a_pair(draw_keys()) as (one, other):
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_MS / 1000 / 2):
                await cut_after(other.address, GREETING, LARGE_COMMAND, bytes(1 << 20))
            one.send(other.address, a_message())
            assert await other.receive() == (a_message(), [])

    asyncio.run(test())


@pytest.mark.parametrize(
    "said", [b"", GREETING, GREETING + b"\x04\xff"], ids=["silent", "greets", "begins"]
)
def test_a_stranger_that_does_not_get_on_is_cut(
    said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is a connection, with its descriptor, for those that have a key."""
    monkeypatch.setattr(mailbox_module, "HANDSHAKE_TIMEOUT_MS", 50)

    async def test() -> None:
        async with a_pair(draw_keys()) as (_, other), asyncio.timeout(HANDSHAKE_TIMEOUT_MS / 1000):
            await cut_after(other.address, said)

    asyncio.run(test())


def test_a_frame_above_the_limit_is_not_sent_and_not_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mailbox_module, "MAX_FRAME_BYTES", 1000)

    async def test() -> None:
        keys = draw_keys()
        async with a_pair(keys) as (one, other):
            assert not one.send(other.address, a_message("large"), [bytes(1001)])
            # What is in the message itself counts too: a peer would cut the connection, and what
            # it has lost would be sent again, and cut again.
            assert not one.send(other.address, a_message("l" * 1000))
            assert one.send(other.address, a_message("small"), [bytes(1000)])
            assert await other.receive() == (a_message("small"), [bytes(1000)])
            own = {
                "CURVE_PUBLICKEY": keys.public,
                "CURVE_SECRETKEY": keys.secret,
                "CURVE_SERVERKEY": keys.public,
            }
            with (
                watched(other, zmq.EVENT_DISCONNECTED) as cuts,
                a_push_socket(other.address, **own) as careless,
            ):
                careless.send_multipart([*numbered(0, ENCODED), bytes(2 * PART_BYTES)])
                await cuts.recv_multipart()
            one.send(other.address, a_message("next"))
            assert await other.receive() == (a_message("next"), [])

    asyncio.run(test())
    assert "message dropped, too large" in caplog.text


def test_messages_to_a_new_peer_wait_until_there_are_descriptors_for_its_socket(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        async with a_pair(draw_keys()) as (one, other):
            messages = [(a_message(str(number)), [bytes(number)]) for number in range(3)]
            with descriptors_left(0):
                # Receipts come to it.
                reading = asyncio.create_task(one.deliver(lambda message, frames: None))
                for message, frames in messages:
                    assert one.send(other.address, message, frames)
                receiving = asyncio.create_task(other.receive())
                # It tries again meanwhile.
                await asyncio.wait(
                    (reading, receiving), timeout=2 * TICK_S, return_when="FIRST_COMPLETED"
                )
                assert not reading.done()
                assert not receiving.done()
            assert [await receiving, await other.receive(), await other.receive()] == messages
            one.send(other.address, a_message("next"))
            assert await other.receive() == (a_message("next"), [])
            reading.cancel()

    asyncio.run(test())
    assert caplog.text.count("its messages wait") == 1


def test_more_than_a_thousand_peers_have_a_socket_each() -> None:
    """By default a context of ZeroMQ has 1,023 sockets at most."""

    async def test() -> None:
        async with a_pair(None) as (one, other):
            port = other.address.rpartition(":")[2]
            for number in range(1_024):
                # Nothing listens there.
                address = f"tcp://127.1.{number // 256}.{number % 256}:{port}"
                assert one.send(address, a_message("lost"))
            one.send(other.address, a_message("last"))
            assert await other.receive() == (a_message("last"), [])

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_limit()
    try:
        asyncio.run(test())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_peer_that_leaves_before_there_is_a_socket_for_it_is_forgotten() -> None:
    async def test() -> None:
        async with a_pair(None) as (one, other):
            with descriptors_left(0):
                one.send(other.address, a_message("gone"))
                one.keep_only(set())
            one.send(other.address, a_message("back"))
            assert await other.receive() == (a_message("back"), [])

    asyncio.run(test())


class Cutter:
    """A wire to a mailbox that breaks whenever it has carried so many bytes: what is on its way
    then is lost."""

    def __init__(self, address: str, num_bytes: int) -> None:
        self._port = int(address.rpartition(":")[2])
        self._num_bytes = num_bytes
        self._carrying: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self.num_cuts = 0

    async def open(self) -> str:
        """Begin to carry bytes; returns the address of this end."""
        self._server = await asyncio.start_server(self._accept, HOST, 0)
        return f"tcp://{HOST}:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        self._is_closed = True
        self._server.close()
        for task in self._carrying:
            task.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A plain function, so that the task is known from the beginning: of a coroutine, asyncio
        # would make a task of its own, and complain when that is cancelled.
        if self._is_closed:
            writer.transport.abort()
        else:
            self._carrying.add(asyncio.create_task(self._carry(reader, writer)))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer.transport):
            far_reader, far_writer = await asyncio.open_connection(HOST, self._port)
            back = asyncio.create_task(_pump(far_reader, writer, None))
            try:
                await _pump(reader, far_writer, self._num_bytes)
                self.num_cuts += 1
            finally:
                back.cancel()
                for each in (writer, far_writer):
                    each.transport.abort()


async def _pump(
    source: asyncio.StreamReader, sink: asyncio.StreamWriter, num_bytes: int | None
) -> None:
    """Carry so many bytes at most."""
    with contextlib.suppress(ConnectionError):
        while content := await source.read(1000):
            if num_bytes is not None and (num_bytes := num_bytes - len(content)) < 0:
                return
            sink.write(content)
            await sink.drain()


@pytest.mark.slow
@pytest.mark.parametrize("keys", [None, draw_keys()], ids=["plain", "keys"])
def test_whatever_is_lost_when_a_connection_is_cut_arrives_all_the_same(
    keys: MailboxKeys | None,
) -> None:
    """Once each, and in order. A connection carries some 20 messages before it breaks."""
    num_messages = 60

    async def test() -> int:
        async with a_pair(keys) as (one, other):
            cutter = Cutter(other.address, 12_000)
            address = await cutter.open()
            # Receipts come back on a way of their own, which is not cut.
            reading = asyncio.create_task(one.deliver(lambda message, frames: None))
            try:
                for number in range(num_messages):
                    one.send(address, a_message(str(number)), [bytes(500)])
                for number in range(num_messages):
                    message, _ = await other.receive()
                    assert message == a_message(str(number))
            finally:
                reading.cancel()
                await cutter.close()
            return cutter.num_cuts

    assert asyncio.run(test()) >= 2
