"""Moves of requests whose prompts are more than tokens: images, and embeddings.

Their prompts travel with them, for they are needed again where a request is preempted.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench.kinds.prompts import embeds_prompt, image_prompt
from tests.engine.kind_cores import KindCore, kind_core
from tests.engine.kind_moves import Asked, Way, moved, recovered, unmoved

pytest.importorskip("vllm")

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

CUTS = (1, 45, 90)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KindCore]:
    """Two cores of a model that sees images, and has rotary positions of several dimensions."""
    pytest.importorskip("torchvision")
    folder: Path = tmp_path_factory.mktemp("models") / "qwen2_vl"
    with kind_core("qwen2_vl", folder, num_cores=2) as made:
        yield made


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KindCore]:
    """Two cores that take embeddings in place of tokens."""
    folder: Path = tmp_path_factory.mktemp("models") / "llama"
    with kind_core("llama", folder, num_cores=2, enable_prompt_embeds=True) as made:
        yield made


def seen(seed: int, *, sampling_seed: int | None = None) -> Asked:
    """No engine has the image of this number from another test."""
    return Asked(60, partial(image_prompt, seed=seed), sampling_seed)


def embedded(seed: int, *, sampling_seed: int | None = None) -> Asked:
    return Asked(60, partial(embeds_prompt, seed=seed), sampling_seed)


@pytest.mark.parametrize("sampling_seed", [None, 7])
def test_a_request_with_an_image_goes_on_as_if_it_had_not_moved(
    seeing: KindCore, sampling_seed: int | None
) -> None:
    asked = seen(1, sampling_seed=sampling_seed)
    expected = seeing.run(unmoved, asked, 1)
    assert len(set(expected.token_ids)) > 20
    assert seeing.run(moved, asked, Way(CUTS), 1) == expected


def test_images_positions_and_pages_matter(seeing: KindCore) -> None:
    """Otherwise the test above would show nothing."""
    expected = seeing.run(unmoved, seen(2)).token_ids
    assert seeing.run(unmoved, seen(3)).token_ids != expected
    assert seeing.run(moved, seen(2), Way((45,), left_out=0)).token_ids != expected
    assert seeing.run(moved_without_positions, seen(2), Way((45,))).token_ids != expected


def test_a_request_that_is_preempted_where_it_went_still_has_its_image(seeing: KindCore) -> None:
    expected = seeing.run(unmoved, seen(4))
    said = seeing.run(moved, seen(4), Way((45, 80), is_preempted=True))
    assert said.token_ids == expected.token_ids


def test_a_request_with_an_image_goes_on_behind_the_outputs_of_an_engine_that_died(
    seeing: KindCore,
) -> None:
    token_ids = seeing.run(unmoved, seen(5)).token_ids
    assert seeing.run(recovered, seen(5), token_ids[:50]) == token_ids[50:]


@pytest.mark.parametrize("sampling_seed", [None, 7])
def test_a_request_with_embeddings_goes_on_as_if_it_had_not_moved(
    embedding: KindCore, sampling_seed: int | None
) -> None:
    asked = embedded(1, sampling_seed=sampling_seed)
    expected = embedding.run(unmoved, asked, 1)
    assert len(set(expected.token_ids)) > 20
    assert embedding.run(moved, asked, Way(CUTS), 1) == expected
    said = embedding.run(moved, asked, Way((45, 80), is_preempted=True))
    assert said.token_ids == expected.token_ids


def test_embeddings_and_pages_matter(embedding: KindCore) -> None:
    """Otherwise the test above would show nothing."""
    expected = embedding.run(unmoved, embedded(2)).token_ids
    assert embedding.run(unmoved, embedded(3)).token_ids != expected
    assert embedding.run(moved, embedded(2), Way((45,), left_out=0)).token_ids != expected


def test_a_request_with_embeddings_goes_on_behind_the_outputs_of_an_engine_that_died(
    embedding: KindCore,
) -> None:
    token_ids = embedding.run(unmoved, embedded(4)).token_ids
    assert embedding.run(recovered, embedded(4), token_ids[:50]) == token_ids[50:]


# ------------------------------------------------------------------------- in the cores' process


def moved_without_positions(cores: list[Any], asked: Asked, way: Way) -> Any:
    """A request whose worker takes the tokens of the image for text."""
    from unittest.mock import patch

    from tests.engine.kind_moves import _runner

    runner_class = type(_runner(cores[0]))
    initialize = runner_class._init_mrope_positions

    def without_image(runner: Any, state: Any) -> None:
        initialize(runner, state)
        if state.output_token_ids:
            state.mrope_position_delta = 0

    with patch.object(runner_class, "_init_mrope_positions", without_image):
        return moved(cores, asked, way)
