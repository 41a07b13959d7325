"""The supervisor without actors, sockets and clock: messages in, effects out. Pure.

`Fleet` decides which instances there should be. The core adds the requests of other actors and of
operators, the `Membership` that tells all members who belongs to the cluster, and the state that it
carries for a successor. `runtime.supervisor` carries the effects out with Ray, `fault_simulation`
in virtual time.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from sterna.errors import FleetError, SternaError
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
    StartInstances,
    TerminateInstance,
    WireMessage,
)
from sterna.messaging.send_effects import KeepOnly, ToMailbox, Unexpected
from sterna.supervisor.failure_detector import ProcessIdentity
from sterna.supervisor.fleet import Announce, Cause, Fleet, FleetEffect, Phase
from sterna.types import InstanceId

NUM_INSTANCES_AT_ONCE = 100
"""The most that an operator may start at once: more is taken for a typing error."""

TAKEOVER_GAP = 1000
"""Added to the newest version that a member knows for the first membership of a successor: its
predecessor may have sent a few more, which are still under way and must count as older."""

_OPTION = re.compile(r"(--?[A-Za-z][\w.+-]*)(=.*)?", re.DOTALL)
"""A word of a command line that begins an option; -1 is a value."""

Order = DrainInstance | StartInstances | RestartInstances


@dataclass(frozen=True, slots=True)
class NotTerminated:
    """A fact for the log: the scheduler's order to terminate was too late, for this reason."""

    instance_id: InstanceId
    reason: str


@dataclass(frozen=True, slots=True)
class OperatorTermination:
    """A fact for the log: an operator has ordered to terminate an instance, or has undone it."""

    instance_id: InstanceId
    is_undo: bool


@dataclass(frozen=True, slots=True)
class OperatorDrain:
    """A fact for the log: an operator has ordered to drain a node, or has undone it."""

    node: str
    is_undo: bool


SupervisorEffect = (
    FleetEffect | ToMailbox | Unexpected | NotTerminated | OperatorTermination | OperatorDrain
)


@dataclass(frozen=True, slots=True)
class HostedInstance:
    """An instance that is up.

    Attributes:
        kv_format: that of `InstanceMember`.
        process: None in a simulation, which has no processes.
    """

    address: str
    kv_format: str
    process: ProcessIdentity | None = None


@dataclass(frozen=True, slots=True)
class OtherMembers:
    """The members that are not instances, and what a successor needs to start more of them.

    Attributes:
        scheduler: its mailbox; None while there is no scheduler.
        ready: what front ends need to start (`EngineFacts`).
    """

    frontends: tuple[FrontendMember, ...]
    scheduler: str | None
    num_frontends_begun: int
    num_schedulers_begun: int
    ready: bytes | None


class SupervisorState(msgspec.Struct, frozen=True):
    """The state that a successor needs besides the members themselves.

    Attributes:
        options: those of `SupervisorCore`.
        emptied_since: that of `InstanceMember`, for each terminating instance.
        ready: what front ends need to start (`EngineFacts`).
        hosted: the instances that are up: one that does not answer the successor must be fenced.
    """

    fleet: Fleet
    options: dict[int, tuple[str, ...]]
    emptied_since: dict[InstanceId, int]
    num_frontends_begun: int
    num_schedulers_begun: int
    ready: bytes | None
    hosted: dict[InstanceId, HostedInstance] = msgspec.field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the state that a `Membership` carries."""
        return msgspec.msgpack.encode(self)


def next_number(num_begun: int, numbers_found: Iterable[int]) -> int:
    """Return the number of the next actor of a kind, so that no name is used twice.

    Args:
        num_begun: as the predecessor announced it last; it may have begun more since.
        numbers_found: those of all actors that exist, also of those that are not up.
    """
    return max([num_begun, *(number + 1 for number in numbers_found)])


def state_of(membership: Membership) -> SupervisorState:
    """The supervisor's state when it announced this membership."""
    return msgspec.msgpack.decode(membership.state, type=SupervisorState)


