"""Output tokens of an emulated engine: a function of prompt and seed only.

A client that knows a request's prompt and seed can compute all its tokens, and so check its stream
after preemptions, migrations or the death of an instance.

    key      = BLAKE2b-64(prompt's token ids, 4 bytes each; then the seed in 8 bytes, if any)
    token(i) = first_id + BLAKE2b-64(i in 8 bytes, keyed with `key`) mod num_ids

Integers are little-endian, the seed is signed. `docs/emulated_engine.md` has a checking client.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from sterna.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The token ids of outputs: `num_ids` of them from `first_id` on."""

    first_id: int
    num_ids: int

    def __post_init__(self) -> None:
        if self.first_id < 0 or self.num_ids < 1:
            raise ConfigurationError(f"a vocabulary needs at least one token, not {self}")

    def __contains__(self, token_id: int) -> bool:
        return self.first_id <= token_id < self.first_id + self.num_ids


def stream_key(prompt_token_ids: Sequence[int], seed: int | None) -> bytes:
    """The key from which a request's tokens are computed."""
    digest = blake2b(_little_endian(prompt_token_ids), digest_size=8)
    if seed is not None:
        # Some routes of vLLM take seeds of any size.
        digest.update((seed & (1 << 64) - 1).to_bytes(8, "little"))
    return digest.digest()


def token_at(key: bytes, index: int, vocabulary: Vocabulary) -> int:
    """The id of the request's output token of this index, from 0."""
    digest = blake2b(index.to_bytes(8, "little"), digest_size=8, key=key).digest()
    return vocabulary.first_id + int.from_bytes(digest, "little") % vocabulary.num_ids


def first_stop(
    key: bytes,
    stop_token_ids: Iterable[int],
    min_tokens: int,
    max_tokens: int,
    vocabulary: Vocabulary,
) -> int | None:
    """The index of the output token that ends the request before its `max_tokens`-th.

    As in vLLM, the first `min_tokens` tokens do not end the request, and a stop token as the last
    of `max_tokens` counts as one. None: no stop token occurs.
    """
    stops = {token_id for token_id in stop_token_ids if token_id in vocabulary}
    if not stops:
        return None
    indexes = range(min_tokens, max_tokens)
    return next((i for i in indexes if token_at(key, i, vocabulary) in stops), None)


def block_hashes(
    prompt_token_ids: Sequence[int],
    key: bytes,
    num_outputs: int,
    vocabulary: Vocabulary,
    block_size: int,
    cache_salt: str | None = None,
) -> bytes:
    """For each full block of a request's prompt and outputs, 8 bytes that stand for all tokens up
    to its end, and for the salt: requests with different salts share no block."""
    outputs = (token_at(key, index, vocabulary) for index in range(num_outputs))
    return chained_hashes([*prompt_token_ids, *outputs], block_size, cache_salt)


def chained_hashes(token_ids: Sequence[int], block_size: int, cache_salt: str | None) -> bytes:
    """For each full block of these tokens, 8 bytes that stand for all tokens up to its end."""
    chain = blake2b((cache_salt or "").encode(), digest_size=8).digest()
    hashes = []
    for end in range(block_size, len(token_ids) + 1, block_size):
        block = _little_endian(token_ids[end - block_size : end])
        chain = blake2b(block, digest_size=8, key=chain).digest()
        hashes.append(chain)
    return b"".join(hashes)


def _little_endian(token_ids: Sequence[int]) -> bytes:
    ids = array("I", token_ids)
    if ids.itemsize != 4:
        return b"".join(token_id.to_bytes(4, "little") for token_id in token_ids)
    if (1).to_bytes(2, "little") != array("H", [1]).tobytes():
        ids.byteswap()
    return ids.tobytes()
