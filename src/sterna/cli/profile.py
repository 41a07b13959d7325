"""`sterna profile`: measure the steps of one engine, and propose its target load.

It builds one engine core in this process, like that of an instance of `sterna serve` with the same
options, and writes a file that `serve` finds and that is a profile for an emulated engine.
"""

import argparse
import datetime
import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sterna.cli.serve.engine_options import checked_engine_config
from sterna.cli.serve.read_options import parse
from sterna.cli.serve.serve_command import engine_environment
from sterna.cli.serve.serve_options import cluster_config
from sterna.engine.profiling.measurement_plan import REQUEST_TOKENS, TOLERANCE
from sterna.errors import ConfigurationError

if TYPE_CHECKING:
    from sterna.engine.emulated.profiles import Profile
    from sterna.engine.profiling.fitting import PrefillPoint
    from sterna.engine.profiling.measurement_plan import Decode, Proposal
    from sterna.engine.profiling.profile_file import Measurement
    from sterna.engine.vllm.step_timing import ProfiledEngine

NUM_ROUNDS, NUM_QUICK_ROUNDS = 5, 3
"""Rounds; each of them times every batch."""

NUM_STEPS = 6
"""Timed steps of a batch in each round."""

NUM_PREFILL_ROUNDS, NUM_QUICK_PREFILL_ROUNDS = 3, 1

MIN_REQUEST_TOKENS = 16
"""Shorter requests grow by too large a fraction while they are timed."""

PREFILL_SHARE = 0.25
"""Approximate share of the time for prefills."""

SIGNIFICANT_DIGITS = 5


def profile(arguments: Sequence[str]) -> int:
    """Run `sterna profile [MODEL] ...`; returns the exit status.

    Raises:
        ConfigurationError: an option cannot work, or the measurement is useless.
    """
    os.environ.update(engine_environment())
    args = parse(["serve", *arguments], _add_options)
    if args.engine != "vllm":
        raise ConfigurationError(
            f"--engine {args.engine}: there is nothing to measure; leave it out"
        )
    # An instance of `serve` gets its part of the memory here.
    cluster_config(args)
    _check(args)
    config = checked_engine_config(args)
    from sterna.engine.vllm.facts import profile_key

    key = profile_key(config, args.num_threads)
    emulated, measurement = _measure(args, config, key)
    return _deliver(args, emulated, measurement)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "sterna profile [MODEL] [options]"
    parser.description = (
        "Time the steps of one engine and propose its target load, the headroom of high priority. "
        "Takes the options of `sterna serve`; --help=Profile lists the others."
    )
    parser.epilog = (parser.epilog or "").replace("sterna serve", "sterna profile")
    group = parser.add_argument_group("Profile", "Measurement and output.")
    group.add_argument(
        "--output", type=Path, metavar="FILE", help="write the profile to this file as well"
    )
    group.add_argument("--json", action="store_true", help="print only the profile, as JSON")
    group.add_argument(
        "--quick",
        action="store_true",
        help="fewer batches, rounds and prompts, in half of the time",
    )
    group.add_argument(
        "--request-tokens",
        type=int,
        default=REQUEST_TOKENS,
        metavar="N",
        help="length of each request in the batch to which the target load refers (default: "
        "%(default)s, that of a request of the paper's Short-Short trace at its end)",
    )
    group.add_argument(
        "--tolerance",
        type=float,
        default=TOLERANCE,
        metavar="FRACTION",
        help="fraction by which a step may be longer than that of one request alone (default: "
        "%(default)s)",
    )


def _check(args: Namespace) -> None:
    if args.request_tokens < MIN_REQUEST_TOKENS:
        raise ConfigurationError(
            f"--request-tokens must be at least {MIN_REQUEST_TOKENS}, not {args.request_tokens}"
        )
    if not 0 < args.tolerance < 1:
        raise ConfigurationError(f"--tolerance must be between 0 and 1, not {args.tolerance}")
    path: Path | None = args.output
    if path is not None and (path.suffix != ".json" or not path.parent.is_dir()):
        raise ConfigurationError(f"--output {path}: name a .json file in a folder that is there")


