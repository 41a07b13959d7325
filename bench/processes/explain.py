"""The cost of `sterna explain`: the share of the processor time that histories, the reasons of
decisions and `Server-Timing` take.

A server with two real engines of a tiny model, so that Sterna has as large a part as it can have,
gets the loads of `bench front-end`, and py-spy takes samples of its front end and scheduler. A
sample counts when it is within code that exists for explanations. Instances only send what the
engine's events say in any case; traces are off.

    sterna bench explain [--rounds 5] [--continue]

`bench/results/explain.json` is written after every server. It needs py-spy on the path.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import psutil

from bench.common import py_spy, results_io
from bench.common.command import end_like_ctrl_c, ended
from bench.common.comparison import Middle
from bench.common.pages import Goal, goal_list
from bench.common.tables import Row, markdown_table, number, rounded
from bench.paced.cases import tiny_model
from bench.plain_vllm.sides import ONE_THREAD
from bench.processes.equal_streams import LONG, SHORT, TINY_ENGINE, Load, send
from bench.processes.front_end_report import IDLE
from bench.serving.comparing import add_round_options, rows_in_rounds
from bench.serving.measured import LOGS, Notes
from bench.serving.served import served
from sterna.errors import ConfigurationError

NAME = "explain"

PAGE = results_io.ROOT / "docs" / "performance.md"

CODE = (
    "sterna/frontend/requests/histories.py",
    "sterna/scheduler/explanation.py",
    # Looks at each output; the metrics of preemptions need it, too.
    "_note (sterna/frontend/vllm_server/router.py",
)
"""The code that exists for explanations alone, with all that it calls."""

AROUND = "sterna/frontend/http/server_timing.py"
"""The middleware around the application; what it calls counts only in `HELPERS`."""

HELPERS = (
    *("asyncio/events.py", "asyncio/base_events.py", "sterna/frontend/http/request_context.py"),
)

PROCESSES: Mapping[str, str] = {"front end": "_FrontendActor", "scheduler": "_SchedulerActor"}
"""Parts of their command lines."""

GOAL_SHARE = 0.01

RECORDED_S = {SHORT.name: 12, LONG.name: 40}
"""Longer than each load takes: py-spy is waited for."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the results."""
    options = _parser().parse_args(argv)
    return ended(lambda: rows_in_rounds(NAME, options, _measure, markdown, PAGE))


def _measure(options: argparse.Namespace, rows: list[Row], folder: Path) -> None:
    spy = py_spy.needed_program()
    notes = Notes()
    model = tiny_model(LOGS / "tiny-model")
    loads = [SHORT, LONG]
    if options.quick:
        loads = [replace(each, num_streams=16, at_once=8) for each in loads]
    known = {row["seed"] for row in rows}
    for seed in range(1, options.rounds + 1):
        if seed in known:
            continue
        notes.say(f"round {seed} of {options.rounds}")
        rows += _rows_of_server(model, loads, seed, spy, notes)
        results_io.write(
            NAME,
            {"rounds": options.rounds, "loads": [asdict(each) for each in loads]},
            rows,
            folder,
            summary=summary(rows),
        )


def _rows_of_server(
    model: Path, loads: Sequence[Load], seed: int, spy: str, notes: Notes
) -> list[Row]:
    log = LOGS / NAME / f"{seed}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    arguments = (str(model), *TINY_ENGINE, "--instances", "2")
    with served(arguments, log=log, environment=ONE_THREAD) as url:
        pids = _pids()
        # What is imported and made with the first requests.
        asyncio.run(send(url, replace(loads[0], num_streams=64)))
        for load in loads:
            recorded_s, begun_s = RECORDED_S[load.name], time.monotonic()
            with py_spy.recording(spy, pids, recorded_s) as stacks:
                failed = asyncio.run(send(url, load)).num_failed
                if (took_s := time.monotonic() - begun_s) > recorded_s:
                    raise ConfigurationError(
                        f"{load.name} took {took_s:.0f} s, of which {recorded_s} are recorded: "
                        "the machine is too slow, or does something else"
                    )
            counts = {name: seen(lines) for name, lines in stacks.items()}
            row = {
                **{"seed": seed, "load": load.name, "n": load.num_streams, "failed": failed},
                **{f"{name}: explaining": each[0] for name, each in counts.items()},
                **{f"{name}: all": each[1] for name, each in counts.items()},
                "commit": results_io.measured_commit(),
            }
            notes.say(f"{load.name}: {100 * share(row):.2f} % for explanations")
            rows.append(row)
    return rows


