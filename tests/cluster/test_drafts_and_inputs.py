"""Requests of engines that draft, and requests with images, on real instances.

They say the same wherever they move, and where the instance dies that has them.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from bench.kinds import drafts
from bench.kinds.cases import nothing_more
from bench.kinds.prompts import image_prompt
from bench.kinds.tiny_models import KINDS, build
from bench.kinds.workload import prompt_of
from sterna.policy.presets import LLUMNIX
from tests.cluster.conftest import MakePair, Run, patient_transport
from tests.cluster.pair import InstancePair, assert_same
from tests.cluster.test_model_kinds import options_of

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

SAMPLING: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True}


@dataclass(frozen=True)
class Case:
    """A model, what its engine needs besides, and how prompts are made of tokens.

    Attributes:
        short_prompt_of: of a prompt of few tokens.
        is_alone: whether tokens depend on the batch, without any migration (`bench.kinds.cases`).
    """

    model: str
    prepare: Callable[[Path], dict[str, Any]] = nothing_more
    short_prompt_of: Callable[[list[int]], Any] = list
    is_alone: bool = False

    def prompt(self, num_tokens: int) -> Any:
        token_ids = prompt_of(num_tokens, num_tokens)
        return self.short_prompt_of(token_ids) if num_tokens < 100 else token_ids


CASES = {
    "ngram": Case("gemma3", drafts.ngram, is_alone=True),
    "draft_model": Case("llama", drafts.draft_model, is_alone=True),
    "eagle": Case("llama", drafts.eagle, is_alone=True),
    "image": Case("qwen2_vl", short_prompt_of=image_prompt),
}


@pytest.fixture(scope="module", params=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def pair(
    case: Case, make_pair: MakePair, run: Run, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[InstancePair]:
    folder: Path = tmp_path_factory.mktemp("models")
    model = build(case.model, folder / "model")
    made = make_pair(
        str(model),
        *options_of(KINDS[case.model], **case.prepare(folder)),
        transport=patient_transport("shm"),
        policy=replace(LLUMNIX, num_concurrent_migrations=4),
    )
    yield made
    run(made.close())


def test_requests_move_to_and_fro(pair: InstancePair, run: Run, case: Case) -> None:
    """Beside each other, where tokens do not depend on that."""

    async def together(lengths: Sequence[int]) -> None:
        def requests() -> list[Any]:
            return [pair.build(case.prompt(n), **SAMPLING) for n in lengths]

        expected = await asyncio.gather(*map(pair.generate, requests()))
        moved = await asyncio.gather(
            *(
                pair.generate_moving(each, [3, 45, 90], is_exact=case.is_alone)
                for each in requests()
            )
        )
        for found, wanted in zip(moved, expected, strict=True):
            assert len(set(wanted.token_ids)) > 20
            assert_same(found, wanted)
            assert found.moves == ["i1", "i0", "i1"]

    for lengths in ((30,), (230,)) if case.is_alone else ((30, 230),):
        run(together(lengths))
    run(pair.until_idle())


def test_a_request_goes_on_where_the_instance_died_to_which_it_had_moved(
    pair: InstancePair, run: Run, case: Case
) -> None:
    """The last test of the pair, of which one instance is left."""
    asked = case.prompt(60)

    async def die() -> None:
        expected = await pair.generate(pair.build(asked, **SAMPLING))
        request = pair.build(asked, **SAMPLING)
        await pair.pause_at(request.request_id, "i1", 60)
        generated = pair.submit(request, "i0")
        await generated.until_tokens(20)
        assert "stages" in await pair.move(request.request_id, "i0", "i1")
        await generated.until_tokens(60)
        await pair.kill("i1")
        pair.bury("i1")
        token_ids = list(generated.token_ids)
        again = pair.submit(pair.build(asked, **SAMPLING), "i0", output_token_ids=token_ids)
        rest = await again.until_end()
        assert token_ids + rest.token_ids == expected.token_ids

    run(die())
    run(pair.until_idle("i0"))
