"""Measures for each kind of model whether its requests move, with which tokens, and at what cost.

Each kind is a tiny random model on two real instances (`cases.CASES`). A request moves to and fro
beside others, and must have the tokens of one that stays. Then an instance is killed, and a request
that had moved there must go on with the same tokens.

    sterna bench kinds                            all
    sterna bench kinds --kinds gemma3 granite4    these; the others' rows are kept
    sterna bench kinds --report                   measure nothing; write the pages again

`bench/results/model_kinds.json` has a row for each kind (`model_kinds_cuda.json` on a machine with
a CUDA device, which the instances share): its KV cache `groups` by vLLM's names, whether it `moves`
or the `reason` why not, whether the tokens were the same after moves (`token_identical`) and after
a death (`recovered_identical`), the largest number of `stages`, the `downtime_ms`, and the largest
`last_stage_bytes` as the data planes count them. The `recovery` is `as recomputed` where tokens
after a death are others, but those that vLLM alone gives when it computes a KV cache again. The
models are tiny: compare rows, and read downtimes against `decode_step_ms`.
Run it on a quiet machine.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.common import results_io
from bench.common.command import Progress, end_like_ctrl_c, ended, positive
from bench.common.pages import write_marked
from bench.kinds.cases import CASES, SERVE_OPTIONS
from bench.kinds.report import has_right_tokens, line_of, models_table, readme_table, row_of
from bench.kinds.workload import NEIGHBOUR_TOKENS, PROMPT_TOKENS
from sterna.config import TransportConfig
from sterna.errors import SternaError

NAME = "model_kinds"
COMMAND = "sterna bench kinds"
README = results_io.ROOT / "README.md"
PAGE = results_io.ROOT / "docs" / "models.md"

DEFAULT_MOVES = 20

Row = dict[str, Any]


class KindsError(SternaError):
    """Kinds could not be measured, or their requests had other tokens; the message names them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the results."""
    options = _parser().parse_args(argv)
    end_like_ctrl_c()
    return ended(lambda: _run(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=COMMAND,
        description="Measures whether requests of each kind of model move, and at what cost.",
    )
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=CASES,
        default=list(CASES),
        metavar="KIND",
        help=f"all unless some are named: {', '.join(CASES)}",
    )
    parser.add_argument(
        "--moves",
        type=positive,
        default=DEFAULT_MOVES,
        help="migrations of each kind (default: %(default)s)",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=results_io.RESULTS,
        metavar="FOLDER",
        help="folder of the result file; pages are written from the default folder only",
    )
    parser.add_argument(
        "--dtype", help="what to compute in, in place of what vLLM's CPU build needs for the model"
    )
    parser.add_argument("--report", action="store_true", help="only write the pages again")
    return parser


def _run(options: argparse.Namespace) -> None:
    if options.dtype is not None and options.results.resolve() == results_io.RESULTS:
        raise KindsError("--dtype needs --results: others are kept in bench/results")
    failures = [] if options.report else _measure_all(options)
    document = read(options.results, results_io.named_for_device(NAME))
    print(models_table(document))
    if options.results.resolve() == results_io.RESULTS:
        write_marked(README, COMMAND, readme_table(read(options.results)))
        write_marked(PAGE, COMMAND, models_table(read(options.results)))
    if failures:
        raise KindsError("; ".join(failures))


def read(folder: Path, name: str = NAME) -> dict[str, Any] | None:
    """The results in the folder; None where there are none."""
    try:
        return results_io.read(name, folder)
    except FileNotFoundError:
        return None


def _measure_all(options: argparse.Namespace) -> list[str]:
    """Measure the kinds, and write the results after each; returns the failures in words."""
    from sterna.cli.serve.serve_command import engine_environment

    # Before vLLM is imported, which reads it.
    os.environ.update(engine_environment())
    from transformers.utils.logging import disable_progress_bar

    from bench.migration.cluster_driver import local_ray

    disable_progress_bar()
    say = Progress()

    def measure_one(kind: str) -> Row:
        return _measure(kind, options.moves, options.dtype, say)

    try:
        with local_ray():
            return measured(dict.fromkeys(options.kinds), measure_one, options.results, say)
    except KeyboardInterrupt:
        say("interrupted; the kinds so far are written")
        raise


def measured(
    kinds: Iterable[str],
    measure_one: Callable[[str], Row],
    folder: Path,
    say: Callable[[str], None],
) -> list[str]:
    """Measure each kind, and write its row into the folder; a failure is not that of the next kind.

    Returns the failures in words.
    """
    failures = []
    for kind in kinds:
        try:
            row = measure_one(kind)
        except (SternaError, RuntimeError, ValueError, TimeoutError) as error:
            failures.append(f"{kind} is not measured: {str(error) or type(error).__name__}")
            say(failures[-1])
            continue
        say(line_of(row))
        say(f"written: {_write(row, folder)}")
        if not has_right_tokens(row):
            failures.append(f"{kind} has other tokens")
    return failures


def _measure(kind: str, num_moves: int, dtype: str | None, say: Progress) -> Row:
    from ray.exceptions import RayError

    from bench.kinds.measurement import measure
    from sterna.cli.serve.read_options import parse
    from sterna.runtime.supervisor.ray_errors import reason_of

    case = CASES[kind]
    say(f"{kind}: starting two instances of a model like {case.title}")
    with tempfile.TemporaryDirectory(prefix="kinds-") as name:
        folder = Path(name)
        args = parse(["serve", *case.serve_arguments(folder, dtype)])
        measuring = measure(case, args, folder, num_moves, lambda text: say(f"  {text}"))
        try:
            return {**row_of(kind, asyncio.run(measuring)), **_settings(args)}
        except RayError as error:
            raise KindsError(reason_of(error)) from error


def _settings(args: argparse.Namespace) -> Row:
    from vllm import envs

    return {
        "dtype": args.dtype,
        "runner": "V2" if envs.VLLM_USE_V2_MODEL_RUNNER else "V1",
        "batch_invariant": envs.VLLM_BATCH_INVARIANT,
    }


def _write(row: Row, folder: Path) -> Path:
    """Write this row, and keep those of other kinds."""
    name = results_io.named_for_device(NAME)
    earlier = read(folder, name)
    kept = [] if earlier is None else [each for each in earlier["rows"] if each["kind"] in CASES]
    rows = {_place(each): each for each in kept}
    rows[_place(row)] = row
    config = {
        "models": "tiny random ones (bench/kinds/tiny_models.py)",
        "engine_options": SERVE_OPTIONS,
        "num_instances": 2,
        "transport": TransportConfig().kind,
        "prompt_tokens": PROMPT_TOKENS,
        "neighbour_tokens": NEIGHBOUR_TOKENS,
    }
    ordered = [rows[place] for place in sorted(rows)]
    return results_io.write(name, config, ordered, folder)


def _place(row: Row) -> tuple[str, int]:
    """What a row is of: the runner, and the kind by its place in `CASES`."""
    return row.get("runner", "V1"), list(CASES).index(row["kind"])


if __name__ == "__main__":
    sys.exit(main())
