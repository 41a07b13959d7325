"""The emulated engine decides what vLLM decides, step by step.

The same requests come after the same steps to vLLM's engine core, on CPU in this process, and to
`EmulatedCore` with vLLM 1's rules, both with a KV cache of a few dozen blocks. What each step
computes, who is admitted and preempted, who ends, and how many contents the prefix cache has must
be the same.

One engine core serves all scripts: each gets a scheduler of its own, made as vLLM makes it.
"""

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest

from sterna.engine.emulated.config import EmulatedEngineConfig, Preemption, StepMode
from sterna.engine.emulated.core import EmulatedCore
from sterna.engine.emulated.durations import StepTime
from sterna.engine.emulated.requests import RequestState
from sterna.engine.emulated.tokens import chained_hashes
from sterna.types import Priority, RequestId
from tests.engine.vllm_cores import tiny_core

pytest.importorskip("vllm")

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_SEEDS = 4
BLOCK_SIZE = 32
MAX_NUM_BLOCKS = 40
MAX_MODEL_LEN = 256
ANY_STEP_TIME = StepTime(0.01, 0.0, 0.0, 0.01, 0.01, 0.0, 0.0)


@dataclass(frozen=True)
class Arrival:
    """A request that comes when so many steps have been made."""

    after_step: int
    name: str
    prompt: tuple[int, ...]
    output_tokens: int
    arrived_s: float
    urgency: int = 0
    salt: str | None = None


@dataclass(frozen=True)
class Script:
    """What comes when, and to which engine."""

    arrivals: tuple[Arrival, ...]
    num_blocks: int
    max_num_batched_tokens: int
    max_num_seqs: int
    watermark: float
    policy: str
    prefix_caching: bool


@dataclass(frozen=True)
class StepRecord:
    """What one step did, each in the engine's order; those who ended are sorted."""

    computed: tuple[tuple[str, int], ...]
    admitted: tuple[str, ...]
    preempted: tuple[str, ...]
    ended: tuple[str, ...]
    num_contents: int


def random_script(
    seed: int, *, is_chunked: bool, policy: str, prefix_caching: bool = False
) -> Script:
    """Sixteen requests whose memory does not suffice for them all.

    With prefix caching there are more, in families that share the beginnings of their prompts; a
    third of them have a salt, and share blocks only with these.
    """
    rng = random.Random(f"{seed} {is_chunked} {policy}")
    step = 0
    arrivals = []
    for number in range(32 if prefix_caching else 16):
        step += rng.choice([0, 0, 1, 3])
        prompt_tokens = rng.choice([rng.randint(1, 30), rng.randint(20, 110)])
        num_shared = rng.choice([0, 64, 96, 110, 110]) if prefix_caching else 0
        family = rng.choice([2, 3])
        shared = [family + place for place in range(min(prompt_tokens, num_shared))]
        arrivals.append(
            Arrival(
                after_step=step,
                name=f"r{number:02d}",
                prompt=(*shared, *[200 + number] * (prompt_tokens - len(shared))),
                output_tokens=rng.choice([rng.randint(1, 40), rng.randint(30, 70)]),
                # Where vLLM looks at arrivals, some requests were held elsewhere before they came.
                arrived_s=number - (rng.choice([0, 0, 4.5]) if policy == "priority" else 0),
                urgency=rng.choice([0, 0, 1]) if policy == "priority" else 0,
                salt=rng.choice([None, None, "pepper"]) if prefix_caching else None,
            )
        )
    return Script(
        arrivals=tuple(arrivals),
        num_blocks=rng.choice([9, 11]),
        # With so many tokens a step no prompt is ever cut: a request has 256 at most.
        max_num_batched_tokens=rng.choice([16, 40, 64, 100]) if is_chunked else 4096,
        max_num_seqs=rng.choice([4, 8, 16]),
        watermark=rng.choice([0.0, 0.1]),
        policy=policy,
        prefix_caching=prefix_caching,
    )


# ------------------------------------------------------------------------------------- vLLM