@dataclass(slots=True)
class SupervisorCore:
    """The decisions of one supervisor.

    Attributes:
        options: further options of vLLM by generation; later ones overrule those that every
            engine has. Each membership carries those of the generations that are still needed.
        version: that of the latest membership.
        emptied_since: that of `InstanceMember`, for each terminating instance.
    """

    fleet: Fleet
    options: dict[int, tuple[str, ...]] = field(default_factory=lambda: {0: ()})
    version: int = 0
    emptied_since: dict[InstanceId, int] = field(default_factory=dict)

    # ----------------------------------------------------------------------------- messages

    def on_message(self, message: WireMessage, now_s: float) -> list[SupervisorEffect]:
        """Take in a message; no message to the supervisor has payload frames."""
        match message:
            case AddInstances(num_instances):
                return [*self.fleet.on_needed(num_instances, now_s)]
            case TerminateInstance(instance_id):
                try:
                    return [*self.fleet.on_terminate(instance_id, Cause.SCALING, now_s)]
                except SternaError as error:
                    # The scheduler's view was older than ours.
                    return [NotTerminated(instance_id, str(error))]
            case Emptied(instance_id, emptied_since):
                # A message about an earlier termination, which was undone, is void.
                if self.emptied_since.get(instance_id) != emptied_since:
                    return []
                return [*self.fleet.on_emptied(instance_id, now_s)]
            case DrainInstance() | StartInstances() | RestartInstances():
                return self._on_order(message, now_s)
            case _:
                return [Unexpected(message)]

    def on_drain_node(
        self, order: DrainNode, nodes: Collection[str], now_s: float
    ) -> list[SupervisorEffect]:
        """Carry out an operator's order about a node, and answer it.

        Args:
            nodes: addresses of the live nodes.
        """
        error = None
        effects: list[SupervisorEffect] = []
        try:
            if order.is_undo:
                begun = self.fleet.on_undo_node(order.node, now_s)
            else:
                self._check_node(order.node, nodes)
                begun = self.fleet.on_drain_node(order.node, now_s)
            effects = [OperatorDrain(order.node, order.is_undo), Announce(), *begun]
        except FleetError as refusal:
            error = str(refusal)
        return [*effects, ToMailbox(order.reply_to, AdminReply(order.query_id, b"null", error))]

    def _on_order(self, order: Order, now_s: float) -> list[SupervisorEffect]:
        """Carry out an operator's order, and answer it."""
        error = None
        effects: list[SupervisorEffect] = []
        generation = self.fleet.generation
        try:
            # Announced even if nothing can begin yet: a successor must know the order.
            begun: list[FleetEffect] = [Announce(), *self._effects_of(order, now_s)]
            if isinstance(order, DrainInstance):
                effects.append(OperatorTermination(order.instance_id, order.is_undo))
            effects += begun
        except SternaError as refusal:
            error = str(refusal)
        body = b"null"
        if isinstance(order, RestartInstances) and error is None:
            # If the order has the restart given up, the answer names its generation.
            generation = max(generation, self.fleet.generation)
            body = msgspec.json.encode({"generation": generation})
        reply = ToMailbox(order.reply_to, AdminReply(order.query_id, body, error))
        return [*effects, reply]

    def _effects_of(self, order: Order, now_s: float) -> list[FleetEffect]:
        match order:
            case DrainInstance(_, _, instance_id, is_undo):
                if is_undo:
                    return self.fleet.on_undo(instance_id, now_s)
                return self.fleet.on_terminate(instance_id, Cause.OPERATOR, now_s)
            case StartInstances(_, _, num_instances):
                if not 1 <= num_instances <= NUM_INSTANCES_AT_ONCE:
                    raise FleetError(
                        f"can start 1 to {NUM_INSTANCES_AT_ONCE} instances, not {num_instances}"
                    )
                limit, num_kept = self.fleet.max_instances, self.fleet.num_kept
                if limit is not None and num_kept + num_instances > limit:
                    raise FleetError(
                        f"--max-instances is {limit}, and with {num_kept} there is room for "
                        f"{max(0, limit - num_kept)} more, not for {num_instances}"
                    )
                return self.fleet.on_add(num_instances, now_s)
            case RestartInstances(_, _, has_surge, options):
                generation = self.fleet.generation
                before = self.options[generation]
                if self.fleet.is_restarting and options and before[-len(options) :] != options:
                    raise FleetError(
                        "a rolling restart is under way already, with other options; "
                        "`sterna instances` shows it"
                    )
                effects = self.fleet.on_restart(now_s, has_surge=has_surge)
                if self.fleet.generation != generation:
                    kept = _not_overruled(before, options)
                    self.options[self.fleet.generation] = (*kept, *options)
                return effects

    def _check_node(self, node: str, nodes: Collection[str]) -> None:
        """Raises FleetError: there is no such node, or no other one that may have instances."""
        if not nodes:
            raise FleetError("Ray does not say which nodes there are; try again")
        if node not in nodes:
            raise FleetError(f"no node has the address {node}; there are: {', '.join(nodes)}")
        if not set(nodes) - self.fleet.drained_nodes - {node}:
            raise FleetError(f"{node} is the only node that takes instances: let another one join")

    # ----------------------------------------------------------------------------- takeover

    @classmethod
    def successor(cls, membership: Membership) -> "SupervisorCore":
        """Return the successor of the supervisor that announced this membership."""
        state = state_of(membership)
        version = membership.version + TAKEOVER_GAP
        return cls(state.fleet, state.options, version, state.emptied_since)

    def take_over(self, found: Collection[InstanceId], now_s: float) -> list[SupervisorEffect]:
        """These instances are up, and no others.

        Those that the fleet does not know came up after the last announcement: the caller kills
        them, and their names are not used again.
        """
        return [*self.fleet.on_takeover(found, now_s)]

    # --------------------------------------------------------------------------- membership

    def announce(
        self, hosted: Mapping[InstanceId, HostedInstance], others: OtherMembers, own_address: str
    ) -> list[ToMailbox | KeepOnly]:
        """Return a new membership for all members.

        Args:
            hosted: the instances that are up.
        """
        self.version += 1
        self._note_emptying()
        self._forget_generations()
        serving = self.fleet.in_phase(Phase.SERVING, Phase.TERMINATING, Phase.CLOSING)
        instances = tuple(self._describe(each, hosted[each]) for each in serving)
        coming = self.fleet.in_phase(Phase.STARTING, Phase.WARM)
        state = SupervisorState(
            self.fleet,
            self.options,
            self.emptied_since,
            others.num_frontends_begun,
            others.num_schedulers_begun,
            others.ready,
            dict(hosted),
        )
        membership = Membership(
            self.version,
            instances,
            others.frontends,
            others.scheduler,
            tuple(self._describe_absent(each) for each in coming),
            own_address,
            state.encode(),
            self.fleet.wanted,
            tuple(sorted(self.fleet.drained_nodes)),
        )
        addresses = sorted({i.address for i in instances} | {f.address for f in others.frontends})
        if others.scheduler is not None:
            addresses.append(others.scheduler)
        return [
            *(ToMailbox(address, membership) for address in addresses),
            # Instances that are not announced yet send heartbeats, and are answered.
            KeepOnly(frozenset([*addresses, *(each.address for each in hosted.values())])),
        ]

    def _describe(self, instance_id: InstanceId, hosted: HostedInstance) -> InstanceMember:
        member = self.fleet.members[instance_id]
        is_terminating = member.phase is not Phase.SERVING
        note = None if member.cause is None else member.cause.value
        if not is_terminating and self.fleet.is_on_drained_node(member):
            note = f"{Cause.NODE.value}; it stays until another instance takes requests"
        return InstanceMember(
            instance_id,
            hosted.address,
            is_terminating,
            note,
            member.generation,
            hosted.kv_format,
            self.emptied_since.get(instance_id, 0),
            member.node,
        )

    def _describe_absent(self, instance_id: InstanceId) -> Absent:
        member = self.fleet.members[instance_id]
        state = member.phase.value if member.pending is None else "pending"
        is_for_pool = instance_id in self.fleet.starting_for_pool
        return Absent(
            instance_id, state, member.pending, member.generation, is_for_pool, member.node
        )

    def _note_emptying(self) -> None:
        self.emptied_since = {
            each: self.emptied_since.get(each, self.version)
            for each in self.fleet.in_phase(Phase.TERMINATING, Phase.CLOSING)
        }

    def _forget_generations(self) -> None:
        needed = self.fleet.generations
        self.options = {each: given for each, given in self.options.items() if each in needed}


def _not_overruled(before: Iterable[str], options: Iterable[str]) -> tuple[str, ...]:
    """Return the earlier options but those that are given again in the same form: of these, vLLM's
    parser takes the last one.

    Only the parser knows which words are values: `--a=1 x`, `--a 1 x` and `--a 1` do not replace
    each other. An option with a dot in its name is a part of one; the parser joins all parts.
    """
    forms = set(map(_form, _split(options))) - {None}
    kept = [each for each in _split(before) if _form(each) not in forms]
    return tuple(word for each in kept for word in each)


def _split(options: Iterable[str]) -> list[list[str]]:
    """Return each option with the words behind it."""
    split: list[list[str]] = []
    for word in options:
        if not split or _OPTION.fullmatch(word):
            split.append([])
        split[-1].append(word)
    return split


def _form(option: list[str]) -> tuple[str, bool, int] | None:
    """Return the name, whether a value is in the same word, and the number of words; None for a
    part of an option, and for a model in front of all options."""
    found = _OPTION.fullmatch(option[0])
    if found is None or "." in found[1]:
        return None
    return found[1], found[2] is not None, len(option)
