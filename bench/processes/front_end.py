"""Front-end costs: processor time of a server's HTTP process for a request and for a token, beside
vLLM's own API server.

Both servers have one real engine with a tiny model, whose steps are so short that the front end has
most of the work. A first load has short answers, a second one long answers, so that both costs are
known. Both servers are up, and the loads go to one and to the other in turn: on a machine that
others share, costs change by half within minutes, which would hide the difference between servers
that are measured one after the other. Then emulated instances, with slow steps and large batches,
show whether the costs stay the same with many instances, many streams and several front ends.

    sterna bench front-end [--rounds 5] [--continue]

`bench/results/front_end.json` is written after every round. With py-spy on the path, the first
round also has a profile of each server's front end.
"""

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import psutil

from bench.common import py_spy, results_io
from bench.common.command import end_like_ctrl_c, ended
from bench.common.machine import ForeignLoad
from bench.common.tables import Row, rounded
from bench.paced.cases import tiny_model
from bench.plain_vllm.sides import ONE_INSTANCE, ONE_THREAD, QUIET, STERNA, VLLM
from bench.processes import front_end_report as report
from bench.processes.equal_streams import (
    LONG,
    SHORT,
    STEP_S,
    TINY_ENGINE,
    Load,
    allow_streams,
    send,
    slow_server,
)
from bench.serving.comparing import add_round_options, in_turn, rows_in_rounds
from bench.serving.measured import LOGS, Notes
from bench.serving.served import served
from sterna.errors import ConfigurationError

NAME = "front_end"

PAGE = results_io.ROOT / "docs" / "performance.md"

PARTS = ("real", "emulated")

TITLES: Mapping[str, str] = {STERNA: "_FrontendActor", VLLM: "bench.plain_vllm.vllm_command serve"}
"""What the command lines of the HTTP processes contain."""

NUM_WARM_UP = 64
"""Requests of one token before the first load."""

NUM_TURNS = 2
"""Of each load at each server in a round."""

PROFILE_S = 8


EMULATED: Sequence[tuple[int, int, Load]] = (
    (64, 1, Load("64 instances, 32 streams each", 2_048, 2_048, 64)),
    (64, 1, Load("64 instances, 5,000 streams", 5_000, 5_000, 32)),
    *(
        (16, number, Load(f"16 instances, {name} of 256 streams", 256 * number, 256 * number, 64))
        for number, name in ((1, "1 front end"), (2, "2 front ends"), (4, "4 front ends"))
    ),
)
"""Instances, front ends and streams. Of several front ends each has as many streams as a single
one, so that a token costs as much where more front ends serve more streams."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the results."""
    options = _parser().parse_args(argv)
    return ended(lambda: rows_in_rounds(NAME, options, _measure, report.markdown, PAGE))


def _measure(options: argparse.Namespace, rows: list[Row], folder: Path) -> None:
    notes = Notes()
    allow_streams(max(load.at_once for _, _, load in EMULATED))
    model = tiny_model(LOGS / "tiny-model")
    short, long, emulated = SHORT, LONG, EMULATED
    if options.quick:
        short, long = replace(SHORT, num_streams=64), replace(LONG, output_tokens=16)
        emulated = [(2, 2, Load("2 instances, 2 front ends", 8, 8, 4))]
    known = {row["seed"] for row in rows if "instances" not in row}
    known_loads = {row["load"] for row in rows}
    config = {"short": asdict(short), "long": asdict(long), "step_s": STEP_S, "turns": NUM_TURNS}

    def write() -> None:
        results_io.write(NAME, config, rows, folder, summary=report.summary(rows))

    for seed in range(1, options.rounds + 1) if "real" in options.parts else ():
        if seed in known:
            continue
        notes.say(f"round {seed} of {options.rounds}")
        rows += _real_rows(model, (short, long), seed, notes)
        write()
    for num_instances, num_frontends, load in emulated if "emulated" in options.parts else ():
        if load.name not in known_loads:
            notes.say(load.name)
            rows.append(_emulated_row(num_instances, num_frontends, load, notes))
            write()


