"""LoRA adapters on an engine whose batch has as many as it may: no other one drops them."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.kinds.tiny_adapters import build_adapter
from sterna.migration.messages import BlocksReserved, Reason, ReserveFailed
from sterna.types import FrontendId
from tests.engine.test_vllm_adapters import (
    NUM_ADAPTERS,
    adapter,
    add,
    arriving,
    core_with_adapters,
    running,
)
from tests.engine.test_vllm_engine import MIGRATION, Listener, run_with_engine
from tests.engine.test_vllm_histories import wire_request
from tests.engine.test_vllm_scheduler import finish, step, with_scheduler

pytest.importorskip("vllm")

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def core_for_one(folder: Path) -> Iterator[Any]:
    """A core with at most one adapter in a batch."""
    with core_with_adapters(folder, max_loras=1) as core:
        yield core


def test_the_adapter_of_a_running_request_stays_where_others_are_loaded(
    core_for_one: Any, folder: Path
) -> None:
    """vLLM would drop it, and end the engine in the next step if its files are gone."""
    from sterna.engine.vllm.payload import encode_request

    core = with_scheduler(core_for_one)

    async def play(engine: Any, listener: Listener) -> None:
        for number in range(1, NUM_ADAPTERS + 1):
            wire = wire_request(f"r{number}", {"max_tokens": 4, "ignore_eos": True})
            wire.lora_request = adapter(folder, number)
            engine.add(FrontendId(4), encode_request(wire))
            if number == 1:
                step(core)
                shutil.rmtree(folder / "adapter1")
        assert not listener.outputs

    run_with_engine(core, play)
    assert running(core) == ["r1"]
    requests = dict(core.scheduler.requests)
    finish(core)
    said = {name: each.num_output_tokens for name, each in requests.items()}
    assert said == {"r1": 4, "r2": 4, "r3": 4}


def test_nothing_is_loaded_for_a_move_that_has_no_place_for_its_adapter(
    core_for_one: Any, folder: Path, tmp_path: Path
) -> None:
    """It would take the place of another one."""
    from vllm.lora.request import LoRARequest

    from sterna.engine.vllm.adapters import adapter_digest

    core = with_scheduler(core_for_one)
    place = build_adapter(folder / "tiny", tmp_path / "third", seed=12)
    third = arriving(LoRARequest("third", 12, str(place)), adapter_digest(place))
    add(core, folder, "a", 2)
    step(core)

    async def play(engine: Any, _: Listener) -> None:
        refused = ReserveFailed(0, Reason.NO_ADAPTER_SLOT)
        assert await engine.reserve(replace(third, num_blocks=3)) == refused
        assert 12 not in core.list_loras()
        # Without memory, its request would queue.
        assert await engine.reserve(third) == BlocksReserved(0, ())
        assert core.list_loras() == {2, 12}
        await engine.free_reservation(MIGRATION)

    run_with_engine(core, play)
    finish(core)
