"""An emulated engine speaks to vLLM's server in vLLM's own encoding."""

import msgspec
import pytest

pytest.importorskip("vllm")

from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine import (
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    FinishReason,
)

from sterna.engine.emulated import engine_messages
from sterna.engine.emulated.config import EmulatedEngineConfig
from sterna.engine.emulated.emulated_engine import UTILITY_RESULTS
from sterna.engine.emulated.refusals import refusal
from sterna.engine.payload_parts import EngineEvent, EventType
from sterna.engine.vllm.payload import decode_outputs, encode_request, merge_outputs
from tests.engine.emulated.clusters import payload

pytestmark = pytest.mark.vllm


def vllm_request(**changes: object) -> EngineCoreRequest:
    fields = {
        "request_id": "cmpl-1",
        "prompt_token_ids": [1, 2, 3],
        "mm_features": None,
        "sampling_params": SamplingParams(max_tokens=9, seed=-7, stop_token_ids=[4], min_tokens=2),
        "pooling_params": None,
        "arrival_time": 17.5,
        "lora_request": None,
        "cache_salt": "tenant",
        "data_parallel_rank": None,
        "client_index": 3,
        "priority": -2,
        "external_req_id": "1",
    }
    return EngineCoreRequest(**{**fields, **changes})


def test_vllms_requests_are_read() -> None:
    request = engine_messages.decode_request(encode_request(vllm_request()))
    assert request.unsupported() is None
    assert request.request_id == "cmpl-1"
    assert request.prompt_token_ids == [1, 2, 3]
    assert request.arrival_time == 17.5
    assert request.cache_salt == "tenant"
    assert request.client_index == 3
    assert request.priority == -2
    params = request.sampling_params
    assert params == engine_messages.SamplingParams(
        seed=-7, stop_token_ids=[4], max_tokens=9, min_tokens=2
    )


def test_what_vllm_leaves_out_is_what_is_assumed() -> None:
    defaults = vllm_request(sampling_params=SamplingParams(), priority=0)
    request = engine_messages.decode_request(encode_request(defaults))
    ours, theirs = request.sampling_params, defaults.sampling_params
    assert ours is not None
    assert ours.seed == theirs.seed
    assert not ours.stop_token_ids
    assert not theirs.stop_token_ids
    assert (ours.max_tokens, ours.min_tokens) == (theirs.max_tokens, theirs.min_tokens)
    assert request.priority == 0


def test_the_fields_are_vllms_in_vllms_order() -> None:
    for ours, theirs in (
        (engine_messages.Request, EngineCoreRequest),
        (engine_messages.Output, EngineCoreOutput),
        (engine_messages.Outputs, EngineCoreOutputs),
    ):
        names = ours.__struct_fields__
        assert names == theirs.__struct_fields__[: len(names)]
    assert {each.name: each.value for each in engine_messages.FinishReason}.items() <= {
        each.name: each.value for each in FinishReason
    }.items()
    assert {each.name: each.value for each in EventType} == {
        each.name: each.value for each in EngineCoreEventType
    }


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({"prompt_token_ids": None}, "answer to a prompt without tokens"),
        ({"sampling_params": None}, "answer to a prompt without tokens"),
        ({"mm_features": []}, "images"),
    ],
)
def test_what_only_a_model_can_serve_is_noticed(changes: dict[str, object], needed: str) -> None:
    request = engine_messages.decode_request(encode_request(vllm_request(**changes)))
    assert request.unsupported() == needed


def test_the_tests_requests_are_like_vllms() -> None:
    """The other tests of the driver make theirs without vLLM."""
    ours = engine_messages.decode_request(
        payload("cmpl-1", [1, 2, 3], arrival_s=17.5, priority=-2, max_tokens=9, seed=5)
    )
    params = SamplingParams(max_tokens=9, seed=5)
    theirs = engine_messages.decode_request(
        encode_request(vllm_request(sampling_params=params, client_index=0))
    )
    assert ours.unsupported() is theirs.unsupported() is None
    for name in ("request_id", "prompt_token_ids", "arrival_time", "priority"):
        assert getattr(ours, name) == getattr(theirs, name)
    params = ours.sampling_params
    assert (params.max_tokens, params.seed) == (9, 5)
    assert not params.stop_token_ids
    assert theirs.sampling_params.seed == 5


