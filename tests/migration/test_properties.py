"""Random interleavings of migrations, faults and deaths over real llumlets and tiny engines.

The invariants, checked after every single move by `World.check`: at most one living instance may
step a request; a request that has ended is not stepped; every block of every engine is free, a
request's or a reservation's, exactly once; KV that is adopted is what the source computed. And by
`World.check_healed`, once the network has healed and time has passed: somebody can step every
request that has not ended, no request waits drained, no reservation and no receiver is left, and
every request that its client aborted has ended.

Hypothesis searches with shrinking; the seeded walks reach the deep states more often.
"""

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from sterna.migration.messages import Mode
from tests.migration.engine import Where
from tests.migration.walks import walk
from tests.migration.world import Node, World

PICK = st.integers(0, 30)
"""Chooses among what is possible at that moment; small, so that failures shrink well."""

INSTANCE = st.sampled_from("ABC")


class Interleavings(RuleBasedStateMachine):
    """Chooses the moves of a `World`."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @initialize(
        lengths=st.lists(
            st.tuples(INSTANCE, st.integers(1, 10), st.integers(5, 30)), min_size=1, max_size=3
        ),
        moves=st.lists(st.tuples(PICK, INSTANCE, st.sampled_from([Mode.LIVE, *Mode])), max_size=3),
    )
    def begin(
        self, lengths: list[tuple[str, int, int]], moves: list[tuple[int, str, Mode]]
    ) -> None:
        for name, num_tokens, num_more in lengths:
            self.world.add_request(self.world.named(name), num_tokens, num_more)
        for pick, to, mode in moves:
            self.order(pick, to, mode)

    # --------------------------------------------------------------------------- no fault

    @rule(picks=st.lists(PICK, min_size=5, max_size=40))
    def go_on(self, picks: Sequence[int]) -> None:
        """Messages arrive, engines work and blocks are copied, in any order."""
        for pick in picks:
            moves = self.world.moves()
            if moves:
                moves[pick % len(moves)]()
            self.world.check()

    @rule(pick=PICK, picks=st.lists(PICK, max_size=10))
    def step(self, pick: int, picks: list[int]) -> None:
        self.world.step(self.node(pick))
        self.go_on(picks)

    @rule(
        pick=PICK,
        to=INSTANCE,
        mode=st.sampled_from([Mode.LIVE, *Mode]),
        picks=st.lists(PICK, max_size=20),
    )
    def order(self, pick: int, to: str, mode: Mode, picks: Sequence[int] = ()) -> None:
        here = [(node, each) for node in self.world.alive() for each in node.engine.requests]
        destination = self.world.named(to)
        # An interpreter begins nothing with an instance that it knows to be dead.
        if here and not self.world.nodes[destination].is_death_confirmed:
            node, request_id = here[pick % len(here)]
            self.world.order(request_id, node.engine.instance_id, destination, mode)
        self.go_on(picks)

    @rule(pick=PICK, to=st.none() | INSTANCE)
    def set_destination(self, pick: int, to: str | None) -> None:
        node = self.node(pick)
        destination = None if to is None else self.world.named(to)
        if destination != node.engine.instance_id:
            self.world.set_destination(node.engine.instance_id, destination)

    # ------------------------------------------------------------------------ what may happen

    @rule(
        pick=PICK,
        fault=st.sampled_from(
            ["lose", "repeat", "abort", "preempt", "hint", "refuse", "transfer", "listening"]
        ),
        picks=st.lists(PICK, max_size=10),
    )
    def disturb(self, pick: int, fault: str, picks: list[int]) -> None:
        """One of the faults that a migration must survive without a death."""
        world, node = self.world, self.node(pick)
        running = [
            (each, request.request_id)
            for each in world.alive()
            for request in each.engine.requests.values()
            if request.where is Where.RUNNING
        ]
        live = sorted(set(world.home) - world.ended)
        listening = [(each, key) for each in world.alive() for key in each.engine.listening]
        match fault:
            case "lose" if world.network:
                del world.network[pick % len(world.network)]
            case "repeat" if world.network:
                world.network.append(world.network[pick % len(world.network)])
            case "abort" if live:
                world.abort_by_client(live[pick % len(live)])
            case "preempt" | "hint" if running:
                where, request_id = running[pick % len(running)]
                world.preempt(where, request_id, is_hinted=fault == "hint")
            case "refuse":
                node.engine.num_adoptions_to_fail = 1
            case "transfer" if world.transfers:
                world.fail_transfer(world.transfers[pick % len(world.transfers)])
            case "listening" if listening:
                world.fail_listening(*listening[pick % len(listening)])
        self.go_on(picks)

    @rule(for_s=st.sampled_from([0.1, 1.0, 6.0, 11.0]))
    def pass_time(self, for_s: float) -> None:
        self.world.advance(self.world.now_s + for_s)
        self.world.check()

    @rule(pick=PICK, is_new=st.booleans())
    def die(self, pick: int, is_new: bool) -> None:
        """An instance dies, or the supervisor confirms a death."""
        world = self.world
        unconfirmed = [
            instance_id
            for instance_id, node in world.nodes.items()
            if not node.is_alive and not node.is_death_confirmed
        ]
        if is_new and len(world.alive()) > 1:
            world.kill(self.node(pick).engine.instance_id)
        elif unconfirmed:
            world.confirm_death(unconfirmed[pick % len(unconfirmed)])
        world.check()

    @rule()
    def heal(self) -> None:
        self.world.heal()

    def teardown(self) -> None:
        self.world.heal()

    def node(self, pick: int) -> Node:
        alive = self.world.alive()
        return alive[pick % len(alive)]


def explore(num_examples: int) -> None:
    """Play so many interleavings; fails with the shortest that breaks a rule."""
    run_state_machine_as_test(
        Interleavings,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_random_interleavings_keep_one_owner_all_blocks_and_every_request() -> None:
    explore(40)


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_many_random_interleavings_keep_one_owner_all_blocks_and_every_request() -> None:
    explore(4000)


@pytest.mark.parametrize("seed", range(40))
def test_random_walk_keeps_one_owner_all_blocks_and_every_request(seed: int) -> None:
    walk(World(), seed)


@pytest.mark.slow
@pytest.mark.parametrize("thousand", range(40, 45))
def test_many_random_walks_keep_one_owner_all_blocks_and_every_request(thousand: int) -> None:
    for seed in range(thousand * 1000, (thousand + 1) * 1000):
        try:
            walk(World(), seed)
        except Exception as error:
            raise AssertionError(f"walk with seed {seed} failed") from error


def test_an_abort_follows_a_request_that_was_ordered_again_as_it_left() -> None:
    """Found by the interleavings: B has committed and not yet released what A has adopted."""
    play = Interleavings()
    play.begin(lengths=[("B", 1, 5)], moves=[])
    play.order(mode=Mode.RECOMPUTE, pick=0, picks=[], to="A")
    play.go_on(picks=[0] * 12)
    holders = [node.engine.instance_id for node in play.world.alive() if node.engine.requests]
    assert len(holders) == 2, "the destination has it, and the source has not let go yet"
    play.order(mode=Mode.LIVE, pick=1, picks=[], to="A")
    play.disturb(fault="abort", pick=0, picks=[])
    play.teardown()
