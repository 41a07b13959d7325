"""Moves between engines with vLLM's V2 model runner, whose kernels run in Triton's interpreter.

They run with `make test-v2` and `make test-next`, which fetch Triton: the CPU environment has none.
"""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.kinds.tiny_models import KINDS
from tests.engine.kind_cores import PLAIN_KINDS, KindCore, kind_core
from tests.engine.kind_moves import Asked, Said, Way, moved, unmoved

pytest.importorskip("vllm")

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
        reason="run by `make test-v2`",
    ),
]

CUTS = (1, 45)


@pytest.fixture(scope="module", params=PLAIN_KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def cores(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KindCore]:
    folder: Path = tmp_path_factory.mktemp("models") / kind
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        with kind_core(kind, folder, num_cores=2) as made:
            assert made.run(runners) == {"vllm.v1.worker.cpu.model_runner"}
            yield made


def test_pages_are_not_exchanged_with_the_other_runner(cores: KindCore) -> None:
    assert cores.run(layouts) == 2 * ["runner=V2"]


@pytest.mark.parametrize("prompt_tokens", [20, 230])
@pytest.mark.parametrize("seed", [None, 7])
def test_a_request_goes_on_as_if_it_had_not_moved(
    cores: KindCore, prompt_tokens: int, seed: int | None
) -> None:
    asked = Asked(prompt_tokens, seed=seed)
    expected = cores.run(unmoved, asked).token_ids
    assert len(set(expected)) > 20
    for cut in CUTS:
        assert cores.run(moved, asked, Way((cut,))).token_ids == expected, cut


def test_an_unseeded_request_keeps_the_seed_that_vllm_drew(cores: KindCore) -> None:
    said, seed = cores.run(moved_with_its_seed, Asked(40, is_drawn=True), Way((20,)))
    assert said.token_ids == cores.run(unmoved, Asked(40, seed=seed)).token_ids


def test_stages_are_copied_while_windows_move_on(cores: KindCore) -> None:
    expected = cores.run(unmoved, Asked(300)).token_ids
    assert cores.run(moved, Asked(300), Way((20,), num_stages=4)).token_ids == expected


def test_pages_of_every_group_matter(cores: KindCore, kind: str) -> None:
    """Otherwise the tests above would show nothing."""
    expected = cores.run(unmoved, Asked(230)).token_ids
    for group in range(len(KINDS[kind].groups)):
        said = cores.run(moved, Asked(230), Way((45,), left_out=group))
        assert said.token_ids != expected, group


# ------------------------------------------------------------------------- in the cores' process


def runners(cores: list[Any]) -> set[str]:
    """The modules of the cores' model runners."""
    workers = [core.model_executor.driver_worker.worker for core in cores]
    return {type(worker.model_runner).__module__ for worker in workers}


def layouts(cores: list[Any]) -> list[str]:
    """The last part of the KV format of each core's rank."""
    found = [core.collective_rpc("sterna_page_layout")[0] for core in cores]
    return [each.split("; ")[-1] for each in found]


def moved_with_its_seed(cores: list[Any], asked: Asked, way: Way) -> tuple[Said, int]:
    """What became of a request that moves, and the seed that it brings."""
    seeds = []
    scheduler = cores[1].scheduler
    adopt = scheduler.adopt_running

    def adopt_and_note(migration_id: Any, request: Any, *args: Any) -> None:
        seeds.append(request.sampling_params.seed)
        adopt(migration_id, request, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "adopt_running", adopt_and_note)
        said = moved(cores, asked, way)
    (seed,) = seeds
    return said, seed
