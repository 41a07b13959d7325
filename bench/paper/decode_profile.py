"""Profile of the real engine's decode steps over batch sizes and lengths, with their scheduling.

One vLLM engine core runs in this process, as in an instance, with the small model and more memory
(`sterna profile` measures any other engine). Isolated is the step: no other program runs, every
request is past its prompt, and no request starts or ends while steps are timed. The durations are
those of the paper's Figure 4; the scheduling gives the costs for Figure 16's simulation. Writes
`bench/results/decode_profile.json`.

    python -m bench.paper.decode_profile
"""

import argparse
import os
import pickle
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.common.machine import ForeignLoad
from bench.common.results_io import RESULTS, summary, write

LENGTHS = (64, 256, 1024)
BATCH_SIZES = (1, 2, 4, 8, 16, 32)
MAX_TOTAL_TOKENS = 8192
NUM_STEPS = 25
MODEL_NAME = "SmolLM2-135M-Instruct"

Row = dict[str, Any]


class Stopwatch:
    """Times the calls of one method.

    Attributes:
        last: the result of the last call.
        last_s: its duration.
    """

    def __init__(self, owner: Any, method: str) -> None:
        self.last: Any = None
        self.last_s = 0.0
        call = getattr(owner, method)

        def timed(*arguments: Any, **named: Any) -> Any:
            begun_s = time.perf_counter()
            self.last = call(*arguments, **named)
            self.last_s = time.perf_counter() - begun_s
            return self.last

        setattr(owner, method, timed)


class Profile:
    """One engine core with timed scheduling."""

    def __init__(self, seed: int) -> None:
        from sterna.demo_model.small_model import default_cache_folder, ensure_small_model
        from sterna.engine.vllm.arguments import make_serve_parser, parse_serve
        from sterna.engine.vllm.hosted_core import engine_config
        from sterna.engine.vllm.step_timing import ProfiledEngine

        model = ensure_small_model(default_cache_folder(os.environ), print)
        options = [
            "serve",
            str(model),
            "--no-enable-prefix-caching",
            f"--kv-cache-memory-bytes={1 << 30}",
        ]
        args = parse_serve(*make_serve_parser(), options, str(model))
        # vLLM's command does the same after parsing.
        args.model = args.model_tag
        self._engine = ProfiledEngine(engine_config(args), seed)
        scheduler: Any = self._engine.scheduler
        self._scheduling = Stopwatch(scheduler, "schedule")
        self._updating = Stopwatch(scheduler, "update_from_output")
        self._executing = Stopwatch(self._engine.core.model_executor, "sample_tokens")

    def cell(self, batch_size: int, tokens_each: int, num_steps: int) -> Row:
        """Time `num_steps` decode steps of a batch, and the other costs of each."""
        from sterna.engine.profiling.measurement_plan import Batch

        foreign: list[ForeignLoad] = []
        schedules_s: list[float] = []
        updates_s: list[float] = []
        sends_s: list[float] = []
        views_s: list[float] = []

        def after_step() -> None:
            schedules_s.append(self._scheduling.last_s)
            updates_s.append(self._updating.last_s)
            views_s.append(_timed(self._report))
            sends_s.append(_timed(self._send_and_receive))

        timing = self._engine.decode(
            Batch(batch_size, tokens_each),
            num_steps,
            before_steps=lambda: foreign.append(ForeignLoad()),
            after_step=after_step,
        )
        return {
            "batch_size": batch_size,
            "tokens_each": tokens_each,
            "total_tokens": batch_size * tokens_each,
            "n": num_steps,
            "step_ms": _ms(timing.steps_s),
            "schedule_ms": _ms(schedules_s),
            "update_ms": _ms(updates_s),
            "coding_ms": _ms(sends_s),
            "report_ms": _ms(views_s),
            "foreign_cores": round(foreign[0].cores(), 2),
        }

    def _report(self) -> None:
        """The cost of a llumlet: the engine's view, and the load report from it."""
        import msgspec

        from sterna.policy.load_report import load
        from sterna.policy.presets import LLUMNIX
        from sterna.types import InstanceId

        report = load(
            self._engine.scheduler.view(InstanceId("i0"), False),
            LLUMNIX,
            sequence=1,
            last_dispatch=0,
            num_migrating_out=0,
            num_migrating_in=0,
        )
        msgspec.msgpack.encode(report)

    def _send_and_receive(self) -> None:
        """The cost of a scheduler in another process: the step's plan and its outcome as bytes, as
        vLLM itself sends them to workers in other processes."""
        for message in (self._scheduling.last, self._executing.last):
            pickle.loads(pickle.dumps(message, protocol=5))


def _timed(call: Callable[[], None]) -> float:
    begun_s = time.perf_counter()
    call()
    return time.perf_counter() - begun_s


def _ms(durations_s: Sequence[float]) -> dict[str, float]:
    return summary([1000 * each for each in durations_s])


def main() -> None:
    """Measure every cell and write the result file."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.paper.decode_profile", description=__doc__
    )
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="timed steps a cell")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where to write")
    args = parser.parse_args()
    profile = Profile(seed=1)
    rows = []
    for tokens_each in LENGTHS:
        for batch_size in BATCH_SIZES:
            if batch_size * tokens_each <= MAX_TOTAL_TOKENS:
                rows.append(profile.cell(batch_size, tokens_each, args.steps))
                print(rows[-1])
    write("decode_profile", {"model": MODEL_NAME, "num_steps": args.steps}, rows, args.results)


if __name__ == "__main__":
    main()
