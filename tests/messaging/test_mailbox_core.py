"""Channels of a mailbox: which messages go where, and which of those that come are handed over."""

from collections import deque
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sterna.messaging.mailbox_core import MailboxCore
from sterna.messaging.reliable_channel import (
    GAP,
    MESSAGE,
    PERIODIC,
    PERIODIC_RECEIPT_AFTER_S,
    PROBE,
    PROBE_AFTER_S,
    RECEIPT,
    RECEIPT_AFTER_S,
    Head,
    ReceivingEnd,
)

Sent = tuple[str, Head, list[bytes]]


class Wires:
    """Connections that keep what they are given.

    Attributes:
        are_short: whether no further connection can be opened.
        log: what has happened to connections, in order.
    """

    def __init__(self) -> None:
        self.are_short = False
        self.log: list[str] = []
        self.open: set[str] = set()
        self._sent: list[Sent] = []

    def connect(self, address: str) -> bool:
        assert address not in self.open
        if self.are_short:
            return False
        self.log.append(f"connect {address}")
        self.open.add(address)
        return True

    def push(self, address: str, head: Head, content: Sequence[bytes]) -> None:
        assert address in self.open
        self._sent.append((address, head, list(content)))

    def close(self, address: str) -> None:
        self.log.append(f"close {address}")
        self.open.discard(address)

    def sent(self) -> list[Sent]:
        """What was sent since the last call."""
        sent, self._sent = self._sent, []
        return sent


def channel(number: int) -> bytes:
    """The channel that was drawn as the so many'th."""
    return number.to_bytes(16, "big")


def a_mailbox(
    *, capacity: int = 100, capacity_bytes: int = 10_000, max_origins: int = 100
) -> tuple[MailboxCore, Wires]:
    """A mailbox at `me`; its channels are numbered from 0 on."""
    wires = Wires()
    numbers = iter(range(1000))
    core = MailboxCore(
        "me", wires, lambda: channel(next(numbers)), capacity, capacity_bytes, max_origins
    )
    return core, wires


THEIRS = b"one of another's"


# --------------------------------------------------------------------------------------- sending


def test_a_probe_with_the_own_address_goes_first_and_messages_are_numbered() -> None:
    core, wires = a_mailbox()
    assert core.send("a", [b"1"], 0.0)
    assert core.send("a", [b"2", b"frame"], 0.0)
    assert wires.sent() == [
        ("a", Head(PROBE, channel(0), 0), [b"me"]),
        ("a", Head(MESSAGE, channel(0), 0), [b"1"]),
        ("a", Head(MESSAGE, channel(0), 1), [b"2", b"frame"]),
    ]
    assert wires.log == ["connect a"]


def test_periodic_messages_have_numbers_like_others_and_their_receipt_waits() -> None:
    core, wires = a_mailbox()
    core.send("a", [b"1"], 0.0, True)
    core.send("a", [b"2"], 0.0)
    assert [(head.kind, head.number) for _, head, _ in wires.sent()[1:]] == [
        (PERIODIC, 0),
        (MESSAGE, 1),
    ]
    core.on_probe(Head(PROBE, THEIRS, 0), "them", 0.0)
    wires.sent()
    assert core.on_message(Head(PERIODIC, THEIRS, 0), 0.1)
    core.on_tick(0.1 + RECEIPT_AFTER_S)
    assert wires.sent() == []
    core.on_tick(0.1 + PERIODIC_RECEIPT_AFTER_S)
    assert wires.sent()[-1] == ("them", Head(RECEIPT, THEIRS, 1), [b""])


def test_each_address_has_a_channel_of_its_own() -> None:
    core, wires = a_mailbox()
    core.send("a", [b"1"], 0.0)
    core.send("b", [b"2"], 0.0)
    assert [(to, head) for to, head, _ in wires.sent() if head.kind == MESSAGE] == [
        ("a", Head(MESSAGE, channel(0), 0)),
        ("b", Head(MESSAGE, channel(1), 0)),
    ]


def test_what_is_too_much_for_one_address_is_refused_and_not_sent() -> None:
    core, wires = a_mailbox(capacity=2)
    assert core.send("a", [b"1"], 0.0)
    assert core.send("a", [b"2"], 0.0)
    wires.sent()
    assert not core.send("a", [b"3"], 0.0)
    assert wires.sent() == []
    assert core.num_kept("a") == 2
    assert core.send("b", [b"3"], 0.0)


def test_bytes_that_are_too_many_for_one_address_are_refused() -> None:
    core, _ = a_mailbox(capacity_bytes=10)
    assert core.send("a", [bytes(6)], 0.0)
    assert not core.send("a", [bytes(2), bytes(3)], 0.0)
    assert core.send("a", [bytes(2), bytes(2)], 0.0)


