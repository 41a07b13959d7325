"""Compares policies on real engines whose steps last as long as on measured hardware.

The same requests are sent to servers that differ in their policy alone, one after the other; a
round has every policy once, and other requests than the other rounds (other arrivals alone, where
a trace is a file: its requests and their order are the same). Beside each run stands what
the simulator predicts for the same requests. Steps sleep for the rest of their time
(docs/emulated_engine.md), so that a few cores carry all instances; how many steps were late is in
each row.

    sterna bench paced ["M-M, 4 instances" ...] [--rounds 5] [--policies sterna ...] [--continue]
    sterna bench paced --continue --predict

`bench/results/paced.json` is written after every run; `--continue` goes on with what is missing,
and with `--predict` only predicts anew what has been measured.
All runs of a case are of one machine; other cases may be of another one, and stay when they are
not named.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from bench.common import results_io
from bench.common.command import end_like_ctrl_c, ended
from bench.common.pages import goal_list
from bench.common.tables import Row
from bench.paced import report
from bench.paced.cases import CASES, POLICIES, TUNED, Case, tiny_model
from bench.paced.plot import draw
from bench.paced.runs import PACED, job_of, paced_row, simulated_row
from bench.serving.comparing import add_round_options, in_turn, results_folder, rows_in_rounds
from bench.serving.measured import LOGS, Notes
from sterna.errors import ConfigurationError
from sterna.workload.catalog import has_drawn_lengths

NAME = "paced"

PLOT_TEXT = "Latencies of each policy, measured and predicted, a panel for each case"

QUICK_REQUESTS = 24
QUICK_TOKENS = 256
"""The number and the longest of the requests of a run that only checks."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the results."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.predicts and not options.is_continued:
        parser.error("--predict is for results that there are: add --continue")
    return ended(lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    rows_in_rounds(NAME, options, _measure, _page, is_one_machine=False)
    folder = results_folder(options)
    draw(results_io.read(NAME, folder)["rows"], folder / f"{NAME}.png")


def _page(rows: Sequence[Row]) -> str:
    found = [asdict(each) for each in report.goals(rows)]
    picture = f"![{PLOT_TEXT}](../bench/results/{NAME}.png)"
    return "\n\n".join((picture, report.markdown(rows), goal_list(found)))


def _measure(options: argparse.Namespace, rows: list[Row], folder: Path) -> None:
    notes = Notes()
    machine = results_io.machine()
    commit = results_io.measured_commit()
    cases = [_quick(each) for each in options.cases] if options.quick else options.cases
    if not options.is_continued:
        rows += _others(cases, folder)
    _check_origin(cases, rows, None if options.predicts else machine)
    logs = LOGS / NAME
    logs.mkdir(parents=True, exist_ok=True)
    model = tiny_model(logs / "model")
    known = {_place(row) for row in rows}
    runs = [
        (case, policy, seed, case.write_hardware(logs))
        for seed in range(1, options.rounds + 1)
        for case in cases
        for policy in in_turn(options.policies or list(case.policies), seed)
    ]
    for case, policy, seed, hardware in runs:
        if options.predicts or (case.name, policy, seed, PACED) in known:
            continue
        notes.say(f"round {seed} of {options.rounds}: {case.name}, {policy}")
        log = logs / f"{case.name}-{policy}-{seed}.log".replace(" ", "")
        job = job_of(case, hardware, policy, seed)
        row = paced_row(case, job, model, hardware, log, notes)
        notes.say(
            f"TTFT {row['ttft_mean_s']:.3f} s, TPOT {1000 * row['tpot_mean_s']:.1f} ms,"
            f" {row['late_steps']} of {row['steps']} steps late"
        )
        rows.append({**row, "commit": commit, "machine": machine})
        _write(options, rows, folder)
    known = {_place(row) for row in rows}
    # The predictions come last, since they keep a core busy, and are all made anew.
    for case, policy, seed, hardware in runs:
        if (case.name, policy, seed, PACED) not in known:
            continue
        notes.say(f"simulated, round {seed} of {options.rounds}: {case.name}, {policy}")
        predicted = simulated_row(case, job_of(case, hardware, policy, seed)) | {"commit": commit}
        rows[:] = [*(row for row in rows if _place(row) != _place(predicted)), predicted]
        _write(options, rows, folder)


def _place(row: Row) -> tuple[object, ...]:
    """What only one row has."""
    return row["point"], row["policy"], row["seed"], row["kind"]


def _others(cases: Sequence[Case], folder: Path) -> list[Row]:
    """The rows of other cases that have been measured before."""
    names = {each.name for each in cases}
    try:
        known: list[Row] = results_io.read(NAME, folder)["rows"]
    except FileNotFoundError:
        return []
    return [row for row in known if row["point"] not in names]


def _check_origin(cases: Sequence[Case], rows: Sequence[Row], machine: str | None) -> None:
    """Raises ConfigurationError when runs of one of the cases are of another machine than this one,
    or of what the case was before.

    Args:
        machine: None: any will do, since nothing is measured.
    """
    meant = {each.name: each.description for each in cases}
    for row in rows:
        if (description := meant.get(row["point"])) is None:
            continue
        then_machine = row.get("machine", machine)
        for what, then, now in (
            ("of another machine, or of other versions", then_machine, machine or then_machine),
            ("of another definition of the case", row["case"], description),
        ):
            if then != now:
                raise ConfigurationError(
                    f"the runs of {row['point']!r} are {what} ({then}; now {now}): name other "
                    "cases, or leave out --continue to measure this one again"
                )


def _write(options: argparse.Namespace, rows: list[Row], folder: Path) -> None:
    config = {"rounds": options.rounds}
    cases = {name: place for place, name in enumerate(CASES)}
    order = {name: place for place, name in enumerate((*POLICIES, *TUNED))}
    # Rows of a removed case come last.
    rows.sort(key=lambda row: (cases.get(row["point"], 99), order.get(row["policy"], 99)))
    results_io.write(NAME, config, rows, folder)


def _quick(case: Case) -> Case:
    """Two instances, and few requests, short ones where lengths are drawn."""
    few = replace(case, instances=2, requests=QUICK_REQUESTS, rate=20.0)
    is_drawn = has_drawn_lengths(case.workload[case.workload.index("--trace") + 1])
    return replace(few, max_total_tokens=QUICK_TOKENS) if is_drawn else few


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"sterna bench {NAME}",
        description="Compare policies on real engines whose steps last as long as on measured "
        "hardware, and with what the simulator predicts.",
        epilog="docs/benchmarks.md explains what is measured.",
    )
    parser.add_argument(
        "cases",
        nargs="*",
        type=_case,
        default=list(CASES.values()),
        metavar="CASE",
        help=f"some of: {'; '.join(CASES)} (default: all)",
    )
    parser.add_argument(
        "--policies",
        nargs="+",
        metavar="NAME",
        help=f"default: {' '.join(POLICIES)}; of sessions also {' '.join(TUNED)}",
    )
    parser.add_argument(
        "--predict",
        dest="predicts",
        action="store_true",
        help="with --continue: measure nothing, and predict all runs anew",
    )
    add_round_options(parser, quick="two instances and few requests, as a check")
    return parser


def _case(text: str) -> Case:
    try:
        return CASES[text]
    except KeyError:
        names = "; ".join(CASES)
        raise argparse.ArgumentTypeError(f"must be one of: {names}, not {text!r}") from None


if __name__ == "__main__":
    end_like_ctrl_c()
    sys.exit(main())
