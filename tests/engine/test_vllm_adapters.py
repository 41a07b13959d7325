"""LoRA adapters: never more in a batch than vLLM bears, loaded before they are needed, and equal
on both sides of a move."""

import asyncio
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.kinds.tiny_adapters import build_adapter
from sterna.messages.actors import TokenSpan
from sterna.migration.messages import BlocksReserved, Drain, Mode, Reason, ReserveFailed
from sterna.types import FrontendId, Immovable, InstanceId, MigrationId, RequestId
from tests.engine.test_vllm_engine import MIGRATION, REQUEST, Listener, reserve, run_with_engine
from tests.engine.test_vllm_histories import wire_request
from tests.engine.test_vllm_scheduler import finish, step, with_scheduler
from tests.engine.vllm_cores import SMALL, tiny_core

pytest.importorskip("vllm")

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

NUM_BLOCKS = 60
NUM_ADAPTERS = 3
M = MigrationId("i0-1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@contextmanager
def core_with_adapters(folder: Path, *, max_loras: int) -> Iterator[Any]:
    """A core with at most so many adapters in a batch, and its three adapters."""
    from sterna.engine.vllm.hosted_core import WORKER_EXTENSION

    with tiny_core(
        folder / "tiny",
        load_format="auto",
        **{**SMALL, "max_num_seqs": 8},
        worker_extension_cls=WORKER_EXTENSION,
        enable_lora=True,
        max_loras=max_loras,
        max_lora_rank=8,
    ) as core:
        for number in range(1, NUM_ADAPTERS + 1):
            build_adapter(folder / "tiny", folder / f"adapter{number}", seed=number)
        yield core


@pytest.fixture(scope="module")
def lora_core(folder: Path) -> Iterator[Any]:
    """A core with at most two adapters in a batch."""
    with core_with_adapters(folder, max_loras=2) as core:
        yield core


def adapter(folder: Path, number: int, **settings: Any) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"adapter{number}", number, str(folder / f"adapter{number}"), **settings)


def add(core: Any, folder: Path, name: str, number: int | None, num_tokens: int = 40) -> None:
    wire = wire_request(name, {"max_tokens": num_tokens, "ignore_eos": True})
    wire.lora_request = None if number is None else adapter(folder, number)
    core.add_request(*core.preprocess_add_request(wire))


def reserved(core: Any, number: int | None, migration: MigrationId = M) -> bool:
    """Whether a batch slot and a block could be reserved for a request with this adapter."""
    outcome = core.scheduler.reserve(migration, (range(1),), needs_slot=True, adapter=number)
    assert not isinstance(outcome, Reason) or outcome in (Reason.NO_SLOT, Reason.NO_ADAPTER_SLOT)
    return not isinstance(outcome, Reason)


def drain(core: Any, name: str) -> None:
    core.scheduler.begin_drain(Drain(M, RequestId(name), Mode.LIVE, 0, 0, NUM_BLOCKS))
    assert core.scheduler.is_drained(name)


def running(core: Any) -> list[str]:
    return [each.request_id for each in core.scheduler.running]


def test_what_a_request_says_depends_on_its_adapter(lora_core: Any, folder: Path) -> None:
    """Otherwise no test of moves would show anything."""
    core = with_scheduler(lora_core)
    for name, number in (("plain", None), ("first", 1), ("second", 2)):
        add(core, folder, name, number)
    requests = dict(core.scheduler.requests)
    finish(core)
    said = {tuple(request.output_token_ids) for request in requests.values()}
    assert len(said) == 3


def test_no_slot_is_reserved_for_an_adapter_too_many(lora_core: Any, folder: Path) -> None:
    """vLLM would end the engine in the step after the adoption."""
    core = with_scheduler(lora_core)
    add(core, folder, "a", 1)
    add(core, folder, "b", 2)
    step(core)
    assert running(core) == ["a", "b"]
    refused = core.scheduler.reserve(M, (range(1),), needs_slot=True, adapter=3)
    assert refused is Reason.NO_ADAPTER_SLOT
    for harmless in (None, 1, 2):
        assert reserved(core, harmless)
        core.scheduler.free_reservation(M)
    core.abort_requests(["b"])
    assert reserved(core, 3)
    # It holds the second place of the two.
    assert not reserved(core, 2, MigrationId("i0-2"))
    core.scheduler.free_reservation(M)
    finish(core)


def test_a_drained_request_finds_the_place_of_its_adapter_when_it_resumes(
    lora_core: Any, folder: Path
) -> None:
    core = with_scheduler(lora_core)
    add(core, folder, "a", 1)
    add(core, folder, "b", 2)
    step(core)
    drain(core, "a")
    add(core, folder, "c", 3)
    add(core, folder, "plain", None)
    step(core)
    assert running(core) == ["b", "plain"]
    core.scheduler.resume(RequestId("a"))
    step(core)
    assert running(core) == ["b", "plain", "a"]
    core.abort_requests(["b"])
    step(core)
    assert running(core) == ["plain", "a", "c"]
    finish(core)


