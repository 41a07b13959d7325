"""Time to add an instance: as a new process, as a fork, and from the warm pool.

The time is from the command until the instance serves (`bench/results/instance_start.json`); a fork
comes from a process that has imported vLLM. One real instance serves the small model, and no other
program runs. Isolated is the start: the model is in the page cache, no request is running, and each
started instance is drained before the next one. Read the ratios to the new process; its time
depends on the machine.

    sterna bench instance-start
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.common.command import end_like_ctrl_c, ended, positive
from bench.common.pages import write_marked
from bench.common.results_io import RESULTS, summary, write
from bench.serving.comparing import PAGE
from bench.serving.served import served
from sterna.cli.operate.admin_commands import ask

COMMAND = "sterna bench instance-start"
POLL_INTERVAL_S = 0.05

WAYS = {
    "new process": ["--no-fork-server"],
    "fork": ["--fork-server"],
    "warm": ["--fork-server", "--warm-instances", "1"],
}
"""The ways to start one, with the options of `sterna serve` for them."""

Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=positive, default=5, metavar="N", help="default: 5")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    args = parser.parse_args(arguments)
    end_like_ctrl_c()
    return ended(lambda: run(args))


def run(args: argparse.Namespace) -> None:
    """Measure, and write the result."""
    samples = {way: _measure(way, options, args.repeats) for way, options in WAYS.items()}
    rows = [{"way": way, "n": len(each), "ready_s": summary(each)} for way, each in samples.items()]
    reference_s = median(samples["new process"])
    config = {"ways": WAYS, "repeats": args.repeats}
    ratios = {way: round(median(each) / reference_s, 4) for way, each in samples.items()}
    path = write("instance_start", config, rows, args.results, summary=ratios)
    print(f"wrote {path}", file=sys.stderr)
    text = markdown(rows, ratios)
    if args.results == RESULTS:
        write_marked(PAGE, COMMAND, text)
    print(text)


def markdown(rows: Sequence[Row], ratios: dict[str, float]) -> str:
    """The table of the page."""
    lines = ["| one more instance, as | n | serves after, median | P99 | ratio |",
             "| --- | ---: | ---: | ---: | ---: |"]  # fmt: skip
    for row in rows:
        ready_s = row["ready_s"]
        lines.append(
            f"| {row['way']} | {row['n']} | {ready_s['median']:.2f} s | {ready_s['p99']:.2f} s "
            f"| {ratios[row['way']]:.3f} |"
        )
    return "\n".join(lines)


def _measure(way: str, options: Sequence[str], repeats: int) -> list[float]:
    samples_s = []
    num_warm = int("--warm-instances" in options)
    with served(["--instances", "1", *options]) as url:
        for number in range(1, repeats + 1):
            # The pool has to be filled again first.
            _until(url, lambda rows: _states(rows).count("warm") == num_warm)
            before = {each["id"] for each in _instances(url) if each["state"] == "running"}
            begun_s = time.perf_counter()
            ask(url, "POST", "/admin/start", None, {"instances": 1})
            _until(url, lambda rows: _states(rows).count("running") == 2)
            samples_s.append(time.perf_counter() - begun_s)
            print(f"{way}, {number} of {repeats}: {samples_s[-1]:.2f} s", file=sys.stderr)
            (new,) = {each["id"] for each in _instances(url) if each["state"] == "running"} - before
            _drain(url, new)
    return samples_s


def _drain(url: str, instance_id: str) -> None:
    sterna = Path(sys.executable).with_name("sterna")
    subprocess.run([sterna, "drain", instance_id, "--url", url], check=True, capture_output=True)


def _until(url: str, is_so: Any) -> None:
    while not is_so(_instances(url)):
        time.sleep(POLL_INTERVAL_S)


def _instances(url: str) -> list[Row]:
    rows: list[Row] = ask(url, "GET", "/admin/instances", None)
    return rows


def _states(rows: Sequence[Row]) -> list[str]:
    return [each["state"] for each in rows]


if __name__ == "__main__":
    sys.exit(main())
