"""Overhead of one instance that Sterna runs, beside plain `vllm serve`.

Both servers have the same model and the same options of vLLM, once with the compiled model and once
without compilation. Both are up, and one of them runs at a time (`turns`): vLLM's own client sends
each load to one and then to the other, and takes turns in which is first. A round starts both
again, since two starts of the same server differ by some percent, and has other requests. A pair of
runs during which the machine became slower or faster is measured again, and does not count if it
did so each time; `--continue` measures it once more.

    sterna bench overhead [--modes compiled eager] [--rounds 5] [--continue]

`bench/results/overhead.json` (`overhead_cuda.json` on a machine with a CUDA device) is written
after every run.
"""

import argparse
import contextlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import psutil

from bench.common import results_io
from bench.common.command import end_like_ctrl_c, ended, positive
from bench.common.machine import ForeignLoad, tree_cpu_s, tree_memory_bytes
from bench.common.pace import Pace, at_one_speed
from bench.common.tables import Row, rounded
from bench.plain_vllm import overhead_report
from bench.plain_vllm.sides import ENGINE_OPTIONS, FLOAT32, ONE_INSTANCE, QUIET
from bench.plain_vllm.turns import Turns
from bench.plain_vllm.vllm_client import Load, measure
from bench.serving.comparing import add_round_options, in_turn, rows_in_rounds
from bench.serving.measured import LOGS, MAX_FOREIGN_CORES, Notes
from bench.serving.served import served
from sterna.demo_model.small_model import default_cache_folder, ensure_small_model
from sterna.errors import ConfigurationError

NAME = "overhead"

PAGE = results_io.ROOT / "docs" / "performance.md"

MODES: Mapping[str, tuple[str, ...]] = {"compiled": (), "eager": ("--enforce-eager",)}
"""The options of vLLM in each mode."""

LOADS = (
    Load("128 tokens, saturated", 128, 64, num_requests=64, at_once=32),
    Load("128 tokens, half the rate", 128, 64, num_requests=40, at_once=None),
    Load("128 tokens, saturated, a core busy", 128, 64, 64, at_once=32, with_busy_core=True),
    Load("1,024 tokens, saturated", 1_024, 64, num_requests=24, at_once=12),
    Load("1,024 tokens, half the rate", 1_024, 64, num_requests=16, at_once=None),
    Load("128 tokens, one at a time", 128, 24, num_requests=40, at_once=1),
)
"""In this order: half the rate is that of the saturated load before it, as measured first. Of
requests one at a time both servers compute the same batches, so that these tell a few ms."""

IDLE = "idle"
IDLE_S = 30
"""How long a server without requests is watched, after half as long: one that goes on after a stop
makes up for what it has missed."""

MEMORY = ("--kv-cache-memory-bytes", "1G")
"""Enough for all requests of a load at once."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the results."""
    options = _parser().parse_args(argv)
    name = results_io.named_for_device(NAME)
    page = PAGE if name == NAME else None
    return ended(lambda: rows_in_rounds(name, options, _measure, overhead_report.markdown, page))


def _measure(options: argparse.Namespace, rows: list[Row], folder: Path) -> None:
    is_usual = options.model is None and not options.engine_options and options.times == 1
    if folder == results_io.RESULTS and not is_usual:
        raise ConfigurationError(
            "--model, --engine-options and --times need --results: others are kept in bench/results"
        )
    notes = Notes()
    model = options.model
    if model is None:
        model = ensure_small_model(default_cache_folder(os.environ), notes.say)
    name = results_io.named_for_device(NAME)
    engine_options = (
        *(*ENGINE_OPTIONS, *MEMORY),
        *(FLOAT32 if name == NAME else ()),
        *shlex.split(options.engine_options),
    )
    loads = [
        replace(each, num_requests=options.times * each.num_requests)
        for each in LOADS
        if each.name in options.loads
    ]
    idle_s = options.idle_seconds
    for each in loads:
        if each.has_rate and not _has_saturated(loads, each):
            raise ConfigurationError(
                f"--loads: {each.name!r} needs a saturated load of as many tokens, whose rate it "
                "halves"
            )
    if options.quick:
        loads = [replace(each, num_requests=4, output_tokens=8) for each in LOADS[:2]]
        idle_s = 2.0
    config = {
        "model": model.name,
        "engine_options": engine_options,
        "rounds": options.rounds,
        "loads": [asdict(each) for each in loads],
        "idle_s": idle_s,
    }
    # Both runs of a pair follow one start: a run that was interrupted between them is done again.
    rows[:] = overhead_report.paired(rows)
    pace = None if options.quick else Pace(None, notes.say, is_held=False)
    measurements = [
        _Measurement(mode, model, (*engine_options, *MODES[mode]), loads, idle_s, rows, notes, pace)
        for mode in options.modes
    ]
    for seed in range(1, options.rounds + 1):
        for measurement in measurements:
            for _ in measurement.of_round(seed, options.rounds):
                results_io.write(name, config, rows, folder, summary=overhead_report.summary(rows))


