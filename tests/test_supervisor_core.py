"""What the supervisor tells everybody, and how a successor goes on."""

import pytest
from msgspec import structs

from sterna.fleet import Announce, Cause, Fleet, Member, Phase, Start
from sterna.messages import (
    AdminReply,
    DrainInstance,
    Emptied,
    Frontend,
    Instance,
    Membership,
    RestartInstances,
    StartInstances,
)
from sterna.sending import KeepOnly, ToMailbox
from sterna.supervisor_core import (
    Hosted,
    OperatorDrains,
    Others,
    SupervisorCore,
    SupervisorState,
    next_number,
    state_of,
)
from sterna.types import FrontendId, InstanceId

I0, I1, I2 = InstanceId("i0"), InstanceId("i1"), InstanceId("i2")
OTHERS = Others((Frontend(FrontendId(0), "f0"),), "scheduler", 1, 1, b"ready")
HOSTED = {each: Hosted(f"mailbox of {each}", "kv") for each in (I0, I1, I2)}


def serving(*instance_ids: InstanceId) -> Fleet:
    members = {each: Member(0, Phase.SERVING) for each in instance_ids}
    return Fleet(len(members), members=members, _num_begun=len(members))


def announced(core: SupervisorCore) -> Membership:
    effects = core.announce(HOSTED, OTHERS, "supervisor")
    memberships = [each.message for each in effects if isinstance(each, ToMailbox)]
    assert len({id(each) for each in memberships}) == 1
    assert isinstance(effects[-1], KeepOnly)
    membership = memberships[0]
    assert isinstance(membership, Membership)
    return membership


def test_everybody_is_told_who_is_there_and_what_a_successor_needs() -> None:
    core = SupervisorCore(serving(I0, I1))
    core.fleet.on_terminate(I1, Cause.OPERATOR, 0.0)
    core.version = 6
    effects = core.announce(HOSTED, OTHERS, "supervisor")
    addresses = ["f0", "mailbox of i0", "mailbox of i1", "scheduler"]
    assert [each.address for each in effects if isinstance(each, ToMailbox)] == addresses
    # Another instance is up, and nobody is told of it yet.
    assert effects[-1] == KeepOnly(frozenset([*addresses, "mailbox of i2"]))
    message = effects[0].message
    assert message.version == 7
    assert message.instances == (
        Instance(I0, "mailbox of i0", kv_format="kv"),
        Instance(I1, "mailbox of i1", True, Cause.OPERATOR.value, 0, "kv", emptied_since=7),
    )
    state = SupervisorState(core.fleet, {0: ()}, {I1: 7}, 1, 1, b"ready", HOSTED)
    assert state_of(message) == state


def test_what_is_said_of_an_earlier_emptying_ends_nothing() -> None:
    core = SupervisorCore(serving(I0, I1))
    core.fleet.on_terminate(I1, Cause.OPERATOR, 0.0)
    since = announced(core).instances[1].emptied_since
    core.fleet.on_undo(I1, 0.0)
    announced(core)
    core.fleet.on_terminate(I1, Cause.OPERATOR, 0.0)
    announced(core)
    assert core.on_message(Emptied(I1, since), 0.0) == []
    assert core.fleet.members[I1].phase is Phase.TERMINATING


def test_an_operator_is_answered_also_when_nothing_was_begun() -> None:
    core = SupervisorCore(serving(I0))
    (reply,) = core.on_message(StartInstances("operator", 3, 0), 0.0)
    error = "can start 1 to 100 instances, not 0"
    assert reply == ToMailbox("operator", AdminReply(3, b"null", error))


def test_a_drain_that_is_refused_is_not_told_to_the_log() -> None:
    core = SupervisorCore(serving(I0, I1))
    order = DrainInstance("operator", 3, I1, False)
    assert core.on_message(order, 0.0)[0] == OperatorDrains(I1, is_undo=False)
    (reply,) = core.on_message(structs.replace(order, instance_id=I0), 0.0)
    assert isinstance(reply, ToMailbox)
    assert isinstance(reply.message, AdminReply)
    assert "the last instance that takes requests" in str(reply.message.error)


@pytest.mark.parametrize(
    "order",
    [StartInstances("operator", 3, 2), RestartInstances("operator", 3, True, ("--seed=1",))],
)
def test_what_an_operator_was_promised_everybody_is_told(
    order: StartInstances | RestartInstances,
) -> None:
    """A start has failed, and none is begun before it is to be tried again. Should the supervisor
    die meanwhile, its successor must know of what was ordered."""
    core = SupervisorCore(serving(I0, I1))
    core.fleet.on_add(1, 0.0)
    core.fleet.on_start_failed(I2, "no memory", 1.0)
    effects = core.on_message(order, 1.5)
    assert not any(isinstance(each, Start) for each in effects)
    assert Announce() in effects
    assert effects[-1] == ToMailbox("operator", AdminReply(3, b"null", None))


def test_what_a_dead_supervisor_said_last_never_overrules_its_successor() -> None:
    """It was still under way when the successor asked for the newest that anybody knew: whoever
    hears it first would not listen to a successor that goes on with the same numbers."""
    predecessor = SupervisorCore(serving(I0, I1))
    heard = announced(predecessor)
    under_way = [announced(predecessor) for _ in range(10)]
    successor = SupervisorCore.successor(heard)
    assert announced(successor).version > max(each.version for each in under_way)


def test_a_successor_replaces_what_died_meanwhile() -> None:
    core = SupervisorCore.successor(announced(SupervisorCore(serving(I0, I1))))
    assert core.take_over({I0}, 0.0) == [Announce(), Start(I2, 0)]


def test_a_successor_never_uses_the_name_of_an_instance_that_nobody_told_of() -> None:
    """Its predecessor began `i2` and died before it could say so: the name is taken."""
    core = SupervisorCore.successor(announced(SupervisorCore(serving(I0, I1))))
    effects = core.take_over({I0, I2}, 0.0)
    assert [each for each in effects if isinstance(each, Start)] == [Start(InstanceId("i3"), 0)]


def test_a_successor_never_uses_the_number_of_an_actor_that_nobody_told_of() -> None:
    """Its predecessor began the third front end and died before it could say so."""
    assert next_number(2, []) == 2
    assert next_number(2, [0, 1]) == 2
    assert next_number(2, [0, 2]) == 3
