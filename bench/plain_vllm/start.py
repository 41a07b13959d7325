"""The start: from the command to the first token, beside plain `vllm serve`.

Each server starts three times: without the compiled model in any cache, with it, and without
compilation. The two first share a new folder of caches; the model's files are in the page cache.

    sterna bench start [--replicas 1 2] [--rounds 5] [--continue]

`bench/results/start.json` is written after every start.
"""

import argparse
import json
import os
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.common import results_io
from bench.common.command import end_like_ctrl_c, ended
from bench.common.machine import ForeignLoad
from bench.common.tables import Row, rounded
from bench.plain_vllm import start_report as report
from bench.plain_vllm.sides import REPLICA_OPTIONS, SIDES, STERNA, VLLM, VLLM_PROGRAM
from bench.serving.comparing import add_round_options, in_turn, rows_in_rounds
from bench.serving.measured import LOGS, Notes
from bench.serving.served import served
from sterna.demo_model.small_model import default_cache_folder, ensure_small_model

NAME = "start"

PAGE = results_io.ROOT / "docs" / "performance.md"

LOOK_INTERVAL_S = 0.1
"""Time between two looks at a server's output."""

SIGNS: Mapping[str, Mapping[str, str]] = {
    STERNA: {"options": "\nstarting ", "engines": "instance ready"},
    VLLM: {"options": "non-default args: ", "engines": "init engine ("},
}
"""The words with which a server ends each stage. The engines end theirs with the last of them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the results."""
    options = _parser().parse_args(argv)
    return ended(lambda: rows_in_rounds(NAME, options, _measure, report.markdown, PAGE))


def _measure(options: argparse.Namespace, rows: list[Row], folder: Path) -> None:
    notes = Notes()
    model = ensure_small_model(default_cache_folder(os.environ), notes.say)
    modes = (report.EAGER,) if options.quick else report.MODES
    rows[:] = report.paired(rows)
    known = {(row["replicas"], row["side"], row["seed"]) for row in rows}
    for seed in range(1, options.rounds + 1):
        for replicas in options.replicas:
            for side in in_turn((STERNA, VLLM), seed):
                if (replicas, side, seed) in known:
                    continue
                labels = {"replicas": replicas, "side": side, "seed": seed}
                with tempfile.TemporaryDirectory() as caches:
                    # All three or none, since the second one needs the first one's caches.
                    rows += [
                        {**labels, **_row(side, replicas, mode, model, Path(caches), seed, notes)}
                        for mode in modes
                    ]
                config = {"rounds": options.rounds, "engine_options": REPLICA_OPTIONS}
                results_io.write(NAME, config, rows, folder, summary=report.summary(rows))


def _row(
    side: str, replicas: int, mode: str, model: Path, caches: Path, seed: int, notes: Notes
) -> Row:
    notes.say(f"round {seed}: {replicas} of {side}, {mode}")
    log = LOGS / NAME / f"{side}-{replicas}-{mode}-{seed}.log".replace(" ", "-")
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    options = SIDES[side].replica_options(replicas)
    if mode == report.EAGER:
        options.append("--enforce-eager")
    environment = {
        "VLLM_CACHE_ROOT": str(caches / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
    }
    program = VLLM_PROGRAM if side == VLLM else None
    others = ForeignLoad()
    stages = _Stages(log, SIGNS[side], replicas)
    with (
        stages,
        served(
            (str(model), *REPLICA_OPTIONS, *options),
            log=log,
            program=program,
            environment=environment,
        ) as url,
    ):
        ready_s = stages.elapsed_s()
        _first_token(url)
        first_token_s = stages.elapsed_s()
        # Before the server's processes end: what they have used then counts as that of others.
        foreign_cores = round(others.cores(), 2)
    notes.say(f"ready after {ready_s:.1f} s, first token after {first_token_s:.1f} s")
    return {
        "mode": mode,
        "commit": results_io.measured_commit(),
        **{f"{name}_s": rounded(stages.ends_s.get(name)) for name in SIGNS[side]},
        "ready_s": rounded(ready_s),
        "first_token_s": rounded(first_token_s),
        "foreign_cores": foreign_cores,
    }


class _Stages:
    """When the stages of a start end, by what the server prints; times since the beginning.

    Attributes:
        ends_s: of the stages that have ended, by name.
    """

    def __init__(self, log: Path, signs: Mapping[str, str], replicas: int) -> None:
        self._log = log
        self._signs = signs
        self._replicas = replicas
        self._begun_s = time.monotonic()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.ends_s: dict[str, float] = {}

    def elapsed_s(self) -> float:
        """Time since the beginning."""
        return time.monotonic() - self._begun_s

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(LOOK_INTERVAL_S) and len(self.ends_s) < len(self._signs):
            if not self._log.exists():
                continue
            text = self._log.read_text("utf-8", "replace")
            for name, sign in self._signs.items():
                num_needed = self._replicas if name == "engines" else 1
                if name not in self.ends_s and text.count(sign) >= num_needed:
                    self.ends_s[name] = self.elapsed_s()


def _first_token(url: str) -> None:
    body = {"model": "small", "prompt": "Hello", "max_tokens": 1}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300.0) as answer:
        answer.read()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"sterna bench {NAME}",
        description="Compare the time from the command to the first token with that of plain "
        "`vllm serve`, on the small model.",
        epilog="docs/performance.md explains what is measured.",
    )
    parser.add_argument(
        "--replicas", nargs="+", type=int, choices=(1, 2, 3), default=[1, 2], metavar="N",
        help="numbers of instances (default: 1 2)",
    )  # fmt: skip
    add_round_options(parser, quick="starts without compilation only, as a check")
    return parser


if __name__ == "__main__":
    end_like_ctrl_c()
    sys.exit(main())
