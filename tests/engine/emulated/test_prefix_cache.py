"""Requests find the blocks of their prefixes, and blocks keep contents as long as they can."""

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from sterna.engine.drains import Left
from sterna.engine.emulated.config import Preemption
from sterna.engine.emulated.core import EmulatedCore
from sterna.engine.emulated.prefix_cache import PrefixCache, num_free
from sterna.engine.emulated.requests import RequestState
from sterna.errors import ConfigurationError
from sterna.types import InstanceId, MigrationId, RequestId, prefix_id
from tests.engine.emulated.builders import add, chunked, drain, engine, named, request, step, steps


def caching(num_blocks: int = 20, **options: object) -> EmulatedCore:
    return chunked(
        num_blocks,
        watermark=0.0,
        keeps_block_free=False,
        preemption=Preemption.LAST_ADMITTED,
        prefix_caching=True,
        **options,
    )


def asking(
    name: str, contents: Sequence[int], prompt_tokens: int, output_tokens: int = 1
) -> RequestState:
    """A request with these block hashes."""
    state = request(name, prompt_tokens, output_tokens)
    return structs.replace(state, block_hashes=array("q", contents).tobytes())


def ask(core: EmulatedCore, *requests: RequestState) -> list[int]:
    """The numbers of tokens that the requests, which come now, find."""
    add(core, *requests)
    return list(step(core).cached)


def test_a_prompt_is_computed_from_where_the_cache_ends() -> None:
    core = caching()
    assert ask(core, asking("a", [1, 2, 3], 12)) == [0]
    add(core, asking("b", [1, 2, 4], 13))
    begun = core.begin_step()
    assert (begun.scheduled, begun.cached) == ((("b", 5),), (8,))
    assert named(core, "b").num_blocks == 4


def test_the_block_of_the_last_token_is_computed_again() -> None:
    """ "When all tokens hit the cache, we must recompute the last token" (vLLM)."""
    core = caching()
    assert ask(core, asking("a", [1, 2, 3], 12)) == [0]
    assert ask(core, asking("b", [1, 2, 3], 12)) == [8]
    assert ask(core, asking("c", [1, 2, 3], 13)) == [12]


def test_requests_of_the_same_step_share_what_it_computes() -> None:
    core = caching()
    assert ask(core, asking("a", [1, 2, 3], 12), asking("b", [1, 2, 5], 12)) == [0, 8]


def test_shared_blocks_are_held_once() -> None:
    core = caching(10)
    add(core, asking("a", [1, 2, 3], 13, 50), asking("b", [1, 2, 3], 13, 50))
    step(core)
    assert core.num_free_blocks == 10 - 3 - 2
    view = core.view(InstanceId("i0"))
    assert [each.physical_usage_tokens for each in view.running] == [16, 16]
    assert view.shared_tokens == 12
    core.abort(RequestId("a"))
    assert core.num_free_blocks == 10 - 4
    core.abort(RequestId("b"))
    assert (core.num_free_blocks, core.num_idle_blocks) == (10, 3)


def test_blocks_without_content_are_taken_first_and_then_what_was_used_longest_ago() -> None:
    """A request's last blocks before its first ones."""
    core = caching(8)
    ask(core, asking("a", [1, 2, 3], 12))
    ask(core, asking("b", [4, 5, 6], 12))
    assert core.num_idle_blocks == 6
    ask(core, asking("c", [7], 8))
    assert set(core.cached_hashes()) == {1, 2, 3, 4, 5, 6, 7}
    # Of eight free blocks, seven have contents.
    ask(core, asking("d", [10, 11, 12], 12))
    assert set(core.cached_hashes()) == {1, 4, 5, 6, 7, 10, 11, 12}
    assert ask(core, asking("e", [1, 2, 3], 5)) == [4]


def test_tokens_that_were_looked_up_and_found_are_counted() -> None:
    core = caching()
    ask(core, asking("a", [1, 2, 3], 13), asking("b", [1, 2, 5], 12))
    view = core.view(InstanceId("i0"))
    assert (view.num_prefix_tokens, view.num_prefix_hits) == (25, 8)


