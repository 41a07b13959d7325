"""Requests whose thinking budget ends their thoughts by several tokens, on V1 model runners.

Each request is cut before, within and behind such an end: by a move, a preemption or a death.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.kind_cores import KindCore, kind_core
from tests.engine.kind_moves import Asked, Way, moved, preempted, recovered, unmoved

pytest.importorskip("vllm")

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

START = 505
END = (20, 21, 22, 20, 23, 24)
ASKED = Asked(230, seed=7, sampling={"thinking_token_budget": 4, "logit_bias": {START: 25.0}})
"""A request that begins several sections of thoughts."""


def thoughts(_: Path) -> dict[str, Any]:
    """The options of an engine that ends thoughts by several tokens."""
    from vllm.config import ReasoningConfig

    config = ReasoningConfig()
    config._reasoning_start_token_ids = [START]
    config._reasoning_end_token_ids = list(END)
    config._natural_reasoning_end_token_ids = list(END)
    return {"reasoning_config": config}


def prepare(cores: list[Any]) -> None:
    """As an engine does when it starts."""
    for core in cores:
        core.collective_rpc("sterna_prepare", args=(os.getpid(),))


@pytest.fixture(scope="module")
def cores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KindCore]:
    folder: Path = tmp_path_factory.mktemp("models") / "llama"
    with kind_core("llama", folder, num_cores=2, prepare=thoughts) as made:
        made.run(prepare)
        yield made


@pytest.fixture(scope="module")
def expected(cores: KindCore) -> list[int]:
    token_ids: list[int] = cores.run(unmoved, ASKED).token_ids
    assert len(ends(token_ids)) > 2
    return token_ids


def ends(token_ids: list[int]) -> list[int]:
    """The places at which thoughts are ended."""
    places = range(len(token_ids) - len(END))
    return [place for place in places if token_ids[place : place + len(END)] == list(END)]


def cuts(token_ids: list[int]) -> range:
    """Numbers of outputs from before the second end to behind it."""
    second = ends(token_ids)[1]
    return range(second, second + len(END) + 3, 2)


def test_a_request_that_moves_says_the_end_of_its_thoughts_once(
    cores: KindCore, expected: list[int]
) -> None:
    for cut in cuts(expected):
        assert cores.run(moved, ASKED, Way((cut,))).token_ids == expected, cut
    to_and_fro = Way(tuple(cuts(expected)))
    assert cores.run(moved, ASKED, to_and_fro).token_ids == expected


def test_a_request_that_is_preempted_says_the_end_of_its_thoughts_once(
    cores: KindCore, expected: list[int]
) -> None:
    for cut in cuts(expected):
        assert cores.run(preempted, ASKED, cut).token_ids == expected, cut


def test_a_request_whose_engine_died_says_the_end_of_its_thoughts_once(
    cores: KindCore, expected: list[int]
) -> None:
    for cut in cuts(expected):
        assert cores.run(recovered, ASKED, expected[:cut]) == expected[cut:], cut
