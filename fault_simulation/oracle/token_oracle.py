"""Requests of clients, and tokens that show whether they were made from the right history.

Each token is a function of all output tokens before it and of the request's *salt*. A seeded
request has one salt, so that its answer is known beforehand. For another request the salt of each
token is drawn, as in sampling: its answer is right when each token was made from exactly the tokens
that the client has. So every token travels with the digest of the history that it was made from.
An engine whose KV cache is not that of the request answers `WRONG`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from fault_simulation.virtual.timeline import Violation
from sterna.types import FrontendId, Priority, RequestId

VOCABULARY = 50_000
WRONG = VOCABULARY
"""A token that no request has."""

EMPTY = 0x9E3779B97F4A7C15
"""The digest of no tokens."""

_MASK = (1 << 64) - 1


def extend(digest: int, token_id: int) -> int:
    """The digest of a history with one more token."""
    digest = ((digest ^ token_id) * 0xD6E8FEB86659FD93 + 0x632BE59BD9B4E019) & _MASK
    return digest ^ (digest >> 32)


def next_token(digest: int, salt: int) -> int:
    """The token that follows the history."""
    mixed = ((digest ^ salt) * 0x9FB21C651E98DF25) & _MASK
    return (mixed >> 28) % VOCABULARY


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """A request as its client sends it: the payload of an AddRequest, as `engine.payload_parts`
    expects it to begin.

    Attributes:
        salt: of a seeded request; None for another one.
        is_immovable: it cannot move.
    """

    request_id: RequestId
    frontend_id: FrontendId
    prompt_tokens: int
    output_tokens: int
    arrival_s: float
    priority: Priority
    salt: int | None
    is_immovable: bool = False


@dataclass(slots=True)
class Stream:
    """The state from which an engine makes the next token of a request.

    Attributes:
        digests: of its first outputs: of none, of one, and so on.
        is_wrong: its last step has looked at other KV than its own.
    """

    ask: Ask
    digests: list[int] = field(default_factory=lambda: [EMPTY])
    is_wrong: bool = False


class Output(msgspec.Struct, frozen=True, array_like=True):
    """Tokens, each with the digest of the history that it was made from."""

    request_id: RequestId
    token_ids: list[int]
    digests: list[int]


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """One payload of a TokenBatch, which holds one output."""

    engine_index: int
    outputs: list[Output]


class Event(msgspec.Struct, frozen=True, array_like=True):
    """The content of one event of a stream."""

    token_ids: list[int]
    digests: list[int]
    is_last: bool


class StreamPayloads:
    """Access of front ends to outputs, to record them (`resumable.replicas.Payloads`)."""

    def token_ids_of(self, payload: bytes) -> list[int]:
        """Return the tokens of an output."""
        return decode_output(payload).token_ids

    def joined_outputs(self, first: bytes, second: bytes) -> bytes | None:
        """Return one output with the tokens of both; None: one of them reports a failure."""
        one, other = decode_output(first), decode_output(second)
        if not one.token_ids or not other.token_ids:
            return None
        token_ids = one.token_ids + other.token_ids
        return encode_output(one.request_id, token_ids, one.digests + other.digests)

    def renamed_output(self, payload: bytes, request_id: str) -> bytes:
        """Return the output as one of that request."""
        output = decode_output(payload)
        return encode_output(RequestId(request_id), output.token_ids, output.digests)


def encode_output(request_id: RequestId, token_ids: list[int], digests: list[int]) -> bytes:
    """The payload of a TokenBatch; one without tokens reports a failure."""
    return encode(Answer(0, [Output(request_id, token_ids, digests)]))


encode = msgspec.msgpack.Encoder().encode
decode_ask = msgspec.msgpack.Decoder(Ask).decode


def decode_output(payload: bytes) -> Output:
    """The output of a TokenBatch's payload."""
    (output,) = _decode_answer(payload).outputs
    return output


_decode_answer = msgspec.msgpack.Decoder(Answer).decode

encode_event = msgspec.json.Encoder().encode
decode_event = msgspec.json.Decoder(Event).decode


def followed(
    ask: Ask, num_tokens: int, digest: int, tokens: Iterable[tuple[int, int]]
) -> tuple[int, int]:
    """Return the number of tokens that a client has after these, and their digest.

    Args:
        tokens: each with the digest of the history that it was made from.

    Raises:
        Violation: they are not what a single engine would have generated.
    """
    for token_id, history in tokens:
        place = f"token {num_tokens} of {ask.request_id}"
        if history != digest:
            raise Violation(f"{place} was made from another history than its client has")
        is_other = ask.salt is not None and token_id != next_token(history, ask.salt)
        if token_id == WRONG or is_other:
            raise Violation(f"{place} is wrong")
        digest = extend(history, token_id)
        num_tokens += 1
    if num_tokens > ask.output_tokens:
        raise Violation(f"{ask.request_id} got more tokens than it has")
    return num_tokens, digest
