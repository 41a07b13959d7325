"""Tensor parallelism: each rank sends its shard of the KV cache to its peer rank; a latent cache,
which all ranks hold, is sent to one of them.

Two instances of two worker processes each; the KV cache lives in the workers, whose data planes
the instance commands from outside.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.kinds.cases import as_arguments
from bench.kinds.tiny_models import KINDS, build
from bench.kinds.workload import prompt_of
from sterna.config import TransportConfig
from sterna.migration.messages import Mode
from tests.cluster.conftest import TINY_OPTIONS, MakePair, Run, patient_transport
from tests.cluster.pair import Generated, InstancePair, assert_same
from tests.cluster.requests import random_prompt

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "seed": 4},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.5},
    "logprobs": {"logprobs": 3},
}


RANKS = ("--tensor-parallel-size", "2", "--num-gpu-blocks-override", "128")


@pytest.fixture(scope="module", params=["shm", "tcp", "gloo"])
def transport(request: pytest.FixtureRequest) -> TransportConfig:
    return patient_transport(request.param)


@pytest.fixture(scope="module")
def shared_ranks(
    make_tiny: MakePair, run: Run, transport: TransportConfig
) -> Iterator[InstancePair]:
    pair = make_tiny(*RANKS, transport=transport)
    yield pair
    run(pair.close())


@pytest.fixture(scope="module")
def latent_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("deepseek", tmp_path_factory.mktemp("models") / "deepseek")


@pytest.fixture(scope="module")
def latent_ranks(
    make_pair: MakePair, run: Run, transport: TransportConfig, latent_model: Path
) -> Iterator[InstancePair]:
    options = as_arguments(KINDS["deepseek"].options)
    pair = make_pair(str(latent_model), *TINY_OPTIONS, *options, *RANKS, transport=transport)
    yield pair
    run(pair.close())


@pytest.fixture
def ranks(shared_ranks: InstancePair, run: Run) -> Iterator[InstancePair]:
    yield shared_ranks
    run(shared_ranks.settle())


@pytest.mark.parametrize("name", SAMPLING)
def test_a_sharded_request_generates_the_same_tokens_wherever_it_moves(
    ranks: InstancePair, run: Run, name: str
) -> None:
    asked = {"max_tokens": 24, "ignore_eos": True, **SAMPLING[name]}
    prompt = random_prompt(150, seed=1)

    expected = run(ranks.generate(ranks.build(prompt, **asked)))
    moved = run(ranks.generate_moving(ranks.build(prompt, **asked), [3, 8, 15], is_exact=True))

    assert_same(moved, expected)
    assert moved.moves == ["i1", "i0", "i1"]
    # After the first copy of many blocks, a last stage of one or two.
    assert [report["stages"] for report in moved.reports] == [2, 2, 2]
    run(ranks.until_idle())


@pytest.mark.parametrize("mode", [Mode.STOP_AND_COPY, Mode.RECOMPUTE], ids=lambda mode: mode.value)
def test_a_sharded_request_moves_in_the_papers_other_ways_too(
    ranks: InstancePair, run: Run, mode: Mode
) -> None:
    asked = {"max_tokens": 24, "ignore_eos": True, "temperature": 0.9, "seed": 6}
    prompt = random_prompt(150, seed=2)

    expected = run(ranks.generate(ranks.build(prompt, **asked)))
    moved = run(ranks.generate_moving(ranks.build(prompt, **asked), [3, 8], mode, is_exact=True))

    assert_same(moved, expected)
    run(ranks.until_idle())


def test_sharded_requests_that_cross_are_the_same(ranks: InstancePair, run: Run) -> None:
    prompts = [random_prompt(100 + 20 * seed, seed=seed) for seed in range(4)]
    ends = [("i0", "i1"), ("i1", "i0")] * 2

    async def alone() -> list[Generated]:
        return [
            await ranks.generate(ranks.build(prompt, max_tokens=24, ignore_eos=True))
            for prompt in prompts
        ]

    async def crossing() -> list[Generated]:
        return await asyncio.gather(
            *(
                ranks.generate_moving(
                    ranks.build(prompt, max_tokens=24, ignore_eos=True),
                    [4, 12],
                    between=between,
                    is_exact=True,
                )
                for prompt, between in zip(prompts, ends, strict=True)
            )
        )

    expected = run(alone())
    for found, each in zip(run(crossing()), expected, strict=True):
        assert_same(found, each)
        assert len(found.moves) == 2
    run(ranks.until_idle())


def test_an_aborted_sharded_copy_leaves_nothing(ranks: InstancePair, run: Run) -> None:
    async def abort() -> None:
        request = ranks.build(random_prompt(150, seed=3), max_tokens=24, ignore_eos=True)
        await ranks.pause_at(request.request_id, "i0", 5)
        await ranks.submit(request, "i0").until_tokens(5)
        async with ranks.held("i1", "Adopt") as until_held:
            moving = ranks.begin_move(request.request_id, "i0", "i1")
            await until_held()
            ranks.abort(request.request_id, "i0")
            await ranks.requests_on("i0")
        await ranks.hear(moving)
        await ranks.until_idle()

    run(abort())


@pytest.mark.parametrize("name", ["greedy", "seeded"])
def test_a_request_with_a_latent_cache_generates_the_same_tokens_wherever_it_moves(
    latent_ranks: InstancePair, run: Run, name: str
) -> None:
    """The second rank of the destination has all pages by hops alone."""
    asked = {"max_tokens": 40, "ignore_eos": True, **SAMPLING[name]}
    prompt = prompt_of(150, len(name))
    for each in latent_ranks.actors.values():
        assert run(each.hops.remote()) == ([0], [(0, 1)])

    expected = run(latent_ranks.generate(latent_ranks.build(prompt, **asked)))
    moving = latent_ranks.build(prompt, **asked)
    moved = run(latent_ranks.generate_moving(moving, [3, 12, 25], is_exact=True))

    assert_same(moved, expected)
    assert moved.moves == ["i1", "i0", "i1"]
    run(latent_ranks.until_idle())
