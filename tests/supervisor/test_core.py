"""Announcements and answers of the supervisor's core, and the state of its successor."""

from dataclasses import replace

import msgspec
import pytest
from msgspec import structs

from sterna.messages.actors import (
    Absent,
    AddInstances,
    AdminReply,
    DrainInstance,
    DrainNode,
    Emptied,
    FrontendMember,
    InstanceMember,
    Membership,
    RestartInstances,
    SetDestination,
    StartInstances,
    TerminateInstance,
)
from sterna.messaging.send_effects import KeepOnly, ToMailbox, Unexpected
from sterna.supervisor.core import (
    TAKEOVER_GAP,
    HostedInstance,
    NotTerminated,
    OperatorDrain,
    OperatorTermination,
    OtherMembers,
    SupervisorCore,
    SupervisorState,
    next_number,
    state_of,
)
from sterna.supervisor.fleet import Announce, Cause, Close, Fleet, Member, Phase, Start
from sterna.types import FrontendId, InstanceId
from tests.supervisor import fleets
from tests.supervisor.fleets import started

I0, I1, I2 = InstanceId("i0"), InstanceId("i1"), InstanceId("i2")
OTHERS = OtherMembers((FrontendMember(FrontendId(0), "f0"),), "scheduler", 1, 1, b"ready")
HOSTED = {each: HostedInstance(f"mailbox of {each}", "kv") for each in (I0, I1, I2)}


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
        InstanceMember(I0, "mailbox of i0", kv_format="kv"),
        InstanceMember(I1, "mailbox of i1", True, Cause.OPERATOR.value, 0, "kv", emptied_since=7),
    )
    assert message.num_wanted == 1
    state = SupervisorState(core.fleet, {0: ()}, {I1: 7}, 1, 1, b"ready", HOSTED)
    assert state_of(message) == state


def test_those_that_come_are_told_of_with_what_they_wait_for() -> None:
    core = SupervisorCore(serving(I0))
    core.fleet.wanted = 2
    core.fleet.members |= {
        I1: Member(0, Phase.STARTING, pending="no node has a GPU"),
        I2: Member(1, Phase.STARTING),
        InstanceId("i3"): Member(1, Phase.WARM, node="10.0.0.1"),
    }
    assert announced(core).absent == (
        Absent(I1, "pending", "no node has a GPU", 0),
        # One more is enough.
        Absent(I2, "starting", None, 1, is_for_pool=True),
        Absent(InstanceId("i3"), "warm", None, 1, node="10.0.0.1"),
    )


def test_one_that_is_empty_and_ends_is_told_of_until_it_is_gone() -> None:
    """With the number of its emptying: a successor of the supervisor, or an instance that has the
    news late, must not take it for one that is emptied anew."""
    core = SupervisorCore(serving(I0, I1))
    core.fleet.on_terminate(I1, Cause.SCALING, 0.0)
    core.version = 6
    announced(core)
    assert core.on_message(Emptied(I1, 7), 0.0) == [Announce(), Close(I1)]
    assert announced(core).instances == (
        InstanceMember(I0, "mailbox of i0", kv_format="kv"),
        InstanceMember(I1, "mailbox of i1", True, Cause.SCALING.value, 0, "kv", emptied_since=7),
    )
    core.fleet.on_gone(I1, 1.0)
    assert announced(core).instances == (InstanceMember(I0, "mailbox of i0", kv_format="kv"),)
    assert core.emptied_since == {}


def test_while_there_is_no_scheduler_the_others_are_told_so() -> None:
    core = SupervisorCore(serving(I0))
    others = OtherMembers(OTHERS.frontends, None, 1, 1, None)
    *told, keep = core.announce({I0: HOSTED[I0]}, others, "supervisor")
    addresses = ["f0", "mailbox of i0"]
    assert [each.address for each in told if isinstance(each, ToMailbox)] == addresses
    assert keep == KeepOnly(frozenset(addresses))


def test_the_scheduler_has_instances_started_and_emptied() -> None:
    core = SupervisorCore(serving(I0, I1))
    assert core.on_message(AddInstances(1), 0.0) == [Announce(), Start(I2, 0)]
    assert core.on_message(TerminateInstance(I0), 1.0) == [Announce()]
    assert core.fleet.members[I0] == Member(
        0, Phase.TERMINATING, cause=Cause.SCALING, has_lowered_wanted=True
    )