@pytest.fixture(scope="module")
def vllm_core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A vLLM engine core of a tiny random model, stepped by hand."""
    with tiny_core(
        tmp_path_factory.mktemp("models") / "tiny",
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=MAX_NUM_BLOCKS + 1,
        max_num_batched_tokens=4096,
        max_num_seqs=16,
        enable_prefix_caching=True,
    ) as core:
        yield core


def vllm_records(core: Any, script: Script) -> list[StepRecord]:
    """What vLLM's steps do."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    core.scheduler = scheduler = _scheduler_of(core, script)

    def add(arrival: Arrival) -> None:
        # Each request has outputs of its own, after the same prompt, too.
        sampling_params = SamplingParams(
            temperature=1.0, max_tokens=arrival.output_tokens, ignore_eos=True
        )
        wire_request = EngineCoreRequest(
            request_id=arrival.name,
            prompt_token_ids=list(arrival.prompt),
            mm_features=None,
            sampling_params=sampling_params,
            pooling_params=None,
            arrival_time=arrival.arrived_s,
            lora_request=None,
            cache_salt=arrival.salt,
            data_parallel_rank=None,
            # vLLM serves small values first.
            priority=-arrival.urgency,
        )
        core.add_request(*core.preprocess_add_request(wire_request))

    def step() -> StepRecord | None:
        outputs, is_executed = core.step_fn()
        core.post_step(is_executed)
        ended = [
            output.request_id
            for each in (outputs or {}).values()
            for output in each.outputs
            if output.finished
        ]
        return scheduler.take_record(ended) if is_executed else None

    records = _play(script, add, step, lambda: bool(scheduler.get_num_unfinished_requests()))
    while scheduler.has_requests():
        # The worker has yet to hear of the last ends.
        core.step_fn()
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == script.num_blocks
    return records


def _scheduler_of(core: Any, script: Script) -> Any:
    """A scheduler as the engine core makes its own, with the script's limits."""
    from vllm.v1.core.sched.scheduler import Scheduler

    class RecordingScheduler(Scheduler):
        """Says what its last step computes, and whom it admitted and preempted."""

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            running = {request.request_id for request in self.running}
            self._preempted: list[str] = getattr(self, "_preempted", [])
            output = super().schedule(*args, **kwargs)
            self._computed = list(output.num_scheduled_tokens.items())
            self._admitted = [name for name, _ in self._computed if name not in running]
            return output

        def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
            self._preempted.append(request.request_id)
            super()._preempt_request(request, *args, **kwargs)

        def take_record(self, ended: list[str]) -> StepRecord:
            preempted, self._preempted = self._preempted, []
            return StepRecord(
                tuple(self._computed),
                tuple(self._admitted),
                tuple(preempted),
                tuple(sorted(ended)),
                len(self.kv_cache_manager.block_pool.cached_block_hash_to_block),
            )

    config = copy.deepcopy(core.vllm_config)
    config.scheduler_config.max_num_batched_tokens = script.max_num_batched_tokens
    config.scheduler_config.max_num_scheduled_tokens = None
    config.scheduler_config.max_num_seqs = script.max_num_seqs
    config.scheduler_config.watermark = script.watermark
    config.scheduler_config.policy = script.policy
    config.cache_config.enable_prefix_caching = script.prefix_caching
    kv_cache_config = copy.copy(core.scheduler.kv_cache_config)
    # vLLM keeps one block for itself.
    kv_cache_config.num_blocks = script.num_blocks + 1
    return RecordingScheduler(
        vllm_config=config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=core.structured_output_manager,
        block_size=core.scheduler.block_size,
        hash_block_size=core.scheduler.hash_block_size,
    )


# ---------------------------------------------------------------------------------- emulated


def emulated_records(script: Script, preemption: Preemption | None = None) -> list[StepRecord]:
    """What the emulated engine's steps do; with another rule than the script's, if asked."""
    # vLLM counts its own block in, of which the watermark is a part.
    watermark_blocks = int(script.watermark * (script.num_blocks + 1))
    config = EmulatedEngineConfig(
        num_blocks=script.num_blocks,
        block_size=BLOCK_SIZE,
        watermark=(watermark_blocks + 0.5) / script.num_blocks if watermark_blocks else 0.0,
        max_num_seqs=script.max_num_seqs,
        max_num_batched_tokens=script.max_num_batched_tokens,
        step_mode=StepMode.CHUNKED,
        preemption=preemption or PREEMPTION[script.policy],
        keeps_block_free=False,
        prefix_caching=script.prefix_caching,
    )
    core = EmulatedCore(config, ANY_STEP_TIME)

    def add(arrival: Arrival) -> None:
        core.add(
            RequestState(
                request_id=RequestId(arrival.name),
                prompt_tokens=len(arrival.prompt),
                output_tokens=arrival.output_tokens,
                arrival_s=arrival.arrived_s,
                scheduling_priority=Priority(arrival.urgency),
                block_hashes=hashes_of(arrival),
            )
        )

    def step() -> StepRecord | None:
        begun = core.begin_step()
        ended = [str(token.request_id) for token in core.end_step() if token.is_last]
        return StepRecord(
            begun.scheduled,
            begun.admitted,
            begun.preempted,
            tuple(sorted(ended)),
            len(list(core.cached_hashes())),
        )

    records = _play(script, add, step, lambda: not core.is_empty)
    assert core.num_free_blocks == script.num_blocks
    return records


