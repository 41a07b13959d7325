"""Every kind of KV cache moves: windows, chunks, latent attention, recurrent states.

Tiny random models (`bench.kinds.tiny_models`) on real instances. A request says the same wherever
it moves, alone and beside others, while its windows move on.
"""

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreRequest

from bench.kinds.cases import as_arguments
from bench.kinds.tiny_models import KINDS, Kind, build
from bench.kinds.workload import prompt_of
from sterna.policy.presets import LLUMNIX
from sterna.types import InstanceId
from tests.cluster.conftest import TINY_OPTIONS, MakePair, Run, patient_transport
from tests.cluster.pair import Generated, InstancePair, assert_same
from tests.engine.kind_cores import PLAIN_KINDS

pytestmark = [
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
]

_numbers = itertools.count()

ALONE = ("deepseek", "qwen3_next")
"""Kinds whose tokens depend on the batch on vLLM's CPU build, without any migration."""


CACHE_KINDS = tuple(kind for kind in PLAIN_KINDS if kind != "qwen2_vl")
"""Kinds of KV caches; Qwen2-VL, which has that of a Llama, is in test_drafts_and_inputs."""

SHM, TCP = "shm", "tcp"
OVER_TCP = ("gemma3", "granite4")
"""Kinds of which the other transport is tried as well: windows, and states."""


@pytest.fixture(
    scope="module",
    params=[*((kind, SHM) for kind in CACHE_KINDS), *((kind, TCP) for kind in OVER_TCP)],
    ids="-".join,
)
def kind_and_transport(request: pytest.FixtureRequest) -> tuple[str, str]:
    kind, transport = request.param
    return kind, transport


@pytest.fixture(scope="module")
def kind(kind_and_transport: tuple[str, str]) -> str:
    return kind_and_transport[0]


