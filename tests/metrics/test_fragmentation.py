"""The fragmentation proportion (Section 6.3)."""

from itertools import permutations

import pytest

from sterna.metrics.summary import fragmentation_proportion


def test_the_example_of_the_paper_is_37_5_percent() -> None:
    """Section 6.3: "For example, if the total free memory is 8 GB, with three head-of-line
    blocking requests each requiring 3 GB, then the fragmented memory is counted as 6 GB, i.e.,
    this 6 GB memory could satisfy two queuing requests if no fragmentation. [...] In the
    example, if the total memory is 16 GB, then the proportion is 37.5% (6/16)."
    """
    assert fragmentation_proportion(8, [3, 3, 3], 16) == 0.375


@pytest.mark.parametrize(
    ("free_tokens", "demands_tokens", "fragmented_tokens"),
    [
        (8, [], 0),
        (0, [3], 0),
        (2, [3], 0),
        (3, [3], 3),
        (100, [3, 4, 5], 12),
    ],
)
def test_only_demands_that_the_free_memory_could_satisfy_count(
    free_tokens: int, demands_tokens: list[int], fragmented_tokens: int
) -> None:
    """Section 6.3: "the portion of cluster free memory that could satisfy the demands of the
    head-of-line blocking requests across all instances, if no fragmentation"."""
    assert fragmentation_proportion(free_tokens, demands_tokens, 100) == fragmented_tokens / 100


@pytest.mark.parametrize("demands_tokens", list(permutations((3, 4, 6))))
def test_as_many_requests_as_possible_are_satisfied_whatever_their_order(
    demands_tokens: tuple[int, ...],
) -> None:
    assert fragmentation_proportion(8, demands_tokens, 16) == (3 + 4) / 16