def test_a_receipt_frees_room_and_a_gap_has_the_rest_sent_again_to_the_same_address() -> None:
    core, wires = a_mailbox()
    for name in (b"1", b"2", b"3"):
        core.send("a", [name], 0.0)
        core.send("b", [name], 0.0)
    wires.sent()
    core.on_receipt(Head(RECEIPT, channel(1), 2), 0.1)
    assert (core.num_kept("a"), core.num_kept("b"), core.num_kept("c")) == (3, 1, 0)
    assert wires.sent() == []
    core.on_receipt(Head(GAP, channel(1), 2), 0.2)
    assert wires.sent() == [("b", Head(MESSAGE, channel(1), 2), [b"3"])]


# ------------------------------------------------------------------------------------- addresses


def test_connections_to_all_but_the_members_are_closed() -> None:
    core, wires = a_mailbox()
    for address in ("a", "b", "c"):
        core.send(address, [b"1"], 0.0)
    core.keep_only({"b", "d"})
    assert wires.log == ["connect a", "connect b", "connect c", "close a", "close c"]
    assert [core.num_kept(each) for each in ("a", "b", "c")] == [0, 1, 0]


def test_a_receipt_that_comes_after_its_address_was_forgotten_is_ignored() -> None:
    core, wires = a_mailbox()
    core.send("a", [b"1"], 0.0)
    core.send("b", [b"1"], 0.0)
    core.keep_only({"b"})
    wires.sent()
    core.on_receipt(Head(GAP, channel(0), 0), 0.1)
    assert wires.sent() == []
    core.on_receipt(Head(GAP, channel(1), 0), 0.1)
    assert wires.sent() == [("b", Head(MESSAGE, channel(1), 0), [b"1"])]


def test_a_receipt_of_a_channel_that_never_was_is_ignored() -> None:
    core, wires = a_mailbox()
    core.on_receipt(Head(GAP, THEIRS, 0), 0.0)
    assert wires.sent() == []


def test_an_address_that_comes_back_has_a_new_channel() -> None:
    core, wires = a_mailbox()
    core.send("a", [b"lost"], 0.0)
    core.keep_only(set())
    wires.sent()
    core.send("a", [b"new"], 1.0)
    assert wires.sent() == [
        ("a", Head(PROBE, channel(1), 0), [b"me"]),
        ("a", Head(MESSAGE, channel(1), 0), [b"new"]),
    ]


# ------------------------------------------------------------------------------------- receiving


def test_a_message_is_handed_over_once_and_in_order() -> None:
    core, _ = a_mailbox()
    heads = [Head(MESSAGE, THEIRS, number) for number in (0, 2, 1, 1, 2)]
    assert [core.on_message(each, 0.0) for each in heads] == [True, False, True, False, True]


def test_senders_are_told_apart_by_their_channels() -> None:
    core, _ = a_mailbox()
    assert core.on_message(Head(MESSAGE, channel(7), 0), 0.0)
    assert core.on_message(Head(MESSAGE, channel(8), 0), 0.0)


def test_a_probe_is_answered_at_once_by_a_connection_of_the_own() -> None:
    core, wires = a_mailbox()
    core.on_probe(Head(PROBE, THEIRS, 0), "them", 0.0)
    assert wires.sent() == [
        ("them", Head(PROBE, channel(0), 0), [b"me"]),
        ("them", Head(RECEIPT, THEIRS, 0), [b""]),
    ]
    core.on_probe(Head(PROBE, THEIRS, 3), "them", 0.1)
    assert wires.sent() == [("them", Head(GAP, THEIRS, 0), [b""])]
    assert wires.log == ["connect them"]


def test_a_gap_is_asked_for_at_once_and_a_receipt_goes_out_at_a_tick() -> None:
    core, wires = a_mailbox()
    core.on_probe(Head(PROBE, THEIRS, 0), "them", 0.0)
    wires.sent()
    core.on_message(Head(MESSAGE, THEIRS, 1), 0.1)
    assert wires.sent() == [("them", Head(GAP, THEIRS, 0), [b""])]
    core.on_message(Head(MESSAGE, THEIRS, 0), 0.2)
    core.on_tick(0.2)
    assert wires.sent() == []
    assert core.needs_tick
    core.on_tick(0.2 + RECEIPT_AFTER_S)
    assert wires.sent() == [("them", Head(RECEIPT, THEIRS, 1), [b""])]
    assert not core.needs_tick


def test_a_receipt_waits_until_its_address_is_known() -> None:
    """The probe that went first was lost. There may be no other: the sender may have gone."""
    core, wires = a_mailbox()
    core.on_message(Head(MESSAGE, THEIRS, 0), 0.0)
    assert not core.needs_tick
    core.on_tick(1.0)
    assert wires.sent() == []
    core.on_probe(Head(PROBE, THEIRS, 1), "them", 2.0)
    assert wires.sent()[-1] == ("them", Head(RECEIPT, THEIRS, 1), [b""])


