"""`sterna.simulate`: simulations from Python, with data frames as results (docs/policies.md)."""

import argparse
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NoReturn

from sterna.cli.simulate.simulate_command import as_json, configuration, jobs_of
from sterna.cli.simulate.simulate_options import (
    DEFAULT_POLICY,
    PAPER_POLICY,
    add_simulate_options,
)
from sterna.errors import ConfigurationError
from sterna.metrics.summary import DISTRIBUTIONS, Distribution
from sterna.policy.own import Policy
from sterna.policy.setting_text import did_you_mean

if TYPE_CHECKING:
    import pandas as pd

    from sterna.simulator.runs import SimulationRun

KEYS = ("policy", "trace", "rate", "seed")
"""The columns by which a run is known."""

OPTIONS_WITHOUT_MEANING = frozenset(
    {"json", "list", "plot", "baseline", "policy", "record", "record_interval"}
)
"""Of the command: those about its output, and the policies, which are named first."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """Finished runs.

    Attributes:
        runs: a row for each run; the columns are the names that `sterna simulate --json` prints,
            those of nested values with a point in between, as in `ttft_s.p99` and
            `goodput.0.fraction`; without `settings`. Unknown values are NaN.
        requests: a row for each request of each run: lengths in tokens, times in seconds from the
            beginning of the run, and `ttft_s`, `tpot_s` and `request_s`. Unknown values are NaN.
    """

    runs: "pd.DataFrame"
    requests: "pd.DataFrame"


def simulate(*policies: str | type[Policy], **options: Any) -> Simulated:
    """Run a trace under policies, as `sterna simulate` does.

        sterna.simulate("llumnix", MyPolicy, trace="M-M", rate=7.0, seed=[1, 2, 3])

    Args:
        policies: names and variants as on the command line, and classes derived from
            `sterna.policy.own.Policy`; none: the default policy.
        options: those of the command, with _ in place of -; several seeds as a list, an option
            without a value as True, and `set` as a mapping of settings to values. Everything runs
            in this process unless `processes` says otherwise, for which a script must call this
            under `if __name__ == "__main__":`, and which classes do not allow.

    Raises:
        ConfigurationError: an option cannot work.
        ImportError: pandas is missing.
    """
    try:
        # Before the work, not after it.
        import pandas as pd
    except ImportError as error:
        raise ImportError("sterna.simulate needs pandas: pip install pandas") from error
    from sterna.simulator.runs import run_all

    args = _arguments(options)
    configs = {}
    for policy in policies or (PAPER_POLICY if args.paper else DEFAULT_POLICY,):
        if isinstance(policy, str):
            configs[policy] = configuration(args, policy)
        elif not (isinstance(policy, type) and issubclass(policy, Policy)):
            raise ConfigurationError(
                f"a policy must be a name, or a class derived from sterna.policy.own.Policy, not "
                f"{policy!r}"
            )
        elif (name := policy.__name__) in configs:
            raise ConfigurationError(
                f"two policies are called {name}: give each class a name (`__name__`) of its own"
            )
        elif args.paper:
            raise ConfigurationError(f"paper: {name} has rules of its own: leave paper out")
        else:
            configs[name] = configuration(args, policy.base, policy().as_config())
    if args.processes is not None and not all(isinstance(each, str) for each in policies):
        # That of a notebook cannot be imported by another process.
        raise ConfigurationError("processes: a policy that is a class runs in this process alone")
    runs = run_all(jobs_of(args, configs), num_processes=args.processes or 1)
    return Simulated(
        pd.DataFrame([_row(run) for run in runs]),
        pd.concat([_requests(run) for run in runs], ignore_index=True),
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(message)


def _arguments(options: Mapping[str, Any]) -> argparse.Namespace:
    parser = _Parser(prog="sterna.simulate", add_help=False, allow_abbrev=False)
    add_simulate_options(parser)
    actions = parser._option_string_actions
    known = {option[2:].replace("-", "_") for option in actions} - OPTIONS_WITHOUT_MEANING
    words: list[str] = []
    for name, value in options.items():
        if name not in known:
            raise ConfigurationError(
                f"{name} is no option of sterna.simulate(*policies, **options)"
                f"{did_you_mean(name, known)}"
            )
        option = "--" + name.replace("_", "-")
        if value is False or value is None:
            continue
        if isinstance(value, Mapping):
            for key, each in value.items():
                words += [option, f"{key}={each}"]
        elif value is True:
            words.append(option)
        else:
            is_list = actions[option].nargs == "+" and isinstance(value, Iterable)
            several = value if is_list and not isinstance(value, str) else [value]
            words += [option, *map(str, several)]
    return parser.parse_args(words)


def _row(run: "SimulationRun") -> dict[str, Any]:
    shown = as_json(run)
    del shown["settings"]
    return dict(_flat(shown, ""))


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The single values in a value of this name, by their names; those of a list have numbers.

    A distribution has its values also where a run has none of it, so that all runs have the same
    columns.
    """
    if value is None:
        is_distribution = name.rpartition(".")[2] in DISTRIBUTIONS
        names = [f"{name}.{each.name}" for each in fields(Distribution)]
        yield from ((each, math.nan) for each in (names if is_distribution else [name]))
    elif isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flat(each, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def _requests(run: "SimulationRun") -> "pd.DataFrame":
    import pandas as pd

    workload, records = run.job.workload, run.records
    rate = math.nan if workload.rate is None else workload.rate
    keys = (run.job.policy, workload.trace, rate, workload.seed)
    columns: dict[str, Any] = dict(zip(KEYS, keys, strict=True))
    for field in fields(records):
        values = getattr(records, field.name)
        if values is not None:
            columns[field.name] = values
    frame = pd.DataFrame(columns)
    frame["ttft_s"] = frame.first_token_s - frame.arrival_s
    frame["request_s"] = frame.end_s - frame.arrival_s
    num_more = (frame.output_tokens - 1).where(frame.output_tokens > 1)
    frame["tpot_s"] = (frame.end_s - frame.first_token_s) / num_more
    return frame
