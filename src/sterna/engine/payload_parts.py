"""Parts of payloads that can be read and changed without vLLM's types. Pure.

A payload (`engine.vllm.payload` lists all kinds) is a msgpack array, or several frames of which the
first is one. The fields that matter here are its first ones, so that they can be read and replaced
while all others stay encoded as they are:

    EngineCoreRequest    [request_id, ...]
    EngineCoreOutputs    [engine_index, [[request_id, new_token_ids, ...], ...], ...]

Emulated engines write the same.
"""

from collections.abc import Sequence
from enum import IntEnum

import msgspec

Buffer = bytes | bytearray | memoryview

MANY_FRAMES = 0xC1
"""The first byte of a payload of several frames; no msgpack value begins with it."""


def pack_frames(frames: Sequence[Buffer]) -> bytes:
    """Return one payload of these frames, of which there is at least one."""
    if len(frames) == 1:
        return bytes(frames[0])
    return bytes([MANY_FRAMES]) + msgspec.msgpack.encode(list(frames))


def unpack_frames(payload: Buffer) -> list[Buffer]:
    """Return the frames of a payload, without copying them.

    Raises:
        msgspec.DecodeError: the payload is damaged.
    """
    if payload[0] != MANY_FRAMES:
        return [payload]
    return list(msgspec.msgpack.decode(memoryview(payload)[1:], type=list[memoryview]))


class EventType(IntEnum):
    """vLLM's EngineCoreEventType."""

    QUEUED = 1
    SCHEDULED = 2
    """Put into a batch."""
    PREEMPTED = 3


class EngineEvent(msgspec.Struct):
    """vLLM's EngineCoreEvent: what an engine's scheduler did with a request.

    Attributes:
        type: an `EventType`, or one that a newer vLLM has besides.
        timestamp: in seconds, on the monotonic clock of the engine's machine.
    """

    type: int
    timestamp: float


class _PrefillStats(msgspec.Struct):
    num_cached_tokens: int = 0


class _AnnotatedOutput(msgspec.Struct, array_like=True):
    request_id: msgspec.Raw
    new_token_ids: msgspec.Raw
    new_logprobs: msgspec.Raw = msgspec.Raw()
    new_prompt_logprobs_tensors: msgspec.Raw = msgspec.Raw()
    pooling_output: msgspec.Raw = msgspec.Raw()
    finish_reason: msgspec.Raw = msgspec.Raw()
    stop_reason: msgspec.Raw = msgspec.Raw()
    events: list[EngineEvent] | None = None
    kv_transfer_params: msgspec.Raw = msgspec.Raw()
    ec_transfer_params: msgspec.Raw = msgspec.Raw()
    trace_headers: msgspec.Raw = msgspec.Raw()
    prefill_stats: _PrefillStats | None = None


class _AnnotatedOutputs(msgspec.Struct, array_like=True):
    engine_index: msgspec.Raw
    outputs: list[_AnnotatedOutput]
    scheduler_stats: msgspec.Raw = msgspec.Raw()
    timestamp: float = 0.0


class Annotations(msgspec.Struct, frozen=True):
    """What an output says besides its tokens.

    Attributes:
        events: the engine's events since the output before, each with the seconds that passed from
            then until the output.
        cached_tokens: tokens of the prompt that were in the prefix cache; None unless the output is
            the first one of its prefill.
    """

    events: tuple[tuple[int, float], ...]
    cached_tokens: int | None


def annotations_of(payload: Buffer) -> Annotations:
    """Return the annotations of a TokenBatch's payload, which holds one output.

    Raises:
        msgspec.DecodeError: the payload is damaged.
    """
    outputs = msgspec.msgpack.decode(unpack_frames(payload)[0], type=_AnnotatedOutputs)
    (output,) = outputs.outputs
    stats = output.prefill_stats
    events = [(each.type, outputs.timestamp - each.timestamp) for each in output.events or ()]
    return Annotations(tuple(events), None if stats is None else stats.num_cached_tokens)


class _Output(msgspec.Struct, array_like=True):
    request_id: msgspec.Raw
    new_token_ids: list[int]


class _Outputs(msgspec.Struct, array_like=True):
    engine_index: msgspec.Raw
    outputs: list[_Output]


