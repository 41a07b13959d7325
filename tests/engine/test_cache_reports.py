"""Reports of an engine about its prefix cache, over vLLM's own managers: by them, the scheduler
finds for every prompt what vLLM itself would find."""

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    get_mamba_prefill_checkpoint_position,
)
from vllm.v1.request import Request

from sterna.engine.interface import PromptHashing
from sterna.engine.vllm.kv_groups import CacheReports
from sterna.frontend.vllm_server.prompt_hashes import prompt_hashes
from sterna.instance.cache_contents import CacheContents
from sterna.messages.actors import DispatchRequest
from sterna.scheduler.prefix_index import PrefixIndex
from sterna.types import NORMAL, FrontendId, InstanceId, RequestId
from tests.engine.test_kv_groups import chunk, full, state, window

ALGORITHM = "sha256_cbor"
STEP_TOKENS = 64
PIECE_TOKENS = 24
HERE = InstanceId("i0")

GROUPS: dict[str, tuple[KVCacheSpec, ...]] = {
    "full": (full(16),),
    "a window": (window(16, 40),),
    "full and windows": (full(16), window(16, 40), window(16, 40)),
    "blocks of several sizes": (full(32), window(16, 24)),
    "full and chunks": (full(16), chunk(16, 64)),
    "full and a state": (full(16), state(64, "align")),
    "a window, chunks, full": (window(16, 20), chunk(16, 32), full(16)),
    "states inside blocks": (full(64), window(16, 40), state(64, "align")),
}

DRAFTS: list[tuple[str, tuple[int, ...]]] = [
    ("full", ()),
    ("a window", ()),
    ("full and windows", ()),
    ("full and windows", (0,)),
    ("blocks of several sizes", ()),
    ("full and a state", ()),
    ("a window, chunks, full", (2,)),
    ("states inside blocks", (0,)),
]
"""With drafts, by layers in these groups: vLLM drops the end of all if it does not know of any."""


class Cache:
    """vLLM's manager of 60 blocks, without a model, and what the scheduler knows of it."""

    def __init__(
        self, specs: tuple[KVCacheSpec, ...], *, drafters: tuple[int, ...] | None = None
    ) -> None:
        sizes = [each.block_size for each in specs]
        self.hash_tokens = math.gcd(*sizes)
        function = get_hash_fn_by_name(ALGORITHM)
        init_none_hash(function)
        self.hasher = get_request_block_hasher(self.hash_tokens, function)
        config = KVCacheConfig(
            num_blocks=60,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec(
                    [f"layer{number}"], each, is_eagle_group=number in (drafters or ())
                )
                for number, each in enumerate(specs)
            ],
        )
        self.manager = KVCacheManager(
            config,
            max_model_len=1024,
            scheduler_block_size=math.lcm(*sizes),
            hash_block_size=self.hash_tokens,
            max_in_flight_tokens=STEP_TOKENS,
            use_eagle=drafters is not None,
        )
        self.has_drafts = drafters is not None
        self.state_tokens = [each.block_size for each in specs if isinstance(each, MambaSpec)]
        self.reports = CacheReports(self.manager.coordinator)
        self.contents = CacheContents(HERE, self.reports.layout)
        self.index = PrefixIndex()
        self.hashes = prompt_hashes(PromptHashing(ALGORITHM, self.hash_tokens))
        self.held: list[Request] = []

    def compute(self, token_ids: list[int]) -> None:
        """Prefill a request in steps, if there is memory, as vLLM's scheduler does."""
        request = Request.from_engine_core_request(sent(token_ids), self.hasher)
        found, num_found, _ = self.manager.get_computed_blocks(request)
        num_tokens = self.num_in_step(num_found, len(token_ids))
        if self.manager.allocate_slots(request, num_tokens, num_found, found) is None:
            return
        self.end_step()
        request.num_computed_tokens = num_found + num_tokens
        self.held.append(request)
        while request.num_computed_tokens < len(token_ids):
            num_tokens = self.num_in_step(request.num_computed_tokens, len(token_ids))
            if self.manager.allocate_slots(request, num_tokens) is None:
                break
            self.end_step()
            request.num_computed_tokens += num_tokens

    def end_step(self) -> None:
        """The worker has computed the step, and copied the states that it had to."""
        _, copied = self.manager.take_kv_cache_block_copies()
        self.manager.block_pool.free_blocks(copied)
        self.manager.new_step_starts()

    def num_in_step(self, num_computed: int, num_tokens: int) -> int:
        """The tokens of a step. It ends where a state is to be kept, as in vLLM's scheduler
        (`_mamba_block_aligned_split`)."""
        end = min((num_computed // STEP_TOKENS + 1) * STEP_TOKENS, num_tokens)
        sizes = {*self.state_tokens, self.hash_tokens} if self.state_tokens else ()
        stops = [
            get_mamba_prefill_checkpoint_position(num_tokens, each, self.has_drafts)
            for each in sizes
        ]
        return (
            min((each for each in stops if num_computed < each < end), default=end) - num_computed
        )

    def end(self) -> None:
        if self.held:
            self.manager.free(self.held.pop(0))

    def reset(self) -> None:
        while self.held:
            self.end()
        assert self.manager.reset_prefix_cache()
        self.reports.on_reset()

    def report(self) -> None:
        if (changes := self.reports.take_changes()) is not None:
            self.contents.on_changes(changes)
        if (report := self.contents.next_report()) is not None:
            self.index.on_report(report)

    def found_by_vllm(self, token_ids: list[int]) -> int:
        request = Request.from_engine_core_request(sent(token_ids), self.hasher)
        return int(self.manager.get_computed_blocks(request)[1])

    def found_by_report(self, token_ids: list[int]) -> int:
        request = DispatchRequest(
            FrontendId(0),
            RequestId("r"),
            len(token_ids),
            0.0,
            NORMAL,
            NORMAL,
            prompt_tokens=len(token_ids),
            block_hashes=self.hashes(sent(token_ids)),
        )
        return self.index.cached_tokens(request).get(HERE, 0)


NUMBERS = itertools.count()


def sent(token_ids: list[int], salt: str | None = None) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=f"r{next(NUMBERS)}",
        prompt_token_ids=token_ids,
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=8),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=salt,
        data_parallel_rank=None,
    )