# ------------------------------------------------------------------------------------- measure


def _measure(args: Namespace, config: Any, key: dict[str, str]) -> "tuple[Profile, Measurement]":
    """Build the engine, time it, and return the content of the file."""
    from sterna.engine.profiling.measurement_plan import batches, prompt_lengths, propose
    from sterna.engine.vllm.step_timing import ProfiledEngine, time_decodes, time_prefills

    with _progress() as show:
        show("starting the engine", 0.0)
        engine = ProfiledEngine(config, num_threads=args.num_threads, binds_core=args.binds_core)
        try:
            limits = engine.emulated()
            plan = batches(
                engine.total_tokens,
                limits.max_num_seqs,
                engine.max_model_len,
                request_tokens=args.request_tokens,
                is_quick=args.quick,
            )
            prompts = prompt_lengths(
                limits.max_num_batched_tokens,
                engine.max_model_len,
                engine.total_tokens,
                is_quick=args.quick,
            )
            prefills = time_prefills(
                engine,
                prompts,
                NUM_QUICK_PREFILL_ROUNDS if args.quick else NUM_PREFILL_ROUNDS,
                lambda done: show("timing prefills", PREFILL_SHARE * done),
            )
            decodes = time_decodes(
                engine,
                plan,
                NUM_QUICK_ROUNDS if args.quick else NUM_ROUNDS,
                NUM_STEPS,
                lambda done: show("timing decodes", PREFILL_SHARE + (1 - PREFILL_SHARE) * done),
            )
            proposal = propose(
                decodes, request_tokens=args.request_tokens, tolerance=args.tolerance
            )
            return _results(args, key, engine, prefills, decodes, proposal)
        finally:
            engine.close()


def _results(
    args: Namespace,
    key: dict[str, str],
    engine: "ProfiledEngine",
    prefills: "Sequence[PrefillPoint]",
    decodes: "Sequence[Decode]",
    proposal: "Proposal",
) -> "tuple[Profile, Measurement]":
    from sterna.engine.emulated.durations import StepTime
    from sterna.engine.emulated.profiles import Profile, estimated_copy_time
    from sterna.engine.profiling.fitting import fit_step_time
    from sterna.engine.profiling.profile_file import FORMAT, FitError, Measurement

    fit = fit_step_time(prefills, [each.point() for each in decodes])
    target = proposal.target
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    name = _model_name(args)
    emulated = Profile(
        name=name,
        description=f"{name} on {key['hardware']}, vLLM {key['vllm']}",
        source=f"sterna profile, {date}; the copy time is an estimate: as many bytes a second as "
        "LLaMA-7B's on A10",
        engine=engine.emulated(),
        step_time=StepTime(*map(_rounded, fit.step_time.constants)),
        copy_time=estimated_copy_time(engine.block_bytes),
    )
    measurement = Measurement(
        format=FORMAT,
        date=date,
        key=key,
        total_tokens=engine.total_tokens,
        target_load_tokens=target.tokens,
        target_load_by_round_tokens=proposal.by_round,
        is_reached=target.is_reached,
        is_noisy=proposal.is_noisy,
        request_tokens=args.request_tokens,
        tolerance=args.tolerance,
        ideal_step_s=target.ideal_s,
        limit_step_s=target.limit_s,
        basis=target.basis.value,
        target_load_by_request_tokens={length: each.tokens for length, each in proposal.by_length},
        prefill_fit_error=FitError(_rounded(fit.prefill.mean), _rounded(fit.prefill.max)),
        decode_fit_error=FitError(_rounded(fit.decode.mean), _rounded(fit.decode.max)),
        decodes=tuple(decodes),
        prefills=tuple(prefills),
    )
    return emulated, measurement


def _rounded(value: float) -> float:
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")


def _model_name(args: Namespace) -> str:
    return str(args.served_model_name[0] if args.served_model_name else Path(args.model).name)