def _real_rows(model: Path, loads: Sequence[Load], seed: int, notes: Notes) -> list[Row]:
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        urls, processes = {}, {}
        for side in in_turn((STERNA, VLLM), seed):
            log = LOGS / NAME / f"{side}-{seed}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            program, options = ONE_INSTANCE[side]
            server = served(
                (str(model), *TINY_ENGINE, *options),
                log=log,
                program=program,
                environment=ONE_THREAD | QUIET,
            )
            urls[side] = stack.enter_context(server)
            processes[side] = _processes(side)
            _warm_up(urls[side], loads[0])
        for load in loads:
            parts: dict[str, list[Row]] = {side: [] for side in urls}
            for turn in range(NUM_TURNS):
                for side in in_turn(list(urls), turn):
                    notes.say(side)
                    parts[side].append(_loaded(urls[side], load, processes[side], notes))
            rows += [{"side": side, "seed": seed, **_summed(parts[side])} for side in urls]
        if seed == 1 and (spy := py_spy.program()) is not None:
            for row in rows[-len(urls) :]:
                side = row["side"]
                row["profile"] = _profiled(urls[side], loads[-1], processes[side][0], spy, notes)
    return rows


def _warm_up(url: str, load: Load) -> None:
    """Send the first requests, with which processes import modules and fill caches."""
    asyncio.run(send(url, replace(load, num_streams=NUM_WARM_UP, output_tokens=1)))


def _summed(parts: Sequence[Row]) -> Row:
    """The turns of one server under one load."""
    counted = ("n", "failed", "tokens", "chunks", "duration_s", "cpu_s")
    sums = {name: sum(each[name] for each in parts) for name in counted}
    largest = {name: max(each[name] for each in parts) for name in ("most_open", "foreign_cores")}
    return {**parts[-1], **sums, **largest}


def _emulated_row(num_instances: int, num_frontends: int, load: Load, notes: Notes) -> Row:
    log = LOGS / NAME / f"emulated-{num_instances}-{num_frontends}-{load.num_streams}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with slow_server(num_instances, num_frontends, load, log) as url:
        processes = _processes(STERNA)
        _warm_up(url, load)
        row = _loaded(url, load, processes, notes)
    return {
        "side": STERNA,
        "seed": 1,
        "instances": num_instances,
        "front_ends": num_frontends,
    } | row


def _loaded(url: str, load: Load, processes: Sequence[psutil.Process], notes: Notes) -> Row:
    others = ForeignLoad()
    used_s = _cpu_s(processes)
    sent = asyncio.run(send(url, load))
    cpu_s = _cpu_s(processes) - used_s
    num_tokens = (load.num_streams - sent.num_failed) * load.output_tokens
    tokens_per_s = num_tokens / sent.duration_s
    notes.say(f"{load.name}: {tokens_per_s:.0f} tokens/s, {cpu_s:.2f} s of the front end")
    return {
        "load": load.name,
        "n": load.num_streams,
        "failed": sent.num_failed,
        "tokens": num_tokens,
        "chunks": sent.num_chunks,
        "most_open": sent.most_open,
        "duration_s": rounded(sent.duration_s),
        "cpu_s": rounded(cpu_s),
        "memory_bytes": sum(each.memory_info().rss for each in processes),
        "foreign_cores": round(others.cores(), 2),
        "commit": results_io.measured_commit(),
    }


def _processes(side: str) -> list[psutil.Process]:
    """The HTTP processes of the server that this process has started."""
    found = [
        each
        for each in psutil.Process().children(recursive=True)
        if TITLES[side] in " ".join(each.cmdline())
    ]
    assert found, f"no process of {side} has the title {TITLES[side]}"
    return found


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(each.cpu_times()[:2]) for each in processes)


def _profiled(
    url: str, load: Load, process: psutil.Process, spy: str, notes: Notes
) -> dict[str, float]:
    """The shares of the front end's code during the load, by py-spy; empty without its leave."""
    try:
        with py_spy.recording(spy, {"front end": process.pid}, PROFILE_S) as stacks:
            asyncio.run(send(url, load))
    except ConfigurationError as error:
        notes.say(str(error))
        return {}
    return report.shares(stacks["front end"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sterna bench front-end",
        description="Measure the processor time of front ends for a request and for a token, "
        "beside vLLM's own API server.",
        epilog="docs/performance.md explains what is measured.",
    )
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART",
        help=f"some of: {', '.join(PARTS)} (default: both)",
    )  # fmt: skip
    add_round_options(parser, quick="few streams, as a check")
    return parser


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    end_like_ctrl_c()
    sys.exit(main())
