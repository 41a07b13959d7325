"""A request that goes on behind outputs of an engine that is gone says what it would have said.

Each request runs alone to its end first. Then it is added again behind each of some prefixes of its
own output, and must generate the rest: on an engine that never saw it before, with its KV computed
again, in chunks.
"""

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_vllm_scheduler import step, with_scheduler
from tests.engine.vllm_cores import tiny_core

pytest.importorskip("vllm")

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

NUM_TOKENS = 40
CUTS = (1, 7, 30, NUM_TOKENS - 1)
CITY = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "size": {"enum": ["small", "big"]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
RANDOM = {"temperature": 0.9, "seed": 11}
START_OF_THOUGHTS, END_OF_THOUGHTS = 17, 18
THOUGHTS = {START_OF_THOUGHTS: 13.0, END_OF_THOUGHTS: 10.0}
"""A bias by which a model begins several sections of thoughts, and ends some of them itself."""
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": RANDOM,
    "top_k, top_p and min_p": {**RANDOM, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.3},
    "seeded with penalties": {**RANDOM, "frequency_penalty": 1.0},
    "log probabilities": {**RANDOM, "logprobs": 3, "prompt_logprobs": 2},
    "min_tokens": {"min_tokens": 25, "stop_token_ids": list(range(1, 49152, 2))},
    "bad words": {"bad_words_token_ids": True},
    "JSON": {**RANDOM, "json": CITY, "max_tokens": 60, "ignore_eos": False},
    "thinking budget": {**RANDOM, "thinking_token_budget": 5, "logit_bias": THOUGHTS},
    "regex": {"regex": "(ab|cd){60}", "max_tokens": 30},
}


@pytest.fixture(scope="module")
def vllm_core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from vllm.config import ReasoningConfig

    from sterna.engine.vllm.hosted_core import WORKER_EXTENSION

    thoughts = ReasoningConfig()
    thoughts._reasoning_start_token_ids = [START_OF_THOUGHTS]
    thoughts._reasoning_end_token_ids = [END_OF_THOUGHTS]
    thoughts._natural_reasoning_end_token_ids = [END_OF_THOUGHTS]
    with tiny_core(
        tmp_path_factory.mktemp("models") / "tiny",
        load_format="auto",
        reasoning_config=thoughts,
        max_model_len=512,
        block_size=32,
        num_gpu_blocks_override=61,
        max_num_batched_tokens=48,
        max_num_seqs=4,
        enable_chunked_prefill=True,
        worker_extension_cls=WORKER_EXTENSION,
    ) as core:
        core.collective_rpc("sterna_prepare", args=(os.getpid(),))
        yield core


def wire_request(name: str, case: dict[str, Any], lora_request: Any = None) -> Any:
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams
    from vllm.v1.engine import EngineCoreRequest

    settings = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, **case}
    if "json" in settings or "regex" in settings:
        kinds = {kind: settings.pop(kind) for kind in ("json", "regex") if kind in settings}
        settings["structured_outputs"] = StructuredOutputsParams(**kinds)
        settings["structured_outputs"]._backend = "xgrammar"
    has_bad_words = settings.pop("bad_words_token_ids", False)
    params = SamplingParams(**settings)
    if has_bad_words:
        params._bad_words_token_ids = [[number] for number in range(0, 49152, 2)]
    params.update_from_generation_config({}, 2)
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=[(7 * i * i + 100) % 40_000 for i in range(75)],
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=lora_request,
        cache_salt=None,
        data_parallel_rank=None,
    )


class Said:
    """What the engine has said of each request."""

    def __init__(self, core: Any, lora_request: Any = None) -> None:
        self._core = core
        self._lora_request = lora_request
        self.outputs: dict[str, list[Any]] = {}

    def add(self, name: str, case: dict[str, Any], history: Sequence[int] = ()) -> None:
        from sterna.engine.vllm.engine import VllmEngine

        self.outputs[name] = []
        request, _ = self._core.preprocess_add_request(wire_request(name, case, self._lora_request))
        if request.structured_output_request is not None:
            request.structured_output_request._grammar.result()
        if history:
            VllmEngine._restore(self._core, request, history)
        else:
            self._core.add_request(request)

    def run(self, *names: str, num_steps: int = 1000) -> None:
        """Step until these requests have ended."""
        for _ in range(num_steps):
            if all(self.is_finished(name) for name in names):
                break
            outputs, is_executed = self._core.step_fn()
            for of_client in (outputs or {}).values():
                for output in of_client.outputs:
                    self.outputs[output.request_id].append(output)
            self._core.post_step(is_executed)

    def is_finished(self, name: str) -> bool:
        return bool(self.outputs[name]) and self.outputs[name][-1].finish_reason is not None

    def token_ids(self, name: str) -> list[int]:
        return [token for output in self.outputs[name] for token in output.new_token_ids]

    def logprobs(self, name: str) -> list[list[float]]:
        return [
            row.tolist()
            for output in self.outputs[name]
            if output.new_logprobs is not None
            for row in output.new_logprobs.logprobs
        ]


