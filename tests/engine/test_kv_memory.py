"""KV memory of a request over several groups."""

from hypothesis import given
from hypothesis import strategies as st

from sterna.engine.kv_memory import KvGroup, KvMemory, one_group

groups = st.builds(
    KvGroup,
    st.integers(1, 64),
    st.none() | st.integers(1, 20),
    st.integers(0, 3),
)
memories = st.builds(KvMemory, st.integers(1, 64), st.lists(groups, min_size=1).map(tuple))


def test_one_group_with_full_attention_needs_whole_blocks() -> None:
    memory = one_group(16)
    assert [memory.demand_tokens(each) for each in (0, 1, 16, 17, 160)] == [0, 16, 16, 32, 160]


def test_a_window_bounds_what_its_group_needs() -> None:
    """Two groups of windows of at most 11 blocks, and one with full attention."""
    memory = KvMemory(32, (KvGroup(32, 11), KvGroup(32, 11), KvGroup(32)))
    assert memory.num_blocks(64) == 2 + 2 + 2
    assert memory.num_blocks(600) == 11 + 11 + 19
    assert memory.demand_tokens(600) == 41 * 32


def test_a_recurrent_state_takes_one_block_whatever_the_length() -> None:
    """Its block has as many tokens as a request may have; the other group's are smaller."""
    memory = KvMemory(64, (KvGroup(1024), KvGroup(1024), KvGroup(1024), KvGroup(64)))
    assert memory.num_blocks(600) == 3 + 10
    assert memory.demand_tokens(1) == 4 * 64


def test_states_for_drafts_are_counted_beside_the_running_one() -> None:
    assert KvGroup(1024, None, 3).num_blocks(1000) == 4
    assert KvGroup(288, 4, 3).num_blocks(5000) == 4


@given(memories, st.integers(0, 5000), st.integers(0, 500))
def test_a_longer_request_never_needs_less(memory: KvMemory, num_tokens: int, more: int) -> None:
    assert memory.num_blocks(num_tokens + more) >= memory.num_blocks(num_tokens)
