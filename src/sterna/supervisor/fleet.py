"""The fleet: the instances that should exist, those that do, and the steps between the two. Pure.

It is level-triggered: every event changes the wanted or the present instances, and its effects
bring the two together. An instance goes through these phases::

    STARTING -> WARM -> SERVING <-> TERMINATING -> CLOSING -> gone
        |        |         |             |            |
        +--------+---------+-- dies -----+------------+

A warm instance is up but unknown to other members: it begins to serve when it is announced. A
terminating one gets no new requests, and migration empties it (Section 4.4.3); it ends when it is
empty, and until then may be told to serve again. One that dies is replaced if it was wanted.

A *generation* is one set of engine options. A rolling restart replaces the instances of older
generations one at a time: with a *surge* one of the new generation begins before one of the old
is emptied, otherwise after it has ended. A generation of which no instance has come up yet is given
up when one fails to start: options that do not work must not cost an instance that does.

A *drained node* gets no instances, and those that it has are emptied. As many are wanted as before:
others start on other nodes, or wait for a place until the node may have instances again.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum

from sterna.errors import FleetError, UnknownInstanceError
from sterna.types import InstanceId

RETRY_DELAYS_S = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Time from one failed start to the next start; the last one repeats."""


class Phase(Enum):
    """Phase in the life of an instance."""

    STARTING = "starting"
    WARM = "warm"
    """Up, and not announced yet."""
    SERVING = "running"
    TERMINATING = "terminating"
    """It gets no new requests and is being emptied."""
    CLOSING = "closing"
    """It is empty, and is being ended."""


class Cause(Enum):
    """Reason why an instance is being emptied."""

    SCALING = "the cluster has more instances than it needs"
    OPERATOR = "an operator drains it"
    RESTART = "a rolling restart replaces it"
    NODE = "its node is drained"


@dataclass(slots=True)
class Member:
    """One instance.

    Attributes:
        pending: the reason why it has no place to start on yet, or None.
        cause: the reason why it is being emptied, or None.
        has_lowered_wanted: whether its termination has lowered `wanted`.
        node: the address of its node; None while it has no place.
    """

    generation: int
    phase: Phase = Phase.STARTING
    pending: str | None = None
    cause: Cause | None = None
    has_lowered_wanted: bool = False
    node: str | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """Start an instance; then `on_started` or `on_start_failed`."""

    instance_id: InstanceId
    generation: int


@dataclass(frozen=True, slots=True)
class CancelStart:
    """Give up a start that waits for a place; the fleet has forgotten it."""

    instance_id: InstanceId


@dataclass(frozen=True, slots=True)
class Close:
    """End an instance that is empty, or was never announced; then `on_gone`."""

    instance_id: InstanceId


@dataclass(frozen=True, slots=True)
class Announce:
    """Send a new membership to all members."""


@dataclass(frozen=True, slots=True)
class GiveUpGeneration:
    """The generation's first instance did not start: its options are dropped."""

    generation: int
    reason: str


FleetEffect = Start | CancelStart | Close | Announce | GiveUpGeneration

MIN_SERVING = 2
"""Number of instances that take requests of which one may be emptied: the last one stays until
another one serves."""


