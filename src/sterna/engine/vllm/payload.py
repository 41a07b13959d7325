"""Payloads of `messages`: vLLM's own structs in vLLM's own encoding, one blob each.

vLLM encodes a struct as one msgpack frame followed by a frame for each large array (log
probabilities, embeddings), which the msgpack refers to by position. A payload keeps such a list
together in one blob, so that it can be kept, forwarded and put inside another message without
being decoded.

A blob is the frame itself when there is only one, which is nearly always the case: it is not
copied, and the front end forwards it unchanged. Otherwise it is the byte 0xC1, which begins no
msgpack value, and a msgpack list of the frames.

Contents of the payloads:

- `AddRequest`: an `EngineCoreRequest` (`decode_request`);
- `TokenBatch`: for each span an `EngineCoreOutputs` with exactly one `EngineCoreOutput`
  (`encode_outputs`);
- `CallUtility`: the call as vLLM's client encoded it (`decode_utility_call`);
- `UtilityResult`: an `EngineCoreOutputs` with a `UtilityOutput` (`encode_utility_result`).
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    UtilityOutput,
)
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from sterna.engine.payload_parts import (
    MANY_FRAMES,
    Buffer,
    may_have_events,
    pack_frames,
    unpack_frames,
    with_later_events,
)
from sterna.messages.actors import MAX_FRAME_BYTES, ClusterStats, TokenSpan

# vLLM's coders are not safe to share between threads, and building one costs ten times as much
# as encoding a token.
_per_thread = threading.local()

MAX_DRAFT_TOKENS = 128
"""More than a draft of speculative decoding has."""


def encode_request(request: EngineCoreRequest) -> bytes:
    """Return the payload of an AddRequest."""
    return _encode(request)


def decode_request(payload: Buffer) -> EngineCoreRequest:
    """Return the request of an AddRequest's payload.

    Raises:
        msgspec.DecodeError: the payload is damaged.
    """
    return _decoder("requests", EngineCoreRequest).decode(unpack_frames(payload))


def encode_outputs(outputs: EngineCoreOutputs) -> bytes:
    """Return one payload of a TokenBatch, or the payload of a UtilityResult."""
    return _encode(outputs)


def decode_outputs(payload: Buffer) -> EngineCoreOutputs:
    """Return the outputs that `encode_outputs` encoded.

    Raises:
        msgspec.DecodeError: the payload is damaged.
    """
    return _decoder("outputs", EngineCoreOutputs).decode(unpack_frames(payload))


def merge_outputs(payloads: Sequence[bytes]) -> list[bytes]:
    """Return the smallest number of payloads with the same outputs in the same order.

    To vLLM's client a message costs more than an output, so the outputs of one step for it are put
    into one message. Payloads of several frames stay alone, since they refer to frames by position.
    Only outputs with events are decoded.

    All outputs get this process's time, and their events are moved by as much: instances on other
    machines have other clocks, and vLLM's client subtracts times of events from those of outputs.
    """
    merged: list[bytes] = []
    now_s = time.monotonic()
    batch = _Batch(now_s)
    for payload in payloads:
        if payload[0] == MANY_FRAMES:
            batch.close_into(merged)
            first, *others = unpack_frames(payload)
            envelope = msgspec.msgpack.decode(first, type=_Envelope)
            _change_clock(envelope, now_s)
            merged.append(pack_frames([msgspec.msgpack.encode(envelope), *others]))
            continue
        envelope = msgspec.msgpack.decode(payload, type=_Envelope)
        if may_have_events(payload):
            _change_clock(envelope, now_s)
        if envelope.weight_version != batch.weight_version:
            batch.close_into(merged)
            batch.weight_version = envelope.weight_version
        batch.outputs += envelope.outputs
    batch.close_into(merged)
    return merged


_NIL = msgspec.Raw(b"\xc0")


class _Envelope(msgspec.Struct, array_like=True):
    """An EngineCoreOutputs whose parts are left encoded; the fields are vLLM's, in its order."""

    engine_index: msgspec.Raw
    outputs: list[msgspec.Raw]
    scheduler_stats: msgspec.Raw = _NIL
    timestamp: float = 0.0
    utility_output: msgspec.Raw = _NIL
    finished_requests: msgspec.Raw = _NIL
    wave_complete: msgspec.Raw = _NIL
    start_wave: msgspec.Raw = _NIL
    weight_version: str | None = None


