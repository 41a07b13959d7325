"""Run short benchmarks, and compare their ratios with the committed results.

    make bench-check
    python -m bench.check --only dispatch data_plane

Fails if a ratio is worse than the committed one by more than a fifth, could not be measured, or has
nothing to be compared with. What was committed on another processor is not compared, since ratios
depend on it, too: the table says so. It takes about twelve minutes, on a machine on which nothing
else runs.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from bench.check.values import CHECKS, MOST_LOSS, Check, Verdict, table
from bench.common import results_io
from bench.common.command import end_like_ctrl_c, ended
from bench.common.tables import Row
from bench.serving.served import END_TIMEOUT_S, end_group

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
    skipped = [each for each in verdicts if each.elsewhere is not None]
    if skipped:
        print(
            f"{len(skipped)} of {len(verdicts)} were not compared: the results are committed on "
            f"another processor than {results_io.hardware()['cpu']}",
            file=sys.stderr,
        )
    lost = [each for each in verdicts if each.is_lost]
    if lost and code == 0:
        print(
            f"{len(lost)} are worse by more than {MOST_LOSS - 1:.0%}, or lack a value",
            file=sys.stderr,
        )
        return 1
    return code


def _verdicts(check: Check) -> list[Verdict]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", *check.command, "--results", folder]
        with (Path(folder) / "printed").open("w+") as printed:
            code = _code(command, printed)
            if code is None:
                print(f"{check.file} took longer than {TIMEOUT_S:g} s: ended", file=sys.stderr)
            elif code != 0:
                printed.seek(0)
                lines = printed.read().strip().splitlines() or ["it printed nothing"]
                print(f"{check.file} failed: {lines[-1]}", file=sys.stderr)
        written = [each.stem for each in Path(folder).glob("*.json")]
        # With a CUDA device some benchmarks write another file.
        name = next((x for x in (check.file, f"{check.file}_cuda") if x in written), check.file)
        committed, measured = _rows(name, results_io.RESULTS), _rows(name, Path(folder))
    elsewhere = _elsewhere(name, check.file)
    return [
        Verdict(each, each.of(committed), each.of(measured), elsewhere) for each in check.values
    ]


def _code(command: Sequence[str], printed: TextIO) -> int | None:
    """The exit code of a benchmark; None if it took too long, and was ended with its servers."""
    # A session of its own, so that nothing of it is left: it ends its servers at SIGTERM.
    process = subprocess.Popen(
        command, cwd=results_io.ROOT, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        return process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return None
    finally:
        # It may have two servers to end, one after the other.
        end_group(process, 3 * END_TIMEOUT_S)


def _elsewhere(name: str, file: str) -> str | None:
    """The processor of the committed results, if it is another one than this machine's."""
    committed = _document(name, results_io.RESULTS)
    if committed is None:
        # A benchmark that computes on a CUDA device has a file of its own.
        has_other = name != file and _document(file, results_io.RESULTS) is not None
        return "no CUDA device" if has_other else None
    then, now = committed["hardware"], results_io.hardware()
    if all(then.get(each) == now.get(each) for each in ("cpu", "vectors", "gpu")):
        return None
    return ", ".join(str(then[each]) for each in ("cpu", "vectors", "gpu") if then.get(each))


def _rows(name: str, folder: Path) -> Sequence[Row]:
    document = _document(name, folder)
    rows: Sequence[Row] = [] if document is None else document["rows"]
    return rows


def _document(name: str, folder: Path) -> dict[str, Any] | None:
    try:
        return results_io.read(name, folder)
    except FileNotFoundError:
        return None


if __name__ == "__main__":
    end_like_ctrl_c()
    sys.exit(main())
