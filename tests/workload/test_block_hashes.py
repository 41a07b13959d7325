"""Block hashes of a trace: the same where the same prefix blocks reach as far."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sterna.workload.block_hashes import BlockHashes
from sterna.workload.prefix import PrefixBlocks
from sterna.workload.trace import Trace

REQUESTS = st.lists(
    st.tuples(st.lists(st.integers(0, 2), max_size=5), st.integers(1, 50), st.integers(1, 20)),
    min_size=1,
    max_size=6,
)
"""Of each, the ids of its prefix blocks, and the tokens of its prompt and output."""


def trace_of(requests: list[tuple[list[int], int, int]], block_tokens: int = 8) -> Trace:
    ids = [each for prompt, _, _ in requests for each in prompt]
    end = np.cumsum([len(prompt) for prompt, _, _ in requests])
    return Trace(
        name="shared",
        arrival_s=np.zeros(len(requests)),
        input_tokens=np.array([tokens for _, tokens, _ in requests], np.int64),
        output_tokens=np.array([tokens for _, _, tokens in requests], np.int64),
        priority=np.zeros(len(requests), np.int64),
        prefix_blocks=PrefixBlocks(np.array(ids, np.int64), end, block_tokens),
    )


@given(requests=REQUESTS, block_size=st.sampled_from([1, 3, 8, 16]))
def test_hashes_are_the_same_exactly_where_all_tokens_are(
    requests: list[tuple[list[int], int, int]], block_size: int
) -> None:
    """A request's tokens, with the ids of its prefix blocks where they are known."""
    hashes = BlockHashes.of(trace_of(requests), block_size)
    contents: dict[int, object] = {}
    for row, (ids, input_tokens, output_tokens) in enumerate(requests):
        found = hashes.of_request(row).tolist()
        assert len(found) == (input_tokens + output_tokens) // block_size
        num_shared = min(input_tokens, 8 * len(ids))
        for number, block_hash in enumerate(found):
            end = (number + 1) * block_size
            content = (end, *ids[: -(-end // 8)], *([f"own {row}"] if end > num_shared else []))
            assert contents.setdefault(block_hash, content) == content
    assert len(set(contents.values())) == len(contents)


@given(requests=REQUESTS, block_size=st.sampled_from([1, 3, 8, 16]))
def test_what_is_reusable_is_what_an_endless_cache_would_have(
    requests: list[tuple[list[int], int, int]], block_size: int
) -> None:
    hashes = BlockHashes.of(trace_of(requests), block_size)
    cache: set[int] = set()
    for row, (_, input_tokens, _) in enumerate(requests):
        contents = hashes.of_request(row).tolist()
        wanted = contents[: (input_tokens - 1) // block_size]
        num_found = next((n for n, each in enumerate(wanted) if each not in cache), len(wanted))
        assert hashes.reusable_tokens[row] == num_found * block_size
        cache.update(contents)


def test_requests_without_prefix_blocks_share_nothing() -> None:
    trace = Trace("own", np.zeros(2), *np.full((2, 2), 40), np.zeros(2, np.int64))
    hashes = BlockHashes.of(trace, 16)
    assert len(hashes.hashes) == len(set(hashes.hashes.tolist())) == 10
