"""`sterna simulate`: run traces under policies in virtual time, and compare them.

Heavy modules are imported only after the options have been checked: numpy, numba, rich and
matplotlib would delay the help.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sterna.cli.options.option_values import positive, require_writable
from sterna.cli.simulate.simulate_options import (
    DEFAULT_POLICY,
    DEFAULT_PROFILE,
    FRAGMENTATION_INTERVAL_S,
    PAPER_POLICY,
    PLOT_SUFFIXES,
    SETTINGS,
    add_simulate_options,
)
from sterna.cli.simulate.workload_options import arrivals_of, report_long_requests, workload_of
from sterna.config import PolicyConfig
from sterna.errors import ConfigurationError
from sterna.policy.presets import PRESETS
from sterna.policy_file import names_file, policy_named
from sterna.types import HIGH

if TYPE_CHECKING:
    from collections.abc import Callable

    from sterna.cli.simulate.overrides import Override
    from sterna.simulator.config import SimulationConfig
    from sterna.simulator.recorded import Recorded
    from sterna.simulator.runs import Job, SimulationRun


BANDWIDTH = "bandwidth"
"""Name like that of a setting; the setting behind it depends on the size of a block."""


def add_commands(commands: Any) -> None:
    """Add `simulate` to the parser's subcommands."""
    parser = commands.add_parser(
        "simulate",
        help="run a trace under scheduling policies, in virtual time",
        description="Run a trace under scheduling policies, in virtual time: the scheduling code "
        "that serves, over emulated engines. Several policies or seeds print a comparison.",
        epilog="docs/simulation.md explains every option and the JSON.",
        usage="sterna simulate [--trace TRACE] [--rate R] [--policy NAME ...] [options]",
    )
    add_simulate_options(parser)
    parser.set_defaults(run=_simulate)


# ----------------------------------------------------------------------------------------- run


def _simulate(args: argparse.Namespace) -> int:
    """Run `sterna simulate`.

    Raises:
        ConfigurationError: an option cannot work.
    """
    args.policy = args.policy or [PAPER_POLICY if args.paper else DEFAULT_POLICY]
    if args.list:
        from sterna.cli.simulate.simulate_report import print_choices

        print_choices(configuration(args, args.policy[0]), args.policy[0])
        return 0
    _check_output(args)
    jobs = jobs_of(args, {label: configuration(args, label) for label in args.policy})
    from sterna.simulator.runs import run, run_all

    recorded = _recorded(args, jobs)
    with _progress(len(jobs)) as (on_done, on_progress):
        if recorded is not None:
            runs = [run(jobs[0], on_progress=on_progress, recorded=recorded)]
        else:
            runs = run_all(
                jobs, num_processes=args.processes, on_done=on_done, on_progress=on_progress
            )
    if args.json:
        found = [as_json(run) for run in runs]
        # A list also where several seeds are one run.
        is_one = len(args.policy) == len(set(args.seed)) == 1
        print(json.dumps(found[0] if is_one else found, allow_nan=False))
    else:
        from sterna.cli.simulate.simulate_report import print_report

        print_report(runs, baseline=args.baseline or args.policy[0])
    if args.plot is not None:
        _draw(runs, args.plot)
    return 0


def _recorded(args: argparse.Namespace, jobs: Sequence["Job"]) -> "Recorded | None":
    """The recording to write, if one is wanted; refused where it cannot be written."""
    if args.record is None:
        return None
    from sterna.simulator.recorded import Recorded

    if len(jobs) > 1:
        raise ConfigurationError(
            f"--record takes one run: one policy and one seed, not {len(jobs)} runs"
        )
    require_writable("--record", args.record)
    (job,) = jobs
    title = f"{job.policy}, {job.workload.trace}, {job.config.num_instances} instances, simulated"
    return Recorded(args.record, title, args.record_interval)


def _draw(runs: Sequence["SimulationRun"], path: Path) -> None:
    from sterna.cli.simulate.simulate_report import draw

    try:
        draw(runs, path)
    except OSError as error:
        raise ConfigurationError(f"--plot {path} cannot be written: {error.strerror}") from None


def as_json(run: "SimulationRun") -> dict[str, Any]:
    """What `--json` prints of a run; its names are stable (docs/simulation.md)."""
    import msgspec

    from sterna.metrics import summary

    workload, config = run.job.workload, run.job.config
    return {
        "policy": run.job.policy,
        "trace": workload.trace,
        "arrivals": arrivals_of(workload),
        "rate": workload.rate,
        "seed": workload.seed,
        "instances": config.num_instances,
        "max_total_tokens": workload.max_total_tokens,
        **summary.as_json(run.summary()),
        "classes": {
            name: summary.latencies_json(each)
            for name, each in summary.summarize_classes(run.records, run.cluster).items()
        },
        "settings": msgspec.to_builtins(config, str_keys=True, enc_hook=_plain),
    }


def _plain(value: Any) -> Any:
    """A mapping that msgspec does not know, or the name of a custom class."""
    return dict(value) if isinstance(value, Mapping) else type(value).__name__


