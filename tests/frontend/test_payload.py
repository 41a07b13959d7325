"""vLLM's structs survive the way through one payload blob."""

import time

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.metrics.stats import PrefillStats, PrefixCacheStats
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackEncoder

from sterna.engine.payload_parts import (
    Annotations,
    annotations_of,
    joined_outputs,
    pack_frames,
    renamed_output,
    renamed_request,
    token_ids_of,
    unpack_frames,
)
from sterna.engine.vllm import payload
from sterna.messages.actors import ClusterStats, TokenSpan
from sterna.types import RequestId

pytestmark = pytest.mark.vllm


def outputs_with_logprobs(num_logprobs: int) -> EngineCoreOutputs:
    logprobs = LogprobsLists(
        logprob_token_ids=np.arange(num_logprobs, dtype=np.int32)[None, :],
        logprobs=np.linspace(-9, 0, num_logprobs, dtype=np.float32)[None, :],
        sampled_token_ranks=np.array([3], dtype=np.int32),
    )
    return EngineCoreOutputs(
        outputs=[EngineCoreOutput("r1", [17], new_logprobs=logprobs)], timestamp=2.5
    )


def test_a_single_frame_is_its_own_payload_so_that_it_can_be_forwarded_untouched():
    outputs = EngineCoreOutputs(outputs=[EngineCoreOutput("r1", [17])], timestamp=2.5)
    assert [payload.encode_outputs(outputs)] == MsgpackEncoder().encode(outputs)


def test_outputs_with_large_arrays_keep_all_their_frames():
    outputs = outputs_with_logprobs(num_logprobs=500)
    blob = payload.encode_outputs(outputs)
    frames = [bytes(frame) for frame in unpack_frames(blob)]
    assert frames == [bytes(frame) for frame in MsgpackEncoder().encode(outputs)]
    assert len(frames) == 3

    (decoded,) = payload.decode_outputs(blob).outputs
    expected = outputs.outputs[0].new_logprobs
    assert decoded.new_token_ids == [17]
    np.testing.assert_array_equal(decoded.new_logprobs.logprobs, expected.logprobs)
    np.testing.assert_array_equal(
        decoded.new_logprobs.logprob_token_ids, expected.logprob_token_ids
    )


def test_cutting_leading_tokens_cuts_what_belongs_to_them():
    logprobs = LogprobsLists(
        logprob_token_ids=np.arange(12, dtype=np.int32).reshape(3, 4),
        logprobs=-np.arange(12, dtype=np.float32).reshape(3, 4),
        sampled_token_ranks=np.array([5, 6, 7], dtype=np.int32),
    )
    output = EngineCoreOutput(
        "r1", [17, 18, 19], new_logprobs=logprobs, finish_reason=FinishReason.LENGTH
    )
    blob = payload.encode_outputs(EngineCoreOutputs(outputs=[output], timestamp=2.5))
    outputs = payload.decode_outputs(payload.cut_leading_tokens(blob, 2))
    (cut,) = outputs.outputs
    assert (cut.new_token_ids, cut.finish_reason) == ([19], FinishReason.LENGTH)
    assert cut.new_logprobs.logprob_token_ids.tolist() == [[8, 9, 10, 11]]
    assert cut.new_logprobs.logprobs.tolist() == [[-8, -9, -10, -11]]
    assert cut.new_logprobs.sampled_token_ranks.tolist() == [7]
    assert outputs.timestamp == 2.5


def test_a_failure_ends_the_request_with_an_error():
    blob = payload.encode_failure("r1", "no luck", is_pooling=False)
    (output,) = payload.decode_outputs(blob).outputs
    assert output == EngineCoreOutput(
        "r1", [], finish_reason=FinishReason.ERROR, stop_reason="no luck"
    )


