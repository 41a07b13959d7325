"""Every kind of KV cache moves: windows, chunks, latent attention, recurrent states.

Tiny random models (`bench.kinds.tiny_models`) on real instances. A request says the same wherever
it moves, alone and beside others, while its windows move on.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bench.kinds.tiny_models import KINDS, Kind, build
from sterna.config import TransportConfig
from sterna.policy.presets import LLUMNIX
from tests.cluster.conftest import TINY_OPTIONS, MakePair, Run
from tests.cluster.pair import InstancePair, assert_same

pytestmark = [
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
]

ALONE = ("deepseek", "qwen3_next")
"""Kinds whose tokens depend on the batch on vLLM's CPU build, without any migration."""


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def pair(
    kind: str, make_pair: MakePair, run: Run, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[InstancePair]:
    model: Path = build(kind, tmp_path_factory.mktemp("models") / kind)
    made = make_pair(
        str(model),
        *options_of(KINDS[kind]),
        transport=TransportConfig(kind="shm"),
        policy=replace(LLUMNIX, num_concurrent_migrations=4),
    )
    yield made
    run(made.close())


def options_of(kind: Kind) -> tuple[str, ...]:
    """Options of `sterna serve` for the kind: those of a tiny model, where it takes them."""
    options = [*TINY_OPTIONS, "--dtype", kind.dtype]
    for name, value in kind.options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is False:
            options.append(f"--no-{flag.removeprefix('--')}")
        else:
            options += [flag, str(value)]
    return tuple(options)


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return [3 + (7 * token + 31 * seed) % 500 for token in range(num_tokens)]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "seed"])
def test_a_request_that_moves_to_and_fro_says_the_same(
    pair: InstancePair, run: Run, sampling: dict[str, float]
) -> None:
    """Before, on and behind the edge of a window and of a chunk of 64 tokens."""
    asked = {"max_tokens": 150, "ignore_eos": True, **sampling}
    for num_tokens in (20, 230):
        expected = run(pair.generate(pair.build(prompt(num_tokens), **asked)))
        assert len(set(expected.token_ids)) > 20
        cuts = [3, 45, 90]
        moved = run(pair.generate_moving(pair.build(prompt(num_tokens), **asked), cuts))
        assert_same(moved, expected)
        assert moved.moves == ["i1", "i0", "i1"]
    run(pair.until_idle())


def test_requests_that_move_beside_others_say_the_same(
    pair: InstancePair, run: Run, kind: str
) -> None:
    if kind in ALONE:
        pytest.skip("its tokens depend on the batch, without any migration")
    asked = {"max_tokens": 120, "ignore_eos": True}
    lengths = (30, 130, 300)

    async def together() -> None:
        expected = await asyncio.gather(
            *(pair.generate(pair.build(prompt(n, n), **asked)) for n in lengths)
        )
        moved = await asyncio.gather(
            *(
                pair.generate_moving(pair.build(prompt(n, n), **asked), [5 + n // 20, 60])
                for n in lengths
            )
        )
        for found, wanted in zip(moved, expected, strict=True):
            assert_same(found, wanted)
            assert len(found.moves) == 2

    run(together())
    run(pair.until_idle())


def test_a_request_that_begins_like_one_that_moved_says_what_it_would_have_said(
    pair: InstancePair, run: Run
) -> None:
    """The blocks of a request that was adopted are in the prefix cache, where there is one."""
    asked = {"max_tokens": 40, "ignore_eos": True}
    sibling = [*prompt(260, 9), 17, 23]
    expected = run(pair.generate(pair.build(sibling, cache_salt="before", **asked)))
    run(pair.generate_moving(pair.build(prompt(260, 9), cache_salt="a", **asked), [10]))
    found = run(pair.generate(pair.build(sibling, cache_salt="a", **asked), "i1"))
    assert found.token_ids == expected.token_ids
    run(pair.until_idle())
