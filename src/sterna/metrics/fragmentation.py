"""How much memory fragmentation wastes (Section 6.3). Pure."""

from collections.abc import Iterable


def fragmentation_proportion(
    free_tokens: int, demands_tokens: Iterable[int], total_tokens: int
) -> float:
    """Fragmented memory over the cluster's total memory, at one moment.

    "We define the fragmented memory at each moment as the portion of cluster free memory that
    could satisfy the demands of the head-of-line blocking requests across all instances, if no
    fragmentation." As many of these requests as possible are taken to be satisfied: the
    smallest first.

    Args:
        free_tokens: free memory of all instances together, but for what each of them keeps free
            when it admits a request: in one place, too, no request could have that.
        demands_tokens: of the requests at the heads of their lines that do not fit where they
            are.
        total_tokens: memory of all instances together.
    """
    fragmented_tokens = 0
    for demand_tokens in sorted(demands_tokens):
        if fragmented_tokens + demand_tokens > free_tokens:
            break
        fragmented_tokens += demand_tokens
    return fragmented_tokens / total_tokens
