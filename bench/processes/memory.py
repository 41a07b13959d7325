"""Memory of idle servers, of each further instance, and of each open stream.

Servers of one and two replicas of the small model, by kind of process, beside plain `vllm serve`
and vLLM's data parallelism; each has answered a few requests. Then emulated instances, which hold
no model, with thousands of streams.

    sterna bench memory [--rounds 5] [--continue]

`bench/results/memory.json` is written after every server.
"""

import argparse
import asyncio
import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil

from bench.common import results_io
from bench.common.command import end_like_ctrl_c, ended
from bench.common.machine import process_memory_bytes
from bench.common.tables import Row
from bench.plain_vllm.sides import REPLICA_OPTIONS, SIDES, STERNA, VLLM_LEAN
from bench.processes import memory_report as report
from bench.processes.equal_streams import Load, allow_streams, send, slow_server
from bench.serving.comparing import add_round_options, in_turn, rows_in_rounds
from bench.serving.measured import LOGS, Notes
from bench.serving.served import served
from sterna.demo_model.small_model import default_cache_folder, ensure_small_model

NAME = "memory"

PAGE = results_io.ROOT / "docs" / "performance.md"

SETTLE_S = 10.0
"""After the last answer, before an idle server is looked at."""

LOOK_INTERVAL_S = 1.0
"""Between two looks at a server with streams, of which the largest counts."""

NUMS_STREAMS = (100, 1_000, 5_000)
STREAM_TOKENS = 32

WARM_UP = Load("warm-up", 8, 4, 4)
"""The first answers bring modules and caches into memory."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the results."""
    options = _parser().parse_args(argv)
    return ended(lambda: rows_in_rounds(NAME, options, _measure, report.markdown, PAGE))


def _measure(options: argparse.Namespace, rows: list[Row], folder: Path) -> None:
    notes = Notes()
    model = ensure_small_model(default_cache_folder(os.environ), notes.say)
    nums_streams = (8,) if options.quick else NUMS_STREAMS
    allow_streams(max(nums_streams))
    known = {(row["seed"], row["side"], row["replicas"], row["streams"]) for row in rows}

    def add(row: Row) -> None:
        rows.append({**row, "commit": results_io.measured_commit()})
        config = {"rounds": options.rounds, "engine_options": REPLICA_OPTIONS}
        results_io.write(NAME, config, rows, folder, summary=report.summary(rows))

    for seed in range(1, options.rounds + 1):
        for replicas in (1,) if options.quick else (1, 2):
            for side in in_turn((VLLM_LEAN, STERNA), seed):
                if (seed, side, replicas, 0) not in known:
                    notes.say(f"round {seed} of {options.rounds}: {replicas} of {side}")
                    add(_idle_row(side, replicas, seed, model))
        for num_streams in nums_streams:
            if (seed, STERNA, report.EMULATED, num_streams) not in known:
                notes.say(f"round {seed} of {options.rounds}: {num_streams} streams")
                add(_streams_row(num_streams, seed))


def _idle_row(side: str, replicas: int, seed: int, model: Path) -> Row:
    of_side = SIDES[side]
    server = served(
        (str(model), *REPLICA_OPTIONS, "--enforce-eager", *of_side.replica_options(replicas)),
        log=_log(f"{side}-{replicas}"),
        program=of_side.program,
        environment=of_side.environment(replicas),
    )
    with server as url:
        asyncio.run(send(url, WARM_UP))
        time.sleep(SETTLE_S)
        return _row(side, replicas, 0, seed, _memory_bytes())


def _streams_row(num_streams: int, seed: int) -> Row:
    load = replace(WARM_UP, num_streams=num_streams, at_once=num_streams)
    load = replace(load, output_tokens=STREAM_TOKENS)
    with slow_server(report.EMULATED, 1, load, _log(f"streams-{num_streams}")) as url:
        asyncio.run(send(url, WARM_UP))
        time.sleep(SETTLE_S)
        before = _memory_bytes()
        with ThreadPoolExecutor(1) as pool:
            is_over = threading.Event()
            answering = pool.submit(asyncio.run, send(url, load))
            answering.add_done_callback(lambda _: is_over.set())
            most = before
            while not is_over.wait(LOOK_INTERVAL_S):
                now = _memory_bytes()
                if sum(now.values()) > sum(most.values()):
                    most = now
            sent = answering.result()
    row = _row(STERNA, report.EMULATED, num_streams, seed, most)
    return {
        **row,
        "failed": sent.num_failed,
        "most_open": sent.most_open,
        "before_bytes": before,
    }


def _row(side: str, replicas: int, streams: int, seed: int, memory: dict[str, int]) -> Row:
    labels = {"seed": seed, "side": side, "replicas": replicas, "streams": streams}
    return {**labels, "memory_bytes": memory}


def _memory_bytes() -> dict[str, int]:
    """Of the processes of the server that runs, by kind; what several share counts once (PSS)."""
    found: dict[str, int] = {}
    for process in psutil.Process().children(recursive=True):
        try:
            kind = report.kind_of(" ".join(process.cmdline()))
            num_bytes = process_memory_bytes(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        found[kind] = found.get(kind, 0) + num_bytes
    return found


def _log(name: str) -> Path:
    path = LOGS / NAME / f"{name}.log".replace(" ", "-").replace(",", "")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"sterna bench {NAME}",
        description="Measure the memory of servers by kind of process, and of each stream.",
        epilog="docs/performance.md explains what is measured.",
    )
    add_round_options(parser, quick="one replica of each, and few streams, as a check")
    return parser


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    end_like_ctrl_c()
    sys.exit(main())