def _change_clock(envelope: _Envelope, now_s: float) -> None:
    """Change all times as if the outputs had been made at this time."""
    by_s = now_s - envelope.timestamp
    envelope.outputs = [with_later_events(each, by_s) for each in envelope.outputs]
    envelope.timestamp = now_s


class _Batch:
    """Outputs of one message, with its time, and the version of the weights that produced them."""

    def __init__(self, now_s: float) -> None:
        self._now_s = now_s
        self.outputs: list[msgspec.Raw] = []
        self.weight_version: str | None = None

    def close_into(self, merged: list[bytes]) -> None:
        if self.outputs:
            merged.append(
                msgspec.msgpack.encode(
                    _Envelope(
                        engine_index=msgspec.Raw(b"\x00"),
                        outputs=self.outputs,
                        timestamp=self._now_s,
                        weight_version=self.weight_version,
                    )
                )
            )
            self.outputs = []


def cut_leading_tokens(payload: Buffer, num_tokens: int) -> bytes:
    """Return the payload of a TokenBatch without its first `num_tokens` tokens and their data.

    Raises:
        msgspec.DecodeError: the payload is damaged.
    """
    outputs = decode_outputs(payload)
    (output,) = outputs.outputs
    num_kept = len(output.new_token_ids) - num_tokens
    output.new_token_ids = output.new_token_ids[num_tokens:]
    if output.new_logprobs is not None:
        output.new_logprobs = output.new_logprobs.slice_request(num_tokens, num_kept)
    if output.new_sampling_mask is not None:
        # Without offsets the mask is that of a single position.
        is_whole = output.new_sampling_mask.offsets is None or num_kept == 0
        output.new_sampling_mask = (
            None if is_whole else output.new_sampling_mask.slice_request(num_tokens, num_kept)
        )
    if output.routed_experts is not None:
        output.routed_experts = output.routed_experts[num_tokens:]
    # These come with the first token, which the client has.
    output.new_prompt_logprobs_tensors = None
    output.prompt_token_id_logprobs = None
    output.prefill_stats = None
    return encode_outputs(outputs)


def encode_failure(request_id: str, reason: str, *, is_pooling: bool) -> bytes:
    """Return a payload that ends the request with an error: of HTTP, or an event in a stream that
    has begun (`frontend.http.request_errors`)."""
    output = EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR, stop_reason=reason)
    if is_pooling:
        # vLLM's output processor has only this way for a pooling request to fail; otherwise it
        # takes the missing embedding for a bug and ends the server.
        output.mm_cache_miss_hashes = [request_id]
    return encode_outputs(EngineCoreOutputs(outputs=[output]))


def encode_span(
    span: TokenSpan, output: EngineCoreOutput, max_bytes: int, weight_version: str | None = None
) -> tuple[TokenSpan, bytes]:
    """Return an output's span and payload of a TokenBatch. If it has too many bytes to be sent, the
    span is replaced by one that ends the request with an error.

    Args:
        weight_version: of the weights that produced it; None where vLLM does not give one.
    """
    payload = encode_outputs(EngineCoreOutputs(outputs=[output], weight_version=weight_version))
    if len(payload) <= max_bytes:
        return span, payload
    is_pooling = output.pooling_output is not None
    ended = TokenSpan(span.request_id, span.first_index, 0, True)
    reason = "its answer is larger than what can be sent"
    return ended, encode_failure(span.request_id, reason, is_pooling=is_pooling)