def test_an_output_that_is_too_large_for_a_message_ends_its_request():
    output = EngineCoreOutput("r1", [10, 11], finish_reason=None)
    span = TokenSpan(RequestId("r1"), 5, 2, False)
    sent, content = payload.encode_span(span, output, max_bytes=1000)
    assert sent is span
    assert payload.decode_outputs(content).outputs[0].new_token_ids == [10, 11]
    sent, content = payload.encode_span(span, output, max_bytes=len(content) - 1)
    assert sent == TokenSpan(RequestId("r1"), 5, 0, True)
    (failure,) = payload.decode_outputs(content).outputs
    assert (failure.request_id, failure.finish_reason) == ("r1", FinishReason.ERROR)
    assert not failure.mm_cache_miss_hashes


def test_an_output_says_which_weights_made_it():
    output = EngineCoreOutput("r1", [7])
    span = TokenSpan(RequestId("r1"), 0, 1, False)
    _, content = payload.encode_span(span, output, 1000, "after step 40")
    assert payload.decode_outputs(content).weight_version == "after step 40"


def test_an_embedding_that_is_too_large_for_a_message_ends_its_request_as_vllm_wants_it():
    output = EngineCoreOutput(
        "r1", [], pooling_output=torch.zeros(100), finish_reason=FinishReason.STOP
    )
    span = TokenSpan(RequestId("r1"), 0, 0, True)
    sent, content = payload.encode_span(span, output, max_bytes=100)
    assert sent == span
    assert payload.decode_outputs(content).outputs[0].mm_cache_miss_hashes == ["r1"]


def test_a_request_comes_back_equal():
    request = EngineCoreRequest(
        request_id="cmpl-1-0",
        prompt_token_ids=[1, 2, 3],
        mm_features=None,
        sampling_params=SamplingParams(temperature=0.3, seed=7, max_tokens=9, logprobs=2),
        pooling_params=None,
        arrival_time=12.5,
        lora_request=None,
        cache_salt="salt",
        data_parallel_rank=None,
        priority=-4,
        external_req_id="cmpl-1",
    )
    decoded = payload.decode_request(payload.encode_request(request))
    assert decoded.sampling_params == request.sampling_params
    assert decoded.prompt_token_ids == [1, 2, 3]
    assert (decoded.priority, decoded.external_req_id) == (-4, "cmpl-1")


def test_a_utility_call_of_vllms_client_can_be_read():
    frames = MsgpackEncoder().encode((0, 1 << 63, "reset_prefix_cache", (True, False)))
    call = payload.decode_utility_call(pack_frames(frames))
    assert call == payload.UtilityCall(0, 1 << 63, "reset_prefix_cache", (True, False))


@pytest.mark.parametrize("result", [object(), "x" * 1000])
def test_a_utility_result_that_cannot_be_sent_becomes_a_failure(result: object):
    output = payload.decode_outputs(
        payload.encode_utility_result(5, result, max_bytes=1000)
    ).utility_output
    assert output.call_id == 5
    assert output.failure_message.startswith("the result cannot be sent")


def test_a_utility_result_comes_back():
    output = payload.decode_outputs(
        payload.encode_utility_result(5, result=[1, "two"])
    ).utility_output
    assert (output.failure_message, output.result.result) == (None, [1, "two"])


def test_counts_of_drafts_become_vllms_statistics():
    """By hand: 9 drafts of 2 tokens, of which 7 and 4 were accepted. vLLM reads as many positions
    as it has counters for."""
    stats = ClusterStats(())
    content = payload.encode_cluster_stats(stats, draft_counts=(9, 18, 7, 4))
    drafts = payload.decode_outputs(content).scheduler_stats.spec_decoding_stats
    assert (drafts.num_drafts, drafts.num_draft_tokens, drafts.num_accepted_tokens) == (9, 18, 11)
    assert drafts.num_accepted_tokens_per_pos[:6] == [7, 4, 0, 0, 0, 0]
    content = payload.encode_cluster_stats(stats)
    assert payload.decode_outputs(content).scheduler_stats.spec_decoding_stats is None


def test_counts_of_caches_become_vllms_statistics():
    content = payload.encode_cluster_stats(ClusterStats(()), (200, 96), (104, 64))
    stats = payload.decode_outputs(content).scheduler_stats
    assert stats.prefix_cache_stats == PrefixCacheStats(queries=200, hits=96)
    assert stats.connector_prefix_cache_stats == PrefixCacheStats(queries=104, hits=64)


