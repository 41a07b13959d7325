"""vLLM's messages between front end and engine, as far as an emulated engine reads and writes them.

vLLM's server stays the front end, so requests arrive and outputs leave in vLLM's msgpack. These
structs mirror vLLM's by position and name, because importing vLLM's own costs an emulated instance
seconds and a gigabyte. A test compares them with vLLM's.
"""

from enum import IntEnum
from typing import Any

import msgspec

from sterna.engine.emulated.config import EmulatedEngineConfig
from sterna.engine.payload_parts import EngineEvent, unpack_frames

_NIL = msgspec.Raw(b"\xc0")


class FinishReason(IntEnum):
    """Why a request ended, by vLLM's numbers."""

    STOP = 0
    LENGTH = 1
    ERROR = 3


class SamplingParams(msgspec.Struct):
    """Parameters that decide a request's tokens and end; others have no meaning without a model,
    or are refused by the front end (`refusals`)."""

    seed: int | None = None
    stop_token_ids: list[int] | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0


class Request(msgspec.Struct, array_like=True):
    """The first fields of vLLM's EngineCoreRequest; of Raw fields only the presence matters."""

    request_id: str
    prompt_token_ids: list[int] | None
    mm_features: msgspec.Raw
    sampling_params: SamplingParams | None
    pooling_params: msgspec.Raw
    arrival_time: float
    lora_request: msgspec.Raw
    cache_salt: str | None
    data_parallel_rank: msgspec.Raw
    prompt_embeds: msgspec.Raw = _NIL
    prompt_is_token_ids: msgspec.Raw = _NIL
    client_index: int = 0
    current_wave: int = 0
    priority: int = 0

    def unsupported(self) -> str | None:
        """A feature that the request needs and no emulated engine has, or None."""
        parts = {
            "images": self.mm_features,
            "pooling": self.pooling_params,
            "a LoRA adapter": self.lora_request,
            "prompt embeddings": self.prompt_embeds,
        }
        needed = [name for name, part in parts.items() if bytes(part) != bytes(_NIL)]
        if self.sampling_params is None or not self.prompt_token_ids:
            needed.append("answer to a prompt without tokens")
        return needed[0] if needed else None


class PrefillStats(msgspec.Struct):
    """vLLM's PrefillStats, which come with the first token."""

    num_prompt_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_local_cached_tokens: int


class Output(msgspec.Struct, array_like=True, omit_defaults=True):
    """vLLM's EngineCoreOutput as far as it is used."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: None = None
    new_prompt_logprobs_tensors: None = None
    pooling_output: None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    events: list[EngineEvent] | None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    trace_headers: None = None
    prefill_stats: PrefillStats | None = None


class UtilityOutput(msgspec.Struct, array_like=True):
    """The outcome of a utility call: a failure, or a result behind its type, which vLLM leaves
    out."""

    call_id: int
    failure_message: str | None
    result: tuple[None, Any] | None


class Outputs(msgspec.Struct, array_like=True, omit_defaults=True):
    """vLLM's EngineCoreOutputs as far as it is used."""

    engine_index: int = 0
    outputs: list[Output] = []
    scheduler_stats: None = None
    timestamp: float = 0.0
    utility_output: UtilityOutput | None = None


def decode_request(payload: bytes) -> Request:
    """The request of an AddRequest's payload; images and embeddings beside it are dropped.

    Raises:
        msgspec.DecodeError: it is damaged.
    """
    return msgspec.msgpack.decode(unpack_frames(payload)[0], type=Request)


def encode_outputs(outputs: Outputs) -> bytes:
    """One payload of a TokenBatch, or the payload of a UtilityResult."""
    return msgspec.msgpack.encode(outputs)


def encode_ready(config: EmulatedEngineConfig, max_model_len: int, instance_id: str) -> bytes:
    """vLLM's EngineCoreReadyResponse: the first message that its client expects of an engine."""
    return msgspec.msgpack.encode(
        {
            "max_model_len": max_model_len,
            "num_gpu_blocks": config.num_blocks,
            "block_size": config.block_size,
            "effective_attention_block_size": config.block_size,
            "kv_cache_size_tokens": config.num_blocks * config.block_size,
            "kv_cache_max_concurrency": config.num_blocks * config.block_size / max_model_len,
            "dp_stats_address": None,
            "dtype": "bfloat16",
            "vllm_version": "",
            "world_size": 1,
            "data_parallel_size": 1,
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "data_parallel_rank": 0,
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "instance_id": instance_id,
            "supports_lora": False,
            "max_loras": 0,
        }
    )
