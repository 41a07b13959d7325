"""Questions of operators to the supervisor and to other front ends, over real mailboxes."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from sterna.errors import (
    FleetError,
    UnansweredError,
    UnknownInstanceError,
    UnknownRequestError,
)
from sterna.frontend.operators.questions import Operators
from sterna.frontend.peers import Peers
from sterna.messages.actors import (
    Absent,
    AdminReply,
    DescribeHistory,
    DrainInstance,
    FrontendMember,
    InstanceMember,
    ListRecent,
    ListRequests,
    Membership,
    WireMessage,
)
from sterna.messaging.mailbox import Mailbox
from sterna.migration.messages import Mode
from sterna.types import FrontendId, InstanceId

HANG_S = 60.0
HERE = {"tern": [{"id": "cmpl-tern-0-9f86d081"}]}
"""The histories of this front end, by the name of the request."""


MOVED = {"event": "moved", "time_s": 5.0}
RECENT = {"decisions": [MOVED], "ttft_s": [0.1], "tpot_s": [], "waiting": 1}
"""What has happened here."""


def here(question: DescribeHistory | ListRecent) -> object:
    return HERE.get(question.name, []) if isinstance(question, DescribeHistory) else RECENT


def operators_of(peers: Peers) -> Operators:
    return Operators(FrontendId(0), peers, HANG_S, here)


async def drain(instance_id: str, error: str | None = None) -> DrainInstance:
    """Drain it in a cluster of `i0`, where `i1` is starting; returns what the supervisor heard.

    Args:
        error: what it answers.
    """
    ours, supervisor = Mailbox("127.0.0.1"), Mailbox("127.0.0.1")
    peers = Peers(ours)
    peers.on_membership(
        Membership(
            1,
            (InstanceMember("i0", "tcp://127.0.0.1:1"),),
            (),
            None,
            absent=(Absent("i1", "starting"),),
            supervisor=supervisor.address,
        )
    )
    operators = operators_of(peers)

    async def answer() -> DrainInstance:
        order, _ = await supervisor.receive()
        assert isinstance(order, DrainInstance)
        supervisor.send(order.reply_to, AdminReply(order.query_id, b"null", error))
        reply, _ = await ours.receive()
        assert isinstance(reply, AdminReply)
        operators.on_reply(reply)
        return order

    answering = asyncio.create_task(answer())
    try:
        await operators.drain(instance_id)
        return await answering
    finally:
        answering.cancel()
        ours.close()
        supervisor.close()


@pytest.mark.parametrize("instance_id", ["i0", "i1"])
def test_the_supervisor_is_asked_about_instances_that_serve_and_that_start(
    instance_id: str,
) -> None:
    order = asyncio.run(drain(instance_id))
    assert (order.instance_id, order.is_undo) == (instance_id, False)


def test_nodes_are_listed_with_their_instances_and_those_that_are_drained() -> None:
    mailbox = Mailbox("127.0.0.1")
    peers = Peers(mailbox)
    members = tuple(InstanceMember(each, "a", node="10.0.0.2") for each in ("i0", "i1"))
    absent = (Absent("i2", "pending"), Absent("i3", "starting", node="10.0.0.1"))
    peers.on_membership(
        Membership(1, members, (), None, absent, drained_nodes=("10.0.0.2", "10.0.0.3"))
    )
    assert operators_of(peers).list_nodes() == [
        {"node": "10.0.0.1", "drained": False, "instances": ["i3"]},
        {"node": "10.0.0.2", "drained": True, "instances": ["i0", "i1"]},
        {"node": "10.0.0.3", "drained": True, "instances": []},
    ]
    mailbox.close()


def test_what_the_supervisor_refuses_is_a_conflict() -> None:
    with pytest.raises(FleetError, match="is being drained already"):
        asyncio.run(drain("i0", "i0 is being drained already"))


def test_an_instance_that_nobody_knows_is_unknown_and_the_others_are_named() -> None:
    with pytest.raises(UnknownInstanceError, match="no instance is called i9; there are: i0, i1"):
        asyncio.run(drain("i9"))


@pytest.mark.parametrize("successor", [None, "tcp://127.0.0.1:2"])
def test_what_a_scheduler_was_asked_that_has_died_is_not_waited_for(successor: str | None) -> None:
    async def ask() -> None:
        mailbox, scheduler = Mailbox("127.0.0.1"), Mailbox("127.0.0.1")
        peers = Peers(mailbox)
        operators = operators_of(peers)

        def announce(version: int, address: str | None) -> None:
            membership = Membership(version, (), (), address)
            peers.on_membership(membership)
            operators.on_membership(membership)

        announce(1, scheduler.address)
        asking = asyncio.create_task(operators.list_instances())
        await scheduler.receive()
        announce(2, scheduler.address)
        await asyncio.sleep(0)
        assert not asking.done()
        announce(3, successor)
        try:
            async with asyncio.timeout(HANG_S / 2):
                await asking
        finally:
            mailbox.close()
            scheduler.close()

    with pytest.raises(UnansweredError, match="the scheduler died"):
        asyncio.run(ask())


def test_without_a_supervisor_there_is_no_answer() -> None:
    async def ask() -> None:
        mailbox = Mailbox("127.0.0.1")
        peers = Peers(mailbox)
        peers.on_membership(Membership(1, (InstanceMember("i0", "tcp://127.0.0.1:1"),), (), None))
        try:
            await operators_of(peers).drain("i0")
        finally:
            mailbox.close()

    with pytest.raises(UnansweredError, match="no supervisor"):
        asyncio.run(ask())


Asked = TypeVar("Asked")


async def explained(name: str, body: bytes | None) -> list[dict[str, object]]:
    """Ask where there is one other front end, which answers this, or dies."""
    asked, found = await beside_another(body, lambda operators: operators.explain(name))
    assert asked is None or (isinstance(asked, DescribeHistory) and asked.name == name)
    return found


async def beside_another(
    body: bytes | None, ask: Callable[[Operators], Awaitable[Asked]]
) -> tuple[WireMessage | None, Asked]:
    """Ask where there is one other front end, which answers this, or dies. Returns what that one
    was asked, and what is found."""
    ours, other = Mailbox("127.0.0.1"), Mailbox("127.0.0.1")
    peers = Peers(ours)
    operators = operators_of(peers)

    def announce(version: int, *frontends: FrontendMember) -> None:
        membership = Membership(version, (), frontends, None)
        peers.on_membership(membership)
        operators.on_membership(membership)

    announce(
        1, FrontendMember(FrontendId(0), ours.address), FrontendMember(FrontendId(1), other.address)
    )

    questions: list[WireMessage] = []

    async def answer() -> None:
        question, _ = await other.receive()
        assert isinstance(question, DescribeHistory | ListRecent)
        questions.append(question)
        if body is None:
            announce(2, FrontendMember(FrontendId(0), ours.address))
            return
        other.send(question.reply_to, AdminReply(question.query_id, body))
        reply, _ = await ours.receive()
        assert isinstance(reply, AdminReply)
        operators.on_reply(reply)

    answering = asyncio.create_task(answer())
    try:
        found = await ask(operators)
        return next(iter(questions), None), found
    finally:
        answering.cancel()
        ours.close()
        other.close()


def test_histories_come_from_all_front_ends() -> None:
    found = asyncio.run(explained("tern", b'[{"id":"chatcmpl-tern-5e884898"}]'))
    assert found == [
        {"id": "cmpl-tern-0-9f86d081", "frontend": 0},
        {"id": "chatcmpl-tern-5e884898", "frontend": 1},
    ]


def test_a_request_that_no_front_end_remembers_is_unknown() -> None:
    with pytest.raises(UnknownRequestError, match="no front end remembers a request called gull"):
        asyncio.run(explained("gull", b"[]"))


def test_a_front_end_that_dies_is_not_waited_for() -> None:
    with pytest.raises(UnansweredError, match="front end 1 died"):
        asyncio.run(explained("gull", None))


def test_what_is_known_is_explained_although_a_front_end_does_not_answer() -> None:
    found = asyncio.run(explained("tern", None))
    assert found == [{"id": "cmpl-tern-0-9f86d081", "frontend": 0}]


def test_what_has_happened_at_all_front_ends_is_one_list() -> None:
    decisions = b'{"decisions":[{"event":"lost","time_s":4.0},{"event":"moved","time_s":6.0}]'
    there = decisions + b',"ttft_s":[0.2],"tpot_s":[3.0],"waiting":2}'
    question, found = asyncio.run(beside_another(there, lambda operators: operators.recent(7.5)))
    assert isinstance(question, ListRecent)
    assert question.last_s == 7.5
    assert found == {
        "decisions": [{"event": "lost", "time_s": 4.0}, MOVED, {"event": "moved", "time_s": 6.0}],
        "ttft_s": [0.1, 0.2],
        "tpot_s": [3.0],
        "waiting": 3,
    }


def test_a_front_end_that_does_not_answer_in_time_is_left_out() -> None:
    async def ask() -> dict[str, object]:
        ours, silent = Mailbox("127.0.0.1"), Mailbox("127.0.0.1")
        peers = Peers(ours)
        operators = operators_of(peers)
        ids = ((FrontendId(0), ours), (FrontendId(1), silent))
        members = tuple(FrontendMember(each, mailbox.address) for each, mailbox in ids)
        membership = Membership(1, (), members, None)
        peers.on_membership(membership)
        operators.on_membership(membership)
        try:
            return await operators.recent(10.0, 0.05)
        finally:
            ours.close()
            silent.close()

    assert asyncio.run(ask()) == RECENT


LISTED = {"id": "cmpl-tern", "priority": 0, "instance": "i0", "class": "normal"}


@pytest.mark.parametrize("has_scheduler", [False, True])
@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        (lambda operators: operators.requests_by_instance(1.0), {"i0": [LISTED]}),
        (lambda operators: operators.list_requests(1.0), [LISTED]),
    ],
)
def test_the_requests_of_actors_that_do_not_answer_in_time_are_left_out(
    ask: Callable[[Operators], Awaitable[object]], expected: object, has_scheduler: bool
) -> None:
    async def answered() -> object:
        ours, quick, silent = (Mailbox("127.0.0.1") for _ in range(3))
        peers = Peers(ours)
        operators = operators_of(peers)
        ids = (("i0", quick), ("i1", silent))
        members = tuple(InstanceMember(each, mailbox.address) for each, mailbox in ids)
        scheduler = silent.address if has_scheduler else None
        peers.on_membership(Membership(1, members, (), scheduler))

        async def answer() -> None:
            question, _ = await quick.receive()
            assert isinstance(question, ListRequests)
            body = b'[{"id":"cmpl-tern","priority":0}]'
            quick.send(question.reply_to, AdminReply(question.query_id, body))
            reply, _ = await ours.receive()
            assert isinstance(reply, AdminReply)
            operators.on_reply(reply)

        answering = asyncio.create_task(answer())
        try:
            return await ask(operators)
        finally:
            answering.cancel()
            for each in (ours, quick, silent):
                each.close()

    assert asyncio.run(answered()) == expected


def test_an_instance_that_has_gone_since_it_was_listed_is_not_waited_for() -> None:
    async def migrate() -> None:
        ours, source, other = (Mailbox("127.0.0.1") for _ in range(3))
        members = InstanceMember("i0", source.address), InstanceMember("i1", other.address)
        peers = Peers(ours)
        operators = operators_of(peers)

        def on_members(version: int, *live: InstanceMember) -> None:
            membership = Membership(version, live, (), None)
            peers.on_membership(membership)
            operators.on_membership(membership)

        async def answer_list(instance: Mailbox, body: bytes) -> None:
            question, _ = await instance.receive()
            assert isinstance(question, ListRequests)
            instance.send(question.reply_to, AdminReply(question.query_id, body))
            reply, _ = await ours.receive()
            assert isinstance(reply, AdminReply)
            operators.on_reply(reply)

        on_members(1, *members)
        moving = asyncio.create_task(operators.migrate("tern", InstanceId("i1"), Mode.LIVE))
        try:
            await answer_list(source, b'[{"id": "cmpl-tern-0-9f86d081", "priority": 0}]')
            on_members(2, members[1])
            await answer_list(other, b"[]")
            async with asyncio.timeout(5.0):
                await moving
        finally:
            moving.cancel()
            for mailbox in (ours, source, other):
                mailbox.close()

    with pytest.raises(UnansweredError, match="instance i0 died"):
        asyncio.run(migrate())