def test_merged_payloads_hold_the_same_outputs_in_the_same_order():
    outputs = [
        EngineCoreOutput(f"r{number}", [number, number + 1], finish_reason=FinishReason.STOP)
        for number in range(3)
    ]
    payloads = [payload.encode_outputs(EngineCoreOutputs(outputs=[output])) for output in outputs]

    merged = payload.merge_outputs(payloads)

    assert len(merged) == 1
    assert payload.decode_outputs(merged[0]).outputs == outputs


def test_a_payload_of_several_frames_is_not_merged_but_keeps_its_place():
    large = np.zeros((64, 1024), dtype=np.float32)
    one = EngineCoreOutput("one", [1])
    two = EngineCoreOutput("two", [2], routed_experts=large)
    three = EngineCoreOutput("three", [3])
    payloads = [payload.encode_outputs(EngineCoreOutputs(outputs=[o])) for o in (one, two, three)]

    merged = payload.merge_outputs(payloads)

    decoded = [payload.decode_outputs(each).outputs for each in merged]
    assert [[output.request_id for output in each] for each in decoded] == [
        ["one"],
        ["two"],
        ["three"],
    ]
    np.testing.assert_array_equal(decoded[1][0].routed_experts, large)


@pytest.mark.parametrize("num_positions", [0, 64], ids=["one_frame", "several_frames"])
def test_the_events_of_an_output_keep_their_distance_to_it_on_another_machines_clock(
    num_positions: int,
):
    """vLLM's client subtracts times of events from those of outputs."""
    kinds = (EngineCoreEventType.QUEUED, EngineCoreEventType.SCHEDULED)
    events = [
        EngineCoreEvent.new_event(kind, at_s)
        for kind, at_s in zip(kinds, (1e6 + 1.0, 1e6 + 1.5), strict=True)
    ]
    experts = np.zeros((num_positions, 1024), dtype=np.float32) if num_positions else None
    first = EngineCoreOutput("r1", [1], events=events, routed_experts=experts)
    later = EngineCoreOutput("r2", [2])
    blobs = [
        payload.encode_outputs(EngineCoreOutputs(outputs=[output], timestamp=at_s))
        for output, at_s in ((first, 1e6 + 3.5), (later, 2e6))
    ]

    before_s = time.monotonic()
    merged = [payload.decode_outputs(each) for each in payload.merge_outputs(blobs)]
    after_s = time.monotonic()

    for each in merged:
        assert before_s <= each.timestamp <= after_s
    shifted = merged[0].outputs[0].events
    assert [event.type for event in shifted] == list(kinds)
    ago_s = [merged[0].timestamp - event.timestamp for event in shifted]
    assert ago_s == pytest.approx([2.5, 2.0])
    assert [output.events for each in merged for output in each.outputs][1:] == [None]


def test_outputs_of_different_weights_are_not_merged():
    payloads = [
        payload.encode_outputs(
            EngineCoreOutputs(outputs=[EngineCoreOutput(name, [1])], weight_version=version)
        )
        for name, version in (("one", "v1"), ("two", "v1"), ("three", "v2"), ("four", None))
    ]

    merged = [payload.decode_outputs(each) for each in payload.merge_outputs(payloads)]

    assert [(each.weight_version, [o.request_id for o in each.outputs]) for each in merged] == [
        ("v1", ["one", "two"]),
        ("v2", ["three"]),
        (None, ["four"]),
    ]


def test_the_envelope_has_vllms_fields_in_vllms_order():
    assert payload._Envelope.__struct_fields__ == EngineCoreOutputs.__struct_fields__


def test_tokens_are_read_without_vllms_types():
    outputs = EngineCoreOutputs(outputs=[EngineCoreOutput("r1", [17, 18])], timestamp=2.5)
    assert token_ids_of(payload.encode_outputs(outputs)) == [17, 18]
    assert token_ids_of(payload.encode_outputs(outputs_with_logprobs(num_logprobs=500))) == [17]
    pooled = EngineCoreOutputs(outputs=[EngineCoreOutput("r1", [])])
    assert token_ids_of(payload.encode_outputs(pooled)) == []


