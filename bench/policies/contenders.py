"""Contenders: policies, bounds, and the parameters among which the search chooses. Pure.

A policy is named as in `sterna simulate`: a preset, or a variant of one.
"""

import itertools
from collections.abc import Mapping, Sequence

LLUMNIX = "llumnix"
STERNA = "sterna"

TRUE_LENGTHS = "true lengths"
FREE_MOVES = "free moves"
POOLED = "one pool"
SOLO = "each alone"
BOUNDS = (TRUE_LENGTHS, FREE_MOVES, POOLED, SOLO)
"""References, most of which no policy can reach (`bounds`)."""

ZOO = (
    "round-robin",
    "power-of-two",
    "vllm-dp",
    "session-hash",
    "llm-d",
    "dynamo",
    "sglang",
    "production-stack",
)
"""The rules of other systems with their defaults."""

GRIDS: Mapping[str, Mapping[str, tuple[float, ...]]] = {
    "llm-d": {
        "dispatch.min_share": (0.2, 0.5, 0.8),
        "saturation_tokens": (0, 2_000, 8_000, 32_000, 286_704),
    },
    "dynamo": {
        "prefill_scale": (1, 2, 4, 8, 16, 32, 64),
        "request_tokens": (0, 500, 2_000, 8_000, 32_000, 128_000),
    },
    "sglang": {"dispatch.min_share": (0.3, 0.5, 0.7, 0.9), "max_difference": (4, 8, 16, 32)},
    "production-stack": {"load_weight": (0.05, 0.1, 0.25, 0.5, 1)},
    "sterna": {"horizon_steps": (0, 16, 32, 64), "others_weight": (0.1, 0.25, 0.5, 1)},
}
"""For each rule with parameters, the values that the search combines."""

OBJECTIVE = ("ttft_mean_s", "ttft_p99_s", "tpot_mean_s", "tpot_p99_s", "request_mean_s")
"""The search minimises the product of these, over the points of choice."""

ALONE = (
    "llumnix:dispatch=soonest",
    "llumnix:binds_late=true",
    "llumnix:shares_headroom=true",
    "llumnix:balance_ratio=1.2",
    "llumnix:concurrency=4",
)
"""Single parts of Sterna's policy, and settings that it leaves alone, beside the paper's rules."""

OF_CACHES = ("sterna:awaits_prefix=false", "sterna:holds_by_uncached=false")
"""Of those below, what changes nothing without prefix caches."""

BY_FREENESS = "sterna:dispatch=freest"
"""Sterna's policy with Llumnix's rule of dispatch."""

WITHOUT = (
    BY_FREENESS,
    "sterna:binds_late=false",
    "sterna:growth_steps=0",
    "sterna:crowded_share=0",
    "sterna:copy_token_cost=none",
    "sterna:shares_headroom=false",
    "sterna:balance_ratio=none",
    "sterna:migrates=false",
    *OF_CACHES,
)
"""Sterna's policy without one of its parts."""

AHEAD = "sterna:num_session_copies=4"
EXPECTED = "sterna:balance_horizon_steps=512"
FREEING = "sterna:victim=freeing"
MORE = (AHEAD, EXPECTED, FREEING)
"""Sterna's policy with a part that it leaves off."""

ENGINE_COSTS = "costs of the engine"
"""Sterna's policy with the costs of the simulated engine in place of its own (`runs`)."""

DERIVED = (*BOUNDS, ENGINE_COSTS)
"""Those that are made from runs of Sterna's policy, and no names of `sterna simulate`."""

VALUES = (
    ENGINE_COSTS,
    "sterna:ageing_tokens_per_s=0",
    "sterna:reserves_after_s=120",
    "sterna:balance_after_tokens=0",
    "sterna:backlog_tokens=1000000",
    "sterna:source_freeness_steps=0",
    "sterna:concurrency=4",
)
"""Sterna's policy with other values of single parameters. From a source of 0 steps requests move
when its memory is used up, and not before."""

COSTS = (
    "sterna:pair_cost=0",
    "sterna:request_cost=1.2",
    "sterna:kv_token_cost=0.0015",
    "sterna:kv_token_cost=0.006",
    "sterna:eviction_weight=0",
    "sterna:copy_start_cost=0",
)
"""Sterna's dispatch with other costs than those of the engine."""

PARTS = (*ALONE, *WITHOUT, *MORE, *VALUES, *COSTS)
"""All variants for what single parts and parameters do."""


def combinations(name: str) -> list[str]:
    """The variants of one grid."""
    grid = GRIDS[name]
    return [
        f"{name}:" + ",".join(f"{key}={value:g}" for key, value in zip(grid, values, strict=True))
        for values in itertools.product(*grid.values())
    ]


def contenders(family: str, tuned: Mapping[str, str], *, has_parts: bool) -> Sequence[str]:
    """The policies and bounds on a point of the family, without repetition.

    Args:
        tuned: the best variant of each rule (`search.tuned`).
        has_parts: whether single parts of Sterna's policy run as well.
    """
    parts: Sequence[str] = (*ALONE, *WITHOUT, EXPECTED, *VALUES) if has_parts else ()
    match family:
        case "paper" | "clusters":
            others: Sequence[str] = ("infaas++", "round-robin", "vllm-dp")
            bounds: Sequence[str] = (TRUE_LENGTHS, SOLO)
        case "prefixes":
            others = ("infaas++", *ZOO, *tuned.values())
            parts = (*parts, AHEAD, FREEING, *COSTS) if has_parts else ()
            bounds = (FREE_MOVES, POOLED, SOLO)
        case _:
            others = ("infaas++", *ZOO, *tuned.values())
            bounds = (FREE_MOVES, POOLED, SOLO)
            if has_parts:
                # A run of the oracle takes minutes with outputs as long.
                bounds = (TRUE_LENGTHS, *bounds)
    if family != "prefixes":
        parts = tuple(each for each in parts if each not in OF_CACHES)
    return list(dict.fromkeys((LLUMNIX, STERNA, *others, *parts, *bounds)))