def prompt(pieces: list[int], num_more: int) -> list[int]:
    """Pieces of 24 equal tokens, and some more."""
    return [piece for piece in pieces for _ in range(PIECE_TOKENS)] + [9] * num_more


PROMPTS = st.builds(prompt, st.lists(st.integers(0, 1), min_size=1, max_size=8), st.integers(0, 20))
COMMANDS = st.lists(st.one_of(PROMPTS, st.sampled_from(["end", "end", "reset"])), max_size=14)


@pytest.mark.parametrize(
    ("name", "drafters"),
    [*((name, None) for name in GROUPS), *DRAFTS],
)
def test_the_scheduler_finds_what_vllm_finds(name: str, drafters: tuple[int, ...] | None) -> None:
    counts = Counter[bool]()

    @settings(max_examples=60, deadline=None)
    @given(COMMANDS, PROMPTS)
    def test(commands: list[list[int] | str], other: list[int]) -> None:
        cache = Cache(GROUPS[name], drafters=drafters)
        computed = [other]
        for command in commands:
            if command == "end":
                cache.end()
            elif command == "reset":
                cache.reset()
            elif isinstance(command, list):
                cache.compute(command)
                computed.append(command)
            cache.report()
            for token_ids in computed:
                found = cache.found_by_vllm(token_ids)
                assert cache.found_by_report(token_ids) == found
                counts[found > 0] += 1

    test()
    assert counts[True] > counts.total() / 20


def test_a_small_pool_forgets_and_the_scheduler_hears_of_it() -> None:
    """By hand: 40 and 30 blocks are too many for 59; the end of the first prompt goes."""
    cache = Cache(GROUPS["full"])
    first, second = [1] * 640, [2] * 480
    for token_ids in (first, second):
        cache.compute(token_ids)
        cache.end()
        cache.report()
    assert cache.found_by_report(second) == cache.found_by_vllm(second) == 464
    assert cache.found_by_report(first) == cache.found_by_vllm(first) == 29 * 16


def test_requests_of_different_salts_share_nothing() -> None:
    hashes = prompt_hashes(PromptHashing(ALGORITHM, 16))
    one, same, other = (hashes(sent([1] * 40, salt)) for salt in ("a", "a", "b"))
    assert len(one) == 2 * 8
    assert one == same
    assert not {one[:8], one[8:]} & {other[:8], other[8:]}


def test_a_request_that_must_not_read_the_cache_is_not_looked_up() -> None:
    """vLLM computes the whole prompt of a request that asks for its log probabilities."""
    request = sent([1] * 40)
    request.sampling_params = SamplingParams(prompt_logprobs=1)
    assert prompt_hashes(PromptHashing(ALGORITHM, 16))(request) == b""