@dataclass(slots=True)
class Fleet:
    """The instances of one cluster.

    Attributes:
        wanted: instances that should take requests. More of them do if a drain was undone after
            its instance had been replaced; they count for the warm pool.
        min_instances: `wanted` never goes below it.
        max_instances: `wanted` never goes above it; None for no limit.
        num_warm: the size of the warm pool.
        members: every instance that has not ended.
        drained_nodes: addresses of the nodes that are to have no instances.
    """

    wanted: int
    min_instances: int = 1
    max_instances: int | None = None
    num_warm: int = 0
    members: dict[InstanceId, Member] = field(default_factory=dict)
    drained_nodes: set[str] = field(default_factory=set)
    _num_begun: int = 0
    _generation: int = 0
    _num_generations: int = 1
    _proven_generation: int | None = None
    _has_surge: bool = True
    _num_at_restart: int = 0
    _num_failures: int = 0
    _no_start_before_s: float = float("-inf")

    # ------------------------------------------------------------------------- queries

    @property
    def generation(self) -> int:
        """The generation of new instances."""
        return self._generation

    @property
    def generations(self) -> frozenset[int]:
        """The generations that instances have, or will have: the current one, and the one before,
        to which a restart that is given up returns."""
        proven = () if self._proven_generation is None else (self._proven_generation,)
        of_members = (each.generation for each in self.members.values())
        return frozenset((self._generation, *proven, *of_members))

    @property
    def num_kept(self) -> int:
        """The number of instances that are wanted, or serve although fewer are: a drained one whose
        replacement had begun may have been told to serve on."""
        return max(self.wanted, len(self.in_phase(Phase.SERVING)))

    @property
    def is_restarting(self) -> bool:
        """Whether instances of an older generation are still to be replaced."""
        return any(self._is_outdated(each) for each in self.members.values())

    @property
    def next_deadline_s(self) -> float | None:
        """When `on_time` is due, for a start that is delayed; None without one."""
        waits = self._num_failures > 0 and self._num_missing() > 0
        return self._no_start_before_s if waits else None

    @property
    def starting_for_pool(self) -> tuple[InstanceId, ...]:
        """The starting instances that are not needed to serve: the last ones."""
        num_needed = self._target() - len(self.in_phase(Phase.SERVING))
        return self.in_phase(Phase.STARTING)[max(0, num_needed) :]

    def in_phase(self, *phases: Phase) -> tuple[InstanceId, ...]:
        """The instances in one of these phases, in the order of their starts."""
        return tuple(each for each, member in self.members.items() if member.phase in phases)

    def is_on_drained_node(self, member: Member) -> bool:
        """Whether it is to leave its node."""
        return member.node in self.drained_nodes

    # ------------------------------------------------------------------------- orders

    def begin(self, now_s: float) -> list[FleetEffect]:
        """Start the instances that are wanted at the beginning."""
        return self._reconcile(now_s)

    def on_pool(self, num_warm: int, now_s: float) -> list[FleetEffect]:
        """Set the size of the warm pool: instances that are up without being needed."""
        self.num_warm = num_warm
        return self._reconcile(now_s)

    def on_needed(self, num_instances: int, now_s: float) -> list[FleetEffect]:
        """Auto-scaling needs this number in addition to those present. `wanted`, which includes
        failed starts that are to be tried again, is not lowered."""
        num_there = len(self.in_phase(Phase.STARTING, Phase.WARM, Phase.SERVING))
        wanted = max(self.wanted, self._at_most(num_there - self.num_warm + num_instances))
        # Announced even if nothing can begin yet.
        announced: list[FleetEffect] = [Announce()] if wanted > self.wanted else []
        self.wanted = wanted
        return [*announced, *self._reconcile(now_s)]

    def on_add(self, num_instances: int, now_s: float) -> list[FleetEffect]:
        """This number of further instances is wanted, up to the maximum."""
        self.wanted = self._at_most(self.num_kept + num_instances)
        return self._reconcile(now_s)

    def on_terminate(
        self, instance_id: InstanceId, cause: Cause, now_s: float
    ) -> list[FleetEffect]:
        """Empty the instance and end it. If auto-scaling needs one instance less, and a start waits
        for a place or for another attempt, that start is given up instead. A second order of an
        operator's, whose command was perhaps interrupted, changes nothing.

        Raises:
            UnknownInstanceError: there is no such instance.
            FleetError: it is being emptied for another reason, or is the last one that takes
                requests, or auto-scaling would leave fewer than the minimum.
        """
        member = self._member(instance_id)
        if member.phase in (Phase.TERMINATING, Phase.CLOSING):
            assert member.cause is not None
            if member.cause is cause is Cause.OPERATOR:
                return []
            raise FleetError(f"{instance_id} is being emptied already: {member.cause.value}")
        if member.phase in (Phase.STARTING, Phase.WARM):
            raise FleetError(f"{instance_id} does not serve yet: there is nothing to drain")
        is_one_less_enough = cause is Cause.SCALING and self.wanted > self.min_instances
        if is_one_less_enough and (self._pending() or self._num_there() < self._target()):
            self.wanted -= 1
            return [Announce(), *self._reconcile(now_s)]
        num_serving = len(self.in_phase(Phase.SERVING))
        if num_serving == 1:
            raise FleetError(
                f"{instance_id} is the last instance that takes requests: its requests would "
                "have nowhere to go; start another one first"
            )
        if cause is Cause.SCALING and num_serving <= self.min_instances:
            raise FleetError(f"{instance_id} stays: no more than --min-instances serve")
        self._set_terminating(member, cause)
        if self.wanted > self.min_instances:
            self.wanted -= 1
            member.has_lowered_wanted = True
        return [Announce(), *self._reconcile(now_s)]

    def on_undo(self, instance_id: InstanceId, now_s: float) -> list[FleetEffect]:
        """Let an instance that is being emptied serve again.

        Raises:
            UnknownInstanceError: there is no such instance.
            FleetError: it is not being emptied, or it is too late, or it is being replaced.
        """
        member = self._member(instance_id)
        if member.phase is Phase.CLOSING:
            raise FleetError(f"{instance_id} is empty and ends: it is too late to undo that")
        if member.phase is not Phase.TERMINATING:
            raise FleetError(f"{instance_id} is not being drained")
        if member.cause is Cause.RESTART:
            raise FleetError(f"{instance_id} is being replaced by the rolling restart")
        if self.is_on_drained_node(member):
            raise FleetError(
                f"{instance_id} is on {member.node}, which is drained; undo that first: "
                f"`sterna drain --undo --node {member.node}`"
            )
        if member.has_lowered_wanted:
            self.wanted = self._at_most(self.wanted + 1)
        member.phase, member.cause, member.has_lowered_wanted = Phase.SERVING, None, False
        return [Announce(), *self._reconcile(now_s)]

    def on_drain_node(self, node: str, now_s: float) -> list[FleetEffect]:
        """Empty the instances of the node with this address, and place no others there."""
        self.drained_nodes.add(node)
        return self._reconcile(now_s)

    def on_undo_node(self, node: str, now_s: float) -> list[FleetEffect]:
        """Let a drained node have instances; those that are being emptied for it serve again.

        Raises:
            FleetError: it is not drained.
        """
        if node not in self.drained_nodes:
            drained = ", ".join(sorted(self.drained_nodes)) or "none"
            raise FleetError(f"{node} is not drained; drained nodes are: {drained}")
        self.drained_nodes.remove(node)
        for member in self.members.values():
            is_emptied = member.phase is Phase.TERMINATING and member.cause is Cause.NODE
            if is_emptied and member.node == node:
                member.phase, member.cause = Phase.SERVING, None
        return self._reconcile(now_s)

    def on_restart(self, now_s: float, *, has_surge: bool = True) -> list[FleetEffect]:
        """Replace every instance by one of a new generation, one at a time.

        A restart whose first successor finds no place goes on without a surge when that is ordered
        again; it is given up where too few serve for that.

        Raises:
            FleetError: a restart is under way.
        """
        if self.is_restarting and not has_surge and self._waits_for_a_place():
            # Without this, nothing would ever be replaced.
            num_serving = len(self.in_phase(Phase.SERVING))
            is_untried = self._proven_generation not in (None, self._generation)
            if num_serving < MIN_SERVING and is_untried:
                reason = "its successor finds no place, and the last instance stays until it serves"
                return [self._give_up_generation(reason), *self._reconcile(now_s)]
            if self._has_surge:
                self._has_surge = False
                self._num_at_restart = num_serving
                return self._reconcile(now_s)
        if self.is_restarting:
            raise FleetError("a rolling restart is under way already; `sterna instances` shows it")
        self._generation = self._num_generations
        self._num_generations += 1
        self._has_surge = has_surge
        self._num_at_restart = len(self.in_phase(Phase.SERVING))
        return self._reconcile(now_s)

    # ------------------------------------------------------------------------- events

    def on_pending(self, instance_id: InstanceId, reason: str) -> list[FleetEffect]:
        """A starting instance waits for a place, for this reason."""
        return self._set_place(instance_id, reason, None)

    def on_placed(self, instance_id: InstanceId, node: str | None) -> list[FleetEffect]:
        """A starting instance has a place on the node with this address; None if nodes are not told
        apart."""
        return self._set_place(instance_id, None, node)

    def on_started(self, instance_id: InstanceId, now_s: float) -> list[FleetEffect]:
        """The instance is up."""
        self._set_up(instance_id)
        return [Announce(), *self._reconcile(now_s)]

    def on_takeover(self, found: Collection[InstanceId], now_s: float) -> list[FleetEffect]:
        """The supervisor died; its successor has found these instances up, and no others.

        They are taken in at once: one by one, the effects for one of them could cancel the start of
        another one that is up. Those that are no members came up after the last announcement; their
        names are not used again.
        """
        numbers = [int(each.removeprefix("i")) for each in found]
        self._num_begun = max([self._num_begun, *(number + 1 for number in numbers)])
        self.members = {each: self.members[each] for each in self.members if each in found}
        for instance_id in self.in_phase(Phase.STARTING):
            self._set_up(instance_id)
        # The predecessor may have died before it carried out the orders to end them.
        closing = map(Close, self.in_phase(Phase.CLOSING))
        return [Announce(), *closing, *self._reconcile(now_s)]

    def on_start_failed(
        self, instance_id: InstanceId, reason: str, now_s: float, *, is_of_options: bool = True
    ) -> list[FleetEffect]:
        """The instance did not come up, and nothing is left of it.

        Args:
            is_of_options: whether its options may be the reason; else they are tried again.
        """
        member = self.members.pop(instance_id)
        effects: list[FleetEffect] = [Announce()]
        is_untried = self._proven_generation not in (None, member.generation)
        if is_of_options and is_untried and member.generation == self._generation:
            effects.append(self._give_up_generation(reason))
        elif now_s >= self._no_start_before_s:
            # Starts that began together, and fail together, are one failure.
            delay_s = RETRY_DELAYS_S[min(self._num_failures, len(RETRY_DELAYS_S) - 1)]
            self._num_failures += 1
            self._no_start_before_s = now_s + delay_s
        return [*effects, *self._reconcile(now_s)]

    def on_emptied(self, instance_id: InstanceId, now_s: float) -> list[FleetEffect]:
        """The instance has reported that it is empty, and that no more requests will come."""
        member = self.members.get(instance_id)
        if member is None or member.phase is not Phase.TERMINATING:
            return []  # The termination has been undone.
        member.phase = Phase.CLOSING
        # Announced first: a successor of the supervisor must know that it was to end.
        return [Announce(), Close(instance_id), *self._reconcile(now_s)]

    def on_gone(self, instance_id: InstanceId, now_s: float) -> list[FleetEffect]:
        """The instance is dead and will never act again; it may have been closed or have died."""
        if self.members.pop(instance_id, None) is None:
            return []
        return [Announce(), *self._reconcile(now_s)]

    def on_time(self, now_s: float) -> list[FleetEffect]:
        """Time has passed; due at `next_deadline_s`, harmless at any other time."""
        return self._reconcile(now_s)

    # ---------------------------------------------------------------------------- internals

    def _reconcile(self, now_s: float) -> list[FleetEffect]:
        effects: list[FleetEffect] = [
            *self._cancel_outdated_starts(),
            *self._close_warm(),
            *self._promote(),
            *self._empty_drained_nodes(),
            *self._replace_one(),
            *self._give_up_surplus(),
        ]
        if self._num_failures == 0 or now_s >= self._no_start_before_s:
            effects += [self._begin() for _ in range(self._num_missing())]
        return effects

    def _give_up_generation(self, reason: str) -> GiveUpGeneration:
        """Those of the generation before are the current ones again."""
        assert self._proven_generation is not None
        given_up, self._generation = self._generation, self._proven_generation
        return GiveUpGeneration(given_up, reason)

    def _cancel_outdated_starts(self) -> list[FleetEffect]:
        """Give up outdated starts that wait for a place: the next free one is for a start with the
        new options."""
        cancelled = [each for each in self._pending() if self._is_outdated(self.members[each])]
        for instance_id in cancelled:
            del self.members[instance_id]
        announced: list[FleetEffect] = [Announce()] if cancelled else []
        return [*announced, *map(CancelStart, cancelled)]

    def _close_warm(self) -> Iterable[FleetEffect]:
        """End warm instances that are outdated, or on drained nodes."""
        for instance_id, member in self.members.items():
            # It has no requests that would have to move first.
            if member.phase is Phase.WARM and self._must_leave(member):
                member.phase = Phase.CLOSING
                member.cause = Cause.RESTART if self._is_outdated(member) else Cause.NODE
                yield Close(instance_id)

    def _promote(self) -> list[FleetEffect]:
        """Let warm instances serve while fewer serve than are wanted."""
        num_lacking = self._target() - len(self.in_phase(Phase.SERVING))
        promoted = self.in_phase(Phase.WARM)[: max(0, num_lacking)]
        for instance_id in promoted:
            self.members[instance_id].phase = Phase.SERVING
        return [Announce()] if promoted else []

    def _empty_drained_nodes(self) -> list[FleetEffect]:
        """Begin to empty the instances of drained nodes. The last one that takes requests stays
        until another one serves."""
        serving = self.in_phase(Phase.SERVING)
        there = [each for each in serving if self.is_on_drained_node(self.members[each])]
        leaving = there[1:] if len(there) == len(serving) else there
        for instance_id in leaving:
            self._set_terminating(self.members[instance_id], Cause.NODE)
        return [Announce()] if leaving else []

    def _replace_one(self) -> list[FleetEffect]:
        """Begin to empty the next instance of an older generation if none is being replaced."""
        serving = self.in_phase(Phase.SERVING)
        outdated = [each for each in serving if self._is_outdated(self.members[each])]
        if not outdated or self._num_being_replaced() > 0:
            return []
        # If the cluster has no room for all that are wanted, those present at the restart suffice.
        num_enough = min(self.wanted, self._num_at_restart)
        if len(serving) < (self._target() if self._has_surge else max(MIN_SERVING, num_enough)):
            return []
        self._set_terminating(self.members[outdated[0]], Cause.RESTART)
        return [Announce()]

    def _give_up_surplus(self) -> list[FleetEffect]:
        """End surplus instances without requests: starts without a place, then warm ones."""
        num_surplus = self._num_there() - self._target() - self.num_warm
        cancelled = self._pending()[::-1][: max(0, num_surplus)]
        for instance_id in cancelled:
            del self.members[instance_id]
        # Those that are needed to serve have been promoted. Others that serve count for the pool.
        num_more = max(0, len(self.in_phase(Phase.SERVING)) - self._target())
        closed = self.in_phase(Phase.WARM)[max(0, self.num_warm - num_more) :]
        for instance_id in closed:
            member = self.members[instance_id]
            member.phase, member.cause = Phase.CLOSING, Cause.SCALING
        announced: list[FleetEffect] = [Announce()] if cancelled or closed else []
        return [*announced, *map(CancelStart, cancelled), *map(Close, closed)]

    def _pending(self) -> tuple[InstanceId, ...]:
        """Starts that wait for a place."""
        starting = self.in_phase(Phase.STARTING)
        return tuple(each for each in starting if self.members[each].pending is not None)

    def _waits_for_a_place(self) -> bool:
        """Whether all instances that the restart has begun wait for a place."""
        begun = [each for each in self.members.values() if not self._is_outdated(each)]
        return self._num_being_replaced() == 0 and all(each.pending is not None for each in begun)

    def _begin(self) -> Start:
        instance_id = InstanceId(f"i{self._num_begun}")
        self._num_begun += 1
        self.members[instance_id] = Member(self._generation)
        return Start(instance_id, self._generation)

    def _num_missing(self) -> int:
        """The number of instances to start."""
        return max(0, self._target() + self.num_warm - self._num_there())

    def _num_there(self) -> int:
        # An instance that is being replaced still holds the resources of its replacement.
        up = self.in_phase(Phase.STARTING, Phase.WARM, Phase.SERVING)
        return len(up) + self._num_being_replaced()

    def _target(self) -> int:
        """The number of instances that should serve: one more during a restart, so that the first
        replacement can start."""
        serving = [self.members[each] for each in self.in_phase(Phase.SERVING)]
        has_surge = self._has_surge and any(map(self._is_outdated, serving))
        # A lone instance cannot be emptied before another one serves.
        is_lone = self.wanted == 1 and any(map(self._must_leave, serving))
        return self.wanted + (1 if has_surge or is_lone else 0)

    def _num_being_replaced(self) -> int:
        return sum(member.cause is Cause.RESTART for member in self.members.values())

    def _at_most(self, wanted: int) -> int:
        return wanted if self.max_instances is None else min(wanted, self.max_instances)

    def _is_outdated(self, member: Member) -> bool:
        return member.generation != self._generation

    def _must_leave(self, member: Member) -> bool:
        return self._is_outdated(member) or self.is_on_drained_node(member)

    def _set_place(
        self, instance_id: InstanceId, pending: str | None, node: str | None
    ) -> list[FleetEffect]:
        member = self.members.get(instance_id)
        if member is None or (member.pending, member.node) == (pending, node):
            return []
        member.pending, member.node = pending, node
        return [Announce()]

    def _set_up(self, instance_id: InstanceId) -> None:
        member = self.members[instance_id]
        member.phase, member.pending = Phase.WARM, None
        if member.generation == self._generation:
            self._proven_generation = member.generation
        self._num_failures = 0

    @staticmethod
    def _set_terminating(member: Member, cause: Cause) -> None:
        member.phase, member.cause = Phase.TERMINATING, cause

    def _member(self, instance_id: InstanceId) -> Member:
        member = self.members.get(instance_id)
        if member is None:
            known = ", ".join(self.members) or "none"
            raise UnknownInstanceError(f"no instance is called {instance_id}; there are: {known}")
        return member