def jobs_of(args: argparse.Namespace, configs: Mapping[str, "SimulationConfig"]) -> list["Job"]:
    """One job for each of these policies, by their labels, and each seed, in this order; of seeds
    that change nothing, for the first one. This, and that a policy lacks the prefix caches for
    which it is made, is said on stderr."""
    from sterna.simulator.runs import Job
    from sterna.workload.catalog import has_same_lengths, is_drawn

    # All policies get the same requests, so that each must fit every policy's instances.
    limit = min(config.engine.total_tokens for config in configs.values())
    if args.max_total_tokens is not None:
        limit = min(limit, args.max_total_tokens)
    workloads = [workload_of(args, seed, limit) for seed in dict.fromkeys(args.seed)]
    for workload in workloads[:1] if has_same_lengths(args.trace) else workloads:
        report_long_requests(workload, limit)
    if len(workloads) > 1 and not is_drawn(workloads[0]):
        # No policy draws anything: those that seem to do so count.
        print(
            "sterna: nothing of this workload is drawn, so that its seed changes nothing: each "
            f"policy runs once, and not {len(workloads)} times",
            file=sys.stderr,
        )
        workloads = workloads[:1]
    for label, config in configs.items():
        if config.policy.needs_prefixes and not config.engine.prefix_caching:
            print(
                f"sterna: {label} looks at prefix caches, and its engines have none: set "
                "engine.prefix_caching=true, with a profile of vLLM 1",
                file=sys.stderr,
            )
    return [
        Job(workload, config, label) for label, config in configs.items() for workload in workloads
    ]


def configuration(
    args: argparse.Namespace, label: str, own: PolicyConfig | None = None
) -> "SimulationConfig":
    """The configuration for a policy or variant, as in `llumnix` or `llumnix:key=value,...`; the
    policy may be a class in a file, as in `mine.py:Mine`.

    Args:
        own: the policy, if it is a class that is there already.

    Raises:
        ConfigurationError: there is no such policy, or an option cannot work.
    """
    from sterna.cli.simulate.overrides import apply

    name, _, variant = label.partition(":")
    if names_file(name):
        class_name, _, variant = variant.partition(":")
        name = f"{name}:{class_name}"
    else:
        _require_policy(name)
    config = _default_config(args, name)
    if own is not None:
        config = replace(config, policy=own)
    if args.auto_scaling is not None:
        config = _with_scaling(config, args)
    given = [*_overrides(args), *_variant(variant)]
    config = apply(config, _with_blocks(given, config))
    _check_start(config)
    return config if args.paper else _as_served(config, args, given)


def _check_start(config: "SimulationConfig") -> None:
    """Refuse to begin with more or fewer instances than auto-scaling allows."""
    scaling, num_instances = config.scaling, config.num_instances
    if scaling and not scaling.min_instances <= num_instances <= scaling.max_instances:
        raise ConfigurationError(
            f"--instances must be within auto-scaling's bounds "
            f"({scaling.min_instances} to {scaling.max_instances}), not {num_instances}"
        )


def _as_served(
    config: "SimulationConfig", args: argparse.Namespace, given: Sequence["Override"]
) -> "SimulationConfig":
    """The configuration with what `sterna serve` makes of priorities, where nothing is given: the
    engine's order of preemptions, and the target load of high priority."""
    fields = {(each.section, each.field) for each in given}
    if config.policy.has_priorities and ("engine", "preemption") not in fields:
        config = replace(config, engine=config.engine.with_priorities())
    if ("policy", "target_load_tokens") not in fields:
        config = _with_target_load(config, args)
    return config


def _with_target_load(config: "SimulationConfig", args: argparse.Namespace) -> "SimulationConfig":
    """The target load of high priority that `sterna serve` has on these engines, where no custom
    class gives another."""
    from sterna.engine.profiling.target_load import default_tokens, measured_tokens
    from sterna.policy.own import gives_target_load

    if not config.policy.has_priorities or gives_target_load(config.policy):
        return config
    tokens = measured_tokens(args.profile or DEFAULT_PROFILE)
    if tokens is None:
        tokens = default_tokens(config.engine.total_tokens)
    return replace(config, policy=replace(config.policy, target_load_tokens={HIGH: tokens}))


def _with_scaling(config: "SimulationConfig", args: argparse.Namespace) -> "SimulationConfig":
    from sterna.config import ScalingConfig
    from sterna.simulator.paper import PAPER_SCALING, PAPER_SCALING_BEGINS_S

    low, high = args.auto_scaling
    scaling = PAPER_SCALING if args.paper else ScalingConfig()
    return replace(
        config,
        scaling=replace(scaling, min_instances=low, max_instances=high),
        scaling_begins_s=PAPER_SCALING_BEGINS_S if args.paper else config.scaling_begins_s,
    )


