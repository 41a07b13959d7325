"""Catalog of the workloads that a user can name; builds their traces.

A trace is one of the paper's (S-S to L-L, sharegpt, burstgpt), a recorded one, a pair of mean
lengths, or a file; docs/traces.md lists them with examples.
"""

import difflib
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from sterna.errors import ConfigurationError
from sterna.types import Priority
from sterna.workload import arrivals as processes
from sterna.workload.arrivals import parse_arrivals, short_name
from sterna.workload.class_mix import mix_priorities, require_fractions
from sterna.workload.drawn import (
    LONG,
    MEDIUM,
    SHORT,
    agents,
    reasoning,
    system_prompts,
    zipf_exponent,
    zipf_lengths,
)
from sterna.workload.files import PARSERS, daily_curve, packaged_rows, read_rows
from sterna.workload.randomness import Draws
from sterna.workload.rows import Rows
from sterna.workload.seeds import MAX_SEED, PAPER_SEED
from sterna.workload.trace import Trace

PAPER_NUM_REQUESTS = 10_000
"""Section 6.1: "Each trace has 10,000 requests"."""

_MEANS = {"S": SHORT, "M": MEDIUM, "L": LONG}

_PACKAGED = {
    "sharegpt": "sharegpt/sharegpt_gpt4_matched.csv.gz",
    "sharegpt-8k": "sharegpt/sharegpt_8k_filtered_llama2.csv.gz",
    "burstgpt": "burstgpt/burstgpt_gpt4_conv_matched.csv.gz",
    "azure-conv": "azure_llm_2023/conv.csv.gz",
    "mooncake-conversation": "mooncake_fast25/conversation.csv.gz",
    "mooncake-arxiv": "mooncake_fast25/arxiv_first1000.csv.gz",
    "agentic-code": "agentic_code/sessions.csv.gz",
}

TRACES: Mapping[str, str] = MappingProxyType(
    {
        f"{i}-{o}": f"power-law lengths, mean {_MEANS[i]} tokens in, {_MEANS[o]} out"
        + (" (the paper's)" if f"{i}-{o}" in ("S-S", "M-M", "L-L", "S-L", "L-S") else "")
        for i in _MEANS
        for o in _MEANS
    }
    | {
        "sharegpt": "lengths of ShareGPT (GPT-4), matched to the paper's Table 1",
        "burstgpt": "lengths of BurstGPT (GPT-4 conversations), matched to the paper's Table 1",
        "sharegpt-8k": "lengths of ShareGPT turns with their whole history, up to 8k tokens",
        "azure-conv": "an hour of Azure's conversations in 2023, with arrivals",
        "mooncake-conversation": "an hour of Mooncake's conversations, with arrivals and prefixes",
        "mooncake-arxiv": "1,000 requests of Mooncake's arXiv service, with arrivals and prefixes",
        "agentic-code": "200 sessions of coding agents (synthetic), each turn after an answer",
        "agents": "sessions of coding agents, drawn by the distributions of agentic-code",
        "reasoning": "1,250 tokens in, 8,000 out in the mean, up to 32,768",
    }
)
"""The names of the catalog, with a line of description each."""