# ------------------------------------------------------------------------------------- deliver


def _deliver(args: Namespace, emulated: "Profile", measurement: "Measurement") -> int:
    """Print and write the results; returns 1 when they are too noisy to be saved."""
    from sterna.demo_model.small_model import default_cache_folder
    from sterna.engine.profiling.profile_file import document, path_of, write

    content = document(emulated, measurement)
    if args.json:
        print(json.dumps(content, indent=1))
    else:
        print(report(emulated, measurement))
    if args.output is not None:
        write(args.output, content)
        _say(f"written to {args.output}")
    if measurement.is_noisy:
        _say(
            "not saved for `sterna serve`: the rounds contradict each other; measure again while "
            "nothing else runs"
        )
        return 1
    path = path_of(default_cache_folder(os.environ), measurement.key)
    write(path, content)
    _say(f"saved to {path}, where `sterna serve` with the same options finds it")
    return 0


def report(emulated: "Profile", measurement: "Measurement") -> str:
    """The measurement and its conclusion, for people."""
    lines = [
        f"decode step of {emulated.description}, in ms (medians; M = "
        f"{measurement.total_tokens} tokens):",
        "",
        *_table(measurement),
        "",
        conclusion(measurement),
    ]
    others = measurement.target_load_by_request_tokens
    if others and not measurement.is_noisy:
        found = ", ".join(f"{tokens} of {length} each" for length, tokens in others.items())
        lines.append(f"With requests of other lengths: {found}.")
    lines.append(
        f"The fitted step time is off by {measurement.decode_fit_error.mean:.0%} for decodes and "
        f"{measurement.prefill_fit_error.mean:.0%} for prefills, on average."
    )
    return "\n".join(lines)


def conclusion(measurement: "Measurement") -> str:
    """The target load in a sentence, with its basis."""
    tokens, each = measurement.target_load_tokens, measurement.request_tokens
    within = (
        f"within {measurement.tolerance:.0%} of {1000 * measurement.ideal_step_s:.1f} ms, that of "
        "one request alone"
    )
    if measurement.basis == "fitted":
        within += " (by the fitted model: too few batches of this length fit)"
    rounds = ", ".join(map(str, measurement.target_load_by_round_tokens))
    if measurement.is_noisy:
        return f"Too noisy for a target load: the rounds say {rounds} tokens."
    if not measurement.is_reached:
        return (
            f"Target load: {tokens} tokens, the most that was measured: with requests of {each} "
            f"tokens, a decode step of all of them is {within}."
        )
    return (
        f"Target load: {tokens} tokens (rounds: {rounds}): with requests of {each} tokens, a "
        f"decode step of more than these is not {within}."
    )


def _table(measurement: "Measurement") -> list[str]:
    """One line for each batch: its tokens, its step, and the ratio to the step of one request."""
    alone_s = {
        each.batch.tokens_each: each.step_s
        for each in measurement.decodes
        if each.batch.num_requests == 1
    }
    lines = ["tokens each  requests   tokens     step   against one request"]
    for each in sorted(
        measurement.decodes, key=lambda each: (each.batch.tokens_each, each.batch.num_requests)
    ):
        ratio = each.step_s / alone_s[each.batch.tokens_each]
        lines.append(
            f"{each.batch.tokens_each:11d}  {each.batch.num_requests:8d}  {each.num_tokens:7.0f}  "
            f"{1000 * each.step_s:7.2f}   {ratio:.2f}"
        )
    return lines


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def _progress() -> Iterator[Callable[[str, float], None]]:
    """A progress bar, on a terminal only. Yields a callback for the current activity and the
    fraction done."""
    if not sys.stderr.isatty():
        yield lambda what, done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn
    from rich.progress import TimeElapsedColumn as Elapsed

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn())
    numbers = (TaskProgressColumn(), Elapsed())
    with Progress(*columns, *numbers, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=1.0)
        yield lambda what, done: progress.update(task, description=what, completed=done)
