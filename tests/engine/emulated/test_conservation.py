"""Any sequence of calls leaves two engines whole.

After every call: blocks are free, held or reserved, each exactly once; a request is in one place
of one engine; tokens came in order, each once. At the end, when nothing new comes, every request
that was not aborted produces its last token.
"""

from array import array
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sterna.engine.cache_changes import CacheRecorder
from sterna.engine.drains import Left
from sterna.engine.emulated.config import EmulatedEngineConfig, Preemption, StepMode
from sterna.engine.emulated.core import EmulatedCore, Step
from sterna.engine.emulated.requests import RequestState, decode_state
from sterna.types import HIGH, NORMAL, InstanceId, MigrationId, RequestId, unpacked
from tests.engine.emulated.builders import STEP_TIME, drain, num_held

BLOCK_SIZE = 4
PICK = st.integers(0, 30)
SIDE = st.integers(0, 1)
REQUEST = st.tuples(
    st.floats(0.0, 1.0),
    st.floats(0.0, 0.9),
    st.integers(0, 9),
    st.booleans(),
    st.tuples(st.integers(0, 1), st.integers(0, 9)),
)
"""Of the usable memory, the request's share; the prompt's share of that; arrival; priority; which
prefix its prompt has, and how many blocks of it."""


def with_prefix_cache(config: EmulatedEngineConfig, prefix_caching: bool) -> EmulatedEngineConfig:
    """The engine with a prefix cache, if its rules allow one."""
    has_rules = (
        config.step_mode is StepMode.CHUNKED and config.preemption is not Preemption.LATEST_ARRIVED
    )
    return replace(config, prefix_caching=prefix_caching and has_rules)


configs = st.builds(
    with_prefix_cache,
    st.builds(
        EmulatedEngineConfig,
        num_blocks=st.integers(6, 16),
        block_size=st.just(BLOCK_SIZE),
        watermark=st.sampled_from([0.0, 0.1, 0.2]),
        max_num_seqs=st.integers(1, 5),
        max_num_batched_tokens=st.sampled_from([1, 3, 8, 100]),
        step_mode=st.sampled_from(StepMode),
        preemption=st.sampled_from(Preemption),
        keeps_block_free=st.booleans(),
    ),
    st.booleans(),
)


def block_hashes(prefix: int, num_shared: int, number: int, num_blocks: int) -> bytes:
    """Those of a request that begins with so many blocks of a prefix; the rest is its own."""
    own = range(1_000 * (2 + number) + num_shared, 1_000 * (2 + number) + num_blocks)
    return array("q", [*range(1_000 * prefix, 1_000 * prefix + num_shared), *own]).tobytes()


@dataclass(slots=True)
class Move:
    """A request on its way: drained on its source, perhaps with a reservation elsewhere."""

    request_id: RequestId
    source: int
    num_blocks: int
    num_reserved: int | None = None

    @property
    def migration_id(self) -> MigrationId:
        return MigrationId(f"m-{self.request_id}")