def test_a_view_shows_what_a_request_found_when_it_was_admitted() -> None:
    core = caching()
    add(core, asking("a", [1, 2, 3], 13, output_tokens=50))
    core.begin_step()
    core.end_step()
    add(core, asking("b", [1, 2, 5], 12))
    core.begin_step()
    assert [each.num_shared_tokens for each in core.view(InstanceId("i0")).running] == [0, 8]


def test_a_kept_prefix_stays_until_it_is_released() -> None:
    """Of twelve tokens of a, the blocks behind the first are kept; one of them is in use by b."""
    core = caching(8)
    ask(core, asking("a", [1, 2, 3], 12))
    add(core, asking("b", [1, 2, 9], 12, 50))
    step(core)
    prefix = prefix_id(RequestId("r"))
    core.keep_prefix(prefix, [1, 2, 3, 4], 1)
    assert core.kept_hashes(prefix) == [2, 3]
    assert core.num_free_blocks == 8 - 3 - 1
    view = core.view(InstanceId("i0"))
    assert (view.reserved_tokens, view.shared_tokens, len(view.running)) == (4, 0, 1)
    core.abort(RequestId("b"))
    # Two blocks are kept, and six are left for what comes.
    assert core.num_free_blocks == 6
    assert ask(core, asking("c", [11, 12, 13, 14, 15, 16], 24)) == [0]
    assert {2, 3} <= set(core.cached_hashes())
    assert not core.is_empty
    core.release(prefix)
    core.release(prefix)
    assert (core.num_free_blocks, core.is_empty) == (8, True)
    assert core.view(InstanceId("i0")).reserved_tokens == 0


def test_a_prefix_that_is_nowhere_is_not_kept() -> None:
    core = caching()
    prefix = prefix_id(RequestId("r"))
    core.keep_prefix(prefix, [1, 2], 0)
    assert core.progress(prefix) is None
    ask(core, asking("a", [1, 2], 8))
    core.keep_prefix(prefix, [1, 2], 2)
    assert core.progress(prefix) is None


def test_an_adopted_prefix_is_found_by_the_request_that_follows() -> None:
    there, here = caching(), caching()
    ask(there, asking("a", [1, 2, 3], 12))
    prefix, migration_id = prefix_id(RequestId("r")), MigrationId("m")
    there.keep_prefix(prefix, [1, 2, 3], 0)
    assert drain(there, prefix) == Left(3, False)
    assert here.reserve(migration_id, 4, needs_slot=False) is None
    here.adopt_prefix(migration_id, there.kept_hashes(prefix))
    there.release(prefix)
    assert here.num_free_blocks == there.num_free_blocks == 20
    assert ask(here, asking("r", [1, 2, 3, 4], 16)) == [12]


def test_a_preempted_request_finds_what_is_left_of_its_own() -> None:
    """Prompt and outputs."""
    core = caching(9)
    first = asking("a", range(10, 17), 12, 16)
    second = asking("b", range(20, 27), 12, 16)
    add(core, first, second)
    preempted = []
    while not preempted:
        preempted = list(step(core).preempted)
    assert preempted == ["b"]
    found: list[int] = []
    while not found:
        found = list(step(core).cached)
    # Four of its blocks were full; `a` has taken the last two of them since.
    assert found == [8]


def test_adopted_blocks_are_found_and_those_that_leave_stay() -> None:
    source, destination = caching(), caching()
    add(source, asking("a", [1, 2, 3, 4, 5], 14, 6))
    steps(source, 3)
    drain(source, "a")
    migration = MigrationId("m")
    assert destination.reserve(migration, 4, needs_slot=True) is None
    destination.adopt(migration, source.export(RequestId("a")), 4)
    assert set(destination.cached_hashes()) == {1, 2, 3, 4}
    source.release(RequestId("a"))
    assert (source.num_free_blocks, source.num_idle_blocks) == (20, 4)
    assert ask(destination, asking("b", [1, 2, 3], 13)) == [12]


def test_a_reservation_takes_the_memory_of_contents() -> None:
    core = caching(4)
    ask(core, asking("a", [1, 2, 3], 12))
    assert core.reserve(MigrationId("m"), 3, needs_slot=True) is None
    assert set(core.cached_hashes()) == {1}
    core.free_reservation(MigrationId("m"))
    assert (core.num_free_blocks, core.num_idle_blocks) == (4, 1)