def encode_cluster_stats(
    stats: ClusterStats,
    prefix_counts: Sequence[int] = (0, 0),
    external_counts: Sequence[int] = (0, 0),
    draft_counts: Sequence[int] = (),
) -> bytes:
    """Return a payload by which vLLM's metrics show the sums over all instances.

    Args:
        prefix_counts: tokens that were looked up in the prefix cache, and those that were found;
            added to vLLM's counters.
        external_counts, draft_counts: of a KV connector and of speculative decoding, as in
            `InstanceView`; added to vLLM's counters as well.
    """
    total_tokens = sum(instance.total_tokens for instance in stats.instances)
    used_tokens = sum(instance.used_tokens for instance in stats.instances)
    scheduler_stats = SchedulerStats(
        num_running_reqs=sum(instance.num_running for instance in stats.instances),
        num_waiting_reqs=stats.num_waiting,
        kv_cache_usage=used_tokens / total_tokens if total_tokens else 0.0,
        prefix_cache_stats=_cache_stats(*prefix_counts),
        connector_prefix_cache_stats=_cache_stats(*external_counts),
        spec_decoding_stats=_draft_stats(*draft_counts) if draft_counts else None,
    )
    return encode_outputs(EngineCoreOutputs(scheduler_stats=scheduler_stats))


def _cache_stats(num_tokens: int, num_hits: int) -> PrefixCacheStats:
    return PrefixCacheStats(queries=num_tokens, hits=num_hits)


def _draft_stats(num_drafts: int, num_tokens: int, *accepted: int) -> SpecDecodingStats:
    stats = SpecDecodingStats.new(len(accepted))
    stats.num_drafts, stats.num_draft_tokens = num_drafts, num_tokens
    stats.num_accepted_tokens = sum(accepted)
    # vLLM counts as many positions as the front end's options say, and a restart of the engines may
    # have shortened their drafts.
    padding = [0] * (MAX_DRAFT_TOKENS - len(accepted))
    stats.num_accepted_tokens_per_pos = [*accepted, *padding]
    return stats


@dataclass(frozen=True, slots=True)
class UtilityCall:
    """A call of an engine core's method.

    Attributes:
        client_index: vLLM's client that called.
        call_id: identifies the call for that client.
        args: positional, in plain msgpack types (vLLM's engine core converts structs).
    """

    client_index: int
    call_id: int
    method: str
    args: tuple[Any, ...]


def decode_utility_call(payload: Buffer) -> UtilityCall:
    """Return the call of a CallUtility's payload.

    Raises:
        msgspec.DecodeError: the payload is damaged.
    """
    client_index, call_id, method, args = _decoder("any", None).decode(unpack_frames(payload))
    return UtilityCall(client_index, call_id, method, tuple(args))


def encode_utility_result(
    call_id: int,
    result: object = None,
    failure: str | None = None,
    max_bytes: int = MAX_FRAME_BYTES,
) -> bytes:
    """Return the payload of a UtilityResult: the method's result, or why it failed.

    A result that cannot be encoded, or has too many bytes to be sent, becomes a failure that says
    so, because a call without an answer would leave its client waiting forever.
    """
    if failure is None:
        succeeded = UtilityOutput(call_id, result=UtilityResult(result))
        try:
            payload = _encode(EngineCoreOutputs(utility_output=succeeded))
        except Exception as error:
            # The result is any object, and may be encoded by code of its own.
            failure = f"the result cannot be sent: {error}"
        else:
            if len(payload) <= max_bytes:
                return payload
            failure = f"the result cannot be sent: it has {len(payload)} bytes"
    failed = UtilityOutput(call_id, failure_message=failure)
    return _encode(EngineCoreOutputs(utility_output=failed))


def _encode(struct: object) -> bytes:
    encoder = getattr(_per_thread, "encoder", None)
    if encoder is None:
        encoder = _per_thread.encoder = MsgpackEncoder()
    return pack_frames(encoder.encode(struct))


def _decoder(name: str, struct: type | None) -> MsgpackDecoder:
    decoder = getattr(_per_thread, name, None)
    if decoder is None:
        decoder = MsgpackDecoder(struct)
        setattr(_per_thread, name, decoder)
    return decoder
