"""Moves of requests of each kind of model between two cores in one process.

The stages are those of the migration protocol, and pages are copied as data planes copy them, by
gather and scatter (`kind_moves`). Engines, protocol and wires together are in tests/cluster.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.kinds.tiny_models import KINDS
from tests.engine.kind_cores import PLAIN_KINDS, KindCore, kind_core
from tests.engine.kind_moves import Asked, Way, moved, preempted, recovered, unmoved

pytest.importorskip("vllm")

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

CUTS = (1, 12, 45, 90)
"""Outputs after which a request moves."""

ROUNDED = ("deepseek", "qwen3_next")
"""Kinds of which vLLM's CPU build says something else where it computes several tokens at once."""


@pytest.fixture(scope="module", params=PLAIN_KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def cores(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KindCore]:
    folder: Path = tmp_path_factory.mktemp("models") / kind
    with kind_core(kind, folder, num_cores=2) as made:
        yield made


@pytest.mark.parametrize("prompt_tokens", [20, 230])
@pytest.mark.parametrize("seed", [None, 7])
def test_a_request_goes_on_as_if_it_had_not_moved(
    cores: KindCore, prompt_tokens: int, seed: int | None
) -> None:
    asked = Asked(prompt_tokens, seed=seed)
    expected = cores.run(unmoved, asked)
    assert len(set(expected.token_ids)) > 20
    for cut in CUTS:
        assert cores.run(moved, asked, Way((cut,))) == expected, cut


def test_stages_are_copied_while_windows_move_on(cores: KindCore) -> None:
    expected = cores.run(unmoved, Asked(300))
    assert cores.run(moved, Asked(300), Way((20,), num_stages=4)) == expected


def test_pages_of_every_group_matter(cores: KindCore, kind: str) -> None:
    """Otherwise the tests above would show nothing."""
    expected = cores.run(unmoved, Asked(230)).token_ids
    for group in range(len(KINDS[kind].groups)):
        said = cores.run(moved, Asked(230), Way((45,), left_out=group))
        assert said.token_ids != expected, group


def test_a_request_goes_on_elsewhere_behind_the_outputs_of_an_engine_that_died(
    cores: KindCore, kind: str
) -> None:
    """As if it had been preempted where it was, for its KV cache is computed again."""
    stayed = cores.run(unmoved, Asked(230)).token_ids
    for cut in (1, 50):
        expected = cores.run(preempted, Asked(230), cut).token_ids
        assert kind in ROUNDED or expected == stayed
        assert cores.run(recovered, Asked(230), expected[:cut]) == expected[cut:], cut
