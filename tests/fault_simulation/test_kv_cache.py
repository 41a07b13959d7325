"""Simulated KV caches: what a request looks at is its own KV, and all else is noticed."""

from collections.abc import Sequence

import pytest

from fault_simulation.engine.engine_kinds import (
    CHUNK,
    FULL,
    KINDS,
    SNAPSHOTS,
    STATE,
    WINDOW,
    WINDOWS,
    EngineKind,
    kind_of,
)
from fault_simulation.engine.grouped_core import GroupedCore
from fault_simulation.engine.kv_cache import KvCache
from fault_simulation.oracle.token_oracle import Ask, Stream, extend
from fault_simulation.virtual.timeline import Violation
from sterna.engine.drains import Left
from sterna.engine.emulated.requests import RequestState
from sterna.migration.messages import Drain, Mode
from sterna.types import NORMAL, FrontendId, MigrationId, RequestId

R, OTHER, M = RequestId("r0"), RequestId("r1"), MigrationId("m")
SAME_BEGINNING = RequestId("r2")
"""Its prompt begins as that of R, and not as that of OTHER."""

with_each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda each: each.name)


class Engine:
    """A core with its cache, stepped by hand."""

    def __init__(self, kind: EngineKind) -> None:
        self.streams: dict[RequestId, Stream] = {}
        self.cache = KvCache(kind, self.streams)
        self.core = GroupedCore(self.cache)
        self.num_wrong = 0

    def add(self, request_id: RequestId, prompt_tokens: int = 20, output_tokens: int = 60) -> None:
        arrival_s = float(len(self.streams))
        ask = Ask(request_id, FrontendId(0), prompt_tokens, output_tokens, arrival_s, NORMAL, 1)
        self.streams[request_id] = Stream(ask)
        self.core.add(RequestState(request_id, prompt_tokens, output_tokens, arrival_s))

    def step(self, num_steps: int = 1) -> None:
        """Step, and count the tokens that were made from wrong KV."""
        for _ in range(num_steps):
            self.core.begin_step()
            for token in self.core.end_step():
                stream = self.streams[token.request_id]
                stream.digests.append(extend(stream.digests[-1], 7))
                self.num_wrong += stream.is_wrong

    def step_to(self, num_tokens: int) -> None:
        """Step until the request has this number of tokens with valid KV."""
        while self.num_valid < num_tokens:
            self.step()

    @property
    def num_valid(self) -> int:
        position = self.core.progress(R)
        assert position is not None
        return position.num_valid_tokens

    def num_blocks(self) -> int:
        held = sum(each.num_blocks for each in self.core.requests())
        return self.cache.num_free + self.core.num_reserved_blocks + held


def copy_stage(
    source: Engine,
    destination: Engine,
    first: int,
    *,
    is_last: bool = False,
    num_steps: int = 0,
    left_out: Sequence[int] = (),
) -> int:
    """Copy the full units of R behind the first ones, or all in the last stage; the source steps
    on before its memory is read. Returns the number of units that are copied by then."""
    planned = source.num_valid
    cache = source.cache
    num_units = cache.num_units(planned) + 1 if is_last else cache.num_full_units(planned)
    columns = cache.stage_columns(first, num_units - first, planned, is_last=is_last)
    assert destination.core.reserve_columns(M, columns, needs_slot=is_last) is None
    if is_last:
        drain = Drain(M, R, Mode.LIVE, 0, first_block=first, max_blocks=num_units - first)
        assert isinstance(source.core.begin_drain(drain), Left)
    leaving = cache.blocks_of(cache.tables(R), columns, source.num_valid)
    source.step(num_steps)
    for number, (sent, received) in enumerate(
        zip(leaving, destination.core.blocks_at(M, columns), strict=True)
    ):
        if number not in left_out:
            for block, copied in zip(sent, received, strict=False):
                copied.content = block.content
    return num_units


def adopt(source: Engine, destination: Engine) -> None:
    """Continue the drained request on the destination."""
    state = source.core.export(R)
    destination.streams[R] = Stream(source.streams[R].ask, [*source.streams[R].digests])
    assert destination.core.can_adopt(M, state.num_computed_tokens)
    destination.core.adopt(M, state, source.cache.num_units(state.num_computed_tokens))
    source.core.release(R)


@with_each_kind
def test_requests_look_at_their_own_kv_to_their_ends(kind: EngineKind) -> None:
    engine = Engine(kind)
    for number in range(12):
        engine.add(RequestId(f"r{number}"), prompt_tokens=5 + 3 * number)
    while not engine.core.is_empty:
        engine.step()
        assert engine.num_blocks() == kind.num_blocks
        assert engine.cache.new_wrong_keys() == []
    assert engine.num_wrong == 0
    assert engine.cache.wrong_keys() == []
    assert engine.cache.num_free == kind.num_blocks


@with_each_kind
def test_the_longest_request_fits(kind: EngineKind) -> None:
    engine = Engine(kind)
    engine.add(R, prompt_tokens=60, output_tokens=90)
    engine.step(200)
    assert engine.core.is_empty
    assert kind.memory.num_blocks(150) <= kind.config.num_usable_blocks


