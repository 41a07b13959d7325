"""Step times of one vLLM engine core, measured in this process.

The step is isolated: nothing else runs here, every request of a timed decode is past its prompt,
and no request arrives or ends meanwhile. Prompts are random tokens; outputs are ignored.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import mean, median
from typing import Any

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreRequest

from sterna.engine.emulated.config import EmulatedEngineConfig, Preemption, StepMode
from sterna.engine.profiling.fitting import PrefillPoint
from sterna.engine.profiling.measurement_plan import ROOM_TOKENS, Batch, Decode
from sterna.engine.vllm.hosted_core import HostedCore, build_core
from sterna.errors import ConfigurationError

NUM_WARMUP_STEPS = 3
"""Steps of a batch before the first one that is timed."""

MAX_EMPTY_STEPS = 1000
"""Limit of consecutive empty steps, after which the engine counts as stuck."""

FIRST_TOKEN_ID = 100
"""Smaller token ids are often special."""

OnProgress = Callable[[float], None]
"""Called with the fraction that is done."""


@dataclass(frozen=True, slots=True)
class DecodeTiming:
    """The timed steps of one batch.

    Attributes:
        steps_s: the duration of each.
        num_tokens: tokens in the KV caches of the batch, on average over the steps.
    """

    steps_s: tuple[float, ...]
    num_tokens: float


class ProfiledEngine:
    """One engine core, stepped by its caller for timings.

    Args:
        config: of the engine; see `engine_config`.
        num_threads: see `build_core`.
        binds_core: see `build_core`.

    Raises:
        ConfigurationError: the model generates no tokens.
    """

    def __init__(
        self,
        config: VllmConfig,
        seed: int = 1,
        num_threads: int | None = None,
        *,
        binds_core: bool = False,
    ) -> None:
        if config.model_config.runner_type != "generate":
            raise ConfigurationError(
                f"model {config.model_config.model} generates no tokens: there is no decode step "
                "to profile"
            )
        self._seed = seed
        self._random = random.Random(seed)
        self._num_requests = 0
        # Special tokens and placeholders of images are mostly at the end.
        self._token_ids = range(FIRST_TOKEN_ID, max(200, config.model_config.get_vocab_size() // 2))
        self.max_model_len: int = config.model_config.max_model_len
        self.core: HostedCore = build_core(
            config, log_stats=False, num_threads=num_threads, binds=binds_core
        )

    @property
    def scheduler(self) -> Any:
        """The core's scheduler."""
        return self.core.scheduler

    @property
    def total_tokens(self) -> int:
        """M: memory usable by requests, in tokens."""
        return int(self.scheduler.total_tokens)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's keys and values in the memory of one rank."""
        cache = self.scheduler.kv_cache_config
        # Each tensor has the size of the allocation in which they all lie.
        return max(int(each.size) for each in cache.kv_cache_tensors) // int(cache.num_blocks)

    def emulated(self) -> EmulatedEngineConfig:
        """The memory and the limits of this engine as the configuration of an emulated one."""
        scheduler = self.scheduler
        num_all_blocks = scheduler.kv_cache_manager.block_pool.num_gpu_blocks
        num_blocks = num_all_blocks - 1
        num_watermark_blocks = scheduler.kv_cache_manager.watermark_blocks
        has_priorities = scheduler.scheduler_config.policy == "priority"
        return EmulatedEngineConfig(
            # vLLM reserves one block.
            num_blocks=num_blocks,
            block_size=scheduler.groups.memory.block_tokens,
            # The engine rounds down to whole blocks.
            watermark=(num_watermark_blocks + 0.5) / num_blocks if num_watermark_blocks else 0.0,
            # Options may set them below the limits of the same names in vLLM's configuration.
            max_num_seqs=scheduler.max_num_active_reqs,
            max_num_batched_tokens=scheduler.max_num_scheduled_tokens,
            step_mode=StepMode.CHUNKED,
            preemption=Preemption.LEAST_URGENT if has_priorities else Preemption.LAST_ADMITTED,
            keeps_block_free=False,
            # An emulated one has one KV cache group, whose requests keep all of their blocks.
            prefix_caching=scheduler.cache_config.enable_prefix_caching
            and scheduler.prefixes.can_move,
        )

    def decode(
        self,
        batch: Batch,
        num_steps: int,
        *,
        before_steps: Callable[[], None] = lambda: None,
        after_step: Callable[[], None] = lambda: None,
    ) -> DecodeTiming:
        """Time `num_steps` steps of the batch.

        The n-th requests of all batches have the same tokens, so that an engine with a prefix
        cache prefills them once.

        Args:
            before_steps: called before the first timed step.
            after_step: called after each one, outside of its time.

        Raises:
            ConfigurationError: the batch does not fit into the engine's memory as a whole.
        """
        preemptions = self.scheduler.num_preemptions
        # Requests reach the lengths of the batch in the middle of the timed steps.
        num_prompt_tokens = max(1, batch.tokens_each - NUM_WARMUP_STEPS - num_steps // 2)
        ids = [
            self._add(self._prompt(index, num_prompt_tokens), self.max_model_len)
            for index in range(batch.num_requests)
        ]
        num_idle_steps = 0
        while not self._are_decoding(batch.num_requests):
            _, is_executed = self.core.step_fn()
            num_idle_steps = 0 if is_executed else num_idle_steps + 1
            if num_idle_steps > MAX_EMPTY_STEPS or self.scheduler.num_preemptions > preemptions:
                raise self._misfit(batch)
        for _ in range(NUM_WARMUP_STEPS):
            self._step()
        steps_s, tokens = [], []
        before_steps()
        for _ in range(num_steps):
            tokens.append(sum(each.num_tokens for each in self.scheduler.running))
            begun_s = time.perf_counter()
            self._step()
            steps_s.append(time.perf_counter() - begun_s)
            after_step()
        is_whole = self._are_decoding(batch.num_requests)
        self._abort(ids)
        if not is_whole:
            raise self._misfit(batch)
        return DecodeTiming(tuple(steps_s), mean(tokens))

    def prefill(self, num_tokens: int) -> list[PrefillPoint]:
        """Time the steps of one prompt of `num_tokens` random tokens, alone.

        On an engine that schedules a step before the previous one has ended, only their sum can be
        measured, so that a prompt of several steps gives no points there.
        """
        prompt = self._random.choices(self._token_ids, k=num_tokens)
        request_id = self._add(prompt, 1)
        request = self.scheduler.requests[request_id]
        points = []
        while True:
            num_before = request.num_computed_tokens
            begun_s = time.perf_counter()
            self.core.step_fn()
            while self.core.batch_queue and request_id in self.scheduler.requests:
                self.core.step_fn()
            duration_s = time.perf_counter() - begun_s
            is_done = request_id not in self.scheduler.requests
            num_computed = (num_tokens if is_done else request.num_computed_tokens) - num_before
            points.append(PrefillPoint(num_computed, duration_s, num_before))
            if is_done:
                break
        self._settle()
        limit = self.scheduler.max_num_scheduled_tokens
        return [] if self.core.batch_queue is not None and num_tokens > limit else points

    def close(self) -> None:
        """Shut the core down."""
        self.core.shutdown()

    def _step(self) -> None:
        """Step until there are tokens: a step of a core with a queue of batches may only fill
        it."""
        for _ in range(MAX_EMPTY_STEPS):
            outputs, _ = self.core.step_fn()
            if outputs:
                return
        raise AssertionError("a batch that decodes gives no tokens")

    def _prompt(self, index: int, num_tokens: int) -> list[int]:
        return random.Random(f"{self._seed} {index}").choices(self._token_ids, k=num_tokens)

    def _add(self, prompt: list[int], max_tokens: int) -> str:
        self._num_requests += 1
        request = EngineCoreRequest(
            request_id=f"r{self._num_requests}",
            prompt_token_ids=prompt,
            mm_features=None,
            sampling_params=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self.core.add_request(*self.core.preprocess_add_request(request))
        return request.request_id

    def _are_decoding(self, num_requests: int) -> bool:
        running = self.scheduler.running
        return len(running) == num_requests and all(each.num_output_tokens > 0 for each in running)

    def _abort(self, ids: Sequence[str]) -> None:
        self.core.abort_requests(list(ids))
        self._settle()

    def _settle(self) -> None:
        while self.scheduler.has_requests() or self.core.batch_queue:
            self.core.step_fn()

    def _misfit(self, batch: Batch) -> ConfigurationError:
        return ConfigurationError(
            f"{batch.num_requests} requests of {batch.tokens_each} tokens do not stay in this "
            f"engine's batch ({self.total_tokens} tokens); give it more KV cache"
        )


def time_decodes(
    engine: ProfiledEngine,
    batches: Sequence[Batch],
    num_rounds: int,
    num_steps: int,
    on_progress: OnProgress,
) -> list[Decode]:
    """Time every batch once a round: a temporary disturbance of the machine shows as rounds that
    differ.

    All rounds of one length precede those of the next, because the prompts of all lengths together
    may not fit into the prefix cache.
    """
    found = []
    weight_done, weight = 0, sum(map(_weight, batches))
    for _, group in groupby(batches, key=lambda batch: batch.tokens_each):
        alike = list(group)
        rounds = []
        for _ in range(num_rounds):
            rounds.append([engine.decode(batch, num_steps) for batch in alike])
            weight_done += sum(map(_weight, alike))
            on_progress(weight_done / weight / num_rounds)
        found += [
            Decode(
                batch,
                mean(each.num_tokens for each in timings),
                tuple(median(each.steps_s) for each in timings),
            )
            for batch, timings in zip(alike, zip(*rounds, strict=True), strict=True)
        ]
    return found


def time_prefills(
    engine: ProfiledEngine, lengths: Sequence[int], num_rounds: int, on_progress: OnProgress
) -> list[PrefillPoint]:
    """Time a prompt of each length once a round; the points are the medians of the rounds."""
    # The very first step takes longer than later ones of its size.
    engine.prefill(lengths[0])
    found: dict[tuple[int, int], list[float]] = {}
    tokens_done, num_tokens = 0, num_rounds * sum(lengths)
    for _ in range(num_rounds):
        for length in lengths:
            for point in engine.prefill(length):
                key = (point.num_tokens, point.num_tokens_before)
                found.setdefault(key, []).append(point.duration_s)
            tokens_done += length
            on_progress(tokens_done / num_tokens)
    return [
        PrefillPoint(num_tokens, median(durations_s), num_before)
        for (num_tokens, num_before), durations_s in sorted(found.items())
    ]


def _weight(batch: Batch) -> int:
    """Approximate relative time of the batch, dominated by its prefill."""
    return batch.num_requests * (batch.tokens_each + ROOM_TOKENS)