def token_ids_of(payload: Buffer) -> list[int]:
    """Return the tokens of a TokenBatch's payload.

    Raises:
        msgspec.DecodeError: the payload is damaged.
    """
    outputs = msgspec.msgpack.decode(unpack_frames(payload)[0], type=_Outputs).outputs
    return [token_id for output in outputs for token_id in output.new_token_ids]


_NIL, _ZERO = b"\xc0", b"\x00"

_FINISH_REASON, _EVENTS, _ROUTED_EXPERTS = 5, 7, 12
"""Indices of vLLM's fields in an output. The fields between its tokens and the first of these, and
those from the last one on, belong to the tokens. The fields from the first one up to the second say
how the request ends."""


def joined_outputs(first: Buffer, second: Buffer) -> bytes | None:
    """Return one output of a request with the tokens of both payloads, each of which holds one
    output of it; None if the first one ends the request, or other fields belong to the tokens.

    Raises:
        msgspec.DecodeError: a payload is damaged.
    """
    if MANY_FRAMES in (first[0], second[0]):
        return None
    outer, other_outer = (
        msgspec.msgpack.decode(each, type=list[msgspec.Raw]) for each in (first, second)
    )
    if list(map(bytes, outer[4:])) != list(map(bytes, other_outer[4:])):
        return None
    output, other = (
        [bytes(field) for field in msgspec.msgpack.decode(each[1], type=list[list[msgspec.Raw]])[0]]
        for each in (outer, other_outer)
    )
    if any(each != _NIL for each in output[_FINISH_REASON:_EVENTS]):
        return None
    own = (*output[2:_FINISH_REASON], *output[_ROUTED_EXPERTS:])
    others = (*other[2:_FINISH_REASON], *other[_EVENTS:])
    if any(each not in (_NIL, _ZERO) for each in (*own, *others)):
        return None
    tokens = [
        token
        for each in (output, other)
        for token in msgspec.msgpack.decode(each[1], type=list[int])
    ]
    fields = output + [_NIL] * (_EVENTS - len(output))
    fields[1] = msgspec.msgpack.encode(tokens)
    ends = other[_FINISH_REASON:_EVENTS]
    fields[_FINISH_REASON : _FINISH_REASON + len(ends)] = ends
    outer[1] = msgspec.Raw(msgspec.msgpack.encode([[msgspec.Raw(field) for field in fields]]))
    return msgspec.msgpack.encode(outer)


def may_have_events(payload: bytes) -> bool:
    """Whether an output of the payload may have events of its engine."""
    # A field of every event is searched for, since decoding would cost as much as all else that is
    # done with a token here; and with `find`, since `in` takes the name for a number first.
    return payload.find(b"timestamp") >= 0


def with_later_events(output: msgspec.Raw, by_s: float) -> msgspec.Raw:
    """Return an encoded output, its events later by this number of seconds.

    Raises:
        msgspec.DecodeError: the output is damaged.
    """
    fields = msgspec.msgpack.decode(output, type=list[msgspec.Raw])
    if len(fields) <= _EVENTS:
        return output
    events = msgspec.msgpack.decode(fields[_EVENTS], type=list[EngineEvent] | None)
    for each in events or ():
        each.timestamp += by_s
    fields[_EVENTS] = msgspec.Raw(msgspec.msgpack.encode(events))
    return msgspec.Raw(msgspec.msgpack.encode(fields))


def renamed_output(payload: Buffer, request_id: str) -> bytes:
    """Return the payload of a TokenBatch, which holds one output, under another request id.

    Raises:
        msgspec.DecodeError: the payload is damaged.
    """
    frames = unpack_frames(payload)
    outputs = msgspec.msgpack.decode(frames[0], type=list[msgspec.Raw])
    (output,) = msgspec.msgpack.decode(outputs[1], type=list[list[msgspec.Raw]])
    output[0] = msgspec.Raw(msgspec.msgpack.encode(request_id))
    outputs[1] = msgspec.Raw(msgspec.msgpack.encode([output]))
    return pack_frames([msgspec.msgpack.encode(outputs), *frames[1:]])


def renamed_request(payload: Buffer, request_id: str) -> bytes:
    """Return the payload of an AddRequest under another id.

    Raises:
        msgspec.DecodeError: the payload is damaged.
    """
    frames = unpack_frames(payload)
    fields = msgspec.msgpack.decode(frames[0], type=list[msgspec.Raw])
    fields[0] = msgspec.Raw(msgspec.msgpack.encode(request_id))
    return pack_frames([msgspec.msgpack.encode(fields), *frames[1:]])
