"""Messages of the simulated clusters go through the mailboxes' own code, over connections that
lose what is on its way."""

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest

from fault_simulation.planted.mailboxes import ConfirmsTooFar, HandsRepeatsOver, NeverProbes
from fault_simulation.run import queues_of, run_seed
from fault_simulation.virtual.network import Network
from fault_simulation.virtual.nodes import Nodes
from fault_simulation.virtual.settings import WIDE, Queues
from fault_simulation.virtual.timeline import Process, Timeline, Violation
from sterna.messages.actors import (
    CancelDispatch,
    HandedBack,
    RequestNews,
    RequestsMoved,
    TokenBatch,
    TokenSpan,
    WireMessage,
)
from sterna.messaging.mailbox_core import MailboxCore
from sterna.types import InstanceId, RequestId
from tests.fault_simulation.replay import said

NUM_MESSAGES = 5


class Pair:
    """Two processes, `a` and `b`, and what `b` has received."""

    def __init__(
        self, core: type[MailboxCore] = MailboxCore, queues: Queues = WIDE, seed: int = 1
    ) -> None:
        self.timeline = Timeline()
        nodes = Nodes(self.timeline, Random(1), 1)
        self.network = Network(self.timeline, Random(seed), nodes, Random(seed), core, queues)
        self.a, self.b = Process("a"), Process("b")
        self.received: list[str] = []
        self.network.join(self.a, self._receive_nothing, 100)
        self.network.join(self.b, self._receive, 100)

    def _receive(self, message: WireMessage, frames: Sequence[bytes]) -> None:
        assert isinstance(message, CancelDispatch)
        self.received.append(message.request_id)

    def _receive_nothing(self, message: WireMessage, frames: Sequence[bytes]) -> None:
        raise AssertionError("nobody writes to it")

    def send(self, *names: str) -> None:
        for each in names:
            self.network.send(self.a, "b", CancelDispatch(RequestId(each)))

    def hang(self, duration_s: float) -> None:
        """Let `b` do nothing for so long."""
        self.b.is_hung = True

        def go_on() -> None:
            self.b.is_hung, self.b.went_on_s = False, self.timeline.now_s
            for what, action in self.b.frozen:
                self.timeline.push(0.0, self.b, what, action)

        self.timeline.push(duration_s, None, "", go_on)

    def run(self, duration_s: float) -> None:
        """Let so much time pass."""
        end_s = self.timeline.now_s + duration_s
        self.timeline.push_at(end_s, None, "", lambda: None)
        while self.timeline.now_s < end_s:
            process, _, action = self.timeline.pop()
            if process is None or process.is_alive:
                action()


def test_messages_that_a_broken_connection_loses_are_sent_again() -> None:
    pair = Pair()
    pair.send("1", "2")
    pair.run(1.0)
    pair.network.break_connection("a", "b", num_frames=2)
    pair.send("3", "4", "5")
    pair.run(1.0)
    assert pair.received == ["1", "2", "3", "4", "5"]
    assert pair.network.counts["lost: message"] == 2
    pair.network.check_rest()


@pytest.mark.parametrize("seed", range(6))
def test_messages_that_are_lost_while_a_link_is_cut_arrive_when_it_is_whole(seed: int) -> None:
    pair = Pair(seed=seed)
    pair.send("1")
    pair.run(1.0)
    pair.network.cut_off("a", "b", 2.0)
    for name in ("2", "3", "4"):
        pair.send(name)
        pair.run(0.5)
    assert pair.received == ["1"]
    pair.run(2.0)
    assert pair.received == ["1", "2", "3", "4"]
    pair.run(2.0)
    pair.network.check_rest()


def test_some_links_that_are_cut_lose_messages() -> None:
    num_lost = 0
    for seed in range(6):
        pair = Pair(seed=seed)
        pair.send("1")
        pair.run(1.0)
        pair.network.cut_off("a", "b", 2.0)
        pair.send("2", "3", "4")
        num_lost += pair.network.counts["lost: message"]
    assert 3 <= num_lost <= 15