PATTERNS: Mapping[str, str] = MappingProxyType(
    {
        "zipf:IN-OUT": "power-law lengths with these means, in tokens, as in zipf:1024-256",
        "fixed:IN-OUT": "every request of these lengths, in tokens, as in fixed:64-64",
        "prompts:N-SHARED-IN-OUT": "N system prompts of SHARED tokens, then power-law lengths with "
        "these means, as in prompts:8-2048-256-128",
        "FILE": "a .csv or .jsonl file, also .gz, with input_tokens and output_tokens",
    }
)
"""The other values that `Workload.trace` takes."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of a run and their arrivals. Equal workloads give equal traces.

    Attributes:
        trace: a name of TRACES or PATTERNS, in upper or lower case, or a file's path.
        num_requests: the first requests of the trace, which is repeated if it has fewer. None: all
            of a file, 10,000 of the traces that are drawn.
        rate: mean requests a second; of a trace of sessions, mean sessions a second. None: as
            recorded, or as in the steps of `arrivals`.
        arrivals: see `sterna.workload.arrivals`. None: as recorded if the trace has arrivals and no
            rate is given, otherwise Poisson.
        seed: seed of everything that is drawn, from 0 to 2**32 - 1; the default is the paper's.
        class_fractions: for each priority, the fraction of the requests that have it; the rest are
            normal. Empty: as in the file, or all normal.
        max_total_tokens: limit of input and output together. Longer requests are drawn again if
            the trace has drawn lengths (see `has_drawn_lengths`), and otherwise left out; of
            `agents` as many further ones are drawn.
        divisor: all lengths of a trace that is not drawn are divided by it.
        think_divisor: the times between the turns of sessions are divided by it.

    Raises:
        ConfigurationError: a value is invalid, whatever the trace.
    """

    trace: str = "M-M"
    num_requests: int | None = None
    rate: float | None = None
    arrivals: str | None = None
    seed: int = PAPER_SEED
    class_fractions: Mapping[Priority, float] = field(default_factory=dict, hash=False)
    max_total_tokens: int | None = None
    divisor: int = 1
    think_divisor: float = 1.0

    def __post_init__(self) -> None:
        if self.num_requests is not None and self.num_requests < 1:
            raise ConfigurationError(f"num_requests must be at least 1, not {self.num_requests}")
        if self.rate is not None and not 0.0 < self.rate < math.inf:
            raise ConfigurationError(f"rate must be positive requests a second, not {self.rate}")
        if not 0 <= self.seed <= MAX_SEED:
            raise ConfigurationError(f"seed must be from 0 to {MAX_SEED}, not {self.seed}")
        if self.max_total_tokens is not None and self.max_total_tokens < 2:
            raise ConfigurationError(
                f"max_total_tokens must be at least 2, not {self.max_total_tokens}"
            )
        if self.divisor < 1:
            raise ConfigurationError(f"divisor must be at least 1, not {self.divisor}")
        if not 0.0 < self.think_divisor < math.inf:
            raise ConfigurationError(f"think_divisor must be positive, not {self.think_divisor}")
        if self.arrivals is not None:
            parse_arrivals(self.arrivals)
        require_fractions(self.class_fractions)


def build_trace(workload: Workload) -> Trace:
    """Make the trace of a workload.

    Lengths and arrivals come from one stream, numpy's legacy RandomState, as in the paper's
    artifact: all input lengths, all output lengths (of the traces that are drawn), then the
    arrivals. With the default seed these are the paper's requests. Priorities have a stream of
    their own, so that they change neither lengths nor arrivals. Lengths that are drawn again have
    one, too, so that the other requests stay as they are.

    Raises:
        ConfigurationError: there is no such trace, none of its requests is short enough, its file
            cannot be read, or it lacks the data for the arrivals.
    """
    draws = np.random.RandomState(workload.seed)
    name, rows = _rows(workload, draws)
    rows = _divided(workload, name, rows)
    if workload.max_total_tokens is not None:
        rows = _short_enough(workload, rows, workload.max_total_tokens)
    num_requests = workload.num_requests or len(rows)
    rows = rows.repeated_to(num_requests)
    arrival_s = _arrivals_of_sessions_s(workload, name, rows, draws)
    if workload.class_fractions or rows.priority is None:
        class_draws = np.random.RandomState([workload.seed, 1])
        priority = mix_priorities(workload.class_fractions, num_requests, class_draws)
    else:
        priority = rows.priority
    return Trace(
        name,
        arrival_s,
        rows.input_tokens,
        rows.output_tokens,
        priority,
        rows.prefix_blocks,
        rows.turns,
    )


def has_drawn_lengths(trace: str) -> bool:
    """Whether the lengths of each request of the trace are drawn by seed, without regard to those
    of others."""
    text = trace.strip()
    is_mix = text.lower() == "reasoning" or _PROMPTS.fullmatch(text) is not None
    return is_mix or _means(text) is not None


def has_same_lengths(trace: str) -> bool:
    """Whether the lengths of the trace's requests are the same with every seed."""
    return not has_drawn_lengths(trace) and trace.strip().lower() not in _DRAWN


def is_drawn(workload: Workload) -> bool:
    """Whether another seed gives the workload other requests: lengths, arrivals or priorities."""
    if workload.class_fractions or not has_same_lengths(workload.trace):
        return True
    if workload.arrivals is None:
        # Without a rate the only arrivals are those of the trace.
        return workload.rate is not None
    process = parse_arrivals(workload.arrivals)
    return not isinstance(process, processes.Recorded | processes.Uniform)


# ---------------------------------------------------------------------------- lengths


