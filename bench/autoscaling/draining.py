"""Drains and restarts instances under streams, and compares every token with an undisturbed run.

Two real instances in float32, so that the tokens of a request do not depend on the rest of its
batch. All streams run side by side, once without any event, once while an instance is added and
another one is drained, and once during a rolling restart of both. Isolated is the clients' view:
answers, and the largest gap between two tokens, compared with the run without events. Instances
start and end on the machine on which the others decode; with few cores, they cause most of a gap.
Writes `bench/results/draining.json`.

    sterna bench draining
"""

import argparse
import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from bench.common.command import end_like_ctrl_c, ended, positive
from bench.common.pages import write_marked
from bench.common.results_io import RESULTS, summary, write
from bench.serving.client import ClientConfig, Outcome, replay
from bench.serving.comparing import PAGE
from bench.serving.served import served
from bench.serving.target import Target, find_target
from sterna.cli.operate.admin_commands import ask
from sterna.errors import SternaError
from sterna.workload.trace import Trace

COMMAND = "sterna bench draining"
SEED = 0xCADE
PROMPT_TOKENS = 24
KV_BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 4
"""Bytes of a token of the small model in float32: layers, keys and values, heads, size, bytes."""

RUN_S = 2.0
"""Time for which streams run before the first event."""

Row = dict[str, Any]


