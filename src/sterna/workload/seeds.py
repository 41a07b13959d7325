"""Seeds of workloads: the default and the limit. Pure."""

PAPER_SEED = 0xCADE
"""Seed of the paper's lengths and arrivals, as its artifact draws them; the default."""

MAX_SEED = 2**32 - 1
"""The largest seed of numpy's legacy generator; the smallest is 0."""