def _overrides(args: argparse.Namespace) -> Iterator["Override"]:
    from sterna.cli.simulate.overrides import override, parse

    for option in SETTINGS.options:
        text = getattr(args, option.dest)
        if option.field is not None and text is not None:
            yield override(option.field, text, option.name)
    for assignment in args.settings:
        yield parse(assignment)
    if args.bandwidth is not None:
        yield _bandwidth("--bandwidth", args.bandwidth)


def _variant(text: str) -> Iterator["Override"]:
    """The settings after a policy's name; keys may also be names of options."""
    from sterna.cli.simulate.overrides import override, parse

    names = {each.name.removeprefix("--"): each.field for each in SETTINGS.options if each.field}
    for assignment in text.split(",") if text else []:
        key, equals, value = assignment.partition("=")
        if equals and key in names:
            yield override(names[key], value, key)
        elif equals and key == BANDWIDTH:
            try:
                yield _bandwidth(key, positive(value))
            except argparse.ArgumentTypeError:
                raise ConfigurationError(
                    f"bandwidth must be positive tokens a second, not {value!r}"
                ) from None
        else:
            yield parse(assignment)


def _bandwidth(option: str, tokens_per_s: float) -> "Override":
    from sterna.cli.simulate.overrides import Override

    return Override(option, "copy_time", BANDWIDTH, tokens_per_s)


def _with_blocks(given: Sequence["Override"], config: "SimulationConfig") -> Iterator["Override"]:
    """Convert each bandwidth to the time of a block. Blocks of another size hold as many tokens
    together, and take as long for each, unless these are overridden as well.

    Raises:
        ConfigurationError: a block would have no tokens.
    """
    from sterna.cli.simulate.overrides import Override

    engine, block_size = config.engine, config.engine.block_size
    for each in given:
        if (each.section, each.field) == ("engine", "block_size"):
            block_size = replace(engine, block_size=each.value).block_size
            num_blocks = engine.num_blocks * engine.block_size // block_size
            block_s = config.copy_time.block_s * block_size / engine.block_size
            # Later overrides of the same fields win.
            yield Override(each.option, "engine", "num_blocks", num_blocks)
            yield Override(each.option, "copy_time", "block_s", block_s)
    for each in given:
        if each.field == BANDWIDTH:
            yield replace(each, field="block_s", value=block_size / each.value)
        else:
            yield each


def _default_config(args: argparse.Namespace, policy: str) -> "SimulationConfig":
    if args.paper:
        from sterna.simulator.paper import paper_config

        if args.profile is not None:
            raise ConfigurationError("--paper has a profile of its own: leave --profile out")
        return paper_config(
            policy,
            args.trace,
            num_instances=args.instances,
            fragmentation_interval_s=FRAGMENTATION_INTERVAL_S,
        )
    from sterna.engine.emulated.profiles import profile
    from sterna.simulator.config import SimulationConfig

    chosen = profile(args.profile or DEFAULT_PROFILE)
    return SimulationConfig(
        engine=chosen.engine,
        step_time=chosen.step_time,
        copy_time=chosen.copy_time,
        policy=policy_named(policy),
        num_instances=args.instances,
    )


# ------------------------------------------------------------------------------------- options


def _require_policy(name: str) -> None:
    if name not in PRESETS:
        from sterna.policy.setting_text import did_you_mean

        raise ConfigurationError(
            f"policy must be one of {', '.join(PRESETS)}, not {name!r}{did_you_mean(name, PRESETS)}"
        )


def _check_output(args: argparse.Namespace) -> None:
    """Refuse output that cannot be written or shown, before any run."""
    if args.plot is not None:
        if args.plot.suffix.lower() not in PLOT_SUFFIXES:
            raise ConfigurationError(
                f"--plot must end in {', '.join(PLOT_SUFFIXES)}, not {str(args.plot)!r}"
            )
        require_writable("--plot", args.plot)
    if args.baseline is not None and args.baseline not in args.policy:
        raise ConfigurationError(
            f"--baseline must be one of the policies that run ({', '.join(args.policy)}), "
            f"not {args.baseline!r}"
        )


@contextmanager
def _progress(
    num_runs: int,
) -> Iterator["tuple[Callable[[int], None] | None, Callable[[float], None] | None]"]:
    """A progress bar of the runs, on a terminal only.

    Yields two callbacks: for the index of a finished run, and for the fraction done of the run in
    this process.
    """
    if not sys.stderr.isatty():
        yield None, None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
    from rich.progress import TaskProgressColumn as Percentage
    from rich.progress import TimeElapsedColumn as Elapsed

    columns = (SpinnerColumn(), TextColumn("simulating"), BarColumn(), Percentage())
    numbers = (MofNCompleteColumn(), Elapsed())
    with Progress(*columns, *numbers, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("runs", total=num_runs)
        num_done = 0

        def on_done(_: int) -> None:
            nonlocal num_done
            num_done += 1
            progress.update(task, completed=num_done)

        def on_progress(fraction: float) -> None:
            progress.update(task, completed=num_done + fraction)

        yield on_done, on_progress
