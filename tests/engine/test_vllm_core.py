"""vLLM's engine core as an instance steps it."""

from pathlib import Path

import pytest

from tests.engine.vllm_cores import tiny_core

pytest.importorskip("vllm")


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_step_waits_for_a_compiler_where_the_engine_is_eager(tmp_path: Path) -> None:
    """The first request with log probabilities had every stream of its instance wait for ten
    seconds, until vLLM's count of greater ones was compiled."""
    import torch._dynamo.utils as dynamo
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    before = sum(dynamo.counters["stats"].values())
    with tiny_core(tmp_path / "tiny", max_model_len=64, num_gpu_blocks_override=9) as core:
        request = EngineCoreRequest(
            request_id="r",
            prompt_token_ids=[100] * 8,
            mm_features=None,
            sampling_params=SamplingParams(temperature=0.0, max_tokens=4, logprobs=3),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        core.add_request(*core.preprocess_add_request(request))
        for _ in range(20):
            _, is_executed = core.step_fn()
            core.post_step(is_executed)
        assert not core.scheduler.has_requests()
    assert sum(dynamo.counters["stats"].values()) == before