@with_each_kind
@pytest.mark.parametrize("num_tokens", [24, 25, 27, 30, 31, 40])
def test_a_request_that_moves_in_stages_looks_at_its_own_kv(
    kind: EngineKind, num_tokens: int
) -> None:
    """Beside others that take the blocks which windows leave behind during the copies."""
    source, destination = Engine(kind), Engine(kind)
    source.add(R)
    source.step_to(num_tokens)
    source.add(OTHER, prompt_tokens=40)
    num_copied = copy_stage(source, destination, 0, num_steps=6)
    copy_stage(source, destination, num_copied, is_last=True, num_steps=1)
    adopt(source, destination)
    assert destination.cache.new_wrong_keys() == []
    destination.step(8)
    assert destination.num_wrong == 0
    assert destination.num_blocks() == kind.num_blocks
    assert source.num_blocks() == kind.num_blocks


@pytest.mark.parametrize(
    ("kind", "group"),
    [(FULL, 0), (WINDOW, 0), (WINDOW, 1), (CHUNK, 0), (CHUNK, 1), (WINDOWS, 1), (STATE, 0)],
    ids=lambda each: getattr(each, "name", each),
)
def test_a_group_that_is_not_copied_is_noticed(kind: EngineKind, group: int) -> None:
    source, destination = Engine(kind), Engine(kind)
    source.add(R)
    source.step_to(27)
    copy_stage(source, destination, 0, is_last=True, left_out=[group])
    adopt(source, destination)
    destination.step(2)
    assert destination.num_wrong == 2


def test_a_state_that_was_copied_too_early_is_noticed() -> None:
    source, destination = Engine(SNAPSHOTS), Engine(SNAPSHOTS)
    source.add(R)
    source.step_to(26)
    copy_stage(source, destination, 0, is_last=True, left_out=[0])
    source.core.resume(R)
    source.step()
    copy_stage(source, destination, 0, is_last=True, left_out=[1])
    adopt(source, destination)
    destination.step()
    assert destination.num_wrong == 1


def test_a_block_that_another_request_has_overwritten_is_noticed() -> None:
    engine = Engine(WINDOW)
    engine.add(R)
    engine.add(OTHER)
    engine.step(3)
    mine, theirs = engine.cache.tables(R)[1][2], engine.cache.tables(OTHER)[1][2]
    mine.content = theirs.content
    engine.step()
    assert engine.num_wrong == 1
    assert engine.streams[R].is_wrong


def test_a_window_leaves_blocks_behind_and_another_request_gets_them() -> None:
    engine = Engine(WINDOW)
    engine.add(R)
    engine.step_to(30)
    null = engine.cache.pool.null_block
    window, full = engine.cache.tables(R)
    assert [each is null for each in window] == [True] * 10 + [False] * 5
    assert null not in full


def test_a_preempted_request_finds_its_blocks_again() -> None:
    engine = Engine(WINDOW)
    engine.add(R)
    engine.step_to(29)
    (request,) = engine.core.requests()
    engine.core._preempt(request)
    step = engine.core.begin_step()
    # It has 30 tokens; those of the window that ends at 28 are there still.
    assert step.scheduled == ((R, 2),)
    engine.core.end_step()
    assert not engine.streams[R].is_wrong


def test_without_a_prefix_cache_a_freed_block_has_lost_its_content() -> None:
    engine = Engine(FULL)
    engine.add(R)
    engine.step(2)
    block = engine.cache.tables(R)[0][0]
    assert block.content is not None
    engine.core.abort(R)
    assert block.content is None


def test_other_kv_under_a_key_is_found() -> None:
    engine = Engine(WINDOW)
    engine.add(R)
    engine.step(2)
    assert engine.cache.new_wrong_keys() == []
    engine.cache.tables(R)[1][4].content = None
    assert engine.cache.wrong_keys() == ["wrong KV in group 1 for r0 up to token 20"]


def test_a_request_finds_the_beginning_of_its_prompt() -> None:
    """After the end of another one with the same beginning, of which the window needs the end."""
    engine = Engine(WINDOW)
    engine.add(R, output_tokens=1)
    engine.step()
    engine.add(SAME_BEGINNING)
    step = engine.core.begin_step()
    assert step.scheduled == ((SAME_BEGINNING, 4),)
    engine.core.end_step()
    assert not engine.streams[SAME_BEGINNING].is_wrong


def test_a_request_that_finds_wrong_kv_is_noticed() -> None:
    engine = Engine(WINDOW)
    engine.add(R, output_tokens=1)
    engine.step()
    for block in engine.cache.pool.cached.values():
        block.content = None
    engine.add(SAME_BEGINNING)
    engine.step()
    assert engine.num_wrong == 1


def test_a_block_is_freed_once() -> None:
    engine = Engine(FULL)
    engine.add(R)
    engine.step()
    (table,) = engine.cache.tables(R)
    engine.core.abort(R)
    with pytest.raises(Violation, match="freed twice"):
        engine.cache.pool.free_blocks(table)


def test_seeds_draw_every_kind() -> None:
    kinds = [kind_of(seed) for seed in range(60)]
    assert set(kinds) == set(KINDS)
    assert kinds == [kind_of(seed) for seed in range(60)]