def hashes_of(arrival: Arrival) -> bytes:
    """The request's block hashes; its outputs are in no other request."""
    first = MAX_MODEL_LEN * (1_000 + int(arrival.name[1:]))
    outputs = range(first, first + arrival.output_tokens)
    return chained_hashes([*arrival.prompt, *outputs], BLOCK_SIZE, arrival.salt)


PREEMPTION = {"fcfs": Preemption.LAST_ADMITTED, "priority": Preemption.LEAST_URGENT}


def _play(script: Script, add: Any, step: Any, has_requests: Any) -> list[StepRecord]:
    """Step to the end of the script; steps that compute nothing are not counted."""
    coming = list(script.arrivals)
    records: list[StepRecord] = []
    num_empty_steps = 0
    while coming or has_requests():
        while coming and (coming[0].after_step <= len(records) or not has_requests()):
            add(coming.pop(0))
        record = step()
        if record is None or not record.computed:
            num_empty_steps += 1
            assert num_empty_steps < 1000, "nothing is computed any more"
        else:
            records.append(record)
    return records


# ------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("prefix_caching", [False, True], ids=["", "prefix_caching"])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("is_chunked", [False, True], ids=["whole_prompts", "chunks"])
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_the_emulated_engine_makes_vllms_steps(
    vllm_core: Any, seed: int, is_chunked: bool, policy: str, prefix_caching: bool
) -> None:
    script = random_script(
        seed, is_chunked=is_chunked, policy=policy, prefix_caching=prefix_caching
    )
    real, emulated = vllm_records(vllm_core, script), emulated_records(script)
    for number, (ours, theirs) in enumerate(zip(emulated, real, strict=False)):
        assert ours == theirs, f"step {number} of {script}"
    assert len(emulated) == len(real)


def test_the_scripts_are_hard_enough() -> None:
    """They have preemptions, queues and cut prompts to compare at all."""
    scripts = [
        random_script(seed, is_chunked=is_chunked, policy=policy)
        for seed in range(NUM_SEEDS)
        for is_chunked in (False, True)
        for policy in ("fcfs", "priority")
    ]
    records = [emulated_records(script) for script in scripts]
    num_preemptions = [sum(len(step.preempted) for step in each) for each in records]
    assert sum(num > 0 for num in num_preemptions) >= len(scripts) // 2
    assert sum(num_preemptions) > 2 * len(scripts)


def test_the_scripts_use_the_prefix_cache() -> None:
    """Prompts are found, and contents are lost."""
    num_lost = num_tokens = num_tokens_without = 0
    for seed in range(NUM_SEEDS):
        script = random_script(seed, is_chunked=True, policy="fcfs", prefix_caching=True)
        records = emulated_records(script)
        contents = [each.num_contents for each in records]
        num_lost += sum(later < earlier for earlier, later in pairwise(contents))
        num_tokens += num_computed(records)
        without = emulated_records(replace(script, prefix_caching=False))
        num_tokens_without += num_computed(without)
    assert num_tokens < 0.9 * num_tokens_without
    assert num_lost > 10 * NUM_SEEDS


def num_computed(records: list[StepRecord]) -> int:
    return sum(num_tokens for step in records for _, num_tokens in step.computed)


def test_the_rule_of_another_engine_is_noticed() -> None:
    """The comparison compares: by the order of vLLM 0.1 the steps are others."""
    scripts = [random_script(n, is_chunked=True, policy="priority") for n in range(NUM_SEEDS)]
    others = [emulated_records(each, Preemption.LATEST_ARRIVED) for each in scripts]
    assert sum(emulated_records(a) != b for a, b in zip(scripts, others, strict=True)) >= 2
