"""A prefix that is copied to another instance is found there, and says what it said.

Two real instances of a tiny random model whose every page of KV matters, in float32; one runs the
request alone, and the other one with a prefix that was computed on the first.
"""

from collections.abc import Iterator

import pytest

from sterna.policy.presets import STERNA
from tests.cluster.conftest import BLOCK_SIZE, MakePair, Run, patient_transport
from tests.cluster.pair import Generated, InstancePair, assert_same
from tests.cluster.requests import random_prompt

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_TOKENS = 10 * BLOCK_SIZE + 5
ASKED = {"max_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module", params=["shm", "tcp"])
def shared_caching(
    request: pytest.FixtureRequest, make_tiny: MakePair, run: Run
) -> Iterator[InstancePair]:
    pair = make_tiny(
        *("--num-gpu-blocks-override", "40"),
        policy=STERNA,
        transport=patient_transport(request.param),
    )
    yield pair
    run(pair.close())


@pytest.fixture
def caching(shared_caching: InstancePair, run: Run) -> Iterator[InstancePair]:
    """Two instances that report their prefix caches, with 39 blocks each."""
    yield shared_caching
    run(shared_caching.settle())


def test_a_request_finds_its_prefix_where_it_was_copied(caching: InstancePair, run: Run) -> None:
    prompt = random_prompt(NUM_TOKENS, seed=1)

    async def both() -> tuple[Generated, Generated]:
        expected = await caching.generate(caching.build(prompt, **ASKED))
        request = caching.build(prompt, **ASKED)
        assert await caching.cached_tokens(request, "i1") == 0
        await caching.copy_prefix(request, "i0", "i1")
        assert await caching.cached_tokens(request, "i1") == 10 * BLOCK_SIZE
        return expected, await caching.generate(request, "i1")

    expected, found = run(both())
    assert_same(found, expected, may_round=True)


def test_blocks_that_are_not_those_of_the_prefix_would_show(
    caching: InstancePair, run: Run
) -> None:
    """The destination drops what it receives: the request finds its blocks, with other KV."""
    prompt = random_prompt(NUM_TOKENS, seed=2)

    async def both() -> tuple[Generated, Generated]:
        expected = await caching.generate(caching.build(prompt, **ASKED))
        await caching.generate(caching.build(random_prompt(1_000, seed=3), max_tokens=2), "i1")
        await caching.actors["i1"].leave_out.remote("kv")
        request = caching.build(prompt, **ASKED)
        await caching.copy_prefix(request, "i0", "i1")
        assert await caching.cached_tokens(request, "i1") == 10 * BLOCK_SIZE
        return expected, await caching.generate(request, "i1")

    expected, found = run(both())
    assert found.token_ids != expected.token_ids


def test_only_what_is_missing_is_copied(caching: InstancePair, run: Run) -> None:
    """The first four blocks are on the destination."""
    prompt = random_prompt(NUM_TOKENS, seed=4)

    async def both() -> tuple[Generated, Generated]:
        expected = await caching.generate(caching.build(prompt, **ASKED))
        beginning = caching.build(prompt[: 4 * BLOCK_SIZE + 1], max_tokens=2)
        await caching.generate(beginning, "i1")
        request = caching.build(prompt, **ASKED)
        assert await caching.cached_tokens(request, "i1") == 4 * BLOCK_SIZE
        await caching.copy_prefix(request, "i0", "i1", first_token=4 * BLOCK_SIZE)
        assert await caching.cached_tokens(request, "i1") == 10 * BLOCK_SIZE
        return expected, await caching.generate(request, "i1")

    expected, found = run(both())
    assert_same(found, expected, may_round=True)


def test_what_is_nowhere_is_computed(caching: InstancePair, run: Run) -> None:
    prompt = random_prompt(NUM_TOKENS, seed=5)

    async def after_nothing() -> int:
        request = caching.build(prompt, **ASKED)
        await caching.copy_prefix(request, "i0", "i1")
        return await caching.cached_tokens(request, "i1")

    assert run(after_nothing()) == 0


def test_a_destination_without_memory_gets_nothing(caching: InstancePair, run: Run) -> None:
    """A request there holds 33 of 39 blocks; the prefix takes ten, and the request waits for
    memory as without a copy."""
    prompt = random_prompt(NUM_TOKENS, seed=6)

    async def both() -> tuple[Generated, Generated]:
        expected = await caching.generate(caching.build(prompt, **ASKED))
        large = caching.build(random_prompt(32 * BLOCK_SIZE - 40, seed=7), max_tokens=36)
        await caching.pause_at(large.request_id, "i1", 2)
        holding = caching.submit(large, "i1")
        await holding.until_tokens(2)
        request = caching.build(prompt, **ASKED)
        await caching.copy_prefix(request, "i0", "i1")
        assert await caching.cached_tokens(request, "i1") == 0
        await caching.unpause(large.request_id, "i1")
        await holding.until_end()
        return expected, await caching.generate(request, "i1")

    expected, found = run(both())
    assert_same(found, expected, may_round=True)


def test_the_death_of_the_destination_frees_what_was_kept(make_tiny: MakePair, run: Run) -> None:
    pair = make_tiny(policy=STERNA)
    prompt = random_prompt(NUM_TOKENS, seed=8)

    async def killed() -> None:
        await pair.generate(pair.build(prompt, **ASKED))
        process_id = await pair.freeze("i1")
        request = pair.build(prompt, **ASKED)
        copy = pair.copy_prefix(request, "i0", "i1")
        await pair.kill("i1", process_id)
        pair.bury("i1")
        await copy
        await pair.until_idle("i0")
        assert await pair.cached_tokens(request, "i0") == 10 * BLOCK_SIZE
        await pair.generate(request, "i0")
        await pair.until_idle("i0")

    run(killed())
    run(pair.close())
