"""Requests with LoRA adapters move, and their engines bear no more adapters than they can."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from bench.kinds.tiny_adapters import build_adapter
from sterna.migration.messages import Reason
from sterna.policy.presets import LLUMNIX
from tests.cluster.conftest import MakePair, Run
from tests.cluster.pair import InstancePair, assert_same
from tests.cluster.requests import random_prompt

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

MAX_ADAPTERS = 2
SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {}, "seed": {"temperature": 1.0, "seed": 5}}


@pytest.fixture(scope="module")
def adapters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    folder = tmp_path_factory.mktemp("adapters")
    return [
        LoRARequest(
            f"a{number}", number, str(build_adapter(tiny_model, folder / name, seed=number))
        )
        for number, name in enumerate(("first", "second", "third"), start=1)
    ]


@pytest.fixture(scope="module")
def pair(make_tiny: MakePair, run: Run, adapters: list[LoRARequest]) -> Iterator[InstancePair]:
    made = make_tiny(
        "--enable-lora",
        *("--max-loras", str(MAX_ADAPTERS)),
        *("--max-lora-rank", "8"),
        policy=replace(LLUMNIX, num_concurrent_migrations=4),
    )
    yield made
    run(made.close())


def asked(num_tokens: int = 80, **sampling: Any) -> dict[str, Any]:
    return {"max_tokens": num_tokens, "ignore_eos": True, **sampling}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_a_request_with_an_adapter_says_the_same_wherever_it_moves(
    pair: InstancePair, run: Run, adapters: list[LoRARequest], sampling: dict[str, Any]
) -> None:
    """Its destination has never seen the adapter."""
    said = []
    for adapter in (*adapters, None):
        prompt = random_prompt(140, seed=3)
        build = lambda: pair.build(prompt, lora_request=adapter, **asked(**sampling))  # noqa: B023, E731
        expected = run(pair.generate(build()))
        moved = run(pair.generate_moving(build(), [3, 25, 50]))
        assert_same(moved, expected)
        assert moved.moves == ["i1", "i0", "i1"]
        said.append(tuple(moved.token_ids))
    assert len(set(said)) == len(said), "an adapter changes nothing"
    run(pair.until_idle())


def test_requests_with_two_adapters_move_beside_each_other(
    pair: InstancePair, run: Run, adapters: list[LoRARequest]
) -> None:
    # One without an adapter says something else beside these than alone: vLLM's CPU kernels take
    # the weights of the last adapter for it, without any move.
    chosen = (adapters[0], adapters[1], adapters[1], adapters[0])

    def build() -> list[Any]:
        prompts = (random_prompt(60 + 30 * n, seed=n) for n in range(len(chosen)))
        return [
            pair.build(prompt, lora_request=adapter, **asked())
            for prompt, adapter in zip(prompts, chosen, strict=True)
        ]

    async def together() -> None:
        expected = await asyncio.gather(*map(pair.generate, build()))
        moves = (pair.generate_moving(each, [4 + 5 * n, 50]) for n, each in enumerate(build()))
        for found, wanted in zip(await asyncio.gather(*moves), expected, strict=True):
            assert_same(found, wanted)
            assert len(found.moves) == 2

    run(together())
    run(pair.until_idle())


def test_a_batch_with_all_the_adapters_it_may_have_takes_no_request_with_another(
    pair: InstancePair, run: Run, adapters: list[LoRARequest]
) -> None:
    """The request stays where it is, unharmed, and moves when there is a place."""
    first, second, third = adapters

    async def crowd() -> None:
        request = pair.build(random_prompt(100, seed=1), lora_request=third, **asked(200))
        expected = await pair.generate(
            pair.build(random_prompt(100, seed=1), lora_request=third, **asked(200))
        )
        others = [
            pair.build(random_prompt(50, seed=9), lora_request=each, **asked(900))
            for each in (first, second)
        ]
        crowding = [pair.submit(each, "i1") for each in others]
        await asyncio.gather(*(each.until_tokens(1) for each in crowding))
        for each in others:
            await pair.pause_at(each.request_id, "i1", 30)
        generated = pair.submit(request, "i0")
        await generated.until_tokens(5)
        refused = await pair.move(request.request_id, "i0", "i1")
        assert refused["reason"] == Reason.NO_ADAPTER_SLOT.value
        for each in others:
            pair.abort(each.request_id, "i1")
            await pair.unpause(each.request_id, "i1")
        await pair.until_idle("i1")
        assert "stages" in await pair.move(request.request_id, "i0", "i1")
        assert_same(await generated.until_end(), expected)
        assert generated.moves == ["i1"]

    run(crowd())
    run(pair.until_idle())


def test_an_instance_that_dies_loses_no_request_with_an_adapter(
    pair: InstancePair, run: Run, adapters: list[LoRARequest]
) -> None:
    """The front end gives it to another instance with the tokens that the client has. The last test
    of the pair, of which one instance is left."""

    def build() -> Any:
        return pair.build(random_prompt(70, seed=2), lora_request=adapters[1], **asked(60))

    async def die() -> None:
        expected = await pair.generate(build())
        request = build()
        await pair.pause_at(request.request_id, "i1", 20)
        generated = pair.submit(request, "i1")
        await generated.until_tokens(20)
        await pair.kill("i1")
        pair.bury("i1")
        said = list(generated.token_ids)
        found = await pair.submit(build(), "i0", output_token_ids=said).until_end()
        assert [*said, *found.token_ids] == expected.token_ids

    run(die())
    run(pair.until_idle("i0"))
