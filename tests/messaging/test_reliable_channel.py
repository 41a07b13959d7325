"""Messages of a channel arrive once and in order, whatever a connection loses."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from sterna.messaging.reliable_channel import (
    GAP,
    HEAD_BYTES,
    MESSAGE,
    PERIODIC,
    PERIODIC_PROBE_AFTER_S,
    PERIODIC_RECEIPT_AFTER_S,
    PROBE,
    PROBE_AFTER_S,
    RECEIPT,
    RECEIPT_AFTER_MESSAGES,
    RECEIPT_AFTER_S,
    Frames,
    Head,
    ReceivingEnd,
    SendingEnd,
)
from sterna.types import earliest

CHANNEL = b"0123456789abcdef"


def outgoing(*contents: bytes, capacity: int = 100) -> SendingEnd:
    """With these messages sent at 0 s."""
    channel = SendingEnd(CHANNEL, capacity, capacity_bytes=10_000)
    for each in contents:
        channel.send([each], 0.0)
    return channel


@given(st.integers(0, PERIODIC), st.binary(min_size=16, max_size=16), st.integers(0, 2**64 - 1))
def test_a_head_is_read_as_it_was_written(kind: int, channel: bytes, number: int) -> None:
    head = Head(kind, channel, number)
    assert Head.decode(head.encode() + b"what follows") == head


def test_a_head_needs_nothing_behind_it() -> None:
    head = Head(RECEIPT, CHANNEL, 7)
    assert Head.decode(head.encode()) == head


@given(st.one_of(st.binary(max_size=40), st.binary(min_size=HEAD_BYTES, max_size=HEAD_BYTES)))
@example(bytes([PERIODIC + 1]) + bytes(HEAD_BYTES))
@example(bytes([PERIODIC]) + bytes(HEAD_BYTES - 1))
def test_bytes_are_a_head_when_they_are_long_enough_and_of_a_known_kind(content: bytes) -> None:
    if len(content) >= HEAD_BYTES and content[0] <= PERIODIC:
        assert content.startswith(Head.decode(content).encode())
    else:
        with pytest.raises(ValueError, match="head"):
            Head.decode(content)


def test_messages_are_numbered_and_kept_until_their_receipt() -> None:
    channel = outgoing(b"a", b"b")
    assert channel.send([b"c"], 0.0) == Head(MESSAGE, CHANNEL, 2)
    assert channel.on_receipt(Head(RECEIPT, CHANNEL, 2), 0.1) == []
    assert channel.num_kept == 1
    assert channel.on_receipt(Head(RECEIPT, CHANNEL, 3), 0.1) == []
    assert channel.num_kept == 0
    assert channel.next_deadline_s is None


def test_messages_are_kept_up_to_so_many_bytes_but_one_at_least() -> None:
    channel = SendingEnd(CHANNEL, 100, capacity_bytes=10)
    assert channel.send([bytes(8), bytes(8)], 0.0) == Head(MESSAGE, CHANNEL, 0)
    assert channel.send([b""], 0.0) is None
    channel.on_receipt(Head(RECEIPT, CHANNEL, 1), 0.1)
    assert channel.send([bytes(4)], 0.2) == Head(MESSAGE, CHANNEL, 1)
    assert channel.send([bytes(3), bytes(3)], 0.2) == Head(MESSAGE, CHANNEL, 2)
    assert channel.send([bytes(1)], 0.2) is None
    channel.on_receipt(Head(RECEIPT, CHANNEL, 2), 0.3)
    assert channel.send([bytes(4)], 0.4) == Head(MESSAGE, CHANNEL, 3)


def test_a_gap_has_everything_sent_again_from_there() -> None:
    channel = outgoing(b"a", b"b", b"c")
    assert channel.on_receipt(Head(GAP, CHANNEL, 1), 0.1) == [
        (Head(MESSAGE, CHANNEL, 1), [b"b"]),
        (Head(MESSAGE, CHANNEL, 2), [b"c"]),
    ]


def test_a_gap_at_the_first_message_that_is_kept_has_all_of_them_sent_again() -> None:
    channel = outgoing(b"a", b"b")
    channel.on_receipt(Head(RECEIPT, CHANNEL, 1), 0.1)
    assert channel.on_receipt(Head(GAP, CHANNEL, 1), 0.2) == [(Head(MESSAGE, CHANNEL, 1), [b"b"])]


def test_a_receipt_that_cannot_be_changes_nothing() -> None:
    channel = outgoing(b"a", b"b", b"c")
    channel.on_receipt(Head(RECEIPT, CHANNEL, 2), 0.1)
    for number in (0, 1, 4):
        assert channel.on_receipt(Head(GAP, CHANNEL, number), 0.1) == []
    assert channel.num_kept == 1


def test_more_than_can_be_kept_is_refused() -> None:
    channel = outgoing(b"a", b"b", capacity=2)
    assert channel.send([b"c"], 0.0) is None
    channel.on_receipt(Head(RECEIPT, CHANNEL, 1), 0.1)
    assert channel.send([b"c"], 0.0) == Head(MESSAGE, CHANNEL, 2)


def test_without_a_receipt_the_sender_asks_again_and_again() -> None:
    channel = outgoing(b"a", b"b")
    assert channel.probe(PROBE_AFTER_S / 2) is None
    assert channel.probe(PROBE_AFTER_S) == Head(PROBE, CHANNEL, 2)
    assert channel.probe(PROBE_AFTER_S) is None
    assert channel.probe(2 * PROBE_AFTER_S) == Head(PROBE, CHANNEL, 2)


def test_further_messages_do_not_put_the_question_off() -> None:
    channel = outgoing(b"a")
    channel.send([b"b"], PROBE_AFTER_S / 2)
    assert channel.next_deadline_s == PROBE_AFTER_S
    assert channel.probe(PROBE_AFTER_S) == Head(PROBE, CHANNEL, 2)


def test_after_a_receipt_for_a_part_the_sender_asks_for_the_rest() -> None:
    channel = outgoing(b"a", b"b", b"c")
    channel.on_receipt(Head(RECEIPT, CHANNEL, 2), 0.2)
    assert channel.next_deadline_s == 0.2 + PROBE_AFTER_S
    assert channel.probe(0.2) is None
    assert channel.probe(0.2 + PROBE_AFTER_S) == Head(PROBE, CHANNEL, 3)


def test_the_first_message_after_all_receipts_is_asked_for_anew() -> None:
    channel = outgoing(b"a")
    channel.on_receipt(Head(RECEIPT, CHANNEL, 1), 0.1)
    assert channel.probe(5.0) is None
    channel.send([b"b"], 7.0)
    assert channel.next_deadline_s == 7.0 + PROBE_AFTER_S


def test_a_periodic_message_is_asked_for_later_than_others() -> None:
    channel = SendingEnd(CHANNEL, 100, capacity_bytes=10)
    assert channel.send([b"a"], 0.0, True) == Head(PERIODIC, CHANNEL, 0)
    assert channel.next_deadline_s == PERIODIC_PROBE_AFTER_S
    channel.send([b"b"], 0.1)
    assert channel.next_deadline_s == 0.1 + PROBE_AFTER_S
    channel.send([b"c"], 0.2, True)
    assert channel.next_deadline_s == 0.1 + PROBE_AFTER_S


def test_the_receipt_of_periodic_messages_waits_for_more_of_them() -> None:
    channel = ReceivingEnd(CHANNEL)
    assert channel.on_message(0, 0.0, True)
    assert channel.on_message(1, 0.4, True)
    assert channel.next_deadline_s == PERIODIC_RECEIPT_AFTER_S
    assert channel.on_message(2, 0.5)
    assert channel.receipt(0.5 + RECEIPT_AFTER_S) == Head(RECEIPT, CHANNEL, 3)
    assert channel.next_deadline_s is None


def test_a_gap_before_a_periodic_message_is_asked_for_at_once() -> None:
    channel = ReceivingEnd(CHANNEL)
    assert not channel.on_message(1, 0.0, True)
    assert channel.receipt(0.0) == Head(GAP, CHANNEL, 0)


def test_a_receipt_waits_for_more_messages_to_speak_of() -> None:
    channel = ReceivingEnd(CHANNEL)
    assert channel.on_message(0, 0.0)
    assert channel.on_message(1, 0.01)
    assert channel.receipt(RECEIPT_AFTER_S / 2) is None
    assert channel.receipt(RECEIPT_AFTER_S) == Head(RECEIPT, CHANNEL, 2)
    assert channel.receipt(1.0) is None
    for number in range(2, 2 + RECEIPT_AFTER_MESSAGES):
        channel.on_message(number, 1.0)
    assert channel.receipt(1.0) == Head(RECEIPT, CHANNEL, 2 + RECEIPT_AFTER_MESSAGES)
    channel.on_message(2 + RECEIPT_AFTER_MESSAGES, 1.0)
    assert channel.receipt(1.0) is None


def test_a_receipt_is_due_with_the_last_message_of_many() -> None:
    """Twice: the count begins anew with each receipt."""
    channel = ReceivingEnd(CHANNEL)
    for first in (0, RECEIPT_AFTER_MESSAGES):
        *numbers, last = range(first, first + RECEIPT_AFTER_MESSAGES)
        for number in numbers:
            channel.on_message(number, 1.0)
            assert channel.next_deadline_s == 1.0 + RECEIPT_AFTER_S
        channel.on_message(last, 1.0)
        assert channel.next_deadline_s == 1.0
        assert channel.receipt(1.0) == Head(RECEIPT, CHANNEL, last + 1)


def test_a_message_that_comes_again_has_the_receipt_said_again() -> None:
    """The sender has not got it: it was lost."""
    channel = ReceivingEnd(CHANNEL)
    channel.on_message(0, 0.0)
    channel.receipt(RECEIPT_AFTER_S)
    assert not channel.on_message(0, 1.0)
    assert channel.next_deadline_s == 1.0 + RECEIPT_AFTER_S
    assert channel.receipt(1.0 + RECEIPT_AFTER_S) == Head(RECEIPT, CHANNEL, 1)


def test_a_gap_is_asked_for_at_once_and_only_once() -> None:
    channel = ReceivingEnd(CHANNEL)
    channel.on_message(0, 0.0)
    assert not channel.on_message(2, 0.0)
    assert channel.receipt(0.0) == Head(GAP, CHANNEL, 1)
    assert not channel.on_message(3, 0.0)
    assert channel.next_deadline_s is None


def test_the_next_gap_is_asked_for_when_the_last_one_is_filled() -> None:
    channel = ReceivingEnd(CHANNEL)
    channel.on_message(1, 0.0)
    assert channel.receipt(0.0) == Head(GAP, CHANNEL, 0)
    assert channel.on_message(0, 0.1)
    assert channel.receipt(0.1 + RECEIPT_AFTER_S) == Head(RECEIPT, CHANNEL, 1)
    channel.on_message(2, 1.0)
    assert channel.receipt(1.0) == Head(GAP, CHANNEL, 1)


def test_a_gap_that_was_asked_for_in_vain_is_asked_for_again_at_a_probe() -> None:
    channel = ReceivingEnd(CHANNEL)
    channel.on_message(1, 0.0)
    channel.receipt(0.0)
    channel.on_probe(2, 0.3)
    assert channel.receipt(0.3) == Head(GAP, CHANNEL, 0)


def test_a_probe_shows_that_the_last_messages_were_lost() -> None:
    channel = ReceivingEnd(CHANNEL)
    channel.on_message(0, 0.0)
    channel.on_probe(1, 0.5)
    assert channel.receipt(0.5) == Head(RECEIPT, CHANNEL, 1)
    channel.on_probe(3, 0.6)
    assert channel.receipt(0.6) == Head(GAP, CHANNEL, 1)


class AChannel(RuleBasedStateMachine):
    """A sender, a receiver, and a connection that is cut now and then: what is on its way is lost
    then, in either direction, and what comes through is in order."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.sender, self.receiver = SendingEnd(CHANNEL, 50, 10_000), ReceivingEnd(CHANNEL)
        self.forth: list[tuple[Head, Frames]] = []
        self.back: list[Head] = []
        self.num_sent = 0
        self.received: list[int] = []
        self.num_lost_last = 0

    @initialize(num_lost_last=st.integers(0, 3))
    def decide_how_it_ends(self, num_lost_last: int) -> None:
        """So many messages, the last of all, are cut behind a receipt for those before them."""
        self.num_lost_last = num_lost_last

    @rule(is_periodic=st.booleans())
    def send(self, is_periodic: bool) -> None:
        content = [str(self.num_sent).encode()]
        head = self.sender.send(content, self.now_s, is_periodic)
        if head is not None:
            self.forth.append((head, content))
            self.num_sent += 1

    @precondition(lambda self: self.forth)
    @rule(count=st.integers(1, 5))
    def arrive(self, count: int) -> None:
        for _ in range(min(count, len(self.forth))):
            head, content = self.forth.pop(0)
            if head.kind == PROBE:
                self.receiver.on_probe(head.number, self.now_s)
            elif self.receiver.on_message(head.number, self.now_s, head.kind == PERIODIC):
                self.received.append(int(bytes(content[0])))
        self.confirm()

    @precondition(lambda self: self.back)
    @rule()
    def return_(self) -> None:
        head = self.back.pop(0)
        self.forth += self.sender.on_receipt(head, self.now_s)

    @rule(of_forth=st.integers(0, 10), of_back=st.integers(0, 3))
    def cut(self, of_forth: int, of_back: int) -> None:
        del self.forth[:of_forth]
        del self.back[:of_back]

    @rule(num_lost=st.integers(1, 3))
    def cut_after_a_receipt(self, num_lost: int) -> None:
        """The sender knows that it was heard, and no message is on its way that would show the
        loss."""
        self.send(is_periodic=False)
        while self.forth:
            self.arrive(5)
        for _ in range(num_lost):
            self.send(is_periodic=False)
        # What was lost before has the sender asked first.
        for _ in range(3):
            self.time_passes()
            self.back, back = [], self.back
            for head in back:
                self.sender.on_receipt(head, self.now_s)
        self.forth.clear()

    @rule()
    def time_passes(self) -> None:
        due_s = earliest((self.sender.next_deadline_s, self.receiver.next_deadline_s))
        if due_s is not None:
            self.now_s = max(self.now_s, due_s)
        probe = self.sender.probe(self.now_s)
        if probe is not None:
            self.forth.append((probe, ()))
        self.confirm()

    def confirm(self) -> None:
        receipt = self.receiver.receipt(self.now_s)
        if receipt is not None:
            self.back.append(receipt)

    @invariant()
    def what_was_received_is_what_was_sent_first(self) -> None:
        assert self.received == list(range(len(self.received)))

    @invariant()
    def nothing_that_is_missing_is_forgotten(self) -> None:
        assert self.sender.num_kept >= self.num_sent - len(self.received)

    def teardown(self) -> None:
        """Once nothing is cut any more, everything arrives, and the sender knows."""
        if self.num_lost_last:
            self.cut_after_a_receipt(self.num_lost_last)
        for _ in range(20):
            while self.forth or self.back:
                if self.forth:
                    self.arrive(5)
                if self.back:
                    self.return_()
            if self.sender.num_kept == 0:
                break
            self.time_passes()
        assert self.received == list(range(self.num_sent))
        assert self.sender.num_kept == 0


TestAChannel = AChannel.TestCase
