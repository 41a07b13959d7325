"""Index of the prefix caches: reports, prompts on their way, ends."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec import structs

from sterna.messages.actors import CacheReport, DispatchRequest
from sterna.scheduler.prefix_index import COMING_LIMIT_S, PrefixIndex
from sterna.types import (
    NORMAL,
    CacheGroup,
    CacheLayout,
    FrontendId,
    InstanceId,
    RequestId,
    cache_key,
    packed,
)

I0, I1, I2 = (InstanceId(f"i{number}") for number in range(3))
BLOCK = 4
FULL = CacheLayout(BLOCK, BLOCK, (CacheGroup(0, BLOCK),), moves=True)


def report(
    instance: InstanceId,
    added: Iterable[int] = (),
    removed: Iterable[int] = (),
    layout: CacheLayout | None = None,
) -> CacheReport:
    return CacheReport(instance, packed(added), packed(removed), layout)


def ask(name: str, hashes: Iterable[int], more_tokens: int = 1) -> DispatchRequest:
    hashes = list(hashes)
    num_tokens = len(hashes) * BLOCK + more_tokens
    return DispatchRequest(
        FrontendId(0),
        RequestId(name),
        num_tokens,
        0.0,
        NORMAL,
        NORMAL,
        prompt_tokens=num_tokens,
        block_hashes=packed(hashes),
    )


def index_of(**contents: Iterable[int]) -> PrefixIndex:
    """An index of instances with full attention that have these blocks."""
    index = PrefixIndex()
    for name, keys in contents.items():
        index.on_report(report(InstanceId(name), keys, layout=FULL))
    return index


# ------------------------------------------------------------------------------- what is there


def test_a_hit_ends_at_the_first_block_that_is_missing() -> None:
    index = index_of(i0=[1, 2, 5], i1=[1], i2=[5])
    assert index.cached_tokens(ask("r", [1, 2, 3, 4])) == {I0: 2 * BLOCK, I1: BLOCK}


def test_a_key_is_one_object() -> None:
    """Of a thousand instances with large caches there are many millions."""
    keys = [2**63 + each for each in range(100)]
    index = index_of(i0=keys)
    assert {*map(id, index.contents()[I0])} == {*map(id, index._holders)}


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    index = index_of(i0=[1, 2])
    assert index.cached_tokens(ask("r", [1, 2], more_tokens=0)) == {I0: BLOCK}
    assert index.cached_tokens(ask("r", [1], more_tokens=0)) == {}


def test_a_prompt_without_hashes_is_found_nowhere() -> None:
    assert index_of(i0=[1]).cached_tokens(ask("r", [])) == {}


def test_removed_blocks_are_found_no_longer() -> None:
    index = index_of(i0=[1, 2, 3], i1=[1, 2])
    index.on_report(report(I0, removed=[2, 3]))
    assert index.cached_tokens(ask("r", [1, 2, 3])) == {I0: BLOCK, I1: 2 * BLOCK}


def test_a_report_with_a_layout_is_all_that_an_instance_has() -> None:
    index = index_of(i0=[1, 2, 3])
    index.on_report(report(I0, [1], layout=FULL))
    assert index.cached_tokens(ask("r", [1, 2, 3])) == {I0: BLOCK}


def test_changes_of_an_instance_whose_contents_are_unknown_say_nothing() -> None:
    index = PrefixIndex()
    index.on_report(report(I0, [1]))
    assert index.cached_tokens(ask("r", [1])) == {}
    assert index.contents() == {}


def test_an_instance_that_has_left_is_forgotten_and_its_late_report_ignored() -> None:
    index = index_of(i0=[1, 2], i1=[1])
    index.on_instance_left(I0)
    index.on_report(report(I0, [1, 2], layout=FULL))
    assert index.cached_tokens(ask("r", [1, 2])) == {I1: BLOCK}


def test_the_place_of_one_that_has_left_is_anothers() -> None:
    index = index_of(i0=[1, 2], i1=[1])
    index.on_instance_left(I0)
    index.on_report(report(I2, [2], layout=FULL))
    assert index.cached_tokens(ask("r", [1, 2])) == {I1: BLOCK}
    index.on_report(report(I2, [1]))
    assert index.cached_tokens(ask("r", [1, 2])) == {I1: BLOCK, I2: 2 * BLOCK}


def test_each_instance_is_looked_up_by_its_own_layout() -> None:
    """By hand: units of two hashes end at the first, or the second, hash of a pair."""
    index = index_of(i0=[1, 2, 3])
    coarse = CacheLayout(BLOCK, 2 * BLOCK, (CacheGroup(0, 2 * BLOCK),))
    index.on_report(report(I1, [2], layout=coarse))
    assert index.cached_tokens(ask("r", [1, 2, 3])) == {I0: 3 * BLOCK, I1: 2 * BLOCK}


def test_a_window_needs_the_last_blocks_and_full_attention_all() -> None:
    """By hand: of two blocks before its end, the window lacks one at three blocks, none at two."""
    windowed = CacheLayout(BLOCK, BLOCK, (CacheGroup(0, BLOCK), CacheGroup(1, BLOCK, 2)))
    index = PrefixIndex()
    window_keys = [cache_key(each, 1) for each in (1, 2, 4)]
    index.on_report(report(I0, [1, 2, 3, 4, *window_keys], layout=windowed))
    assert index.cached_tokens(ask("r", [1, 2, 3, 4])) == {I0: 2 * BLOCK}


def test_drafts_compute_the_end_of_a_hit_again() -> None:
    index = PrefixIndex()
    layout = CacheLayout(BLOCK, BLOCK, (CacheGroup(0, BLOCK, dropped_tokens=BLOCK),))
    index.on_report(report(I0, [1, 2], layout=layout))
    index.on_report(report(I1, [1], layout=layout))
    assert index.cached_tokens(ask("r", [1, 2, 3])) == {I0: BLOCK, I1: 0}


def test_drafts_need_no_state_behind_the_end_of_a_hit() -> None:
    """By hand: of two blocks of full attention the second is dropped, and the state is that behind
    the first; with one block alone nothing is left."""
    index = PrefixIndex()
    groups = (CacheGroup(0, BLOCK, dropped_tokens=BLOCK), CacheGroup(1, BLOCK, 1))
    layout = CacheLayout(BLOCK, BLOCK, groups)
    state = cache_key(1, 1)
    index.on_report(report(I0, [1, 2, state], layout=layout))
    index.on_report(report(I1, [1, state], layout=layout))
    assert index.cached_tokens(ask("r", [1, 2])) == {I0: BLOCK}
    assert index.cached_tokens(ask("r", [1, 2], more_tokens=0)) == {I0: BLOCK}


def test_a_group_that_is_not_the_first_has_keys_of_its_own() -> None:
    index = PrefixIndex()
    keys = [cache_key(each, 2) for each in (1, 2)]
    layout = CacheLayout(BLOCK, BLOCK, (CacheGroup(2, BLOCK),))
    index.on_report(report(I0, [*keys, 3], layout=layout))
    assert index.cached_tokens(ask("r", [1, 2, 3])) == {I0: 2 * BLOCK}


def test_prefixes_are_copied_between_instances_of_one_layout_that_move_them() -> None:
    index = index_of(i0=[1], i1=[])
    assert index.can_copy(I0, I1)
    assert not index.can_copy(I0, I2)
    assert not PrefixIndex().can_copy(I0, I1)
    coarse = CacheLayout(BLOCK, 2 * BLOCK, (CacheGroup(0, 2 * BLOCK),), moves=True)
    # One that offloads KV blocks, say.
    immovable = structs.replace(FULL, moves=False)
    for layout in (coarse, immovable):
        index.on_report(report(I1, [], layout=layout))
        assert not index.can_copy(I0, I1)
        index.on_report(report(I0, [], layout=layout))
        assert index.can_copy(I0, I1) == layout.moves
        index.on_report(report(I0, [], layout=FULL))


# ------------------------------------------------------------------------------ what is coming


def test_what_was_sent_counts_as_cached_until_it_is() -> None:
    """Two requests with one prefix go to one instance, also when they arrive together."""
    index = index_of(i0=[], i1=[])
    index.on_dispatched(ask("a", [1, 2, 3]), I0, 0.0)
    assert index.cached_tokens(ask("b", [1, 2, 9])) == {I0: 2 * BLOCK}
    index.on_report(report(I0, [1, 2]))
    assert index.cached_tokens(ask("b", [1, 2, 3, 4])) == {I0: 3 * BLOCK}
    # It is computed, and evicted at once.
    index.on_report(report(I0, [3]))
    index.on_report(report(I0, removed=[2, 3]))
    assert index.cached_tokens(ask("b", [1, 2, 3, 4])) == {I0: BLOCK}


def test_of_two_prompts_on_their_way_one_may_stay() -> None:
    index = index_of(i0=[])
    index.on_dispatched(ask("a", [1, 2]), I0, 0.0)
    index.on_dispatched(ask("b", [1, 2, 3]), I0, 0.0)
    index.on_report(report(I0, [1, 2]))
    index.on_report(report(I0, removed=[1, 2]))
    assert index.cached_tokens(ask("c", [1, 2, 3, 4])) == {I0: 3 * BLOCK}


def test_what_was_cancelled_is_not_coming() -> None:
    index = index_of(i0=[])
    index.on_dispatched(ask("a", [1, 2]), I0, 0.0)
    index.on_dispatched(ask("b", [1, 2]), I0, 0.0)
    index.on_cancel(RequestId("a"))
    assert index.cached_tokens(ask("c", [1, 2])) == {I0: 2 * BLOCK}
    index.on_cancel(RequestId("b"))
    index.on_cancel(RequestId("b"))
    assert index.cached_tokens(ask("c", [1, 2])) == {}


def test_what_a_dead_front_end_has_sent_is_not_coming() -> None:
    index = index_of(i0=[], i1=[])
    index.on_dispatched(ask("a", [1, 2]), I0, 0.0)
    other = structs.replace(ask("b", [1]), frontend_id=FrontendId(1))
    index.on_dispatched(other, I1, 0.0)
    index.on_frontend_left(FrontendId(0))
    assert index.cached_tokens(ask("c", [1, 2])) == {I1: BLOCK}


def test_what_never_comes_is_forgotten_after_a_while() -> None:
    index = index_of(i0=[])
    index.on_dispatched(ask("a", [1]), I0, 0.0)
    index.on_dispatched(ask("b", [2]), I0, COMING_LIMIT_S - 1.0)
    assert index.cached_tokens(ask("c", [1])) == {I0: BLOCK}
    index.on_dispatched(ask("c", [3]), I0, COMING_LIMIT_S)
    assert index.cached_tokens(ask("d", [1])) == {}
    assert index.cached_tokens(ask("d", [2])) == {I0: BLOCK}


def test_what_is_coming_ends_with_its_instance() -> None:
    index = index_of(i0=[], i1=[])
    index.on_dispatched(ask("a", [1]), I0, 0.0)
    index.on_instance_left(I0)
    assert index.cached_tokens(ask("b", [1])) == {}
    index.on_dispatched(ask("c", [2]), I1, 2 * COMING_LIMIT_S)
    assert index.cached_tokens(ask("d", [2])) == {I1: BLOCK}


def test_what_is_coming_stays_when_all_contents_are_reported_anew() -> None:
    index = index_of(i0=[])
    index.on_dispatched(ask("a", [1, 2]), I0, 0.0)
    index.on_report(report(I0, [7], layout=FULL))
    assert index.cached_tokens(ask("b", [1, 2])) == {I0: 2 * BLOCK}
    index.on_report(report(I0, [1, 2], layout=FULL))
    index.on_report(report(I0, removed=[1, 2]))
    assert index.cached_tokens(ask("b", [1, 2])) == {}


def test_a_request_that_is_sent_again_is_coming_where_it_went_last() -> None:
    index = index_of(i0=[], i1=[])
    index.on_dispatched(ask("a", [1]), I0, 0.0)
    index.on_dispatched(ask("a", [1]), I1, 0.0)
    assert index.cached_tokens(ask("b", [1])) == {I1: BLOCK}


# ------------------------------------------------------------------------- against simple sets

HASHES = st.integers(1, 3).flatmap(
    lambda first: st.integers(0, 6).map(lambda num: [10 * first + each for each in range(num)])
)
"""Prompts of three families, each of which grows by the same blocks."""

ENDS = st.integers(1, 3).flatmap(
    lambda first: st.integers(0, 6).map(lambda kept: [10 * first + each for each in range(kept, 6)])
)
"""What goes of a family: engines evict the end of a prompt first."""


@dataclass
class Known:
    """What an instance has, and the prompts that were sent there, by request."""

    keys: set[int] = field(default_factory=set)
    coming: dict[str, list[int]] = field(default_factory=dict)


class IndexMachine(RuleBasedStateMachine):
    """Reports and dispatches in any order, against sets that are searched block by block."""

    @initialize()
    def begin(self) -> None:
        self.index = PrefixIndex()
        self.known: dict[InstanceId, Known] = {}
        self.num_instances = 0
        self.num_requests = 0

    def some(self, data: st.DataObject) -> InstanceId | None:
        return data.draw(st.sampled_from(sorted(self.known))) if self.known else None

    @rule(hashes=HASHES)
    def join(self, hashes: list[int]) -> None:
        instance_id = InstanceId(f"i{self.num_instances}")
        self.num_instances += 1
        self.known[instance_id] = Known(set(hashes))
        self.index.on_report(report(instance_id, hashes, layout=FULL))

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if len(self.known) > 1:
            instance_id = data.draw(st.sampled_from(sorted(self.known)))
            del self.known[instance_id]
            self.index.on_instance_left(instance_id)

    @rule(data=st.data(), added=HASHES, removed=ENDS, is_whole=st.booleans())
    def change(
        self, data: st.DataObject, added: list[int], removed: list[int], is_whole: bool
    ) -> None:
        if (instance_id := self.some(data)) is None:
            return
        known = self.known[instance_id]
        if is_whole:
            removed = []
            known.keys.clear()
        known.keys.difference_update(removed)
        known.keys.update(added)
        known.coming = {
            name: hashes for name, hashes in known.coming.items() if hashes[-1] not in added
        }
        layout = FULL if is_whole else None
        self.index.on_report(report(instance_id, added, removed, layout))

    @rule(data=st.data(), hashes=HASHES)
    def dispatch(self, data: st.DataObject, hashes: list[int]) -> None:
        if (instance_id := self.some(data)) is None:
            return
        self.num_requests += 1
        name = f"r{self.num_requests}"
        self.index.on_dispatched(ask(name, hashes), instance_id, 0.0)
        known = self.known[instance_id]
        if hashes and hashes[-1] not in known.keys:
            known.coming[name] = hashes

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.num_requests:
            name = f"r{data.draw(st.integers(1, self.num_requests))}"
            self.index.on_cancel(RequestId(name))
            for known in self.known.values():
                known.coming.pop(name, None)

    @invariant()
    def finds_what_is_there_and_what_is_coming(self) -> None:
        for first in (10, 20, 30):
            hashes = list(range(first, first + 7))
            expected = {}
            for instance_id, known in self.known.items():
                lengths = [leading(hashes, known.keys)]
                lengths += [leading(hashes, set(each)) for each in known.coming.values()]
                if max(lengths):
                    expected[instance_id] = max(lengths) * BLOCK
            assert self.index.cached_tokens(ask("other", hashes)) == expected
        assert self.index.contents() == {each: known.keys for each, known in self.known.items()}


def leading(hashes: list[int], keys: set[int]) -> int:
    return next((at for at, each in enumerate(hashes) if each not in keys), len(hashes))


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)