def test_a_gap_is_not_asked_for_until_its_address_is_known() -> None:
    core, wires = a_mailbox()
    core.on_message(Head(MESSAGE, THEIRS, 1), 0.0)
    assert (wires.log, wires.sent()) == ([], [])
    core.on_probe(Head(PROBE, THEIRS, 2), "them", 2.0)
    assert wires.sent()[-1] == ("them", Head(GAP, THEIRS, 0), [b""])


def test_the_sender_that_was_silent_for_longest_is_forgotten_first() -> None:
    core, _ = a_mailbox(max_origins=2)
    old, quiet, new = (channel(number) for number in (7, 8, 9))
    for each in (old, quiet):
        core.on_message(Head(MESSAGE, each, 0), 0.0)
    core.on_probe(Head(PROBE, old, 1), "old", 1.0)
    core.on_message(Head(MESSAGE, new, 0), 2.0)
    assert core.on_message(Head(MESSAGE, old, 1), 3.0)
    assert core.on_message(Head(MESSAGE, new, 1), 3.0)
    # It begins anew.
    assert not core.on_message(Head(MESSAGE, quiet, 1), 3.0)


# ------------------------------------------------------------------------------------------ time


def test_a_sender_without_a_receipt_asks_at_a_tick_for_as_long_as_there_is_none() -> None:
    core, wires = a_mailbox()
    assert not core.needs_tick
    core.send("a", [b"1"], 0.0)
    wires.sent()
    assert core.needs_tick
    core.on_tick(PROBE_AFTER_S / 2)
    assert wires.sent() == []
    for now_s in (PROBE_AFTER_S, 2 * PROBE_AFTER_S):
        core.on_tick(now_s)
        assert wires.sent() == [("a", Head(PROBE, channel(0), 1), [b"me"])]
    core.on_receipt(Head(RECEIPT, channel(0), 1), 1.0)
    assert not core.needs_tick
    core.on_tick(10.0)
    assert wires.sent() == []


def test_messages_wait_for_a_connection_that_cannot_be_opened_yet() -> None:
    """Then a probe goes first, by which the other side asks for them."""
    core, wires = a_mailbox()
    wires.are_short = True
    assert core.send("a", [b"1"], 0.0)
    core.on_tick(0.1)
    assert core.needs_tick
    assert core.send("a", [b"2"], 0.1)
    wires.are_short = False
    core.on_tick(0.2)
    assert wires.sent() == [("a", Head(PROBE, channel(0), 2), [b"me"])]
    core.on_receipt(Head(GAP, channel(0), 0), 0.3)
    assert wires.sent() == [
        ("a", Head(MESSAGE, channel(0), 0), [b"1"]),
        ("a", Head(MESSAGE, channel(0), 1), [b"2"]),
    ]


def test_a_receipt_that_no_connection_can_be_opened_for_is_asked_for_again() -> None:
    core, wires = a_mailbox()
    wires.are_short = True
    core.on_probe(Head(PROBE, THEIRS, 0), "them", 0.0)
    assert core.needs_tick
    wires.are_short = False
    core.on_tick(0.1)
    core.on_probe(Head(PROBE, THEIRS, 0), "them", 0.3)
    assert wires.sent() == [
        ("them", Head(PROBE, channel(0), 0), [b"me"]),
        ("them", Head(RECEIPT, THEIRS, 0), [b""]),
    ]


class Counted(MailboxCore):
    """A mailbox that counts the looks at its senders' deadlines."""

    num_looks = 0

    def _new_incoming(self, channel: bytes) -> ReceivingEnd:
        mailbox = self

        class CountedEnd(ReceivingEnd):
            @property
            def next_deadline_s(self) -> float | None:
                mailbox.num_looks += 1
                return super().next_deadline_s

            def receipt(self, now_s: float) -> Head | None:
                mailbox.num_looks += 1
                return super().receipt(now_s)

        return CountedEnd(channel)


def test_a_tick_looks_only_at_the_senders_that_wait_for_a_receipt() -> None:
    """A mailbox hears many in weeks, most of which have ended."""
    wires = Wires()
    core = Counted("me", wires, lambda: bytes(16), 100, 10_000)
    for number in range(1000):
        core.on_message(Head(MESSAGE, channel(number), 0), 0.0)
        core.on_probe(Head(PROBE, channel(number), 1), "them", 0.0)
    core.num_looks = 0
    assert not core.needs_tick
    core.on_tick(0.1)
    assert core.num_looks == 0
    wires.sent()
    core.on_message(Head(MESSAGE, channel(7), 1), 0.2)
    assert core.needs_tick
    core.num_looks = 0
    core.on_tick(0.2 + RECEIPT_AFTER_S)
    assert wires.sent() == [("them", Head(RECEIPT, channel(7), 2), [b""])]
    assert core.num_looks <= 2
    assert not core.needs_tick