def _rows(workload: Workload, draws: Draws) -> tuple[str, Rows]:
    """The trace's name in the catalog, and its requests."""
    text = workload.trace.strip()
    num_requests = workload.num_requests or PAPER_NUM_REQUESTS
    means = _means(text)
    if means is not None:
        return means[0], _drawn(means, num_requests, draws)
    fixed = _FIXED.fullmatch(text)
    if fixed:
        input_tokens, output_tokens = int(fixed[1]), int(fixed[2])
        if min(input_tokens, output_tokens) < 1:
            raise ConfigurationError(f"trace {text}: lengths must be at least 1 token")
        return text.lower(), Rows(
            np.full(num_requests, input_tokens, np.int64),
            np.full(num_requests, output_tokens, np.int64),
        )
    prompts = _PROMPTS.fullmatch(text)
    if prompts:
        numbers = [int(each) for each in prompts.groups()]
        return text.lower(), _system_prompts(text, numbers, num_requests, draws)
    if text.lower() in _DRAWN:
        return text.lower(), _DRAWN[text.lower()](num_requests, draws)
    if text.lower() in _PACKAGED:
        return text.lower(), packaged_rows(_PACKAGED[text.lower()])
    # Unlike the methods of Path, these functions never raise for a strange name.
    path = Path(os.path.expanduser(text))
    if _looks_like_a_file(text) or os.path.isfile(path):
        return path.name, read_rows(path)
    raise _unknown(text)


def _system_prompts(text: str, numbers: list[int], num_requests: int, draws: Draws) -> Rows:
    num_prompts, shared_tokens, own_tokens, output_tokens = numbers
    if min(numbers) < 1:
        raise ConfigurationError(f"trace {text}: its numbers must be at least 1")
    try:
        return system_prompts(
            num_prompts, shared_tokens, own_tokens, output_tokens, num_requests, draws
        )
    except ConfigurationError as error:
        raise ConfigurationError(f"trace {text}: {error}") from error


def _drawn(means: tuple[str, int, int], num_requests: int, draws: Draws) -> Rows:
    _, mean_input_tokens, mean_output_tokens = means
    return Rows(
        zipf_lengths(mean_input_tokens, num_requests, draws),
        zipf_lengths(mean_output_tokens, num_requests, draws),
    )


def _divided(workload: Workload, name: str, rows: Rows) -> Rows:
    if workload.divisor != 1:
        if _means(workload.trace.strip()) is not None:
            raise ConfigurationError(
                f"trace {name} has lengths that are drawn: choose smaller means, as in "
                "zipf:256-128, instead of dividing them"
            )
        rows = rows.divided(workload.divisor)
    if workload.think_divisor != 1.0:
        if rows.turns is None:
            raise ConfigurationError(f"trace {name} has no sessions whose turns have think times")
        think_s = rows.turns.think_s / workload.think_divisor
        rows = replace(rows, turns=replace(rows.turns, think_s=think_s))
    return rows


def _short_enough(workload: Workload, rows: Rows, max_total_tokens: int) -> Rows:
    if has_drawn_lengths(workload.trace):
        return _drawn_again(workload, rows, max_total_tokens)
    short = rows.no_longer_than(max_total_tokens)
    if not has_same_lengths(workload.trace):
        num_wanted = num_drawn = len(rows)
        while len(short) < num_wanted:
            # The same sessions, and as many again behind them.
            num_drawn *= 2
            more = replace(workload, num_requests=num_drawn)
            name, rows = _rows(more, np.random.RandomState(workload.seed))
            short = _divided(more, name, rows).no_longer_than(max_total_tokens)
        short = short.repeated_to(num_wanted)
    return short


def _drawn_again(workload: Workload, rows: Rows, max_total_tokens: int) -> Rows:
    """The requests, with other lengths where they were too long."""
    draws = np.random.RandomState([workload.seed, 2])
    input_tokens, output_tokens = rows.input_tokens.copy(), rows.output_tokens.copy()
    left = np.flatnonzero(input_tokens + output_tokens > max_total_tokens)
    while len(left):
        # A large sample, since the paper's rule fixes the mean of the sample. Its shortest length
        # is the most frequent one: if any request is short enough, some of these are.
        name, others = _rows(replace(workload, num_requests=PAPER_NUM_REQUESTS), draws)
        others = _divided(workload, name, others).no_longer_than(max_total_tokens)
        num_found = min(len(left), len(others))
        input_tokens[left[:num_found]] = others.input_tokens[:num_found]
        output_tokens[left[:num_found]] = others.output_tokens[:num_found]
        left = left[num_found:]
    return replace(rows, input_tokens=input_tokens, output_tokens=output_tokens)


