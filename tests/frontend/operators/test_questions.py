"""Questions of operators to the supervisor and to other front ends, over real mailboxes."""

import asyncio

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
    Membership,
)
from sterna.messaging.mailbox import Mailbox
from sterna.types import FrontendId

HANG_S = 60.0
HERE = {"tern": [{"id": "cmpl-tern-0-9f86d081"}]}
"""The histories of this front end, by the name of the request."""


def operators_of(peers: Peers) -> Operators:
    return Operators(FrontendId(0), peers, HANG_S, lambda name: HERE.get(name, []))


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


async def explained(name: str, body: bytes | None) -> list[dict[str, object]]:
    """Ask where there is one other front end, which answers this, or dies."""
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

    async def answer() -> None:
        question, _ = await other.receive()
        assert isinstance(question, DescribeHistory)
        assert question.name == name
        if body is None:
            announce(2, FrontendMember(FrontendId(0), ours.address))
            return
        other.send(question.reply_to, AdminReply(question.query_id, body))
        reply, _ = await ours.receive()
        assert isinstance(reply, AdminReply)
        operators.on_reply(reply)

    answering = asyncio.create_task(answer())
    try:
        return await operators.explain(name)
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