def test_a_wish_of_the_scheduler_that_comes_too_late_is_told_to_the_log() -> None:
    core = SupervisorCore(serving(I0))
    (fact,) = core.on_message(TerminateInstance(I0), 0.0)
    assert isinstance(fact, NotTerminated)
    assert fact.instance_id == I0
    assert "the last instance that takes requests" in fact.reason
    assert core.fleet == serving(I0)


def test_a_message_that_is_for_others_is_unexpected() -> None:
    stray = SetDestination(I0)
    assert SupervisorCore(serving(I0)).on_message(stray, 0.0) == [Unexpected(stray)]


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
    assert core.on_message(order, 0.0)[0] == OperatorTermination(I1, is_undo=False)
    (reply,) = core.on_message(structs.replace(order, instance_id=I0), 0.0)
    assert isinstance(reply, ToMailbox)
    assert isinstance(reply.message, AdminReply)
    assert "the last instance that takes requests" in str(reply.message.error)


def test_an_operator_undoes_a_drain() -> None:
    core = SupervisorCore(serving(I0, I1))
    core.fleet.on_terminate(I1, Cause.OPERATOR, 0.0)
    effects = core.on_message(DrainInstance("operator", 3, I1, True), 1.0)
    assert effects[0] == OperatorTermination(I1, is_undo=True)
    assert effects[-1] == ToMailbox("operator", AdminReply(3, b"null", None))
    assert core.fleet == serving(I0, I1)


NODES = ("10.0.0.1", "10.0.0.2")


def on_nodes() -> SupervisorCore:
    """An instance on each node."""
    fleet = serving(I0, I1)
    for instance_id, node in zip((I0, I1), NODES, strict=True):
        fleet.members[instance_id].node = node
    return SupervisorCore(fleet)


def test_all_learn_which_nodes_are_drained_and_on_which_one_an_instance_is() -> None:
    core = on_nodes()
    effects = core.on_drain_node(DrainNode("operator", 3, NODES[1]), NODES, 0.0)
    assert effects == [
        OperatorDrain(NODES[1], is_undo=False),
        *(Announce(), Announce(), Start(I2, 0)),
        ToMailbox("operator", AdminReply(3, b"null", None)),
    ]
    membership = announced(core)
    assert membership.drained_nodes == (NODES[1],)
    assert [each.node for each in membership.instances] == [*NODES]
    assert [each.note for each in membership.instances] == [None, Cause.NODE.value]
    assert SupervisorCore.successor(membership).fleet == core.fleet
    effects = core.on_drain_node(DrainNode("operator", 4, NODES[1], True), (), 1.0)
    assert effects[0] == OperatorDrain(NODES[1], is_undo=True)
    assert announced(core).drained_nodes == ()


def test_the_last_instance_on_a_drained_node_says_what_it_waits_for() -> None:
    core = SupervisorCore(serving(I0))
    core.fleet.members[I0].node = NODES[1]
    core.on_drain_node(DrainNode("operator", 3, NODES[1]), NODES, 0.0)
    (member,) = announced(core).instances
    assert not member.is_terminating
    assert member.note == "its node is drained; it stays until another instance takes requests"


@pytest.mark.parametrize(
    ("node", "nodes", "error"),
    [
        ("10.0.0.3", NODES, "no node has the address 10.0.0.3; there are: 10.0.0.1, 10.0.0.2"),
        ("10.0.0.1", NODES, "10.0.0.1 is the only node that takes instances: let another one join"),
        ("10.0.0.1", (), "Ray does not say which nodes there are; try again"),
    ],
    ids=["unknown", "last", "Ray's GCS is away"],
)
def test_a_node_that_cannot_be_drained_is_refused_in_words(
    node: str, nodes: tuple[str, ...], error: str
) -> None:
    core = on_nodes()
    core.on_drain_node(DrainNode("operator", 3, NODES[1]), NODES, 0.0)
    (reply,) = core.on_drain_node(DrainNode("operator", 4, node), nodes, 1.0)
    assert reply == ToMailbox("operator", AdminReply(4, b"null", error))
    assert core.fleet.drained_nodes == {NODES[1]}