def test_a_sender_that_is_forgotten_gets_no_receipt() -> None:
    core, wires = a_mailbox(max_origins=1)
    core.on_probe(Head(PROBE, channel(7), 0), "old", 0.0)
    core.on_message(Head(MESSAGE, channel(7), 0), 0.0)
    wires.sent()
    core.on_message(Head(MESSAGE, channel(8), 0), 0.1)
    assert not core.needs_tick
    core.on_tick(1.0)
    assert wires.sent() == []


class TwoMailboxes(RuleBasedStateMachine):
    """Both write to each other; connections are cut, cannot be opened for a time, and one side may
    forget the other, which comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.ways = {name: _Way() for name in "ab"}
        self.num_channels = 0
        self.cores = {
            name: MailboxCore(name, self.ways[name], self._draw, 50, 10_000) for name in "ab"
        }
        # Of each sender, by its channels in order: what was sent, and what was handed over.
        self.sent: dict[str, list[list[bytes]]] = {name: [[]] for name in "ab"}
        self.received: dict[bytes, list[bytes]] = {}

    def _draw(self) -> bytes:
        self.num_channels += 1
        return channel(self.num_channels)

    @initialize()
    def both_write(self) -> None:
        self.send("a", 2)
        self.send("b", 2)

    @rule(sender=st.sampled_from("ab"), num_messages=st.integers(1, 4))
    def send(self, sender: str, num_messages: int) -> None:
        messages = self.sent[sender][-1]
        for _ in range(num_messages):
            content = f"{sender}{len(self.sent[sender])}-{len(messages)}".encode()
            if self.cores[sender].send(_other(sender), [content], self.now_s):
                messages.append(content)

    @rule(sender=st.sampled_from("ab"), num_frames=st.integers(1, 8))
    def arrive(self, sender: str, num_frames: int) -> None:
        receiver = self.cores[_other(sender)]
        way = self.ways[sender]
        for _ in range(min(num_frames, len(way.frames))):
            head, content = way.frames.popleft()
            if head.kind == MESSAGE:
                if receiver.on_message(head, self.now_s):
                    self.received.setdefault(head.channel, []).append(content[0])
            elif head.kind == PROBE:
                receiver.on_probe(head, content[0].decode(), self.now_s)
            else:
                receiver.on_receipt(head, self.now_s)

    @rule(sender=st.sampled_from("ab"), first=st.integers(0, 3), num_lost=st.integers(1, 6))
    def cut(self, sender: str, first: int, num_lost: int) -> None:
        """What the kernel held is lost: not what was read, nor what was not written yet."""
        frames = list(self.ways[sender].frames)
        del frames[first : first + num_lost]
        self.ways[sender].frames = deque(frames)

    @rule(sender=st.sampled_from("ab"), are_short=st.booleans())
    def descriptors(self, sender: str, are_short: bool) -> None:
        self.ways[sender].are_short = are_short

    @rule(sender=st.sampled_from("ab"))
    def forget(self, sender: str) -> None:
        self.cores[sender].keep_only(set())
        self.sent[sender].append([])

    @rule()
    def time_passes(self) -> None:
        self.now_s += 0.1
        for core in self.cores.values():
            if core.needs_tick:
                core.on_tick(self.now_s)

    @invariant()
    def each_channel_brings_a_beginning_of_what_was_sent(self) -> None:
        sent = [messages for each in self.sent.values() for messages in each]
        for received in self.received.values():
            assert any(messages[: len(received)] == received for messages in sent)

    def teardown(self) -> None:
        """Once nothing is cut any more, all of the last channel arrives, and nobody ticks on."""
        for way in self.ways.values():
            way.are_short = False
        for name in "ab":
            self.send(name, 2)
        for _ in range(40):
            self.time_passes()
            while any(way.frames for way in self.ways.values()):
                for name in "ab":
                    self.arrive(name, 100)
            if not any(core.needs_tick for core in self.cores.values()):
                break
        for name in "ab":
            assert self.sent[name][-1] in self.received.values()
            assert not self.cores[name].needs_tick


class _Way:
    """The connection of one mailbox to the other."""

    def __init__(self) -> None:
        self.are_short = False
        self.frames: deque[tuple[Head, Sequence[bytes]]] = deque()

    def connect(self, address: str) -> bool:
        return not self.are_short

    def push(self, address: str, head: Head, content: Sequence[bytes]) -> None:
        self.frames.append((head, content))

    def close(self, address: str) -> None:
        self.frames.clear()


def _other(name: str) -> str:
    return "b" if name == "a" else "a"


TestTwoMailboxes = TwoMailboxes.TestCase
TestTwoMailboxes.settings = settings(max_examples=50)