def test_what_it_finds_need_not_be_free_for_a_request_to_be_admitted() -> None:
    core = caching(6)
    add(core, asking("a", [1, 2, 3, 4], 17, 50))
    step(core)
    # Five blocks, of which four are there; but a request of its own content waits.
    assert ask(core, asking("b", [1, 2, 3, 4], 17, 2)) == [16]
    add(core, asking("c", [9, 10], 8, 2))
    assert step(core).admitted == ()


def test_an_idle_block_that_is_found_counts_as_needed() -> None:
    core = caching(5)
    ask(core, asking("a", [1, 2], 9))
    add(core, asking("b", [5, 6, 7], 12, 50))
    step(core)
    # Two of its three blocks are there, in the only free ones.
    add(core, asking("c", [1, 2], 12, 2))
    assert step(core).admitted == ()


def test_what_a_queuing_request_would_find_need_not_be_computed() -> None:
    """By hand: of its 16 tokens 8 are cached when it begins to queue, and 12 when it is admitted.
    With 5 tokens a step, of which the other one takes 2, one is left."""
    core = caching(max_num_batched_tokens=5)

    def left(name: str) -> list[int]:
        view = core.view(InstanceId("i0"))
        return [
            each.uncomputed_tokens
            for each in (*view.running, *view.queuing)
            if each.request_id == name
        ]

    add(core, asking("a", [1, 2, 3], 12))
    assert left("a") == [12]
    steps(core, 2)
    assert left("a") == [2]
    add(core, asking("b", [1, 2, 3, 4], 16))
    assert left("b") == [8]
    steps(core, 1)
    assert left("b") == [1]
    steps(core, 1)
    assert left("b") == []


def test_what_earlier_requests_have_need_not_be_computed_behind_them() -> None:
    core = caching(max_num_batched_tokens=5)
    add(core, asking("a", [1, 2, 3], 12, 9), asking("b", [1, 5, 6, 7], 15))
    assert core.coming_tokens([1, 2, 3], 13) == 12
    assert core.coming_tokens([1, 2, 3], 12) == 8
    # The last block of `b` will not be full before it ends.
    assert core.coming_tokens([1, 5, 6, 7], 20) == 12
    assert core.coming_tokens([7, 8, 9], 20) == 0
    while named(core, "a").is_prefilling:
        step(core)
    assert core.coming_tokens([1, 2, 3], 13) == 12


def test_without_prefix_caching_nothing_is_found() -> None:
    core = engine(20)
    assert ask(core, asking("a", [1, 2, 3], 12)) == [0]
    assert ask(core, asking("b", [1, 2, 3], 12)) == [0]
    assert core.num_idle_blocks == 0


@pytest.mark.parametrize(
    "options", [{}, {"preemption": Preemption.LAST_ADMITTED}], ids=["chunks", "whole"]
)
def test_prefix_caching_needs_the_rules_of_vllm_1(options: dict[str, object]) -> None:
    make = engine if options else chunked
    with pytest.raises(ConfigurationError, match="prefix_caching needs the rules of vLLM 1"):
        make(20, prefix_caching=True, **options)


@given(st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=4), st.integers(0, 6)), max_size=20))
def test_of_the_same_contents_the_first_one_is_found(
    calls: list[tuple[list[int], int]],
) -> None:
    """Against a list of all blocks, in the order in which they got their contents."""
    cache = PrefixCache()
    known = []
    for contents, num_free_blocks in calls:
        found = cache.find(contents, 3)
        for block, content in zip(found, contents, strict=False):
            assert block is next(each for each in known if each.block_hash == content)
        assert len(found) in (3, len(contents)) or contents[len(found)] not in {
            each.block_hash for each in known
        }
        num_idle = cache.num_idle
        assert cache.use(found) == num_idle - cache.num_idle
        mine = [*found, *(cache.add(content) for content in contents[len(found) :])]
        known += mine[len(found) :]
        assert cache.leave(mine) == len(set(mine))
        assert num_free(known) == len(known) == cache.num_idle
        idle = list(cache._idle)
        cache.shrink(num_free_blocks)
        assert list(cache._idle) == idle[-num_free_blocks:] if num_free_blocks else not cache._idle
        known = [each for each in known if each in cache._idle]
        assert set(cache.hashes()) == {each.block_hash for each in known}