@pytest.mark.parametrize(
    ("num_instances", "error"),
    [
        (1, None),
        (100, None),
        (0, "can start 1 to 100 instances, not 0"),
        (101, "can start 1 to 100 instances, not 101"),
    ],
)
def test_an_operator_starts_one_to_a_hundred_instances_at_once(
    num_instances: int, error: str | None
) -> None:
    core = SupervisorCore(serving(I0))
    effects = core.on_message(StartInstances("operator", 3, num_instances), 0.0)
    assert effects[-1] == ToMailbox("operator", AdminReply(3, b"null", error))
    num_started = sum(isinstance(each, Start) for each in effects)
    assert num_started == (0 if error else num_instances)


@pytest.mark.parametrize(("num_instances", "is_refused"), [(1, False), (2, True), (3, True)])
def test_an_operator_starts_no_more_than_the_maximum(num_instances: int, is_refused: bool) -> None:
    core = SupervisorCore(serving(I0, I1))
    core.fleet.max_instances = 3
    reply = core.on_message(StartInstances("operator", 3, num_instances), 0.0)[-1]
    refusal = f"--max-instances is 3, and with 2 there is room for 1 more, not for {num_instances}"
    error = refusal if is_refused else None
    assert reply == ToMailbox("operator", AdminReply(3, b"null", error))
    assert core.fleet.wanted == (2 if is_refused else 3)


def test_an_operator_starts_instances_beside_all_that_serve() -> None:
    """A drained one serves on, although the one in its place had come up."""
    core = SupervisorCore(serving(I0, I1))
    core.fleet.max_instances = 4
    core.fleet.min_instances = 2
    for each in started(core.fleet.on_terminate(I1, Cause.OPERATOR, 0.0)):
        core.fleet.on_started(each, 1.0)
    core.fleet.on_undo(I1, 2.0)
    assert len(core.fleet.in_phase(Phase.SERVING)) == 3
    reply = core.on_message(StartInstances("operator", 3, 2), 3.0)[-1]
    error = "--max-instances is 4, and with 3 there is room for 1 more, not for 2"
    assert reply == ToMailbox("operator", AdminReply(3, b"null", error))
    effects = core.on_message(StartInstances("operator", 4, 1), 4.0)
    assert sum(isinstance(each, Start) for each in effects) == 1


def test_a_restart_adds_its_options_to_those_that_the_instances_have() -> None:
    """Those of a restart that was given up count no more."""
    core = SupervisorCore(serving(I0, I1), {0: ("--seed=1",)})
    for each in started(core.fleet.on_add(1, 0.0)):
        core.fleet.on_started(each, 0.0)
    core.on_message(RestartInstances("operator", 3, True, ("--bad",)), 0.0)
    assert core.options == {0: ("--seed=1",), 1: ("--seed=1", "--bad")}
    core.fleet.on_start_failed(InstanceId("i3"), "unknown option", 1.0)
    core.on_message(RestartInstances("operator", 4, True, ("--good",)), 2.0)
    assert core.options[2] == ("--seed=1", "--good")


@pytest.mark.parametrize(
    ("before", "options", "kept"),
    [
        (("--a=1", "--b=2"), ("--a=3",), ("--b=2",)),
        (("--a", "1", "--b", "-2"), ("--b", "-3"), ("--a", "1")),
        (("--flag", "--a", "1"), ("--flag",), ("--a", "1")),
        (("--a", "1", "2", "--a", "3"), ("--a", "4", "5"), ("--a", "3")),
        # A word may be the model, and not a value.
        (("--flag", "model"), ("--flag",), ("--flag", "model")),
        (("--a=1", "model"), ("--a", "2", "3"), ("--a=1", "model")),
        (("model", "--a=1"), ("--a=2",), ("model",)),
        # Lists of several such options are joined.
        (("--a.b=1", "--a.c+=2"), ("--a.b=3", "--a.c+=4"), ("--a.b=1", "--a.c+=2")),
        (("--a", "1", "--b.c=2"), ("--a", "3", "--d.e=4"), ("--b.c=2",)),
    ],
)
def test_options_that_are_given_again_take_the_place_of_the_earlier_ones(
    before: tuple[str, ...], options: tuple[str, ...], kept: tuple[str, ...]
) -> None:
    core = SupervisorCore(serving(I0), {0: before})
    core.on_message(RestartInstances("operator", 3, True, options), 0.0)
    assert core.options[1] == (*kept, *options)