def _pids() -> dict[str, int]:
    """The processes of the server that this process has started."""
    titles = {
        each.pid: " ".join(each.cmdline()) for each in psutil.Process().children(recursive=True)
    }
    found = {
        name: pid
        for name, title in PROCESSES.items()
        for pid, shown in titles.items()
        if title in shown
    }
    assert found.keys() == PROCESSES.keys(), sorted(titles.values())
    return found


def seen(stacks: Iterable[str]) -> tuple[int, int]:
    """The number of samples within explaining code, and of all that do not wait."""
    num_explaining = num_all = 0
    for line in stacks:
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        if any(each in frames[-1] for each in IDLE):
            continue
        num_all += int(count)
        num_explaining += int(count) * _is_explaining(frames)
    return num_explaining, num_all


def _is_explaining(frames: Sequence[str]) -> bool:
    if any(each in frame for frame in frames for each in CODE):
        return True
    around = [place for place, frame in enumerate(frames) if AROUND in frame]
    if not around:
        return False
    within = frames[around[-1] + 1 :]
    return not within or any(each in within[0] for each in HELPERS)


def share(row: Row, names: Iterable[str] = tuple(PROCESSES)) -> float:
    """The share of these processes' samples that are of explanations."""
    names = tuple(names)
    num_all = sum(row[f"{name}: all"] for name in names)
    return sum(row[f"{name}: explaining"] for name in names) / num_all if num_all else 0.0


def summary(rows: Sequence[Row]) -> dict[str, object]:
    """The median share with each load, and whether the goal is reached."""
    shares = {
        load: Middle.of([share(row) for row in rows if row["load"] == load])
        for load in dict.fromkeys(row["load"] for row in rows)
    }
    goals = [
        Goal(
            f"explanations, {load}", f"at most {100 * GOAL_SHARE:g} % of the samples",
            f"{100 * each.median:.2f} %", each.median <= GOAL_SHARE,
        )
        for load, each in shares.items()
    ]  # fmt: skip
    return {
        **{f"{load}: share": rounded(each.median) for load, each in shares.items()},
        "goals": [asdict(each) for each in goals],
    }


def markdown(rows: Sequence[Row]) -> str:
    """The table and the goals."""
    loads = dict.fromkeys(row["load"] for row in rows)
    lines = []
    for load in loads:
        found = [row for row in rows if row["load"] == load]
        middles = [
            Middle.of([100 * share(row, names) for row in found])
            for names in (*((name,) for name in PROCESSES), tuple(PROCESSES))
        ]
        samples = sum(row[f"{name}: all"] for row in found for name in PROCESSES)
        lines.append([load, *(each.text(2) for each in middles), number(samples)])
    header = ["load", *(f"{name} [%]" for name in PROCESSES), "both [%]", "samples"]
    num_rounds = len({row["seed"] for row in rows})
    return "\n".join(
        [
            f"Share of the samples in which Python code runs, medians over {num_rounds} servers, "
            "with 90 % intervals:",
            "",
            markdown_table(header, lines),
            "",
            goal_list(summary(rows)["goals"]),  # type: ignore[arg-type]
        ]
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"sterna bench {NAME}",
        description="The share of the processor time that histories, reasons and Server-Timing "
        "take.",
        epilog="docs/performance.md explains what is measured.",
    )
    add_round_options(parser, quick="few streams, as a check")
    return parser


if __name__ == "__main__":
    end_like_ctrl_c()
    sys.exit(main())