@pytest.fixture(scope="module")
def pair(
    kind_and_transport: tuple[str, str],
    make_pair: MakePair,
    run: Run,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[InstancePair]:
    kind, transport = kind_and_transport
    model: Path = build(kind, tmp_path_factory.mktemp("models") / kind)
    made = make_pair(
        str(model),
        *options_of(KINDS[kind]),
        transport=patient_transport(transport),
        policy=replace(LLUMNIX, num_concurrent_migrations=4),
    )
    yield made
    run(made.close())


def options_of(kind: Kind, **more: Any) -> tuple[str, ...]:
    """Options of `sterna serve` for the kind: those of a tiny model, where it takes them."""
    return (*TINY_OPTIONS, "--dtype", kind.dtype, *as_arguments({**kind.options, **more}))


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "seed"])
def test_a_request_that_moves_to_and_fro_says_the_same(
    pair: InstancePair, run: Run, sampling: dict[str, float]
) -> None:
    """Before, on and behind the edge of a window and of a chunk of 64 tokens."""
    asked = {"max_tokens": 150, "ignore_eos": True, **sampling}
    for num_tokens in (20, 230):
        expected = run(pair.generate(pair.build(prompt_of(num_tokens), **asked)))
        assert len(set(expected.token_ids)) > 20
        cuts = [3, 45, 90]
        moved = run(pair.generate_moving(pair.build(prompt_of(num_tokens), **asked), cuts))
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
            *(pair.generate(pair.build(prompt_of(n, n), **asked)) for n in lengths)
        )
        moved = await asyncio.gather(
            *(
                pair.generate_moving(pair.build(prompt_of(n, n), **asked), [5 + n // 20, 60])
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
    sibling = [*prompt_of(260, 9), 17, 23]
    expected = run(pair.generate(pair.build(sibling, cache_salt="before", **asked)))
    run(pair.generate_moving(pair.build(prompt_of(260, 9), cache_salt="a", **asked), [10]))
    found = run(pair.generate(pair.build(sibling, cache_salt="a", **asked), "i1"))
    assert found.token_ids == expected.token_ids
    run(pair.until_idle())


def test_without_the_pages_of_any_group_a_request_says_something_else(
    pair: InstancePair, run: Run, kind: str
) -> None:
    """Otherwise the tests above would show nothing."""
    asked = {"max_tokens": 80, "ignore_eos": True}
    expected = run(pair.generate(pair.build(prompt_of(230), **asked)))

    async def without(group: int) -> Generated:
        # Other pages than the right ones, instead of what an earlier request may have left.
        await pair.generate(pair.build(prompt_of(600, 3), max_tokens=60, ignore_eos=True), "i1")
        await pair.actors["i1"].leave_out.remote(f"group {group}")
        request = pair.build(prompt_of(230), **asked)
        found = await pair.generate_moving(request, [40], is_exact=True)
        await pair.actors["i1"].repair.remote()
        return found

    for group in range(len(KINDS[kind].groups)):
        found = run(without(group))
        assert found.token_ids[:40] == expected.token_ids[:40]
        assert found.token_ids != expected.token_ids, group
    run(pair.until_idle())


CUT = 25


@pytest.mark.parametrize("point", ["CopyBlocks", "CopyBlocks last", "Commit"])
def test_the_death_of_a_destination_costs_nothing(
    pair: InstancePair, run: Run, kind: str, point: str
) -> None:
    """The source has everything still, in every group."""
    skip_without_full_block(kind, point)
    expected = run(pair.generate(build_request(pair)))

    async def kill() -> Generated:
        victim = await new_instance(pair)
        request = build_request(pair)
        await pair.pause_at(request.request_id, "i0", CUT)
        generated = pair.submit(request, "i0")
        await generated.until_tokens(CUT)
        async with pair.held("i0", point) as until_held:
            moving = pair.begin_move(request.request_id, "i0", victim)
            await until_held()
            await pair.kill(victim)
        pair.bury(victim)
        await pair.unpause(request.request_id, "i0")
        assert (await pair.hear(moving)).error is not None
        return await generated.until_end()

    found = run(kill())
    assert_same(found, expected)
    assert set(found.origins.values()) == {"i0"}
    run(pair.until_idle())


@pytest.mark.parametrize("point", ["CopyBlocks", "CopyBlocks last"])
def test_a_request_whose_source_dies_goes_on_behind_the_tokens_of_its_client(
    pair: InstancePair, run: Run, kind: str, point: str
) -> None:
    """Its destination frees every block that it has reserved, and computes the request again."""
    skip_without_full_block(kind, point)
    expected = run(pair.generate(build_request(pair))).token_ids
    if kind in ALONE:
        # These round otherwise where several tokens are computed at once.
        said = expected[:CUT]
        again = run(pair.submit(build_request(pair), "i0", output_token_ids=said).until_end())
        expected = said + again.token_ids

    async def kill() -> tuple[list[int], Generated]:
        victim = await new_instance(pair)
        request = build_request(pair)
        await pair.pause_at(request.request_id, victim, CUT)
        generated = pair.submit(request, victim)
        await generated.until_tokens(CUT)
        async with pair.held(victim, point) as until_held:
            pair.begin_move(request.request_id, victim, "i0")
            await until_held()
            await pair.kill(victim)
        pair.bury(victim)
        await pair.until_idle("i0")
        said = generated.token_ids
        again = pair.submit(build_request(pair), "i0", output_token_ids=said)
        return said, await again.until_end()

    said, found = run(kill())
    assert len(said) == CUT
    assert [*said, *found.token_ids] == expected
    run(pair.until_idle())


def skip_without_full_block(kind: str, point: str) -> None:
    """Skip a stage before the last one for a kind whose blocks are longer than the request."""
    if kind == "qwen3_next" and point == "CopyBlocks":
        pytest.skip("the request fills no block, and has a last stage only")


def build_request(pair: InstancePair) -> EngineCoreRequest:
    return pair.build(prompt_of(230, 4), max_tokens=90, ignore_eos=True, temperature=1.0, seed=3)


async def new_instance(pair: InstancePair) -> str:
    """Start one more instance, to be killed."""
    instance_id = InstanceId(f"victim{next(_numbers)}")
    await pair.add_instance(instance_id)
    return instance_id