class UnsettledError(SternaError):
    """The server failed at a measured command; the message has its output."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=positive, default=20, metavar="N", help="default: 20")
    parser.add_argument("--tokens", type=positive, default=1000, metavar="N", help="default: 1000")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    args = parser.parse_args(arguments)
    end_like_ctrl_c()
    return ended(lambda: run(args))


def run(args: argparse.Namespace) -> None:
    """Measure, and write the result."""
    options = server_options(args.streams, args.tokens)
    with served(options) as url:
        target = asyncio.run(find_target(url))
        _say(f"{args.streams} streams of {args.tokens} tokens, without any event")
        expected, _ = _streams(target, args, ())
        _say("the same while an instance is added and another one is drained")
        drained, drain_s = _streams(target, args, (("start",), ("drain", "i0")))
        _say("the same during a rolling restart of both instances")
        restarted, restart_s = _streams(
            target, args, (("restart", "--rolling", "--", "--max-num-seqs", str(args.streams + 4)),)
        )
    rows = [
        row("none", expected, expected, []),
        row("start and drain", drained, expected, drain_s),
        row("rolling restart", restarted, expected, restart_s),
    ]
    config = {
        "server": options,
        "streams": args.streams,
        "tokens": args.tokens,
        "seed": SEED,
    }
    path = write("draining", config, rows, args.results, summary=summarized(rows))
    _say(f"wrote {path}")
    if args.results == RESULTS:
        write_marked(PAGE, COMMAND, markdown(rows))
    for each in rows:
        print(f"{each['event']}: {each['identical']} of {each['streams']} identical, "
              f"largest gap {each['largest_gap_ms']:.0f} ms")  # fmt: skip


def server_options(num_streams: int, num_tokens: int) -> list[str]:
    """Each instance has memory for all streams, since one of them may have to take them all."""
    capacity = num_streams * (PROMPT_TOKENS + num_tokens + 64)
    return [
        *("--dtype", "float32"),
        *("--max-num-seqs", str(num_streams + 2)),
        *("--kv-cache-memory-bytes", str(int(1.1 * capacity) * KV_BYTES_PER_TOKEN)),
    ]


def row(
    event: str, outcomes: Sequence[Outcome], expected: Sequence[Outcome], durations_s: list[float]
) -> Row:
    """The row of one run; `durations_s` are those of its commands."""
    pairs = list(zip(outcomes, expected, strict=True))
    gaps_ms = [1e3 * gap for each in outcomes for gap in each.gaps_s]
    return {
        "event": event,
        "streams": len(pairs),
        "failed": sum(each.error is not None for each in outcomes),
        "identical": sum(
            each.error is None and each.tokens == other.tokens for each, other in pairs
        ),
        "n": len(gaps_ms),
        "gap_ms": summary(gaps_ms),
        "largest_gap_ms": round(max(gaps_ms), 1),
        "commands_s": [round(each, 2) for each in durations_s],
        "errors": sorted({each.error for each in outcomes if each.error is not None}),
    }


def summarized(rows: Sequence[Row]) -> Row:
    """The summary of all runs with events."""
    eventful = [each for each in rows if each["event"] != "none"]
    return {
        "streams": sum(each["streams"] for each in eventful),
        "failed": sum(each["failed"] for each in eventful),
        "identical": sum(each["identical"] for each in eventful),
        "largest_gap_ms": max(each["largest_gap_ms"] for each in eventful),
    }


def markdown(rows: Sequence[Row]) -> str:
    """The table of the page."""
    lines = [
        "| while the streams run | complete | token-identical | gap, median | P99 | largest | "
        "the commands took |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for each in rows:
        complete = each["streams"] - each["failed"]
        took = " + ".join(f"{seconds:.1f} s" for seconds in each["commands_s"]) or "–"
        lines.append(
            f"| {'nothing' if each['event'] == 'none' else each['event']} "
            f"| {complete} of {each['streams']} | {each['identical']} of {each['streams']} "
            f"| {each['gap_ms']['median']:.0f} ms | {each['gap_ms']['p99']:.0f} ms "
            f"| {each['largest_gap_ms']:.0f} ms | {took} |"
        )
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------- runs


def _streams(
    target: Target, args: argparse.Namespace, commands: Sequence[tuple[str, ...]]
) -> tuple[list[Outcome], list[float]]:
    """Run all streams to their ends, and the commands one after the other meanwhile."""
    trace = _trace(args.streams, args.tokens)

    async def send() -> list[Outcome]:
        begin_s = asyncio.get_running_loop().time()
        config = ClientConfig(seed=SEED, keeps_tokens=True)
        return await replay(target, trace, config, begin_s=begin_s)

    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(lambda: asyncio.run(send()))
        with _cancelling_on_error(sending):
            _until_running(target.url, args.streams)
            time.sleep(RUN_S)
            durations_s = [_command(target.url, each) for each in commands]
            if commands and sending.done():
                raise UnsettledError(
                    "the streams ended before the commands did: give more --tokens"
                )
        return sending.result(), durations_s


@contextlib.contextmanager
def _cancelling_on_error(sending: Any) -> Iterator[None]:
    try:
        yield
    except BaseException:
        sending.cancel()
        raise


def _trace(num_streams: int, num_tokens: int) -> Trace:
    return Trace(
        name="equal streams",
        arrival_s=np.zeros(num_streams),
        input_tokens=np.full(num_streams, PROMPT_TOKENS, np.int64),
        output_tokens=np.full(num_streams, num_tokens, np.int64),
        priority=np.zeros(num_streams, np.int64),
    )


def _until_running(url: str, num_streams: int) -> None:
    while sum(each["running"] for each in ask(url, "GET", "/admin/instances", None)) < num_streams:
        time.sleep(0.2)


def _command(url: str, arguments: tuple[str, ...]) -> float:
    """Run an operator's command; returns how long it took, in seconds."""
    place = arguments.index("--") if "--" in arguments else len(arguments)
    whole = [*arguments[:place], "--url", url, *arguments[place:]]
    begun_s = time.perf_counter()
    done = subprocess.run(
        [str(Path(sys.executable).with_name("sterna")), *whole], capture_output=True, text=True
    )
    _say(f"  sterna {' '.join(arguments)}: {done.stdout.strip() or done.stderr.strip()}")
    if done.returncode:
        raise UnsettledError(f"sterna {' '.join(arguments)} failed: {done.stderr.strip()}")
    return time.perf_counter() - begun_s


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
