"""Profiles the real engine's decode steps: their durations over batch sizes and lengths, and what
of each is scheduling (`bench/results/decode_profile.json`).

One vLLM engine core runs in this process, as an instance hosts it, with the small model. Isolated
is the step: nothing else runs, every request is past its prompt, and no request comes or goes
while steps are timed. Read it as the paper's Figure 4 and, for the scheduling, as the costs that
Figure 16's simulation is made of.

    python -m bench.decode_profile
"""

import argparse
import os
import pickle
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.machine import ForeignLoad
from bench.results_io import RESULTS, summary, write

LENGTHS = (64, 256, 1024)
BATCH_SIZES = (1, 2, 4, 8, 16, 32)
MAX_TOTAL_TOKENS = 8192
NUM_STEPS = 25
VOCABULARY = 40_000
MODEL_NAME = "SmolLM2-135M-Instruct"

Row = dict[str, Any]


class Stopwatch:
    """Times the calls of one method."""

    def __init__(self, owner: Any, method: str) -> None:
        self.durations_s: list[float] = []
        self.last: Any = None
        call = getattr(owner, method)

        def timed(*arguments: Any, **named: Any) -> Any:
            begun_s = time.perf_counter()
            self.last = call(*arguments, **named)
            self.durations_s.append(time.perf_counter() - begun_s)
            return self.last

        setattr(owner, method, timed)


class Profile:
    """One engine core, stepped here."""

    def __init__(self, seed: int) -> None:
        from sterna.engine.vllm.arguments import make_serve_parser, parse_serve
        from sterna.engine.vllm.core import build_core, engine_config
        from sterna.engine.vllm.small_model import default_cache_folder, ensure_small_model

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
        self._core = build_core(engine_config(args), log_stats=False)
        self._random = random.Random(seed)
        self._num_requests = 0
        scheduler: Any = self._core.scheduler
        self._scheduling = Stopwatch(scheduler, "schedule")
        self._updating = Stopwatch(scheduler, "update_from_output")
        self._executing = Stopwatch(self._core.model_executor, "sample_tokens")

    def cell(self, batch_size: int, tokens_each: int, num_steps: int) -> Row:
        """Decode a batch for so many steps, from this length of each request on."""
        ids = [self._add(tokens_each - 1, num_steps + 64) for _ in range(batch_size)]
        while not self._are_decoding(batch_size):
            self._core.step()
        for _ in range(3):
            self._core.step()
        for watch in (self._scheduling, self._updating):
            watch.durations_s.clear()
        foreign = ForeignLoad()
        steps_s, sends_s, views_s = [], [], []
        for _ in range(num_steps):
            begun_s = time.perf_counter()
            self._core.step()
            steps_s.append(time.perf_counter() - begun_s)
            views_s.append(_timed(self._report))
            sends_s.append(_timed(self._send_and_receive))
        foreign_cores = foreign.cores()
        self._abort(ids)
        return {
            "batch_size": batch_size,
            "tokens_each": tokens_each,
            "total_tokens": batch_size * tokens_each,
            "n": num_steps,
            "step_ms": _ms(steps_s),
            "schedule_ms": _ms(self._scheduling.durations_s),
            "update_ms": _ms(self._updating.durations_s),
            "coding_ms": _ms(sends_s),
            "report_ms": _ms(views_s),
            "foreign_cores": round(foreign_cores, 2),
        }

    def _add(self, num_tokens: int, max_tokens: int) -> str:
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        self._num_requests += 1
        request = EngineCoreRequest(
            request_id=f"r{self._num_requests}",
            prompt_token_ids=[self._random.randrange(100, VOCABULARY) for _ in range(num_tokens)],
            mm_features=None,
            sampling_params=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self._core.add_request(*self._core.preprocess_add_request(request))
        return request.request_id

    def _are_decoding(self, batch_size: int) -> bool:
        running = self._core.scheduler.running
        return len(running) == batch_size and all(each.num_output_tokens > 0 for each in running)

    def _abort(self, ids: Sequence[str]) -> None:
        self._core.abort_requests(list(ids))
        while self._core.scheduler.has_requests():
            self._core.step()

    def _report(self) -> None:
        """What a llumlet adds: the engine's view, and the load report that is made of it."""
        import msgspec

        from sterna.policy.load_report import load
        from sterna.policy.presets import LLUMNIX
        from sterna.types import InstanceId

        scheduler: Any = self._core.scheduler
        report = load(
            scheduler.view(InstanceId("i0"), False),
            LLUMNIX,
            sequence=1,
            last_dispatch=0,
            num_migrating_out=0,
            num_migrating_in=0,
        )
        msgspec.msgpack.encode(report)

    def _send_and_receive(self) -> None:
        """What a scheduler in another process costs: the step's plan and its outcome as bytes, as
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
    parser = argparse.ArgumentParser(prog="python -m bench.decode_profile", description=__doc__)
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