def _has_saturated(loads: Sequence[Load], load: Load) -> bool:
    return any(
        each.is_saturated and not each.with_busy_core and each.prompt_tokens == load.prompt_tokens
        for each in loads
    )


class _Measurement:
    """All runs of one mode.

    Args:
        options: of vLLM.
        rows: get the rows that they lack.
        pace: None: the machine's speed is not looked at.
    """

    def __init__(
        self,
        mode: str,
        model: Path,
        options: Sequence[str],
        loads: Sequence[Load],
        idle_s: float,
        rows: list[Row],
        notes: Notes,
        pace: Pace | None,
    ) -> None:
        self._pace = pace
        self._mode = mode
        self._model = model
        self._options = options
        self._loads = loads
        self._idle_s = idle_s
        self._rows = rows
        self._notes = notes
        self._urls: dict[str, str] = {}
        self._start_s: dict[str, float] = {}

    def of_round(self, seed: int, num_rounds: int) -> Iterator[None]:
        """Run what the rows lack of this round; yields after each pair of runs.

        A pair of an earlier program, during which the machine's speed changed, is run once more.
        """
        known = overhead_report.counted(self._rows, self._mode, seed)
        lacking = [
            number
            for number, name in enumerate([*(each.name for each in self._loads), IDLE])
            if name not in known
        ]
        if not lacking:
            return
        with Turns() as turns:
            for side in in_turn(list(ONE_INSTANCE), seed):
                self._start(turns, side)
            for number in lacking:
                self._notes.say(f"round {seed} of {num_rounds}: {self._mode}")
                pair = self._pair(turns, seed, number)
                self._rows[:] = overhead_report.replaced(self._rows, pair)
                yield

    def _pair(self, turns: Turns, seed: int, number: int) -> list[Row]:
        """A run of each server, at the same speed of the machine as far as possible."""

        def run(side: str, attempt: int) -> Row:
            with turns.alone(side) as server:
                return self._row(side, server, seed, number, attempt)

        sides = in_turn(list(ONE_INSTANCE), seed + number)
        rows, is_steady = at_one_speed(self._pace, sides, run, self._notes.say)
        return [{**row, "is_steady": is_steady} for row in rows]

    def _row(self, side: str, server: psutil.Process, seed: int, number: int, attempt: int) -> Row:
        labels = {
            "mode": self._mode,
            "side": side,
            "seed": seed,
            "commit": results_io.measured_commit(),
        }
        if number == len(self._loads):
            return {**labels, **self._idle(side, server)}
        # No two runs have the same prompts, which a server may have in its cache.
        of_run = 1_000 * seed + 100 * (attempt - 1) + number
        return {**labels, **self._loaded(side, server, self._loads[number], of_run)}

    def _rows_of_mode(self) -> list[Row]:
        return [row for row in self._rows if row["mode"] == self._mode]

    def _start(self, turns: Turns, side: str) -> None:
        log = LOGS / NAME / f"{side}-{self._mode}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        program, options = ONE_INSTANCE[side]
        begun_s = time.monotonic()
        arguments = (str(self._model), *self._options, *options)
        server = served(arguments, log=log, program=program, environment=QUIET)
        self._urls[side] = turns.start(side, server)
        self._start_s[side] = time.monotonic() - begun_s
        self._notes.say(f"{side}, {self._mode}: start {self._start_s[side]:.1f} s")

    def _rate(self, load: Load) -> float | None:
        """Half of the requests a second that were measured first for prompts of this length, where
        the machine kept its speed; the rate of the load's other rounds, where that pair was run
        once more."""
        if not load.has_rate:
            return None
        for row in self._rows_of_mode():
            if row["load"] == load.name:
                return float(row["rate"])
        saturated = [
            row
            for row in self._rows_of_mode()
            if row.get("is_saturated")
            and not row["with_busy_core"]
            and row["prompt_tokens"] == load.prompt_tokens
        ]
        per_s: float = (overhead_report.steady(saturated) or saturated)[0]["requests_per_s"]
        return per_s / 2

    def _loaded(self, side: str, server: psutil.Process, load: Load, seed: int) -> Row:
        rate, others = self._rate(load), ForeignLoad()
        used: Row = {}
        during = _counted(used, server, with_busy_core=load.with_busy_core)
        row = measure(self._urls[side], self._model, load, rate=rate, seed=seed, during=during)
        row |= used
        row["foreign_cores"] = round(others.cores(), 2)
        self._notes.say(
            f"{side}: {load.name}: {row['tokens_per_s']:.1f} tokens/s,"
            f" TTFT {row['ttft_mean_ms']:.1f}, TPOT {row['tpot_mean_ms']:.2f} ms"
        )
        if row["foreign_cores"] > MAX_FOREIGN_CORES and not load.with_busy_core:
            self._notes.say(f"not quiet: other programs kept {row['foreign_cores']} cores busy")
        return {
            "load": load.name,
            "prompt_tokens": load.prompt_tokens,
            "is_saturated": load.is_saturated,
            "with_busy_core": load.with_busy_core,
            "rate": rounded(rate),
            **row,
        }

    def _idle(self, side: str, server: psutil.Process) -> Row:
        time.sleep(self._idle_s / 2)
        used_s = tree_cpu_s(server)
        time.sleep(self._idle_s)
        idle_cores = (tree_cpu_s(server) - used_s) / self._idle_s
        self._notes.say(f"{side}: idle {60 * idle_cores:.2f} s a minute")
        return {
            "load": IDLE,
            "start_s": rounded(self._start_s[side]),
            "idle_cores": rounded(idle_cores),
            "memory_bytes": tree_memory_bytes(server),
        }