@pytest.mark.parametrize("name", CASES)
def test_a_request_goes_on_as_if_its_engine_had_not_died(vllm_core: Any, name: str) -> None:
    case = CASES[name]
    core = with_scheduler(vllm_core)
    said = Said(core)
    said.add("alone", case)
    said.run("alone")
    token_ids = said.token_ids("alone")
    expected_logprobs = said.logprobs("alone")
    assert len(token_ids) > 20, "too short to be cut"
    for cut in (each for each in CUTS if each < len(token_ids)):
        again = f"behind {cut}"
        said.add(again, case, token_ids[:cut])
        said.run(again)
        assert said.token_ids(again) == token_ids[cut:]
        # Computed in other chunks, they differ in their last digits.
        for row, expected_row in zip(said.logprobs(again), expected_logprobs[cut:], strict=True):
            assert row == pytest.approx(expected_row, abs=1e-4)
        last, expected = said.outputs[again][-1], said.outputs["alone"][-1]
        assert (last.finish_reason, last.stop_reason) == (
            expected.finish_reason,
            expected.stop_reason,
        )
        # They came with the first token, which the client has.
        assert all(output.new_prompt_logprobs_tensors is None for output in said.outputs[again])
        assert all(output.prefill_stats is None for output in said.outputs[again])


def test_a_request_goes_on_right_beside_others(vllm_core: Any) -> None:
    """A batch of seeded and unseeded requests is drawn for together."""
    core = with_scheduler(vllm_core)
    said = Said(core)
    said.add("alone", RANDOM)
    said.run("alone")
    said.add("other seed", {**RANDOM, "seed": 12})
    said.add("no seed", {"temperature": 0.9})
    said.run(num_steps=12)
    said.add("again", RANDOM, said.token_ids("alone")[:13])
    said.run("again", "other seed", "no seed")
    assert said.token_ids("again") == said.token_ids("alone")[13:]
    said.add("other alone", {**RANDOM, "seed": 12})
    said.run("other alone")
    assert said.token_ids("other seed") == said.token_ids("other alone")


def test_a_generator_that_did_not_draw_again_would_say_something_else(vllm_core: Any) -> None:
    """The test above sees what it is to see."""
    core = with_scheduler(vllm_core)
    said = Said(core)
    said.add("alone", RANDOM)
    said.run("alone")
    said.add("again", RANDOM, said.token_ids("alone")[:13])
    import torch

    for request in core.model_executor.driver_worker.worker.model_runner.requests.values():
        if request.req_id == "again":
            request.generator = torch.Generator()
            request.generator.manual_seed(RANDOM["seed"])
    said.run("again")
    assert said.token_ids("again") != said.token_ids("alone")[13:]


def test_a_request_with_a_history_queues_in_front_and_leaves_nothing(vllm_core: Any) -> None:
    core = with_scheduler(vllm_core)
    said = Said(core)
    for number in range(5):
        said.add(f"r{number}", {})
    step(core)
    said.add("again", {}, [5, 6, 7])
    assert next(request.request_id for request in core.scheduler.waiting) == "again"
    names = [f"r{number}" for number in range(5)] + ["again"]
    core.abort_requests(names)
    step(core)
    assert not core.scheduler.requests
    pool = core.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


@pytest.fixture
def adapter(tmp_path: Path) -> Any:
    """A random LoRA adapter of the tiny model."""
    import torch
    from safetensors.torch import save_file
    from vllm.lora.request import LoRARequest

    generator = torch.Generator().manual_seed(3)
    weights = {}
    for layer, name, size in itertools.product(range(2), ("q_proj", "o_proj"), [128]):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
        weights[f"{prefix}.lora_A.weight"] = torch.randn(8, size, generator=generator) / 8
        weights[f"{prefix}.lora_B.weight"] = torch.randn(size, 8, generator=generator)
    save_file(weights, tmp_path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "o_proj"],
        "bias": "none",
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest("terns", 1, str(tmp_path))


def test_a_request_with_an_adapter_goes_on_with_it(tmp_path: Path, adapter: Any) -> None:
    """Such a request does not migrate, but it can be sent again."""
    from sterna.engine.vllm.hosted_core import WORKER_EXTENSION

    with tiny_core(
        tmp_path / "tiny",
        load_format="auto",
        max_model_len=256,
        block_size=32,
        num_gpu_blocks_override=31,
        max_num_seqs=4,
        enable_lora=True,
        max_lora_rank=8,
        worker_extension_cls=WORKER_EXTENSION,
    ) as core:
        with_scheduler(core)
        plain, adapted = Said(core), Said(core, adapter)
        for said in (plain, adapted):
            said.add("alone", RANDOM)
            said.run("alone")
        token_ids = adapted.token_ids("alone")
        assert token_ids != plain.token_ids("alone")
        adapted.add("again", RANDOM, token_ids[:9])
        adapted.run("again")
        assert adapted.token_ids("again") == token_ids[9:]
