"""Whatever happens to instances, in whatever order: the fleet comes to what is wanted."""

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sterna.errors import FleetError
from sterna.supervisor.fleet import Cause, Fleet, FleetEffect, Phase, Start
from sterna.types import InstanceId

NODES = ("10.0.0.1", "10.0.0.2", "10.0.0.3")


class FleetUnderWeather(RuleBasedStateMachine):
    """Whatever happens, in whatever order: the fleet comes to what is wanted, and never empties
    the last instance that takes requests."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet(2, max_instances=4)
        self.now_s = 0.0
        # All that were ever begun, also by a supervisor that died before it could tell of them.
        self.ids: set[InstanceId] = set()
        self.were_serving: tuple[InstanceId, ...] = ()
        self.take(self.fleet.begin(0.0))

    def take(self, effects: list[FleetEffect]) -> None:
        self.started = [each.instance_id for each in effects if isinstance(each, Start)]
        for instance_id in self.started:
            assert instance_id not in self.ids, "a name is used once"
            self.ids.add(instance_id)

    def time(self) -> float:
        self.now_s += 1.0
        return self.now_s

    def pick(self, data: st.DataObject, *among: Phase) -> InstanceId:
        return data.draw(st.sampled_from(self.fleet.in_phase(*among)))

    @precondition(lambda self: self.fleet.in_phase(Phase.STARTING))
    @rule(data=st.data(), comes_up=st.booleans())
    def start_ends(self, data: st.DataObject, comes_up: bool) -> None:
        instance_id = self.pick(data, Phase.STARTING)
        if comes_up:
            self.take(self.fleet.on_started(instance_id, self.time()))
        else:
            self.take(self.fleet.on_start_failed(instance_id, "bad luck", self.time()))

    @precondition(lambda self: self.fleet.in_phase(Phase.TERMINATING))
    @rule(data=st.data())
    def is_emptied(self, data: st.DataObject) -> None:
        self.take(self.fleet.on_emptied(self.pick(data, Phase.TERMINATING), self.time()))

    @precondition(lambda self: self.fleet.in_phase(Phase.CLOSING))
    @rule(data=st.data())
    def has_closed(self, data: st.DataObject) -> None:
        self.take(self.fleet.on_gone(self.pick(data, Phase.CLOSING), self.time()))

    @precondition(lambda self: self.fleet.members)
    @rule(data=st.data())
    def dies(self, data: st.DataObject) -> None:
        phases = (Phase.WARM, Phase.SERVING, Phase.TERMINATING, Phase.CLOSING)
        if self.fleet.in_phase(*phases):
            self.take(self.fleet.on_gone(self.pick(data, *phases), self.time()))

    @precondition(lambda self: self.fleet.members)
    @rule(data=st.data(), cause=st.sampled_from([Cause.OPERATOR, Cause.SCALING]))
    def terminate(self, data: st.DataObject, cause: Cause) -> None:
        instance_id = data.draw(st.sampled_from(sorted(self.fleet.members)))
        num_serving = len(self.fleet.in_phase(Phase.SERVING))
        was_serving = self.fleet.members[instance_id].phase is Phase.SERVING
        try:
            self.take(self.fleet.on_terminate(instance_id, cause, self.time()))
        except FleetError:
            too_few = 1 if cause is Cause.OPERATOR else self.fleet.min_instances
            assert not was_serving or num_serving <= max(1, too_few)

    @precondition(lambda self: self.fleet.in_phase(Phase.TERMINATING))
    @rule(data=st.data())
    def undo(self, data: st.DataObject) -> None:
        instance_id = self.pick(data, Phase.TERMINATING)
        member = self.fleet.members[instance_id]
        is_to_leave = member.cause is Cause.RESTART or member.node in self.fleet.drained_nodes
        try:
            self.take(self.fleet.on_undo(instance_id, self.time()))
            assert not is_to_leave
        except FleetError:
            assert is_to_leave

    @rule(node=st.sampled_from(NODES[1:]))
    def drain_node(self, node: str) -> None:
        self.take(self.fleet.on_drain_node(node, self.time()))

    @precondition(lambda self: self.fleet.drained_nodes)
    @rule(data=st.data())
    def undo_node(self, data: st.DataObject) -> None:
        node = data.draw(st.sampled_from(sorted(self.fleet.drained_nodes)))
        self.take(self.fleet.on_undo_node(node, self.time()))

    @precondition(lambda self: self.fleet.in_phase(Phase.STARTING))
    @rule(data=st.data())
    def is_placed(self, data: st.DataObject) -> None:
        node = data.draw(st.sampled_from(sorted({*NODES} - self.fleet.drained_nodes)))
        self.take(self.fleet.on_placed(self.pick(data, Phase.STARTING), node))

    @rule(num=st.integers(1, 3))
    def add(self, num: int) -> None:
        self.take(self.fleet.on_add(num, self.time()))

    @rule(num=st.integers(1, 3))
    def is_needed(self, num: int) -> None:
        self.take(self.fleet.on_needed(num, self.time()))

    @precondition(lambda self: self.fleet.in_phase(Phase.STARTING))
    @rule(data=st.data())
    def waits_for_a_place(self, data: st.DataObject) -> None:
        self.take(self.fleet.on_pending(self.pick(data, Phase.STARTING), "no place"))

    @rule(num=st.integers(0, 2))
    def pool(self, num: int) -> None:
        self.take(self.fleet.on_pool(num, self.time()))

    @rule(data=st.data(), num_untold=st.integers(0, 2))
    def supervisor_dies(self, data: st.DataObject, num_untold: int) -> None:
        """Its successor has its state, and finds who lives: some that were called off among them,
        and some that were begun and not told of any more."""
        self.fleet = msgspec.msgpack.decode(msgspec.msgpack.encode(self.fleet), type=Fleet)
        last = max(int(each.removeprefix("i")) for each in self.ids)
        untold = [InstanceId(f"i{last + 1 + k}") for k in range(num_untold)]
        found = [each for each in sorted(self.ids) if data.draw(st.booleans())] + untold
        self.ids.update(untold)
        self.take(self.fleet.on_takeover(found, self.time()))
        assert set(self.fleet.members) <= {*found, *self.started}

    @precondition(lambda self: not self.fleet.is_restarting)
    @rule(has_surge=st.booleans())
    def restart(self, has_surge: bool) -> None:
        self.take(self.fleet.on_restart(self.time(), has_surge=has_surge))

    @invariant()
    def what_is_wanted_is_within_the_limits(self) -> None:
        assert 1 <= self.fleet.wanted <= 4

    @invariant()
    def whoever_empties_has_a_cause(self) -> None:
        for member in self.fleet.members.values():
            is_leaving = member.phase in (Phase.TERMINATING, Phase.CLOSING)
            assert (member.cause is not None) == is_leaving

    @invariant()
    def the_last_instance_that_takes_requests_is_not_emptied(self) -> None:
        """Its requests would have nowhere to go; it may die, which no rule prevents."""
        leaving = self.fleet.in_phase(Phase.TERMINATING, Phase.CLOSING)
        serving = self.fleet.in_phase(Phase.SERVING)
        assert serving or not set(self.were_serving) & set(leaving)
        self.were_serving = serving

    def teardown(self) -> None:
        """With luck from here on, all comes to what is wanted, of the newest options."""
        fleet = self.fleet
        for _ in range(200):
            self.now_s += 100.0
            self.take(fleet.on_time(self.now_s))
            for instance_id in fleet.in_phase(Phase.STARTING):
                # What one start brings may call off another.
                if instance_id in fleet.members:
                    self.take(fleet.on_started(instance_id, self.now_s))
            for instance_id in fleet.in_phase(Phase.TERMINATING):
                self.take(fleet.on_emptied(instance_id, self.now_s))
            for instance_id in fleet.in_phase(Phase.CLOSING):
                self.take(fleet.on_gone(instance_id, self.now_s))
        assert not fleet.is_restarting
        assert not any(map(fleet.is_on_drained_node, fleet.members.values()))
        num_surplus = len(fleet.in_phase(Phase.SERVING)) - fleet.wanted
        assert num_surplus >= 0
        assert len(fleet.in_phase(Phase.WARM)) == max(0, fleet.num_warm - num_surplus)
        assert not fleet.in_phase(Phase.STARTING, Phase.TERMINATING, Phase.CLOSING)


TestFleetUnderWeather = FleetUnderWeather.TestCase
TestFleetUnderWeather.settings = settings(max_examples=100, stateful_step_count=40)
