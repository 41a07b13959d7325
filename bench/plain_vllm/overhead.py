"""The overhead of one instance that Sterna runs, beside plain `vllm serve`.

Both servers have the same model and the same options of vLLM; vLLM's own client sends the same
requests to one after the other. A round has each server once with the compiled model and once
without compilation, and other requests than the other rounds; the rounds take turns in which
server is first.

    sterna bench overhead [--modes compiled eager] [--rounds 5] [--continue]

`bench/results/overhead.json` (`overhead_cuda.json` on a machine with a CUDA device) is written
after every server.
"""

import argparse
import contextlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.common import results_io
from bench.common.command import end_like_ctrl_c, ended, positive
from bench.common.machine import ForeignLoad, descendants_cpu_s, descendants_memory_bytes
from bench.common.tables import Row, rounded
from bench.plain_vllm import overhead_report
from bench.plain_vllm.sides import STERNA, VLLM, VLLM_PROGRAM
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
    Load("128 tokens, saturated", 128, 64, num_requests=96, at_once=32),
    Load("128 tokens, half the rate", 128, 64, num_requests=60, at_once=None),
    Load("128 tokens, saturated, a core busy", 128, 64, 64, at_once=32, with_busy_core=True),
    Load("1,024 tokens, saturated", 1_024, 64, num_requests=32, at_once=16),
    Load("1,024 tokens, half the rate", 1_024, 64, num_requests=24, at_once=None),
)
"""In this order: half the rate is that of the saturated load before it, as measured first."""

IDLE = "idle"
IDLE_S = 60
"""How long a server without requests is watched."""

ENGINE_OPTIONS = (
    *("--served-model-name", "small", "--max-model-len", "2048", "--block-size", "32"),
    *("--max-num-batched-tokens", "512", "--max-num-seqs", "32"),
    *("--kv-cache-memory-bytes", "1G"),
)
"""Options of vLLM. The memory is enough for all requests of a load at once."""

SIDES: Mapping[str, tuple[Sequence[str] | None, tuple[str, ...]]] = {
    VLLM: (VLLM_PROGRAM, ()),
    STERNA: (None, ("--instances", "1")),
}
"""The program of each server, None for `sterna serve`, and its options."""


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
    more = tuple(shlex.split(options.engine_options))
    loads = [
        replace(each, num_requests=options.times * each.num_requests)
        for each in LOADS
        if each.name in options.loads
    ]
    idle_s = options.idle_seconds
    for each in loads:
        if not each.is_saturated and not _has_saturated(loads, each):
            raise ConfigurationError(
                f"--loads: {each.name!r} needs a saturated load of as many tokens, whose rate it "
                "halves"
            )
    if options.quick:
        loads = [replace(each, num_requests=4, output_tokens=8) for each in LOADS[:2]]
        idle_s = 2.0
    known = {(row["mode"], row["side"], row["seed"]) for row in rows}
    for seed in range(1, options.rounds + 1):
        for mode in options.modes:
            for name in in_turn(list(SIDES), seed):
                if (mode, name, seed) in known:
                    continue
                notes.say(f"round {seed} of {options.rounds}: {name}, {mode}")
                server = _Server(name, mode, seed, (*ENGINE_OPTIONS, *MODES[mode], *more))
                rates = _rates(rows, mode)
                rows += _rows_of_server(server, model, loads, rates, idle_s, notes)
                config = {
                    "model": model.name,
                    "engine_options": [*ENGINE_OPTIONS, *more],
                    "rounds": options.rounds,
                    "loads": [asdict(each) for each in loads],
                }
                results_io.write(
                    results_io.named_for_device(NAME),
                    config,
                    rows,
                    folder,
                    summary=overhead_report.summary(rows),
                )


def _has_saturated(loads: Sequence[Load], load: Load) -> bool:
    return any(
        each.is_saturated and not each.with_busy_core and each.prompt_tokens == load.prompt_tokens
        for each in loads
    )


def _rates(rows: Sequence[Row], mode: str) -> dict[int, float]:
    """Half of the requests a second that were measured first, by the length of the prompts."""
    rates: dict[int, float] = {}
    for row in rows:
        if row["mode"] == mode and row.get("is_saturated") and not row["with_busy_core"]:
            rates.setdefault(row["prompt_tokens"], row["requests_per_s"] / 2)
    return rates


@dataclass(frozen=True, slots=True)
class _Server:
    side: str
    mode: str
    seed: int
    options: Sequence[str]

    @property
    def log(self) -> Path:
        return LOGS / NAME / f"{self.side}-{self.mode}-{self.seed}.log"


def _rows_of_server(
    server: _Server,
    model: Path,
    loads: Sequence[Load],
    rates: dict[int, float],
    idle_s: float,
    notes: Notes,
) -> list[Row]:
    """Start the server and measure it under each load.

    Args:
        rates: requests a second of the loads at half the rate, by the length of prompts in tokens;
            those that are missing are entered.
    """
    program, options = SIDES[server.side]
    labels = {
        "mode": server.mode,
        "side": server.side,
        "seed": server.seed,
        "commit": results_io.measured_commit(),
    }
    rows: list[Row] = []
    server.log.parent.mkdir(parents=True, exist_ok=True)
    begun_s = time.monotonic()
    arguments = (str(model), *server.options, *options)
    with served(arguments, log=server.log, program=program) as url:
        start_s = time.monotonic() - begun_s
        for number, load in enumerate(loads):
            rate = None if load.is_saturated else rates[load.prompt_tokens]
            others, used_s = ForeignLoad(), descendants_cpu_s()
            with _busy_core() if load.with_busy_core else contextlib.nullcontext():
                row = measure(url, model, load, rate=rate, seed=1_000 * server.seed + number)
            # The other program has ended, and its time counts no longer.
            row["server_cpu_s"] = rounded(descendants_cpu_s() - used_s)
            row["foreign_cores"] = round(others.cores(), 2)
            notes.say(
                f"{load.name}: {row['tokens_per_s']:.1f} tokens/s, TTFT {row['ttft_mean_ms']:.1f},"
                f" TPOT {row['tpot_mean_ms']:.2f} ms"
            )
            if row["foreign_cores"] > MAX_FOREIGN_CORES and not load.with_busy_core:
                notes.say(f"not quiet: other programs kept {row['foreign_cores']} cores busy")
            if load.is_saturated and not load.with_busy_core:
                rates.setdefault(load.prompt_tokens, row["requests_per_s"] / 2)
            rows.append(
                {
                    **labels,
                    "load": load.name,
                    "prompt_tokens": load.prompt_tokens,
                    "is_saturated": load.is_saturated,
                    "with_busy_core": load.with_busy_core,
                    "rate": rounded(rate),
                    **row,
                }
            )
        used_s = descendants_cpu_s()
        time.sleep(idle_s)
        idle_cores = (descendants_cpu_s() - used_s) / idle_s
        memory = descendants_memory_bytes()
    notes.say(f"start {start_s:.1f} s, idle {60 * idle_cores:.2f} s a minute")
    rows.append(
        {
            **labels,
            "load": IDLE,
            "start_s": rounded(start_s),
            "idle_cores": rounded(idle_cores),
            "memory_bytes": memory,
        }
    )
    return rows


@contextlib.contextmanager
def _busy_core() -> Iterator[None]:
    """Keep one core busy for as long as the context lasts."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


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