def test_vllm_alone_would_end_the_engine(
    lora_core: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which the two tests above have to prevent."""
    core = with_scheduler(lora_core)
    monkeypatch.setattr(type(core.scheduler), "_hold_adapters", lambda self: None)
    add(core, folder, "a", 1)
    add(core, folder, "b", 2)
    step(core)
    drain(core, "a")
    add(core, folder, "c", 3)
    step(core)
    core.scheduler.resume(RequestId("a"))
    with pytest.raises(AssertionError):
        core.scheduler.schedule()
    core.scheduler = with_scheduler(lora_core).scheduler


@pytest.mark.parametrize("seed", range(4))
def test_any_course_of_moves_leaves_an_engine_that_goes_on(
    lora_core: Any, folder: Path, seed: int
) -> None:
    """Requests come, leave, return and end; slots are reserved and freed again."""
    core = with_scheduler(lora_core)
    scheduler, rng, seen = core.scheduler, random.Random(seed), Counter[str]()
    migrations: list[MigrationId] = []
    for number in range(150):
        match rng.choice(["add", "drain", "return", "reserve", "free", "step", "step"]):
            case "add" if len(scheduler.requests) < 8:
                add(core, folder, f"r{number}", rng.choice([None, 1, 2, 3]), rng.randint(2, 12))
            case "drain" if scheduler.running:
                chosen = rng.choice(scheduler.running)
                if scheduler.immovable(chosen) is None:
                    drain(core, chosen.request_id)
            case "return" if scheduler._drained:
                resumed = rng.choice(list(scheduler._drained))
                rng.choice([scheduler.resume, scheduler.release])(resumed)
            case "reserve" if len(migrations) < 3:
                migrations.append(MigrationId(f"m{number}"))
                is_reserved = reserved(core, rng.choice([None, 1, 2, 3]), migrations[-1])
                seen["reserved" if is_reserved else "refused"] += 1
            case "free" if migrations:
                scheduler.free_reservation(migrations.pop(rng.randrange(len(migrations))))
            case "step" if scheduler.has_requests():
                step(core)
                numbers = {
                    each.lora_request.lora_int_id
                    for each in scheduler.running
                    if each.lora_request is not None
                }
                assert len(numbers) <= 2
                seen["full"] += len(numbers) == 2
    for migration in migrations:
        scheduler.free_reservation(migration)
    for name in list(scheduler._drained):
        scheduler.resume(name)
    finish(core)
    assert min(seen["reserved"], seen["refused"], seen["full"]) > 0


# ------------------------------------------------------------------------------- loading


def test_an_adapter_that_cannot_be_loaded_fails_its_request_alone(
    lora_core: Any, folder: Path
) -> None:
    """vLLM would end the engine in the step that loads it."""
    from sterna.engine.vllm.payload import encode_request

    core = with_scheduler(lora_core)
    wire = wire_request("lacks", {})
    wire.lora_request = adapter(folder, 9)

    async def play(engine: Any, listener: Listener) -> None:
        engine.add(FrontendId(4), encode_request(wire))
        await asyncio.sleep(0)
        ((frontend, span, _),) = listener.outputs
        assert (frontend, span) == (FrontendId(4), TokenSpan(RequestId("lacks"), 0, 0, True))

    run_with_engine(core, play)
    assert not core.scheduler.requests


def test_a_dropped_adapter_is_looked_at_again(lora_core: Any, folder: Path, tmp_path: Path) -> None:
    """vLLM would load its files in the next step that needs them, whatever they are then."""
    from vllm.lora.request import LoRARequest

    from sterna.engine.vllm.adapters import Adapters, adapter_digest

    place = build_adapter(folder / "tiny", tmp_path / "dropped", seed=4)
    dropped, adapters = LoRARequest("dropped", 11, str(place)), Adapters()
    first = adapters.load(lora_core, dropped)
    assert first == adapter_digest(place)
    lora_core.remove_lora(11)
    assert adapters.load(lora_core, dropped) == first
    shutil.rmtree(place)
    build_adapter(folder / "tiny", place, seed=5)
    second = adapters.load(lora_core, dropped)
    assert second == adapter_digest(place) != first
    assert 11 in lora_core.list_loras()
    shutil.rmtree(place)
    assert adapters.load(lora_core, dropped) == second
    lora_core.remove_lora(11)
    with pytest.raises(Exception, match="dropped"):
        adapters.load(lora_core, dropped)


def test_a_number_gets_the_weights_of_its_old_path_back(
    lora_core: Any, folder: Path, tmp_path: Path
) -> None:
    """A front end's successor loads the adapters of the start again, whose number may have been
    given the weights of another path in place."""
    from vllm.lora.request import LoRARequest

    from sterna.engine.vllm.adapters import Adapters

    paths = [
        str(build_adapter(folder / "tiny", tmp_path / f"v{each}", seed=20 + each))
        for each in (1, 2)
    ]
    old, adapters = LoRARequest("updated", 21, paths[0]), Adapters()

    def said(name: str) -> list[int]:
        core = with_scheduler(lora_core)
        wire = wire_request(name, {"max_tokens": 10, "ignore_eos": True})
        wire.lora_request = old
        core.add_request(*core.preprocess_add_request(wire))
        request = core.scheduler.requests[name]
        finish(core)
        return list(request.output_token_ids)

    def update() -> None:
        answers: list[Any] = []
        new = ("updated", 21, paths[1], None, True)
        lora_core.call_utility("add_lora", (new,), answers.append, 0)
        assert answers[0].failure_message is None

    digest = adapters.load(lora_core, old)
    first = said("first")
    update()
    assert said("updated") != first
    lora_core.call_utility("add_lora", (("updated", 21, paths[0]),), lambda _: None, 0)
    assert said("again") == first
    update()
    assert adapters.load(lora_core, old) == digest
    assert said("by a request") == first


def test_a_move_is_refused_where_the_adapter_has_other_weights(
    lora_core: Any, folder: Path, tmp_path: Path
) -> None:
    from sterna.engine.vllm.adapters import adapter_digest

    core = with_scheduler(lora_core)
    digest = adapter_digest(folder / "adapter1")
    other = adapter_digest(build_adapter(folder / "tiny", tmp_path / "other", seed=8))
    assert None not in (digest, other)
    assert digest != other

    async def play(engine: Any, _: Listener) -> None:
        for found, outcome in (
            (other, ReserveFailed(0, Reason.UNSUPPORTED)),
            (None, ReserveFailed(0, Reason.UNSUPPORTED)),
            (digest, BlocksReserved(0, ())),
        ):
            assert await engine.reserve(arriving(adapter(folder, 1), found)) == outcome
        await engine.free_reservation(MIGRATION)

    run_with_engine(core, play)


def test_a_move_is_refused_where_the_adapter_cannot_be_loaded(lora_core: Any, folder: Path) -> None:
    core = with_scheduler(lora_core)

    async def play(engine: Any, _: Listener) -> None:
        refused = ReserveFailed(0, Reason.UNSUPPORTED)
        assert await engine.reserve(arriving(adapter(folder, 9), None)) == refused

    run_with_engine(core, play)
    assert not core.scheduler._reservations


def test_the_digest_of_an_adapter_goes_with_its_request(lora_core: Any, folder: Path) -> None:
    from sterna.engine.vllm.adapters import adapter_digest
    from sterna.engine.vllm.payload import decode_request, encode_request
    from sterna.engine.vllm.request_state import MovingRequest

    core = with_scheduler(lora_core)
    wire = wire_request("leaves", {})
    wire.lora_request = adapter(folder, 2)

    async def play(engine: Any, _: Listener) -> None:
        engine.add(FrontendId(4), encode_request(wire))
        inspected = await engine.inspect(MIGRATION, RequestId("leaves"))
        moving = MovingRequest.decode(inspected.request)
        assert moving.adapter_digest == adapter_digest(folder / "adapter2")
        # What may be large is encoded once.
        again = await engine.inspect(MIGRATION, RequestId("leaves"))
        assert (again.progress, again.request) == (inspected.progress, None)
        assert decode_request(moving.payload).lora_request == wire.lora_request

    run_with_engine(core, play)
    finish(core)


def test_a_request_whose_adapter_is_lost_stays_and_the_engine_goes_on(
    lora_core: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM dropped it for another one while the request queued, and its files are gone."""
    from sterna.engine.vllm.payload import encode_request

    core = with_scheduler(lora_core)
    wire = wire_request("queues", {})
    wire.lora_request = adapter(folder, 2)

    def lost(*_: Any) -> None:
        raise FileNotFoundError("adapter_config.json")

    async def play(engine: Any, _: Listener) -> None:
        engine.add(FrontendId(4), encode_request(wire))
        monkeypatch.setattr(engine._adapters, "load", lost)
        inspected = await engine.inspect(MIGRATION, RequestId("queues"))
        assert inspected.progress.is_immovable
        monkeypatch.undo()
        assert not (await engine.inspect(MIGRATION, RequestId("queues"))).progress.is_immovable

    run_with_engine(core, play)
    finish(core)


def test_an_adapter_whose_weights_may_change_in_place_stays(lora_core: Any, folder: Path) -> None:
    core = with_scheduler(lora_core)
    wire = wire_request("stays", {})
    wire.lora_request = adapter(folder, 2, load_inplace=True)
    core.add_request(*core.preprocess_add_request(wire))
    step(core)
    (view,) = core.scheduler.view(InstanceId("i0"), False).running
    assert view.immovable is Immovable.UNSUPPORTED_REQUEST_FEATURE
    assert view.unsupported == "a LoRA adapter with load_inplace"
    finish(core)


def arriving(lora_request: Any, digest: str | None) -> Any:
    from sterna.engine.vllm.payload import encode_request
    from sterna.engine.vllm.request_state import MovingRequest

    wire = wire_request(REQUEST, {})
    wire.lora_request = lora_request
    return replace(reserve(0), request=MovingRequest(encode_request(wire), digest).encode())