def test_vllm_reads_outputs() -> None:
    output = engine_messages.Output(
        "cmpl-1",
        [7],
        finish_reason=engine_messages.FinishReason.STOP,
        stop_reason=7,
        events=[EngineEvent(EventType.SCHEDULED, 2.5)],
        prefill_stats=engine_messages.PrefillStats(12, 8, 4, 4),
    )
    blob = engine_messages.encode_outputs(engine_messages.Outputs(outputs=[output], timestamp=4.5))
    (merged,) = merge_outputs([blob])
    for each in (blob, merged):
        outputs = decode_outputs(each)
        (read,) = outputs.outputs
        assert (read.request_id, read.new_token_ids) == ("cmpl-1", [7])
        assert (read.finish_reason, read.stop_reason) == (FinishReason.STOP, 7)
        (event,) = read.events
        assert event.type == EngineCoreEventType.SCHEDULED
        assert outputs.timestamp - event.timestamp == pytest.approx(2.0)
        stats = read.prefill_stats
        assert (stats.num_prompt_tokens, stats.num_computed_tokens) == (12, 8)
        assert (stats.num_cached_tokens, stats.num_local_cached_tokens) == (4, 4)
    assert decode_outputs(blob).timestamp == 4.5


@pytest.mark.parametrize("result", list(UTILITY_RESULTS.values()))
def test_vllm_reads_the_results_of_its_calls(result: object) -> None:
    output = engine_messages.UtilityOutput(5, None, (None, result))
    read = decode_outputs(
        engine_messages.encode_outputs(engine_messages.Outputs(utility_output=output))
    )
    assert read.utility_output.call_id == 5
    assert read.utility_output.failure_message is None
    assert read.utility_output.result.result == result


def test_vllm_reads_the_failure_of_a_call() -> None:
    output = engine_messages.UtilityOutput(5, "there is no such thing", None)
    read = decode_outputs(
        engine_messages.encode_outputs(engine_messages.Outputs(utility_output=output))
    )
    assert read.utility_output.failure_message == "there is no such thing"


def test_vllms_client_understands_that_an_engine_is_ready() -> None:
    config = EmulatedEngineConfig(num_blocks=50, block_size=16)
    ready = msgspec.msgpack.decode(
        engine_messages.encode_ready(config, 400, "i3"), type=EngineCoreReadyResponse
    )
    assert (ready.num_gpu_blocks, ready.block_size, ready.max_model_len) == (50, 16, 400)
    assert ready.effective_attention_block_size == 16
    assert ready.kv_cache_max_concurrency == 2.0


TOKENS = {"type": "token", "prompt_token_ids": [1]}


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(logprobs=0),
        SamplingParams(prompt_logprobs=1),
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+")),
        SamplingParams(logit_bias={5: 1.0}),
        SamplingParams(allowed_token_ids=[5]),
        SamplingParams(bad_words=["tern"]),
    ],
)
def test_what_would_have_to_be_made_up_is_refused(params: SamplingParams) -> None:
    parameter, reason = refusal(TOKENS, params) or ("", "")
    assert getattr(params, parameter) not in (None, [])
    assert "the emulated engine has no model" in reason


def test_images_and_embeddings_are_refused() -> None:
    assert refusal({"type": "multimodal"}, SamplingParams()) is not None
    assert refusal({"type": "embeds"}, SamplingParams()) is not None


def test_whatever_only_chooses_among_tokens_is_accepted() -> None:
    params = SamplingParams(
        n=3, temperature=0.3, top_p=0.5, top_k=7, presence_penalty=1.0, seed=3, stop=["tern"]
    )
    assert refusal(TOKENS, params) is None
    assert refusal(TOKENS, SamplingParams()) is None
