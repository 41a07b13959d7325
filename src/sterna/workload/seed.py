"""Seeds of workloads. Pure."""

PAPER_SEED = 0xCADE
"""Of the paper's lengths and arrivals, as its artifact draws them; the default."""

MAX_SEED = 2**32 - 1
"""The largest that numpy's legacy generator takes; the smallest is 0."""
