"""Run short benchmarks, and compare their ratios with the committed results.

    make bench-check
    python -m bench.check --only dispatch data_plane

Fails if a ratio is worse than the committed one by more than a fifth. It takes about twelve
minutes, on a machine on which nothing else runs.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.check.values import CHECKS, MOST_LOSS, Check, Verdict, table
from bench.common import results_io
from bench.common.command import end_like_ctrl_c, ended
from bench.common.tables import Row

TIMEOUT_S = 900.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.check", description=__doc__)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[each.file for each in CHECKS],
        metavar="NAME",
        help=f"some of: {', '.join(each.file for each in CHECKS)}",
    )
    options = parser.parse_args(argv)
    verdicts: list[Verdict] = []

    def run() -> None:
        chosen = [each for each in CHECKS if options.only is None or each.file in options.only]
        for number, check in enumerate(chosen, 1):
            begun_s = time.monotonic()
            print(f"{number} of {len(chosen)}: {check.file}", file=sys.stderr)
            verdicts.extend(_verdicts(check))
            print(f"took {time.monotonic() - begun_s:.0f} s", file=sys.stderr)
        print(table(verdicts))

    code = ended(run)
    lost = [each for each in verdicts if each.is_lost]
    if lost and code == 0:
        print(f"{len(lost)} are worse by more than {MOST_LOSS - 1:.0%}", file=sys.stderr)
        return 1
    return code


def _verdicts(check: Check) -> list[Verdict]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", *check.command, "--results", folder]
        with (Path(folder) / "printed").open("w+") as printed:
            done = subprocess.run(
                command, cwd=results_io.ROOT, check=False, timeout=TIMEOUT_S,
                stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.STDOUT,
            )  # fmt: skip
            if done.returncode != 0:
                printed.seek(0)
                lines = printed.read().strip().splitlines() or ["it printed nothing"]
                print(f"{check.file} failed: {lines[-1]}", file=sys.stderr)
        written = [each.stem for each in Path(folder).glob("*.json")]
        # With a CUDA device some benchmarks write another file.
        name = next((x for x in (check.file, f"{check.file}_cuda") if x in written), check.file)
        committed, measured = _rows(name, results_io.RESULTS), _rows(name, Path(folder))
    return [Verdict(each, each.of(committed), each.of(measured)) for each in check.values]


def _rows(name: str, folder: Path) -> Sequence[Row]:
    try:
        rows: Sequence[Row] = results_io.read(name, folder)["rows"]
    except FileNotFoundError:
        return []
    return rows


if __name__ == "__main__":
    end_like_ctrl_c()
    sys.exit(main())
