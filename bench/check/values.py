"""The ratios that are compared, and their verdicts. Pure.

Only ratios: what takes twice as long on a machine that is half as fast says nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from bench.common.tables import Row, markdown_table
from bench.plain_vllm import overhead_report
from bench.plain_vllm.overhead import LOADS as OVERHEAD_LOADS
from bench.processes import front_end_report

MOST_LOSS = 1.2
"""A value may be worse than the committed one by this factor."""

SIMULATED = "M-M 7.5/s, paper"
NUM_INSTANCES, NUM_TOKENS = 64, 1_024
DOWNTIME_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Value:
    """A ratio that a benchmark measures.

    Attributes:
        of: finds it in the benchmark's rows; None if they lack it.
    """

    name: str
    of: Callable[[Sequence[Row]], float | None]
    is_higher_better: bool


@dataclass(frozen=True, slots=True)
class Check:
    """A short run of a benchmark.

    Attributes:
        file: of its results; that with the end `_cuda` on a machine with a CUDA device, where the
            benchmark writes this one.
        command: the module and its options, without the folder of results.
    """

    file: str
    command: tuple[str, ...]
    values: tuple[Value, ...]


def _decisions(rows: Sequence[Row]) -> float | None:
    found = {
        policy: [
            row["decisions_per_s_per_core"]
            for row in rows
            if row["policy"] == policy and row["instances"] == NUM_INSTANCES
        ]
        for policy in ("sterna", "round-robin")
    }
    if not all(found.values()):
        return None
    return float(median(found["sterna"]) / median(found["round-robin"]))


def _simulation(rows: Sequence[Row]) -> float | None:
    return next((row["reference_ratio"] for row in rows if row["case"] == SIMULATED), None)


def _wire_share(transport: str) -> Callable[[Sequence[Row]], float | None]:
    def of(rows: Sequence[Row]) -> float | None:
        return next(
            (
                row["wire_share"]["median"]
                for row in rows
                if "wire_share" in row
                and (row["model"], row["transport"]) == ("smollm2-135m", transport)
                and row["tokens"] == NUM_TOKENS
            ),
            None,
        )

    return of


def _front_end(name: str) -> Callable[[Sequence[Row]], float | None]:
    def of(rows: Sequence[Row]) -> float | None:
        found = front_end_report.compared(rows)
        return found[name].median if found else None

    return of


def _downtime(rows: Sequence[Row]) -> float | None:
    wanted = ("live", "shm", DOWNTIME_TOKENS, False)
    return next(
        (
            row["downtime_ms"]["median"] / row["decode_step_ms"]["median"]
            for row in rows
            if (row["mode"], row["transport"], row["tokens"], row["busy"]) == wanted
        ),
        None,
    )


def _throughput(rows: Sequence[Row]) -> float | None:
    return overhead_report.throughput_ratio(rows, "compiled", OVERHEAD_LOADS[0].name)


CHECKS = (
    Check(
        "dispatch",
        ("bench.scheduling", "--instances", str(NUM_INSTANCES), "--rounds", "1"),
        (Value("decisions a second, over those of round robin", _decisions, True),),
    ),
    Check(
        "simulator",
        ("bench.simulation.simulator", "--cases", SIMULATED, "--runs", "3"),
        (Value("a simulation's time, over that of one compiled policy", _simulation, False),),
    ),
    Check(
        "data_plane",
        (
            *("bench.migration.data_plane", "--models", "smollm2-135m"),
            *("--transports", "tcp", "shm", "--max-tokens", str(NUM_TOKENS)),
        ),
        (
            Value("KV copies over TCP, share of the wire's rate", _wire_share("tcp"), True),
            Value("KV copies in shared memory, share of the wire's rate", _wire_share("shm"), True),
        ),
    ),
    Check(
        "front_end",
        ("bench.processes.front_end", "--parts", "real", "--rounds", "1"),
        (
            Value("front end, a token's processor time over vLLM's", _front_end("token"), False),
            Value("front end, a request's over vLLM's", _front_end("request"), False),
        ),
    ),
    Check(
        "migration",
        (
            *("bench.migration", "--parts", "downtime", "--modes", "live", "--transports", "shm"),
            *("--tokens", str(DOWNTIME_TOKENS), "--batches", "idle", "--live-samples", "11"),
        ),
        (Value("downtime of a migration, in decode steps", _downtime, False),),
    ),
    Check(
        "overhead",
        (
            *("bench.plain_vllm.overhead", "--modes", "compiled", "--rounds", "1"),
            *("--loads", OVERHEAD_LOADS[0].name),
        ),
        (Value("throughput over that of `vllm serve`", _throughput, True),),
    ),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A value beside the committed one; None where either is missing.

    Attributes:
        elsewhere: the processor of the committed one, where it is another: they are not compared.
    """

    value: Value
    committed: float | None
    measured: float | None
    elsewhere: str | None = None

    @property
    def loss(self) -> float | None:
        """The factor by which it is worse; below 1 if it is better."""
        if self.committed is None or self.measured is None or self.elsewhere is not None:
            return None
        if self.value.is_higher_better:
            return self.committed / self.measured
        return self.measured / self.committed

    @property
    def is_lost(self) -> bool:
        """Whether it is worse by more than `MOST_LOSS`, could not be measured, or should have
        been committed."""
        if self.elsewhere is not None:
            return self.measured is None
        return self.loss is None or self.loss > MOST_LOSS

    def line(self) -> list[str]:
        """The line of the table."""
        numbers = ["" if x is None else f"{x:.3g}" for x in (self.committed, self.measured)]
        if self.measured is None:
            said = "**not measured**"
        elif self.elsewhere is not None:
            said = f"not compared: committed on another processor ({self.elsewhere})"
        elif self.loss is None:
            said = "**nothing committed**"
        else:
            said = f"{self.loss:.2f} times as bad" if self.loss > 1 else "as good"
            said = f"**{said}**" if self.is_lost else said
        return [self.value.name, *numbers, said]


def table(verdicts: Sequence[Verdict]) -> str:
    """All verdicts."""
    header = ("ratio", "committed", "now", "")
    return markdown_table(header, [each.line() for each in verdicts])
