"""The options of a workload, the same for simulated and real clusters.

Heavy modules are imported only after the options have been checked.
"""

import argparse
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sterna.cli.options.option_values import count, fraction, positive, seed
from sterna.types import HIGH, Priority
from sterna.workload.seeds import PAPER_SEED

if TYPE_CHECKING:
    from sterna.workload.catalog import Workload


def add_workload_options(group: Any, *, longest: str, has_several_seeds: bool) -> None:
    """Add the options to a group of the command's parser.

    Args:
        longest: the default limit of a request's length, in words.
        has_several_seeds: whether `seed` is a list, with one run for each.
    """
    group.add_argument(
        "--trace", default="M-M", help="a name (`sterna simulate --list` has them) or a CSV or "
        "JSONL file (default: M-M)"
    )  # fmt: skip
    group.add_argument(
        "--rate", type=positive, metavar="R", help="requests per second; of sessions, sessions"
    )
    group.add_argument(
        "--arrivals",
        metavar="HOW",
        help="poisson, gamma:CV, uniform, recorded, step:RATE@TIME,... or daily[:MODEL][@DAY] "
        "(default: poisson; without --rate, the trace's own where it has them)",
    )
    group.add_argument(
        "--requests", type=count, metavar="N", help="number of requests (default: the whole trace)"
    )
    group.add_argument(
        "--max-total-tokens",
        type=count,
        metavar="N",
        help="leave longer requests out, input and output counted, or draw them again where "
        f"lengths are drawn (default: {longest})",
    )
    group.add_argument(
        "--divide-lengths",
        type=count,
        default=1,
        metavar="N",
        help="divide all lengths of a trace, but for power-law ones, for engines with little "
        "memory (default: 1)",
    )
    group.add_argument(
        "--divide-think-times",
        type=positive,
        default=1.0,
        metavar="FACTOR",
        help="divide the times between the turns of sessions, for shorter runs (default: 1)",
    )
    group.add_argument(
        "--high-fraction",
        type=fraction,
        default=0.0,
        metavar="FRACTION",
        help="fraction of the requests that have high priority (default: 0)",
    )
    several: dict[str, Any] = {"nargs": "+", "default": [PAPER_SEED]}
    group.add_argument(
        "--seed",
        type=seed,
        **(several if has_several_seeds else {"default": PAPER_SEED}),
        metavar="S",
        help="seed of all random draws: lengths, arrivals, classes"
        + ("; several give one run each" if has_several_seeds else "")
        + f" (default: the paper's, 0x{PAPER_SEED:X})",
    )


def workload_of(args: argparse.Namespace, seed: int, max_total_tokens: int | None) -> "Workload":
    """The workload that the options describe.

    Args:
        max_total_tokens: of a request's input and output together; None for no limit.

    Raises:
        ConfigurationError: a value is invalid for every trace.
    """
    from sterna.workload.catalog import Workload

    classes: dict[Priority, float] = {HIGH: args.high_fraction} if args.high_fraction else {}
    return Workload(
        trace=args.trace,
        num_requests=args.requests,
        rate=args.rate,
        arrivals=args.arrivals,
        seed=seed,
        class_fractions=classes,
        max_total_tokens=max_total_tokens,
        divisor=args.divide_lengths,
        think_divisor=args.divide_think_times,
    )


def report_long_requests(workload: "Workload", max_total_tokens: int) -> None:
    """Print on stderr the number of requests that are too long, and what replaces them.

    Raises:
        ConfigurationError: there is no such trace, or none of it is short enough.
    """
    from sterna.workload.catalog import build_trace, has_drawn_lengths, has_same_lengths

    whole = build_trace(replace(workload, max_total_tokens=None))
    num_too_long = int((whole.input_tokens + whole.output_tokens > max_total_tokens).sum())
    if not num_too_long:
        return
    if num_too_long == len(whole):
        # Raises, since no request could run.
        build_trace(workload)
    if has_drawn_lengths(workload.trace):
        happens = f"drawn again ({num_too_long:,} of {len(whole):,}, seed {workload.seed})"
    elif workload.num_requests is None and has_same_lengths(workload.trace):
        happens = f"left out ({num_too_long:,} of {len(whole):,})"
    else:
        happens = (
            f"left out ({num_too_long:,} of the first {len(whole):,}); the trace's next ones run "
            "instead"
        )
    print(
        f"sterna: requests of more than {max_total_tokens:,} tokens are {happens}",
        file=sys.stderr,
    )


def arrivals_of(workload: "Workload") -> str:
    """The arrivals of a valid workload, in lower case."""
    if workload.arrivals is not None:
        return workload.arrivals.lower()
    # Without a rate the only arrivals are those of the trace.
    return "recorded" if workload.rate is None else "poisson"