class TwoEngines(RuleBasedStateMachine):
    """Chooses the calls, between two steps of the engine that they concern."""

    def __init__(self) -> None:
        super().__init__()
        self.cores: list[EmulatedCore] = []
        self.under_way: list[Step | None] = [None, None]
        self.asked: dict[RequestId, RequestState] = {}
        self.num_tokens: dict[RequestId, int] = {}
        self.aborted: set[RequestId] = set()
        self.computed: dict[RequestId, int] = {}
        self.moves: list[Move] = []
        self.num_reservations = 0

    @initialize(config=configs)
    def begin(self, config: EmulatedEngineConfig) -> None:
        self.config = config
        self.recorders = [CacheRecorder() for _ in range(2)]
        self.cores = [EmulatedCore(config, STEP_TIME, each) for each in self.recorders]
        self.told: list[set[int]] = [set() for _ in range(2)]

    # --------------------------------------------------------------------------------- calls

    @rule(side=SIDE, requests=st.lists(REQUEST, min_size=1, max_size=5))
    def add(
        self, side: int, requests: list[tuple[float, float, int, bool, tuple[int, int]]]
    ) -> None:
        """Also during a step. Each request fits into an empty engine."""
        for share, prompt_share, arrival_s, is_high, (prefix, num_shared) in requests:
            num_tokens = 2 + int(share * (self.config.total_tokens - 2))
            prompt_tokens = max(1, min(num_tokens - 1, int(prompt_share * num_tokens)))
            priority = HIGH if is_high else NORMAL
            state = RequestState(
                RequestId(f"r{len(self.asked)}"),
                prompt_tokens,
                num_tokens - prompt_tokens,
                float(arrival_s),
                priority,
                priority,
                block_hashes=block_hashes(
                    prefix,
                    min(num_shared, prompt_tokens // BLOCK_SIZE),
                    len(self.asked),
                    num_tokens // BLOCK_SIZE,
                ),
            )
            self.asked[state.request_id] = state
            self.num_tokens[state.request_id] = 0
            self.cores[side].add(state)

    @rule(side=SIDE)
    def begin_step(self, side: int) -> None:
        if self.under_way[side] is not None:
            return
        core = self.cores[side]
        step = core.begin_step()
        for request_id in step.preempted:
            if request_id not in step.admitted:
                request = self.request(core, request_id)
                assert (request.num_blocks, request.num_computed_tokens) == (0, 0)
            self.computed[request_id] = 0
        for request_id, num_cached_tokens in zip(step.admitted, step.cached, strict=True):
            assert num_cached_tokens < self.request(core, request_id).num_tokens
            self.computed[request_id] = num_cached_tokens
        self.check_batch(step)
        if step.scheduled:
            assert step.duration_s > 0
            self.under_way[side] = step

    def check_batch(self, step: Step) -> None:
        num_tokens = sum(num for _, num in step.scheduled)
        assert len({request_id for request_id, _ in step.scheduled}) == len(step.scheduled)
        assert len(step.scheduled) <= self.config.max_num_seqs
        if self.config.step_mode is StepMode.CHUNKED:
            assert num_tokens <= self.config.max_num_batched_tokens
        elif step.admitted:
            assert len(step.admitted) == len(step.scheduled)
            is_alone = len(step.scheduled) == 1
            assert is_alone or num_tokens <= self.config.max_num_batched_tokens
        else:
            assert all(num == 1 for _, num in step.scheduled)

    @rule(side=SIDE)
    def end_step(self, side: int) -> None:
        step = self.under_way[side]
        if step is None:
            return
        self.under_way[side] = None
        tokens = {token.request_id: token for token in self.cores[side].end_step()}
        for request_id, num_tokens in step.scheduled:
            asked = self.asked[request_id]
            self.computed[request_id] = self.computed.get(request_id, 0) + num_tokens
            num_before = self.num_tokens[request_id]
            # Everything that is known has to be computed before the next token comes.
            is_complete = self.computed[request_id] == asked.prompt_tokens + num_before
            token = tokens.pop(request_id, None)
            assert (token is not None) == is_complete
            if token is not None:
                assert token.index == num_before
                assert token.is_last == (num_before + 1 == asked.output_tokens)
                self.num_tokens[request_id] += 1
        assert not tokens

    @rule(side=SIDE, num_steps=st.integers(1, 12))
    def steps(self, side: int, num_steps: int) -> None:
        for _ in range(num_steps):
            self.end_step(side)
            self.begin_step(side)
            self.requests_hold_what_their_tokens_take()
        self.end_step(side)

    @rule(side=SIDE, pick=PICK)
    def abort(self, side: int, pick: int) -> None:
        if self.under_way[side] is not None:
            return
        core = self.cores[side]
        moving = {move.request_id for move in self.moves}
        here = [each.request_id for each in core.requests() if each.request_id not in moving]
        if here:
            request_id = here[pick % len(here)]
            core.abort(request_id)
            self.aborted.add(request_id)

    @rule(side=SIDE, pick=PICK)
    def drain(self, side: int, pick: int) -> None:
        core = self.cores[side]
        here = [each.request_id for each in core.requests()]
        if self.under_way[side] is not None or not here:
            return
        request_id = here[pick % len(here)]
        progress = core.progress(request_id)
        assert progress is not None
        outcome = drain(core, request_id, num_preemptions=progress.num_preemptions)
        assert isinstance(outcome, Left) != progress.is_immovable
        if isinstance(outcome, Left):
            self.moves.append(Move(request_id, side, progress.num_blocks))

    @precondition(lambda self: self.moves)
    @rule(pick=PICK, num_more=st.integers(0, 2))
    def reserve(self, pick: int, num_more: int) -> None:
        """Perhaps more than the request turns out to need."""
        move = self.moves[pick % len(self.moves)]
        other, num_blocks = 1 - move.source, move.num_blocks + num_more
        if self.under_way[other] is None and move.num_reserved is None:
            refusal = self.cores[other].reserve(move.migration_id, num_blocks, needs_slot=True)
            move.num_reserved = num_blocks if refusal is None else None

    @precondition(lambda self: self.moves)
    @rule(pick=PICK)
    def adopt(self, pick: int) -> None:
        """The destination has the request from here on, and the source forgets it."""
        move = self.moves[pick % len(self.moves)]
        if move.num_reserved is None or any(each is not None for each in self.under_way):
            return
        source, destination = self.cores[move.source], self.cores[1 - move.source]
        state = decode_state(source.export(move.request_id).encode())
        destination.adopt(move.migration_id, state, move.num_blocks)
        source.release(move.request_id)
        self.moves.remove(move)

    @rule(
        side=SIDE,
        pick=PICK,
        num_steps=st.integers(1, 3),
        num_more=st.integers(0, 2),
        is_committed=st.booleans(),
    )
    def move(self, side: int, pick: int, num_steps: int, num_more: int, is_committed: bool) -> None:
        """The calls of a migration one after the other, with steps in between."""
        self.steps(side, num_steps)
        num_before = len(self.moves)
        self.drain(side, pick)
        if len(self.moves) > num_before:
            last = len(self.moves) - 1
            self.steps(1 - side, num_steps)
            self.reserve(last, num_more)
            self.steps(side, num_steps)
            self.blocks_are_conserved()
            (self.adopt if is_committed else self.resume)(last)

    @precondition(lambda self: self.moves)
    @rule(pick=PICK)
    def resume(self, pick: int) -> None:
        move = self.moves[pick % len(self.moves)]
        if all(each is None for each in self.under_way):
            self.cores[1 - move.source].free_reservation(move.migration_id)
            self.cores[move.source].resume(move.request_id)
            self.moves.remove(move)

    # ---------------------------------------------------------------------------- invariants

    @invariant()
    def blocks_are_conserved(self) -> None:
        for side, core in enumerate(self.cores):
            reserved = sum(move.num_reserved or 0 for move in self.moves if move.source != side)
            assert core.num_free_blocks >= core.num_idle_blocks >= 0
            assert core.num_reserved_blocks == reserved
            assert core.num_free_blocks + num_held(core) + reserved == self.config.num_blocks

    @invariant()
    def what_was_told_is_what_is_cached(self) -> None:
        for core, recorder, told in zip(self.cores, self.recorders, self.told, strict=True):
            if (changes := recorder.take()) is not None:
                told.difference_update(changes.removed)
                told.update(changes.added)
            assert told == set(core.cached_hashes())

    @invariant()
    def of_what_is_cached_all_before_it_is_cached(self) -> None:
        """The scheduler's search for hits relies on it (`scheduler.prefix_index`)."""
        for core in self.cores:
            cached = set(core.cached_hashes())
            for asked in self.asked.values():
                is_cached = [each in cached for each in unpacked(asked.block_hashes)]
                assert is_cached == sorted(is_cached, reverse=True)

    @invariant()
    def every_request_is_in_one_place(self) -> None:
        moving = {move.request_id: move.source for move in self.moves}
        places: list[RequestId] = []
        for side, core in enumerate(self.cores):
            view = core.view(InstanceId(f"i{side}"))
            listed = [each.request_id for each in (*view.running, *view.queuing)]
            unlisted = [
                request_id
                for request_id, source in moving.items()
                if source == side and request_id not in listed
            ]
            places += [*listed, *unlisted]
            assert sorted(listed + unlisted) == sorted(each.request_id for each in core.requests())
        left = [
            request_id
            for request_id, asked in self.asked.items()
            if request_id not in self.aborted and self.num_tokens[request_id] < asked.output_tokens
        ]
        assert sorted(places) == sorted(left)

    @invariant()
    def requests_hold_what_their_tokens_take(self) -> None:
        for core, step in zip(self.cores, self.under_way, strict=False):
            scheduled = dict(step.scheduled) if step is not None else {}
            for each in core.requests():
                assert each.num_output_tokens == self.num_tokens[each.request_id]
                num_tokens = each.num_computed_tokens + scheduled.get(each.request_id, 0)
                assert each.num_blocks == self.config.blocks_of(num_tokens)

    # ------------------------------------------------------------------------------- the end

    def teardown(self) -> None:
        """Without anything new, every request ends."""
        if not self.cores:
            return
        for side in range(2):
            self.end_step(side)
        for _ in list(self.moves):
            self.resume(0)
        for side in range(2):
            for _ in range(3_000):
                if self.cores[side].is_empty:
                    break
                self.begin_step(side)
                assert self.under_way[side] is not None, "an engine with requests steps"
                self.end_step(side)
        self.every_request_is_in_one_place()
        assert all(core.is_empty for core in self.cores)
        assert [core.num_free_blocks for core in self.cores] == [self.config.num_blocks] * 2

    def request(self, core: EmulatedCore, request_id: RequestId):
        (found,) = (each for each in core.requests() if each.request_id == request_id)
        return found


def settings_of(max_examples: int) -> settings:
    return settings(
        max_examples=max_examples,
        stateful_step_count=60,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


class TestTwoEngines(TwoEngines.TestCase):
    settings = settings_of(60)


@pytest.mark.slow
class TestTwoEnginesAtLength(TwoEngines.TestCase):
    settings = settings_of(2_000)