@pytest.mark.parametrize("option", [("--max-num-seqs={}",), ("--max-num-seqs", "{}")])
def test_restarts_do_not_make_memberships_larger(option: tuple[str, ...]) -> None:
    core = SupervisorCore(fleets.serving(1))
    sizes = []
    for number in range(100):
        options = tuple(each.format(10 + number % 90) for each in option)
        core.on_message(RestartInstances("operator", number, True, options), 0.0)
        (old, new) = core.fleet.members
        core.fleet.on_started(new, 0.0)
        core.fleet.on_emptied(old, 0.0)
        core.fleet.on_gone(old, 0.0)
        hosted = {new: HostedInstance("mailbox", "kv")}
        membership = core.announce(hosted, OTHERS, "supervisor")[0].message
        sizes.append(len(msgspec.msgpack.encode(state_of(membership).options)))
        assert state_of(membership).options[core.fleet.generation] == options
    assert sizes[-1] == sizes[1]


def test_the_options_of_all_generations_that_instances_may_have_are_announced() -> None:
    """A restart that fails returns to the last ones with which an instance came up."""
    core = SupervisorCore(fleets.serving(2), {0: ("--a=1",)})
    core.on_message(RestartInstances("operator", 3, True, ("--a=2",)), 0.0)
    assert set(state_of(announced(core)).options) == {0, 1}
    core.fleet.on_start_failed(I2, "unknown option", 1.0)
    assert state_of(announced(core)).options == {0: ("--a=1",)}


def test_a_restart_that_goes_on_without_a_surge_keeps_its_options() -> None:
    """Its first instance may have been begun with them."""
    core = SupervisorCore(serving(I0), options={0: ()})
    core.on_message(RestartInstances("operator", 3, True, ("--max-num-seqs=8",)), 0.0)
    core.fleet.on_pending(I1, "no GPU")
    other = RestartInstances("operator", 4, False, ("--max-num-seqs=4",))
    (reply,) = core.on_message(other, 1.0)
    assert "under way already, with other options" in reply.message.error
    same = RestartInstances("operator", 5, False, ("--max-num-seqs=8",))
    reply = core.on_message(same, 2.0)[-1]
    assert reply.message.error is None
    assert core.options == {0: (), 1: ("--max-num-seqs=8",)}


def test_the_answer_to_an_order_that_gives_a_restart_up_names_that_restart() -> None:
    """Who watches for its instances sees that there are none."""
    core = SupervisorCore(fleets.serving(1))
    core.on_message(RestartInstances("operator", 3, True, ()), 0.0)
    core.fleet.on_pending(I1, "no node has a GPU")
    effects = core.on_message(RestartInstances("operator", 4, False, ()), 1.0)
    (reply,) = [each.message for each in effects if isinstance(each, ToMailbox)]
    assert isinstance(reply, AdminReply)
    assert (reply.body, reply.error) == (b'{"generation":1}', None)
    assert core.fleet.generation == 0


@pytest.mark.parametrize("has_surge", [True, False])
def test_an_operator_says_whether_a_restart_has_a_surge(has_surge: bool) -> None:
    core = SupervisorCore(serving(I0, I1))
    effects = core.on_message(RestartInstances("operator", 3, has_surge, ()), 0.0)
    starts = [each for each in effects if isinstance(each, Start)]
    assert starts == ([Start(I2, 1)] if has_surge else [])


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
    body = b'{"generation":1}' if isinstance(order, RestartInstances) else b"null"
    assert effects[-1] == ToMailbox("operator", AdminReply(3, body, None))


def test_what_a_dead_supervisor_said_last_never_overrules_its_successor() -> None:
    """It was still under way when the successor asked for the newest that anybody knew: whoever
    hears it first would not listen to a successor that goes on with the same numbers."""
    predecessor = SupervisorCore(serving(I0, I1))
    heard = announced(predecessor)
    under_way = [announced(predecessor) for _ in range(10)]
    successor = SupervisorCore.successor(heard)
    assert announced(successor).version > max(each.version for each in under_way)


def test_a_successor_has_all_that_its_predecessor_knew() -> None:
    predecessor = SupervisorCore(serving(I0, I1), {0: (), 1: ("--seed=1",)}, version=4_000)
    predecessor.fleet.on_terminate(I1, Cause.OPERATOR, 0.0)
    successor = SupervisorCore.successor(announced(predecessor))
    assert successor == replace(predecessor, version=4_001 + TAKEOVER_GAP)
    assert successor.emptied_since == {I1: 4_001}


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
