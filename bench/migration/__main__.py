"""Measures live migration against its two baselines: the paper's Figure 10, on real instances.

`bench/results/migration.json` has a row for each cell (mode, transport, length, idle or busy); on a
machine with a CUDA device it is `migration_cuda.json`, and instances share the device;
`bench/results/migration_cost.json` has the cost for requests that do not migrate. Read
downtimes against `decode_step_ms`: a client that gets a token every 40 ms does not notice 10 ms.
Run it on a quiet machine; everything here shares its cores.

    sterna bench migration [--quick] [--transports tcp shm] [--tokens 1024 8192] ...
    sterna bench migration --model FOLDER --engine-options "--load-format dummy"

An interrupted run continues when it is started again with the same options.
"""

import argparse
import asyncio
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common import results_io
from bench.common.command import Progress
from bench.common.machine import ForeignLoad
from bench.common.pages import Goal, write_marked
from bench.migration import cost as migration_cost
from bench.migration import downtime_plot
from bench.migration import report as migration_report
from bench.migration.cluster_driver import Driver, local_ray
from bench.migration.goals import cost_goals, goals
from bench.migration.plan import (
    BATCHES,
    MODES,
    TOKENS,
    TRANSPORTS,
    Group,
    Plan,
    Unfinished,
    groups,
    in_order,
)
from bench.migration.samples import row
from bench.migration.session import BATCH_SIZE, BATCH_TOKENS, ENGINE_OPTIONS, Session
from sterna.cli.serve.engine_options import SMALL_MODEL_NAME
from sterna.cli.serve.read_options import parse
from sterna.cli.serve.serve_command import engine_environment
from sterna.config import MigrationConfig, TransportConfig
from sterna.migration.messages import Mode

PAGE = results_io.ROOT / "docs" / "benchmarks.md"
UNFINISHED = results_io.ROOT / ".cache" / "bench"

QUICK = Plan(
    transports=("shm",),
    tokens=(256, 1024),
    num_samples=3,
    num_live_samples=5,
    num_recompute_samples=2,
)
PARTS = ("downtime", "cost")


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    if options.report:
        _write_page()
        return 0
    plan = QUICK if options.quick else _plan(options)
    served = Served(options.model, tuple(shlex.split(options.engine_options)))
    folder = UNFINISHED / "quick" if options.quick else options.results
    if served != Served() and folder.resolve() == results_io.RESULTS:
        print("--model and --engine-options need --results: others are kept there", file=sys.stderr)
        return 2
    try:
        with local_ray():
            args = parse(["serve", *served.arguments])
            config = _config(plan, served, args.dtype)
            unfinished = Unfinished(UNFINISHED, config, quick=options.quick, resume=options.resume)
            benchmark = _Benchmark(plan, args, config, folder, unfinished)
            if "downtime" in options.parts:
                benchmark.measure_downtimes()
            if "cost" in options.parts:
                benchmark.measure_cost(quick=options.quick)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sterna bench migration",
        description="Measures downtime and cost of migrations between real instances.",
    )
    plan = Plan()
    parser.add_argument("--quick", action="store_true", help="a few cells, kept out of the results")
    parser.add_argument(
        "--report", action="store_true", help="measure nothing; write the page again"
    )
    parser.add_argument(
        "--model", metavar="FOLDER", help="a model's files in place of the small model's"
    )
    parser.add_argument(
        "--engine-options", default="", metavar="OPTIONS", help="more options of vLLM"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=TRANSPORTS)
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--batches", nargs="+", choices=BATCHES, default=BATCHES)
    parser.add_argument(
        "--samples",
        type=int,
        default=plan.num_samples,
        help="migrations of each cell (default: %(default)s)",
    )
    parser.add_argument(
        "--live-samples",
        type=int,
        default=plan.num_live_samples,
        help="the same for live migration (default: %(default)s)",
    )
    parser.add_argument(
        "--recompute-samples",
        type=int,
        default=plan.num_recompute_samples,
        help="the same for recompute (default: %(default)s)",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=results_io.RESULTS,
        metavar="FOLDER",
        help="folder of results; page and plots are written from the default folder only",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue an interrupted run even if the code or the options differ",
    )
    return parser


def _plan(options: argparse.Namespace) -> Plan:
    return Plan(
        modes=options.modes,
        transports=options.transports,
        tokens=options.tokens,
        batches=options.batches,
        num_samples=options.samples,
        num_live_samples=options.live_samples,
        num_recompute_samples=options.recompute_samples,
    )


@dataclass(frozen=True, slots=True)
class Served:
    """What the instances serve.

    Attributes:
        model: the folder of its files; None: the small model.
        options: of vLLM, beside those of every run.
    """

    model: str | None = None
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The model's name in results, without its path."""
        return SMALL_MODEL_NAME if self.model is None else Path(self.model).name

    @property
    def arguments(self) -> list[str]:
        """The arguments of `sterna serve`."""
        return [*([self.model] if self.model else []), *ENGINE_OPTIONS, *self.options]