@contextlib.contextmanager
def _counted(used: Row, server: psutil.Process, *, with_busy_core: bool) -> Iterator[None]:
    """Enter the processor time that the server takes within the context, and the part of a core
    that another program gets meanwhile which would keep one busy."""
    begun_s, used_s = time.monotonic(), tree_cpu_s(server)
    program = None
    if with_busy_core:
        program = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
        used["server_cpu_s"] = rounded(tree_cpu_s(server) - used_s)
        if program is not None:
            got_s = sum(psutil.Process(program.pid).cpu_times()[:2])
            used["busy_program_cores"] = round(got_s / (time.monotonic() - begun_s), 3)
    finally:
        if program is not None:
            program.kill()
            program.wait()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"sterna bench {NAME}",
        description="Compare one instance that Sterna runs with plain `vllm serve`, on the small "
        "model.",
        epilog="docs/performance.md explains what is measured.",
    )
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=list(MODES),
        default=list(MODES),
        metavar="MODE",
        help=f"some of: {', '.join(MODES)} (default: all)",
    )
    parser.add_argument(
        "--loads",
        nargs="+",
        choices=[each.name for each in LOADS],
        default=[each.name for each in LOADS],
        metavar="LOAD",
        help="some of: " + "; ".join(each.name for each in LOADS) + " (default: all)",
    )
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="a model's files in place of the small model's"
    )
    parser.add_argument(
        "--engine-options", default="", metavar="OPTIONS", help="more options of vLLM"
    )
    parser.add_argument(
        "--times", type=positive, default=1, metavar="N", help="N times as many requests"
    )
    parser.add_argument(
        "--idle-seconds",
        type=positive,
        default=IDLE_S,
        metavar="SECONDS",
        help="how long a server without requests is watched (default: %(default)s)",
    )
    add_round_options(parser, quick="two loads of few requests, as a check")
    return parser


if __name__ == "__main__":
    end_like_ctrl_c()
    sys.exit(main())
