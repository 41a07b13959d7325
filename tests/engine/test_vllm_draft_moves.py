"""Moves of requests between two cores with speculative decoding.

Drafts that are wrong change no token: the model says which of them count. So steps are counted: a
request whose drafting layers have lost their KV cache needs more of them. Only greedy requests can
be compared, since with drafts vLLM draws other numbers for the same seed in each run.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.kinds import drafts
from tests.engine.kind_cores import KindCore, kind_core
from tests.engine.kind_moves import NUM_OUTPUTS, Asked, Said, Way, moved, recovered, unmoved

pytest.importorskip("vllm")

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

METHODS = {
    # The other model repeats itself too little.
    "ngram": ("gemma3", drafts.ngram),
    "draft_model": ("llama", drafts.draft_model),
    "eagle": ("llama", drafts.eagle),
    "next_token_layer": ("mimo", drafts.next_token_layer),
}
"""The model, and what its engine needs in order to draft."""

ASKED = Asked(230)


@pytest.fixture(scope="module", params=list(METHODS))
def method(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def cores(method: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KindCore]:
    kind, prepare = METHODS[method]
    folder: Path = tmp_path_factory.mktemp("models") / method
    with kind_core(kind, folder, num_cores=2, prepare=prepare) as made:
        yield made


@pytest.fixture(scope="module")
def expected(cores: KindCore, method: str) -> Said:
    """What the request says where it stays, alone."""
    said: Said = cores.run(unmoved, ASKED)
    assert len(set(said.token_ids)) > 20
    # Some drafts of n-grams are right, and many of those that the model's own weights make.
    most = NUM_OUTPUTS if method == "ngram" else 2 * NUM_OUTPUTS // 3
    assert said.num_steps < most
    return said


def test_a_request_moves_to_and_fro_beside_others(cores: KindCore, expected: Said) -> None:
    beside = cores.run(unmoved, ASKED, 2)
    assert beside.token_ids == expected.token_ids
    assert cores.run(moved, ASKED, Way((1, 33, 80)), 2) == beside


def test_stages_are_copied_while_the_request_goes_on(cores: KindCore, expected: Said) -> None:
    assert cores.run(moved, ASKED, Way((20,), num_stages=3)) == expected


def test_without_its_drafts_a_request_takes_few_steps_more(cores: KindCore, expected: Said) -> None:
    said = cores.run(moved, ASKED, Way((45,), drops_drafts=True))
    assert said.token_ids == expected.token_ids
    assert expected.num_steps <= said.num_steps <= expected.num_steps + 2


def test_a_request_that_is_preempted_where_it_went_says_the_same(
    cores: KindCore, expected: Said
) -> None:
    said = cores.run(moved, ASKED, Way((45, 80), is_preempted=True), 1)
    assert said.token_ids == expected.token_ids


def test_the_kv_cache_of_layers_that_draft_matters(
    cores: KindCore, expected: Said, method: str
) -> None:
    """Otherwise the tests above would show nothing of it."""
    if method == "ngram":
        pytest.skip("no layer drafts")
    said = cores.run(moved, ASKED, Way((45,), loses_drafts=True))
    assert said.token_ids == expected.token_ids
    assert said.num_steps > 1.3 * expected.num_steps


def test_a_request_goes_on_elsewhere_behind_the_outputs_of_an_engine_that_died(
    cores: KindCore, expected: Said
) -> None:
    for cut in (1, 50):
        said = cores.run(recovered, ASKED, expected.token_ids[:cut])
        assert said == expected.token_ids[cut:], cut


def test_engines_whose_layers_draft_otherwise_have_another_format(
    cores: KindCore, method: str
) -> None:
    with_drafts, with_other_weights, without = cores.run(formats)
    if method == "ngram":
        assert with_drafts == without
    else:
        assert len({with_drafts, with_other_weights, without}) == 3


# ------------------------------------------------------------------------- in the cores' process


def formats(cores: list[Any]) -> list[str]:
    """KV formats of the first core, of one whose drafts come from other weights, and of one
    without drafts."""
    import copy
    import shutil

    from sterna.engine.vllm.facts import kv_format

    config = cores[0].vllm_config
    others = [copy.copy(config) for _ in range(3)]
    _, other_weights, without = others
    without.speculative_config = None
    other_weights.speculative_config = speculation = copy.copy(config.speculative_config)
    if speculation.uses_draft_kv_cache():
        speculation.draft_model_config = draft = copy.copy(speculation.draft_model_config)
        folder = shutil.copytree(draft.model, f"{draft.model}_changed")
        draft.model = str(folder)
        for file in Path(folder).glob("*.safetensors"):
            file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\1")
    return [kv_format(each, ["the layout"]) for each in others]