def test_a_process_that_hangs_takes_messages_in_order_when_it_goes_on() -> None:
    pair = Pair()
    pair.hang(1.0)
    pair.send("1", "2")
    pair.run(0.9)
    assert pair.received == []
    pair.run(0.2)
    assert pair.received == ["1", "2"]


def test_of_what_the_dead_have_sent_a_beginning_arrives() -> None:
    beginnings = set()
    for seed in range(20):
        pair = Pair(seed=seed)
        pair.send("1", "2", "3")
        pair.a.is_alive = False
        pair.network.on_death(pair.a)
        pair.run(2.0)
        assert pair.received == ["1", "2", "3"][: len(pair.received)]
        beginnings.add(len(pair.received))
    assert {0, 3} <= beginnings


@pytest.mark.parametrize(
    "news",
    [
        TokenBatch(InstanceId("a"), (TokenSpan(RequestId("r"), 0, 1, False),)),
        TokenBatch(InstanceId("a"), (TokenSpan(RequestId("r"), 1, 1, True),)),
        RequestsMoved(InstanceId("a"), (RequestId("r"),), (1,), 1),
        HandedBack(InstanceId("a"), (RequestId("r"),)),
    ],
    ids=["tokens", "the last tokens", "a move", "what is handed back"],
)
def test_a_full_mailbox_refuses_all_news_of_requests(news: RequestNews) -> None:
    pair = Pair(queues=Queues(of_frontends=100, of_tokens=1))
    assert pair.network.send(pair.a, "b", news, [])
    assert not pair.network.send(pair.a, "b", news, [])


# --------------------------------------------------------------------- what is wrong is found


def test_a_message_that_is_handed_over_twice_is_found() -> None:
    """It hangs meanwhile, is asked twice what it has, and so gets twice what it lacks."""
    pair = Pair(HandsRepeatsOver)
    pair.send("1")
    pair.run(1.0)
    pair.network.break_connection("a", "b", num_frames=1)
    pair.hang(1.0)
    pair.send("2")
    with pytest.raises(Violation, match="b gets message 1 of a, and 2 is the next"):
        pair.run(2.0)


def test_a_message_that_is_forgotten_before_it_has_arrived_is_found() -> None:
    pair = Pair(ConfirmsTooFar)
    pair.send("1")
    pair.run(1.0)
    pair.network.break_connection("a", "b", num_frames=1)
    pair.send("2", "3")
    with pytest.raises(Violation, match="a forgets message 1 to b, which has not arrived"):
        pair.run(1.0)


def test_a_message_that_never_arrives_is_found_at_the_end() -> None:
    pair = Pair(NeverProbes)
    pair.send("1")
    pair.run(1.0)
    pair.network.break_connection("a", "b", num_frames=1)
    pair.send("2")
    pair.run(3.0)
    with pytest.raises(Violation, match="a message of a to b has not arrived"):
        pair.network.check_rest()
    pair.send("3")
    with pytest.raises(Violation, match=r"b gets message 1 of a 3\.0 s later"):
        pair.run(1.0)


# ------------------------------------------------------------------------------- whole clusters


def test_messages_are_lost_and_refused_in_clusters_and_no_promise_is_broken() -> None:
    """Front ends fail requests that they could not send, and send those again whose tokens were
    lost."""
    counts: Counter[str] = Counter()
    for seed in [each for each in range(100) if queues_of(each) is not WIDE]:
        result = run_seed(seed)
        assert result.violation is None, said(result)
        counts += Counter(result.counts)
    assert counts["connection: broken"] >= 20
    assert counts["connection: cannot be opened"] >= 5
    assert counts["lost: message"] >= 30
    assert counts["lost: probe or receipt"] >= 30
    assert counts["refused: TokenBatch"] >= 50
    assert counts["request failed: its instance does not take what is sent to it"] >= 3


def test_queues_are_short_in_some_seeds() -> None:
    num_short = sum(queues_of(each) is not WIDE for each in range(1000))
    assert 120 <= num_short <= 230