_PAIR = re.compile(r"([SML])-([SML])")
_ZIPF = re.compile(r"zipf:([0-9]{1,6})-([0-9]{1,6})", re.IGNORECASE)
_PROMPTS = re.compile(r"prompts:([0-9]{1,6})-([0-9]{1,6})-([0-9]{1,6})-([0-9]{1,6})", re.IGNORECASE)
_DRAWN: Mapping[str, Callable[[int, Draws], Rows]] = {"agents": agents, "reasoning": reasoning}
_FIXED = re.compile(r"fixed:([0-9]{1,6})-([0-9]{1,6})", re.IGNORECASE)


def _means(text: str) -> tuple[str, int, int] | None:
    """Name and mean lengths of a trace that is drawn by the paper's rule; None for another one."""
    pair = _PAIR.fullmatch(text.upper())
    if pair:
        return text.upper(), _MEANS[pair[1]], _MEANS[pair[2]]
    zipf = _ZIPF.fullmatch(text)
    if not zipf:
        return None
    means = int(zipf[1]), int(zipf[2])
    try:
        for mean in means:
            zipf_exponent(mean)
    except ConfigurationError as error:
        raise ConfigurationError(f"trace {text}: {error}") from error
    return text.lower(), *means


def _looks_like_a_file(text: str) -> bool:
    return "/" in text or "\\" in text or text.lower().removesuffix(".gz").endswith(tuple(PARSERS))


def _unknown(text: str) -> ConfigurationError:
    patterns = [pattern for pattern in PATTERNS if ":" in pattern]
    names = {name.lower(): name for name in [*TRACES, *patterns]}
    close = [name for name in patterns if text.lower().startswith(name.partition(":")[0])]
    close = close or difflib.get_close_matches(text.lower(), names, n=1)
    hint = f"there are {', '.join(names.values())}"
    if close:
        hint = f"did you mean {names[close[0].lower()]}?"
    return ConfigurationError(
        f"no trace is called {text!r}, and it is no .csv or .jsonl file; {hint}"
    )


# ---------------------------------------------------------------------------- arrivals


def _arrivals_of_sessions_s(
    workload: Workload, name: str, rows: Rows, draws: Draws
) -> NDArray[np.float64]:
    """The arrivals of all requests; those of a session have the arrival of its first turn."""
    if rows.turns is None:
        return _arrivals_s(workload, name, rows, draws)
    firsts = np.flatnonzero(rows.turns.is_first)
    arrival_s = np.zeros(len(rows))
    arrival_s[firsts] = _arrivals_s(workload, name, rows.taken(firsts), draws)
    return arrival_s[rows.turns.first()]


def _arrivals_s(workload: Workload, name: str, rows: Rows, draws: Draws) -> NDArray[np.float64]:
    rate, process = workload.rate, _process(workload, rows)
    match process:
        case processes.Recorded():
            if rows.arrival_s is None:
                raise ConfigurationError(
                    f"trace {name} has no arrivals: choose others, such as poisson, and a rate"
                )
            return processes.recorded_arrivals_s(rows.arrival_s, rate)
        case processes.Step():
            curve = process.curve()
            try:
                curve = curve if rate is None else curve.scaled_to(rate)
            except ConfigurationError as error:
                raise ConfigurationError(f"arrivals {workload.arrivals}: {error}") from error
            return processes.curve_arrivals_s(curve, len(rows), draws)
    if rate is None:
        raise _rate_is_missing(workload, name, rows)
    match process:
        case processes.Poisson():
            return processes.poisson_arrivals_s(rate, len(rows), draws)
        case processes.Gamma(cv):
            return processes.gamma_arrivals_s(rate, cv, len(rows), draws)
        case processes.Uniform():
            return processes.uniform_arrivals_s(rate, len(rows))
        case processes.Daily(model, day_s):
            curve = daily_curve(model).scaled_to(rate).compressed(processes.DAY_S / day_s)
            return processes.curve_arrivals_s(curve, len(rows), draws)


def _process(workload: Workload, rows: Rows) -> processes.Arrivals:
    if workload.arrivals is not None:
        return parse_arrivals(workload.arrivals)
    is_recorded = workload.rate is None and rows.arrival_s is not None
    return processes.Recorded() if is_recorded else processes.Poisson()


def _rate_is_missing(workload: Workload, name: str, rows: Rows) -> ConfigurationError:
    own = f"; as recorded it is {rows.mean_rate:.3g}" if rows.mean_rate else ""
    process = _process(workload, rows)
    if isinstance(process, processes.Daily):
        own_rate = daily_curve(process.model).mean_rate
        own = f"; {short_name(process.model)}'s own is {own_rate:.0f}"
    return ConfigurationError(
        f"trace {name} with {workload.arrivals or 'poisson'} arrivals needs a rate, in "
        f"{'requests' if rows.turns is None else 'sessions'} a second{own}"
    )