class _Benchmark:
    """One run over a plan; results are kept after every length."""

    def __init__(
        self,
        plan: Plan,
        args: argparse.Namespace,
        config: dict[str, Any],
        folder: Path,
        unfinished: Unfinished,
    ) -> None:
        self._plan = plan
        self._folder = folder
        self._unfinished = unfinished
        self._name = results_io.named_for_device("migration")
        self._config = config
        self._args = args
        self._say = Progress(sys.stdout)

    # ---------------------------------------------------------------------------- downtimes

    def measure_downtimes(self) -> None:
        """Measure the rest of the plan, then write results, table and plot."""
        self._rows = self._unfinished.rows()
        if self._rows:
            self._say(f"going on with {len(self._rows)} rows of an interrupted run")
        for group in groups(self._plan, self._rows):
            asyncio.run(self._measure_group(group))
        rows = in_order(self._plan, self._rows)
        path = results_io.write(self._name, self._config, rows, self._folder)
        self._unfinished.forget()
        self._say(f"written: {path}")
        self._say_goals(goals(rows))
        if self._writes_page():
            _write_page()
        document = results_io.read(self._name, self._folder)
        try:
            migration_report.plot(document, path.with_suffix(".svg"))
            migration_report.plot_phases(document, self._folder / f"{self._name}_phases.svg")
            if self._writes_page():
                downtime_plot.draw(document, self._folder)
        except ImportError:
            self._say("no plot, because matplotlib is not installed")

    async def _measure_group(self, group: Group) -> None:
        batch = "busy" if group.busy else "idle"
        self._say(f"starting two instances over {group.transport}, {batch}")
        driver = await self._start(TransportConfig(kind=group.transport))
        session = Session(driver, busy=group.busy, seed=1)
        await session.warm_up(
            sorted({Mode(c.mode) for cells in group.cells for c in cells}, key=str)
        )
        for cells in group.cells:
            counts = {Mode(cell.mode): self._plan.count(cell) for cell in cells}
            others = ForeignLoad()
            taken = await session.samples(cells[0].tokens, counts)
            foreign_cores = others.cores()
            if foreign_cores > migration_report.MAX_FOREIGN_CORES:
                self._say(f"not quiet: other programs kept {foreign_cores:.2f} cores busy")
            for cell in cells:
                found = row(cell, taken[Mode(cell.mode)], foreign_cores)
                self._rows.append(found)
                self._say(_line(found))
            self._unfinished.keep(self._rows)
        await driver.close()

    # --------------------------------------------------------------------------------- cost

    def measure_cost(self, *, quick: bool) -> None:
        """Measure the cost of migration for the requests that stay."""
        rows = []
        transports = list(migration_cost.COPY_TRANSPORTS.items())
        for name, transport in transports[:1] if quick else transports:
            rows.append(asyncio.run(self._measure_copy(name, transport)))
            self._say(json.dumps(rows[-1]))
        found = asyncio.run(self._measure_throughput(2 if quick else 12))
        for each in found:
            self._say(json.dumps(each))
        name = results_io.named_for_device("migration_cost")
        path = results_io.write(name, self._config, rows + found, self._folder)
        self._say(f"written: {path}")
        self._say_goals(cost_goals(found))
        if self._writes_page():
            _write_page()

    async def _measure_copy(self, name: str, transport: TransportConfig) -> Any:
        self._say(f"copying: {name}")
        driver = await self._start(transport)
        found = await migration_cost.copy_row(driver, name, transport, self._plan.num_samples)
        await driver.close()
        return found

    async def _measure_throughput(self, num_pairs: int) -> list[dict[str, Any]]:
        self._say(f"throughput, {num_pairs} pairs of runs")
        driver = await self._start(TransportConfig())
        found = await migration_cost.throughput_rows(driver, num_pairs)
        await driver.close()
        return found

    # -------------------------------------------------------------------------------- common

    async def _start(self, transport: TransportConfig) -> Driver:
        driver = Driver(self._args, engine_environment(), transport)
        await driver.start()
        return driver

    def _writes_page(self) -> bool:
        return self._folder.resolve() == results_io.RESULTS and self._name == "migration"

    def _say_goals(self, found: Sequence[Goal]) -> None:
        for goal in found:
            mark = "reached" if goal.is_reached else "MISSED "
            self._say(f"{mark} {goal.name}: {goal.found}; {goal.bound}")


def _write_page() -> None:
    """Update the page's tables from all results that there are."""
    try:
        document = results_io.read("migration")
    except FileNotFoundError:
        return
    try:
        cost = results_io.read("migration_cost")
    except FileNotFoundError:
        cost = None
    text = migration_report.markdown(document, cost)
    write_marked(PAGE, "sterna bench migration", text)


def _config(plan: Plan, served: Served, dtype: str) -> dict[str, Any]:
    transport, migration = TransportConfig(), MigrationConfig()
    return {
        "model": served.name,
        "engine_options": [*ENGINE_OPTIONS, *served.options],
        "dtype": dtype,
        "num_instances": 2,
        "busy": f"{BATCH_SIZE} more requests of {BATCH_TOKENS} tokens on each instance",
        "num_samples": plan.num_samples,
        "num_live_samples": plan.num_live_samples,
        "num_recompute_samples": plan.num_recompute_samples,
        "chunk_bytes": transport.chunk_bytes,
        "bandwidth_share": transport.bandwidth_share,
        "last_stage_max_blocks": migration.last_stage_max_blocks,
    }


def _line(found: dict[str, Any]) -> str:
    migrating = found["decode_step_migrating_ms"]
    return (
        f"{found['mode']:9} {found['transport'] or '-':4} {found['tokens']:5} tokens "
        f"{'busy' if found['busy'] else 'idle'}: downtime {found['downtime_ms']['median']:8.1f} ms "
        f"(p99 {found['downtime_ms']['p99']:8.1f}), step {found['decode_step_ms']['median']:.1f} ms"
        + (f", migrating {migrating['median']:.1f} ms" if migrating else "")
        + f", {found['stages']} stages, n={found['n']}"
    )


if __name__ == "__main__":
    sys.exit(main())
