"""Requests that move between engines which save KV blocks in the host's memory (vLLM's
`OffloadingConnector`): what is saved stays right.

A save is made some steps after it was ordered (`bench.kinds.host_offloading`). Requests are asked
again where they were, so that their prompts are loaded from what was saved.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.kinds.cases import with_offloading
from tests.engine.kind_cores import KindCore, kind_core
from tests.engine.kind_moves import (
    NUM_OUTPUTS,
    Asked,
    Way,
    add,
    moved,
    moved_from_queue,
    recovered,
    run_until,
    step,
    unmoved,
)

pytest.importorskip("vllm")

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

BLOCK_SIZE = 32
PROMPT_TOKENS = 230
ASKED = Asked(PROMPT_TOKENS)


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def cores(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KindCore]:
    """Two engines, of which each has saved nothing yet."""
    kind: str = request.param
    folder: Path = tmp_path_factory.mktemp("models") / kind
    with kind_core(kind, folder, num_cores=2, prepare=with_offloading) as made:
        yield made


def asked_on(cores: list[Any], number: int, asked: Asked) -> tuple[list[int], int]:
    """What a request says on this core, and how many of its blocks were loaded."""
    core = cores[number]
    num_before = num_loaded_by(core)
    request = add(core, f"asked{number}", asked)
    run_until(core, request, NUM_OUTPUTS)
    return list(request.output_token_ids), num_loaded_by(core) - num_before


def num_loaded_by(core: Any) -> int:
    """The number of blocks that the core's worker has loaded from its pool."""
    return int(core.kv_connector_of_worker.connector_worker.worker.num_loaded)


def forget_saved(cores: list[Any]) -> None:
    """Empty the pools."""
    for core in cores:
        assert core.scheduler.reset_connector_cache()


def test_an_engine_that_offloads_moves_requests(cores: KindCore) -> None:
    expected = cores.run(unmoved, ASKED).token_ids
    assert len(set(expected)) > 20
    for way in (Way((1,)), Way((45, 90)), Way((20,), num_stages=4), Way((12,), is_preempted=True)):
        assert cores.run(moved, ASKED, way).token_ids == expected, way


def test_what_an_engine_saves_of_a_request_that_came_is_right(cores: KindCore) -> None:
    cores.run(forget_saved)
    expected, num_loaded = cores.run(asked_on, 0, ASKED)
    assert num_loaded == 0
    # While the window still has what a request that begins alike must look at.
    cores.run(moved, ASKED, Way((1,)))
    # Here it did not compute the prompt, and saved its blocks all the same.
    said, num_loaded = cores.run(asked_on, 1, ASKED)
    assert num_loaded >= PROMPT_TOKENS // BLOCK_SIZE
    assert said == expected


@pytest.mark.parametrize("cuts", [(26, 28, 30), (27, 28, 29, 30), (58, 60, 61)])
def test_a_request_comes_back_before_its_blocks_are_saved(
    cores: KindCore, cuts: tuple[int, ...]
) -> None:
    """Prompt and outputs fill a block with the 26th and the 58th output."""
    cores.run(forget_saved)
    expected = cores.run(unmoved, ASKED).token_ids
    cores.run(forget_saved)
    assert cores.run(moved, ASKED, Way(cuts)).token_ids == expected
    for number in range(2):
        assert cores.run(asked_on, number, ASKED)[0] == expected


def end_and_reserve(cores: list[Any], asked: Asked, *, is_careless: bool = False) -> None:
    """A request ends, and before the next step a migration writes to all memory that it gets."""
    from sterna.types import MigrationId

    core = cores[0]
    scheduler, migration = core.scheduler, MigrationId("writing")
    request = add(core, "ending", asked)
    # The prompt has just been computed: nothing of it is saved yet.
    run_until(core, request, 1)
    if is_careless:
        scheduler._unready_free_blocks = lambda: []
    core.abort_requests(["ending"])
    num_reserved = scheduler.total_tokens // BLOCK_SIZE
    while isinstance(blocks := reserve_all(scheduler, migration, num_reserved), str):
        num_reserved -= 1
    write_to(core, blocks)
    for _ in range(5):
        step(core)
    scheduler.free_reservation(migration)
    vars(scheduler).pop("_unready_free_blocks", None)


def reserve_all(scheduler: Any, migration: Any, num_blocks: int) -> Any:
    """Reserve so many blocks in the first group; the name of the reason when there is no place."""
    from sterna.migration.messages import Reason

    columns = [range(num_blocks), *(range(0) for _ in scheduler.groups._managers[1:])]
    reserved = scheduler.reserve(migration, tuple(columns), needs_slot=False)
    return reserved.name if isinstance(reserved, Reason) else reserved


def write_to(core: Any, block_ids: list[list[int]]) -> None:
    """Fill these blocks of all layers."""
    for layer in core.model_executor.driver_worker.worker.model_runner.kv_caches:
        for group in block_ids:
            layer[group] = 0.75


def test_a_migration_writes_to_no_block_that_is_still_to_be_saved(cores: KindCore) -> None:
    cores.run(forget_saved)
    expected, _ = cores.run(asked_on, 0, ASKED)
    for is_careless in (False, True):
        cores.run(forget_saved)
        cores.run(end_and_reserve, ASKED, is_careless=is_careless)
        said, num_loaded = cores.run(asked_on, 0, ASKED)
        assert num_loaded > 0
        # Otherwise this would show nothing.
        assert (said == expected) is not is_careless


def test_a_request_goes_on_elsewhere_where_its_engine_died(cores: KindCore) -> None:
    cores.run(forget_saved)
    expected = cores.run(unmoved, ASKED).token_ids
    assert cores.run(recovered, ASKED, expected[:50]) == expected[50:]


def with_num_loaded(
    cores: list[Any], play: Callable[..., list[int]], *args: Any
) -> tuple[list[int], int]:
    """What a request says in the end on the second core, and how many blocks were loaded there."""
    num_before = num_loaded_by(cores[1])
    said = play(cores, *args)
    return said, num_loaded_by(cores[1]) - num_before


def test_a_request_goes_on_with_blocks_that_its_next_engine_has_saved(cores: KindCore) -> None:
    """vLLM loads them between two steps, and then decides how its worker hears of the request."""
    cores.run(forget_saved)
    expected, _ = cores.run(asked_on, 1, ASKED)
    # Else the worker's row of the batch would still have the outputs.
    cores.run(asked_on, 1, Asked(2 * PROMPT_TOKENS))
    said, num_loaded = cores.run(with_num_loaded, recovered, ASKED, expected[:50])
    assert num_loaded >= PROMPT_TOKENS // BLOCK_SIZE
    assert said == expected[50:]


def test_a_request_that_was_preempted_in_its_prefill_begins_with_saved_blocks(
    cores: KindCore,
) -> None:
    """To the worker it is a new request, although it was preempted where it came from."""
    cores.run(forget_saved)
    asked = Asked(2 * PROMPT_TOKENS)
    expected, _ = cores.run(asked_on, 1, asked)
    said, num_loaded = cores.run(with_num_loaded, moved_from_queue, asked)
    assert num_loaded >= 2 * PROMPT_TOKENS // BLOCK_SIZE
    assert said == expected
