"""Runs that are compared with each other: their servers, conditions and numbers.

The output of a server is kept in `.cache/bench`, for requests that have failed.
"""

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.common.command import Progress
from bench.common.machine import ForeignLoad
from bench.common.results_io import ROOT
from bench.serving.client import ClientConfig, PriorityField
from bench.serving.loads import STEP_LENGTHS, burst
from bench.serving.observer import DEFAULT_INTERVAL_S, ClusterSample
from bench.serving.report import progress, send_delay_s
from bench.serving.served import served
from bench.serving.session import ServedRun, run_trace
from bench.serving.target import Target, find_target
from sterna.metrics.summary import Distribution, Values
from sterna.types import Priority
from sterna.workload.trace import Trace

LOGS = ROOT / ".cache" / "bench"

MAX_FOREIGN_CORES = 0.1
"""Load of other programs above which results are unreliable."""

LOOK_INTERVAL_S = 5.0

WARM_UP_SEED = 2_000_000
"""Seed of other prompts than those of the runs, which must be in no cache."""


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """A run, and the load of other programs on the machine meanwhile, in cores."""

    run: ServedRun
    foreign_cores: float


@dataclass(frozen=True, slots=True, eq=False)
class Server:
    """A server that was started for runs.

    Attributes:
        log: the file of its output.
    """

    target: Target
    log: Path

    def target_load(self) -> dict[str, Any] | None:
        """The target load of high priority and its origin; None where the policy has no
        priorities."""
        found = re.search(
            r"target load tokens=(\d+) from=(.*)", self.log.read_text("utf-8", "replace")
        )
        if found is None:
            return None
        origin = found[2].strip()
        # A saved profile is named by a path, which has no meaning on another machine.
        is_known = origin.startswith(("default", "--target-load"))
        return {"tokens": int(found[1]), "from": origin if is_known else "sterna profile"}

    def warm_up(self, num_requests: int = 4) -> None:
        """Send requests at once, at least one for each instance: an engine's first steps take
        longer."""
        self.measure(burst(num_requests, STEP_LENGTHS, seed=0), "warm-up", seed=WARM_UP_SEED)

    def measure(
        self,
        trace: Trace,
        what: str,
        *,
        seed: int,
        interval_s: float = DEFAULT_INTERVAL_S,
        is_settled: Callable[[ClusterSample], bool] | None = None,
        settle_timeout_s: float = 0.0,
    ) -> Measured:
        """Send the trace, and watch the instances and the machine until all have ended.

        Args:
            what: the name of the measurement, for the progress bar.
            seed: of the prompts.
            is_settled, settle_timeout_s: see `run_trace`.
        """
        config = ClientConfig(seed, priority_field=PriorityField.SERVICE_TIER)
        num_ended = 0

        async def run(show: Callable[[int], None]) -> ServedRun:
            def on_ended() -> None:
                nonlocal num_ended
                num_ended += 1
                show(num_ended)

            looking = asyncio.create_task(_look_periodically(others))
            try:
                return await run_trace(
                    self.target,
                    trace,
                    config,
                    interval_s=interval_s,
                    on_ended=on_ended,
                    is_settled=is_settled,
                    settle_timeout_s=settle_timeout_s,
                )
            finally:
                looking.cancel()

        others = ForeignLoad()
        with progress(len(trace), what) as show:
            done = asyncio.run(run(show))
        return Measured(done, round(others.cores(), 2))


@contextlib.contextmanager
def started(
    options: Sequence[str],
    log: Path,
    *,
    program: Sequence[str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Run `sterna serve`, or another program, with these options for as long as the context lasts.

    Args:
        program, environment: see `served`.

    Raises:
        ConfigurationError: it did not start; the message says why.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with served(options, log=log, program=program, environment=environment) as url:
        yield Server(asyncio.run(find_target(url)), log)


async def _look_periodically(others: ForeignLoad) -> None:
    """Instances end during a run, and their use must be recorded before."""
    while True:
        await asyncio.sleep(LOOK_INTERVAL_S)
        await asyncio.to_thread(others.look)


class Notes:
    """Messages of a benchmark.

    Attributes:
        say: prints one line.
    """

    def __init__(self) -> None:
        self.say = Progress()

    def say_outcome(self, measured: Measured) -> None:
        """Print the conditions that could invalidate the run, if there are any."""
        for error, times in measured.run.errors().items():
            self.say(f"failed {times} of {len(measured.run.trace)} requests: {error}")
        if measured.foreign_cores > MAX_FOREIGN_CORES:
            self.say(f"not quiet: other programs kept {measured.foreign_cores:.2f} cores busy")
        late = send_delay_s(measured.run)
        if late is not None and late.p99 > 0.05:
            self.say(f"the client was late by up to {late.max:.2f} s, which all times count")


# -------------------------------------------------------------------------------- as JSON


def distribution_json(distribution: Distribution | None) -> dict[str, float] | None:
    """The distribution in seconds, to a tenth of a millisecond."""
    if distribution is None:
        return None
    return {name: round(value, 4) for name, value in asdict(distribution).items()}


def values_of(runs: Sequence[ServedRun], metric: str, priority: Priority | None = None) -> Values:
    """The `ttft_s`, `tpot_s` or `request_s` of the requests that ended, of all runs.

    Args:
        priority: of this class only.
    """
    return np.concatenate([_values(run, metric, priority) for run in runs])


def _values(run: ServedRun, metric: str, priority: Priority | None) -> Values:
    records = run.records
    those = ~np.isnan(records.end_s)
    if priority is not None:
        those &= records.priority == int(priority)
    arrival_s, first_s = records.arrival_s[those], records.first_token_s[those]
    end_s, num_tokens = records.end_s[those], records.output_tokens[those]
    match metric:
        case "ttft_s":
            values: Values = first_s - arrival_s
        case "request_s":
            values = end_s - arrival_s
        case "tpot_s":
            has_decoded = num_tokens > 1
            values = ((end_s - first_s)[has_decoded]) / (num_tokens - 1)[has_decoded]
        case _:
            raise AssertionError(metric)
    return values


def cell(values: Values) -> dict[str, Any]:
    """A row's numbers of these values, in their unit: `n, median, p99, mean`."""
    if len(values) == 0:
        return {"n": 0, "median": None, "p99": None, "mean": None}
    median, p99 = np.percentile(values, (50.0, 99.0))
    numbers = {"median": median, "p99": p99, "mean": values.mean()}
    return {"n": len(values), **{name: round(float(each), 4) for name, each in numbers.items()}}