@pytest.mark.parametrize("num_logprobs", [2, 500], ids=["one_frame", "several_frames"])
def test_an_output_is_renamed_and_nothing_else_changes(num_logprobs: int):
    blob = payload.encode_outputs(outputs_with_logprobs(num_logprobs))
    renamed = renamed_output(blob, "another")
    assert payload.decode_outputs(renamed).outputs[0].request_id == "another"
    assert renamed_output(renamed, "r1") == blob


def one(*tokens: int, **fields: object) -> bytes:
    output = EngineCoreOutput("r1", list(tokens), **fields)
    return payload.encode_outputs(EngineCoreOutputs(outputs=[output], timestamp=2.5))


@pytest.mark.parametrize(
    "ends",
    [
        {},
        {"finish_reason": FinishReason.LENGTH},
        {"finish_reason": FinishReason.STOP, "stop_reason": "a string"},
        {"finish_reason": FinishReason.STOP, "stop_reason": 7},
    ],
    ids=str,
)
def test_outputs_of_tokens_alone_become_one_that_ends_as_the_second_does(ends: dict[str, object]):
    stats = PrefillStats()
    stats.num_cached_tokens = 5
    for begins in (
        {},
        {
            "prefill_stats": stats,
            "events": [EngineCoreEvent.new_event(EngineCoreEventType.QUEUED, 1.0)],
        },
    ):
        joined = joined_outputs(one(1, 2, **begins), one(3, **ends))
        assert joined is not None
        assert payload.decode_outputs(joined) == payload.decode_outputs(
            one(1, 2, 3, **begins, **ends)
        )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (one(1, finish_reason=FinishReason.STOP), one(2)),
        (payload.encode_outputs(outputs_with_logprobs(2)), one(2)),
        (one(1), payload.encode_outputs(outputs_with_logprobs(2))),
        (payload.encode_outputs(outputs_with_logprobs(500)), one(2)),
        (one(1), one(2, kv_transfer_params={"a": 1})),
        (one(1, routed_experts=np.ones((1, 2), dtype=np.int8)), one(2)),
        (
            one(1),
            payload.encode_outputs(
                EngineCoreOutputs(
                    outputs=[EngineCoreOutput("r1", [2])], timestamp=2.5, weight_version="2"
                )
            ),
        ),
    ],
)
def test_outputs_with_more_than_tokens_are_not_joined(first: bytes, second: bytes):
    assert joined_outputs(first, second) is None


def test_a_request_is_renamed_and_nothing_else_changes():
    request = EngineCoreRequest(
        request_id="r1",
        prompt_token_ids=[1, 2],
        mm_features=None,
        sampling_params=SamplingParams(temperature=0.5, seed=3, stop=["x"]),
        pooling_params=None,
        arrival_time=1.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        prompt_embeds=torch.ones(64, 64),
    )
    blob = payload.encode_request(request)
    assert len(unpack_frames(blob)) > 1
    renamed = renamed_request(blob, "r1+1")
    assert payload.decode_request(renamed).request_id == "r1+1"
    assert renamed_request(renamed, "r1") == blob


def annotated(**fields):
    output = EngineCoreOutput("r1", [17], **fields)
    return payload.encode_outputs(EngineCoreOutputs(outputs=[output], timestamp=100.0))


def test_the_events_of_an_engine_are_read_with_the_time_since():
    events = [
        EngineCoreEvent(EngineCoreEventType.QUEUED, 99.0),
        EngineCoreEvent(EngineCoreEventType.SCHEDULED, 99.75),
    ]
    stats = PrefillStats(num_prompt_tokens=700, num_cached_tokens=512)
    blob = annotated(events=events, prefill_stats=stats)
    assert annotations_of(blob) == Annotations(((1, 1.0), (2, 0.25)), 512)
    assert annotations_of(annotated(events=events)) == Annotations(((1, 1.0), (2, 0.25)), None)


def test_most_outputs_say_nothing_of_events_and_caches():
    nothing = Annotations((), None)
    assert annotations_of(annotated()) == nothing
    assert annotations_of(payload.encode_outputs(outputs_with_logprobs(500))) == nothing
