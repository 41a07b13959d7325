"""Hashes of a prompt's blocks, as the engines' prefix caches have them.

vLLM hashes them in the engine as well. A front end does it only for a policy that looks at prefix
caches: the scheduler looks the hashes up among what the instances report.
"""

from collections.abc import Callable

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request

from sterna.engine.emulated.tokens import chained_hashes
from sterna.engine.interface import PromptHashing
from sterna.engine.vllm.kv_groups import short_hash
from sterna.types import packed

PromptHashes = Callable[[EngineCoreRequest], bytes]
"""The hashes of a request's prompt (`DispatchRequest.block_hashes`)."""


def prompt_hashes(hashing: PromptHashing) -> PromptHashes:
    """Return the function that hashes prompts as the engines do."""
    hash_tokens = hashing.hash_tokens
    if hashing.algorithm is None:
        return lambda sent: chained_hashes(
            sent.prompt_token_ids or (), hash_tokens, sent.cache_salt
        )
    function = get_hash_fn_by_name(hashing.algorithm)
    init_none_hash(function)
    hasher = get_request_block_hasher(hash_tokens, function)

    def of_vllm(sent: EngineCoreRequest) -> bytes:
        request = Request.from_engine_core_request(sent, hasher)
        if request.skip_reading_prefix_cache:
            return b""
        return packed(map(short_hash, request.block_hashes))

    return of_vllm
