"""The real engine's side of migrations, with a core that is stepped by hand."""

import asyncio
import copy
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import msgspec
import pytest

from sterna.config import TransportConfig
from sterna.engine.drains import Left, Outgrown
from sterna.engine.interface import EngineActivity
from sterna.engine.payload_parts import EventType, annotations_of
from sterna.engine.vllm.weight_updates import WeightUpdates
from sterna.messages.actors import TokenSpan
from sterna.migration.messages import (
    Adopt,
    Adopted,
    AdoptFailed,
    BlocksReserved,
    Drain,
    KeepPrefix,
    Mode,
    Reason,
    ReserveBlocks,
    ReserveFailed,
)
from sterna.types import FrontendId, InstanceId, MigrationId, RequestId, prefix_id
from tests.engine.test_vllm_histories import wire_request
from tests.engine.test_vllm_scheduler import finish, step, with_scheduler
from tests.engine.vllm_cores import SMALL, tiny_core

pytest.importorskip("vllm")

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

T = TypeVar("T")

MIGRATION, REQUEST = MigrationId("i0-1"), RequestId("moves")


@pytest.fixture(scope="module")
def vllm_core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from sterna.engine.vllm.hosted_core import WORKER_EXTENSION

    with tiny_core(
        tmp_path_factory.mktemp("models") / "tiny",
        **SMALL,
        worker_extension_cls=WORKER_EXTENSION,
    ) as core:
        yield core


class DirectThread:
    """A step thread that steps nothing, and carries commands out where they are given."""

    activity = EngineActivity(0, is_busy=False)

    def __init__(self, core: Any) -> None:
        self._core = core

    def call(self, command: Callable[[Any], T], *, may_last: bool = False) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(command(self._core))
        except Exception as error:
            future.set_exception(error)
        return future

    def post(self, command: Callable[[Any], None], *, may_last: bool = False) -> None:
        self.call(command, may_last=may_last).result()


class FastThread(DirectThread):
    """One that steps until all requests have ended before anybody hears of a command's end."""

    def __init__(self, core: Any, on_step: Callable[[Any, dict[int, Any]], None]) -> None:
        super().__init__(core)
        self._on_step = on_step

    def call(self, command: Callable[[Any], T], *, may_last: bool = False) -> Future[T]:
        future = super().call(command, may_last=may_last)
        while self._core.scheduler.has_requests():
            outputs, is_executed = self._core.step_fn()
            self._on_step(self._core, outputs or {})
            self._core.post_step(is_executed)
        return future


class Listener:
    """Notes what it hears."""

    def __init__(self) -> None:
        self.adopted: list[tuple[str, int]] = []
        self.failures: list[str] = []
        self.outputs: list[tuple[FrontendId, TokenSpan, bytes]] = []
        self.news: list[str] = []
        self.utility_results: list[tuple[FrontendId, int, bytes]] = []

    def on_outputs(
        self, frontend_id: FrontendId, spans: tuple[TokenSpan, ...], payloads: list[bytes]
    ) -> None:
        for span, payload in zip(spans, payloads, strict=True):
            assert span.has_events == bool(annotations_of(payload).events)
        self.news += [f"{each.request_id} says something" for each in spans]
        self.outputs += [(frontend_id, *each) for each in zip(spans, payloads, strict=True)]

    def on_adopted(self, frontend_id: FrontendId, request_id: RequestId, first_index: int) -> None:
        self.news.append(f"{request_id} is here")
        self.adopted.append((request_id, first_index))

    def on_view(self, view: Any) -> None:
        pass

    def on_transfer(self, migration_id: MigrationId, event: Any) -> None:
        raise AssertionError(f"{migration_id}: {event}")

    def on_sent(self, num_bytes: int) -> None:
        raise AssertionError(f"{num_bytes} bytes sent")

    def on_utility_result(self, frontend_id: FrontendId, call_id: int, payload: bytes) -> None:
        self.utility_results.append((frontend_id, call_id, payload))

    def on_failure(self, error: BaseException) -> None:
        self.failures.append(str(error))


def run_with_engine(core: Any, play: Callable[[Any, Listener], Coroutine[Any, Any, T]]) -> T:
    """What `play` returns, which is given an engine over this core."""
    from sterna.engine.vllm.engine import VllmEngine

    async def run() -> T:
        listener = Listener()
        engine = VllmEngine(InstanceId("i1"), None, TransportConfig(), listener)  # type: ignore[arg-type]
        engine._core = core
        engine._thread = DirectThread(core)  # type: ignore[assignment]
        try:
            return await play(engine, listener)
        finally:
            await engine._transfers.close()

    return asyncio.run(run())


def reserve(num_blocks: int) -> ReserveBlocks:
    request = moving({"seed": 3, "temperature": 0.9})
    return ReserveBlocks(MIGRATION, REQUEST, 0, 0, num_blocks, True, request)


def moving(sampling: dict[str, Any]) -> bytes:
    """A request as it comes from the engine where it is."""
    from sterna.engine.vllm.payload import encode_request
    from sterna.engine.vllm.request_state import MovingRequest

    return MovingRequest(encode_request(wire_request(REQUEST, sampling))).encode()


def test_an_engine_that_moves_no_kv_takes_requests_without_it(vllm_core: Any) -> None:
    """Else one that is emptied for its sake, by a rolling restart, would never be empty."""
    from sterna.engine.vllm.request_state import RequestState

    core = with_scheduler(vllm_core)
    core.scheduler.immovable_features = ("speculative decoding",)

    async def play(engine: Any, listener: Listener) -> None:
        assert await engine.reserve(reserve(3)) == ReserveFailed(0, Reason.UNSUPPORTED)
        assert await engine.reserve(reserve(0)) == BlocksReserved(0, ())
        state = RequestState([5, 6, 7], 0, 0).encode()
        assert await engine.adopt(Adopt(MIGRATION, REQUEST, 0, state)) == Adopted()
        assert listener.adopted == [(REQUEST, 3)]

    run_with_engine(core, play)
    step(core)
    (running,) = core.scheduler.running
    assert list(running.output_token_ids)[:3] == [5, 6, 7]
    finish(core)


@pytest.mark.parametrize("num_blocks", [-3, 10**12])
def test_blocks_that_no_request_may_have_are_not_reserved(vllm_core: Any, num_blocks: int) -> None:
    """A damaged count must not keep the step thread busy."""
    core = with_scheduler(vllm_core)

    async def play(engine: Any, _: Listener) -> None:
        assert await engine.reserve(reserve(num_blocks)) == ReserveFailed(0, Reason.TOO_LONG)

    run_with_engine(core, play)
    assert not core.scheduler._reservations


@pytest.mark.parametrize("num_valid_tokens", [-5, 3, 77, 10**6])
def test_a_request_whose_blocks_do_not_fit_its_tokens_is_not_adopted(
    vllm_core: Any, num_valid_tokens: int
) -> None:
    """It has 78 tokens: 77 would be right, and there is no block for them."""
    from sterna.engine.vllm.request_state import RequestState

    core = with_scheduler(vllm_core)

    async def play(engine: Any, _: Listener) -> None:
        assert await engine.reserve(reserve(0)) == BlocksReserved(0, ())
        state = RequestState([5, 6, 7], num_valid_tokens, 0).encode()
        adopted = await engine.adopt(Adopt(MIGRATION, REQUEST, 1, state))
        assert adopted == AdoptFailed(Reason.UNSUPPORTED)
        await engine.free_reservation(MIGRATION)

    run_with_engine(core, play)
    assert not core.scheduler.requests


def test_a_request_that_ends_at_once_is_adopted_before_it_ends(vllm_core: Any) -> None:
    """Else its instance would have it for ever: the loop is slow, and the step that ends it ends
    before the migration hears of the adoption."""
    from sterna.engine.vllm.request_state import RequestState

    core = with_scheduler(vllm_core)
    reservation = ReserveBlocks(MIGRATION, REQUEST, 0, 0, 0, True, moving({"max_tokens": 4}))
    state = RequestState([5, 6, 7], 0, 0).encode()

    async def play(engine: Any, listener: Listener) -> None:
        assert await engine.reserve(reservation) == BlocksReserved(0, ())
        engine._thread = FastThread(core, engine._on_step)
        assert await engine.adopt(Adopt(MIGRATION, REQUEST, 0, state)) == Adopted()
        ((_, span, _),) = listener.outputs
        assert span == TokenSpan(REQUEST, 3, 1, True)
        assert listener.news == [f"{REQUEST} is here", f"{REQUEST} says something"]

    run_with_engine(core, play)


def test_an_adoption_waits_for_no_rank_and_one_that_failed_ends_the_engine(vllm_core: Any) -> None:
    """Ranks answer behind the steps that they have queued: no other would be queued meanwhile."""
    from vllm.v1.request import RequestStatus

    from sterna.engine.vllm.request_state import RequestState

    core = with_scheduler(vllm_core)
    registering: Future[Any] = Future()
    calls: list[tuple[str, bool]] = []

    def call_ranks(
        method: str, args: tuple[Any, ...], kwargs: dict[str, Any], non_block: bool = False
    ) -> Future[Any]:
        calls.append((method, non_block))
        return registering

    async def play(engine: Any, listener: Listener) -> None:
        assert await engine.reserve(reserve(0)) == BlocksReserved(0, ())
        state = RequestState([5, 6, 7], 0, 0).encode()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(core.model_executor, "collective_rpc", call_ranks)
            assert await engine.adopt(Adopt(MIGRATION, REQUEST, 0, state)) == Adopted()
        assert calls == [("sterna_import_request", True)]
        assert not listener.failures
        registering.set_exception(RuntimeError("a rank has no memory"))
        await asyncio.sleep(0)
        assert listener.failures == ["a rank has no memory"]

    run_with_engine(core, play)
    core.scheduler.finish_requests(REQUEST, RequestStatus.FINISHED_ABORTED)


def test_an_engine_logs_the_details_of_its_steps(
    vllm_core: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM's front end would, of its only engine."""
    from sterna.engine.vllm.payload import encode_request

    core = with_scheduler(vllm_core, log_stats=True)
    payload = encode_request(wire_request(REQUEST, {"max_tokens": 3, "ignore_eos": True}))

    async def play(engine: Any, _: Listener) -> None:
        with pytest.MonkeyPatch.context() as patch:
            observed = core.vllm_config.observability_config
            patch.setattr(observed, "enable_logging_iteration_details", True)
            patch.setattr(core, "log_stats", True)
            patch.setattr(core.model_executor, "register_failure_callback", lambda _: None)
            engine._open_planes(core)
            engine._thread = FastThread(core, engine._on_step)
            with caplog.at_level("INFO", logger="vllm.v1.metrics.loggers"):
                engine.add(FrontendId(4), payload)

    run_with_engine(core, play)
    steps = [each for each in caplog.messages if "Iteration(" in each]
    assert ["1 generation requests" in each for each in steps] == [False, True, True]


def test_a_span_says_whether_its_output_has_events(vllm_core: Any) -> None:
    from sterna.engine.vllm.payload import encode_request

    # vLLM notes events for its metrics.
    core = with_scheduler(vllm_core, log_stats=True)
    payload = encode_request(wire_request(REQUEST, {"max_tokens": 3, "ignore_eos": True}))

    async def play(engine: Any, listener: Listener) -> None:
        engine._thread = FastThread(core, engine._on_step)
        engine.add(FrontendId(4), payload)
        await asyncio.sleep(0)
        assert [span.has_events for _, span, _ in listener.outputs] == [True, False, False]

    run_with_engine(core, play)


@pytest.mark.parametrize(
    ("chunk_tokens", "earlier"),
    [(32, ["QUEUED", "SCHEDULED", "PREEMPTED"]), (96, ["PREEMPTED"])],
)
def test_a_preemption_is_told_by_the_instance_to_which_the_request_moves(
    vllm_core: Any, chunk_tokens: int, earlier: list[str]
) -> None:
    """Its first step computes all 75 tokens of the prompt, whose output delivers what was before
    the preemption, or only 32. The source's clock is far ahead."""
    from sterna.engine.vllm import request_state
    from sterna.engine.vllm.payload import encode_request

    core = with_scheduler(vllm_core, log_stats=True)
    payload = encode_request(wire_request(REQUEST, {"max_tokens": 3}))
    source = SimpleNamespace(monotonic=lambda: time.monotonic() + 9_000.0)

    async def play(engine: Any, listener: Listener) -> list[Any]:
        engine.add(FrontendId(4), payload)
        await asyncio.sleep(0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(core.scheduler, "max_num_scheduled_tokens", chunk_tokens)
            step(core)
        request = core.scheduler.requests[REQUEST]
        core.scheduler.running.remove(request)
        core.scheduler._preempt_request(request, time.monotonic())
        for event in request.events:
            event.timestamp += 9_000.0 - 1.0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(request_state, "time", source)
            drained = await engine.drain(Drain(MIGRATION, REQUEST, Mode.LIVE, 1, 0, 0))
        engine.release(REQUEST)
        assert await engine.reserve(reserve(0)) == BlocksReserved(0, ())
        adopt = Adopt(MIGRATION, REQUEST, 1, drained.state)
        engine._thread = FastThread(core, engine._on_step)
        assert await engine.adopt(adopt) == Adopted()
        return [annotations_of(payload).events for _, _, payload in listener.outputs]

    first, *others = run_with_engine(core, play)
    assert [EventType(kind).name for kind, _ in first] == [*earlier, "SCHEDULED"]
    assert all(0.9 < ago_s < 60.0 for _, ago_s in first[:-1])
    assert first[-1][1] < 0.9 + first[-2][1]
    assert not any(others)


def test_a_request_beyond_the_length_of_this_engine_is_refused(vllm_core: Any) -> None:
    """Its 75 tokens of prompt and 3 of output may be fine for another, with more memory."""
    from sterna.engine.vllm.payload import encode_request
    from sterna.engine.vllm.request_state import RequestState

    core = with_scheduler(vllm_core)
    payload = encode_request(wire_request(REQUEST, {}))
    state = RequestState([5, 6, 7], 0, 0).encode()

    async def play(engine: Any, listener: Listener) -> None:
        core.scheduler.max_model_len = 78
        engine.add(FrontendId(4), payload, [5, 6, 7])
        (refused,) = listener.outputs
        assert refused[:2] == (FrontendId(4), TokenSpan(REQUEST, 3, 0, True))
        assert await engine.reserve(reserve(0)) == BlocksReserved(0, ())
        refusal = AdoptFailed(Reason.TOO_LONG)
        assert await engine.adopt(Adopt(MIGRATION, REQUEST, 0, state)) == refusal
        assert not core.scheduler.requests
        core.scheduler.max_model_len = 79
        assert await engine.adopt(Adopt(MIGRATION, REQUEST, 0, state)) == Adopted()

    run_with_engine(core, play)
    core.abort_requests([REQUEST])
    finish(core)


def test_a_refused_pooling_request_does_not_end_its_front_end(vllm_core: Any) -> None:
    from vllm.pooling_params import PoolingParams

    from sterna.engine.vllm.payload import decode_outputs, encode_request

    wire = wire_request("embeds", {})
    wire.sampling_params, wire.pooling_params = None, PoolingParams(task="embed")
    core = with_scheduler(vllm_core)

    async def play(engine: Any, listener: Listener) -> bytes:
        # This engine generates.
        engine.add(FrontendId(4), encode_request(wire))
        await asyncio.sleep(0)
        ((_, _, payload),) = listener.outputs
        return payload

    (output,) = decode_outputs(run_with_engine(core, play)).outputs
    # vLLM's output processor takes an end without an embedding and without this for a bug.
    assert output.mm_cache_miss_hashes == ["embeds"]


def test_a_request_goes_on_without_the_v1_runners_state_where_there_is_none(vllm_core: Any) -> None:
    """vLLM's V2 runner is told all tokens when it admits a request."""
    from sterna.engine.vllm.engine import VllmEngine

    core = with_scheduler(vllm_core)
    core.scheduler.use_v2_model_runner = True
    request, _ = core.preprocess_add_request(wire_request("again", {}))
    calls: list[tuple[Any, ...]] = []
    told = SimpleNamespace(scheduler=core.scheduler, collective_rpc=lambda *a, **_: calls.append(a))
    VllmEngine._restore(told, request, [5, 6, 7])  # type: ignore[arg-type]
    assert not calls
    output = core.scheduler.schedule()
    (admitted,) = output.scheduled_new_reqs
    assert admitted.prefill_token_ids[-3:] == [5, 6, 7]


def test_engines_whose_pages_lie_otherwise_have_another_format(vllm_core: Any) -> None:
    from sterna.engine.vllm.facts import kv_format

    (layout,) = vllm_core.collective_rpc("sterna_page_layout")
    assert layout.startswith("layout=LBHNC; backends=['CPU_ATTN']; isas=['")
    # The same model on a processor with other kernels.
    other = layout.replace("isas=['", "isas=['x")
    config = vllm_core.vllm_config
    assert kv_format(config, [layout, layout]) == kv_format(config, [layout])
    assert kv_format(config, [layout]) != kv_format(config, [other])
    assert kv_format(config, [layout]) != kv_format(config, ["no page moves"])


def test_other_weights_of_a_repository_have_another_format(
    vllm_core: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each instance looks up what its branch has when it starts, and may not reach the hub."""
    from huggingface_hub import ResolvedRevision

    from sterna.engine.vllm.facts import kv_format

    def snapshot(name: str, revision: str | None, **_: Any) -> str:
        assert (name, revision) == ("terns/arctic", None)
        return str(tmp_path / ("b" * 40))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)

    def of(revision: str | None) -> str:
        config = copy.copy(vllm_core.vllm_config)
        config.model_config = copy.copy(config.model_config)
        config.model_config.model = "terns/arctic"
        config.model_config.revision = revision
        return kv_format(config, ["the layout"])

    old, new = ResolvedRevision("a" * 40), ResolvedRevision("b" * 40)
    assert of(old) != of(new)
    assert of(new) == of(ResolvedRevision("b" * 40, "main")) == of(None)


def test_weights_in_an_object_store_are_known_by_their_address(vllm_core: Any) -> None:
    from sterna.engine.vllm.facts import kv_format

    def of(address: str) -> str:
        config = copy.copy(vllm_core.vllm_config)
        config.model_config = copy.copy(config.model_config)
        config.model_config.model_weights = address
        return kv_format(config, ["the layout"])

    assert of("s3://terns/1") == of("s3://terns/1") != of("s3://terns/2")


def test_new_weights_under_an_old_name_are_another_model(tmp_path: Path) -> None:
    from sterna.engine.vllm.facts import weights_digest

    digests = set()
    for number in range(3):
        folder = tmp_path / str(number) / "model"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        weights = bytearray(100_000)
        weights[50_000] = number % 2
        (folder / "model.safetensors").write_bytes(weights)
        digests.add(weights_digest(folder))
    assert len(digests) == 2
    assert weights_digest(tmp_path / "nowhere") is None


def test_an_engine_one_of_whose_ranks_has_died_says_so(vllm_core: Any) -> None:
    core = with_scheduler(vllm_core)
    callbacks: list[Callable[[], None]] = []

    async def play(engine: Any, listener: Listener) -> list[str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(core.model_executor, "register_failure_callback", callbacks.append)
            facts = engine._open_planes(core)
        assert "CPU_ATTN" in facts.kv_format
        (died,) = callbacks
        died()
        await asyncio.sleep(0)
        return listener.failures

    assert run_with_engine(core, play) == ["a rank of the engine has died"]


def test_the_data_planes_of_an_engine_are_labelled_by_its_kv_format(vllm_core: Any) -> None:
    """They then refuse copies of engines with other weights."""
    core = with_scheduler(vllm_core)

    async def play(engine: Any, _: Listener) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(core.model_executor, "register_failure_callback", lambda _: None)
            facts = engine._open_planes(core)
        plane = core.model_executor.driver_worker.worker._sterna_plane.plane
        assert plane._cache.label == facts.kv_format

    run_with_engine(core, play)


def test_kv_of_an_engine_whose_weights_were_updated_otherwise_is_not_adopted(
    vllm_core: Any,
) -> None:
    """The scheduler may not have heard of the update, and the copy has begun before it."""
    from sterna.engine.vllm.request_state import RequestState

    core = with_scheduler(vllm_core)
    update = ("collective_rpc", ("update_weights", None, (), {}))
    updated = WeightUpdates()
    updated.on_call(*update, b"another call", is_done=True)

    async def play(engine: Any, _: Listener) -> None:
        async def adopted(num_valid: int, weight_updates: str) -> Adopted | AdoptFailed:
            await engine.free_reservation(MIGRATION)
            assert await engine.reserve(reserve(0)) == BlocksReserved(0, ())
            state = RequestState([5, 6, 7], num_valid, 0, weight_updates=weight_updates)
            return await engine.adopt(Adopt(MIGRATION, REQUEST, 1, state.encode()))

        prefix = prefix_id(REQUEST, 0)
        entered: list[str] = []
        core.scheduler.prefixes = SimpleNamespace(
            can_move=True, enter=lambda _, __, weight_updates: entered.append(weight_updates)
        )
        other, lacks_blocks = AdoptFailed(Reason.OTHER_WEIGHTS), AdoptFailed(Reason.UNSUPPORTED)
        assert await adopted(77, "") == lacks_blocks
        assert await adopted(77, updated.label) == other
        call = msgspec.msgpack.encode((4, 7, *update))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(core, "collective_rpc", lambda method, timeout, args, kwargs: [None])
            engine.call_utility(FrontendId(4), 7, update[0], call, 0)
        assert engine.activity().weight_updates not in ("", updated.label)
        assert await adopted(77, "") == other
        assert await adopted(77, engine.activity().weight_updates) == lacks_blocks
        await engine.free_reservation(MIGRATION)
        await engine.reserve(ReserveBlocks(MIGRATION, prefix, 0, 0, 0, True, b""))
        await engine.adopt(Adopt(MIGRATION, prefix, 0, b""))
        assert entered == [engine.activity().weight_updates]
        # Without KV it is computed again.
        assert await adopted(0, "") == Adopted()

    run_with_engine(core, play)
    finish(core)


def test_a_prefix_enters_only_a_cache_of_the_same_weights(vllm_core: Any) -> None:
    from sterna.engine.vllm.kv_groups import MovingPrefixes

    prefixes = MovingPrefixes(with_scheduler(vllm_core).scheduler.kv_cache_manager.coordinator)
    prefixes._kept[REQUEST] = SimpleNamespace(first_token=0, blocks=[])  # type: ignore[assignment]
    state = prefixes.export(REQUEST, "updated")
    assert [prefixes.enter([{}], state, each) for each in ("updated", "")] == [True, False]


PREFIX = KeepPrefix(MIGRATION, REQUEST, b"", 0)
CALL = msgspec.msgpack.encode((4, 7, "ask", ()))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("abort", ([REQUEST],)),
        ("resume", (REQUEST,)),
        ("release", (REQUEST,)),
        ("keep_prefix", (PREFIX,)),
        ("set_terminating", (True,)),
        ("call_utility", (FrontendId(4), 7, "ask", CALL, 0)),
    ],
)
def test_an_engine_that_cannot_do_what_nothing_waits_for_has_failed(
    name: str, arguments: tuple[Any, ...]
) -> None:
    """Else a migration or a client might wait for ever."""
    from sterna.engine.vllm.step_thread import StepThread

    scheduler = SimpleNamespace(has_requests=lambda: False)
    # It has nothing of what commands need.
    core = SimpleNamespace(scheduler=scheduler, batch_queue=None, shutdown=lambda: None)
    failures: list[BaseException] = []

    async def play(engine: Any, _: Listener) -> None:
        engine._thread = thread = StepThread(
            lambda: core,
            on_step=lambda *_: None,
            on_idle_command=lambda _: None,
            on_failure=failures.append,
        )
        await asyncio.wrap_future(thread.start())
        getattr(engine, name)(*arguments)
        await asyncio.to_thread(thread.close, 60.0)

    run_with_engine(core, play)
    (failure,) = failures
    assert isinstance(failure, AttributeError)


@pytest.mark.parametrize(
    ("result", "failure"),
    [
        ([1, "two"], None),
        (object(), "the result cannot be sent: Object of type"),
        (1 << 70, "the result cannot be sent: can't serialize ints"),
        (ValueError("not now"), "Call to ask method failed: not now"),
    ],
    ids=["list", "object", "large number", "error"],
)
def test_a_utility_call_is_answered_whatever_its_result(result: Any, failure: str | None) -> None:
    from sterna.engine.vllm.hosted_core import HostedCore
    from sterna.engine.vllm.payload import decode_outputs

    def ask() -> Any:
        if isinstance(result, Exception):
            raise result
        return result

    core: Any = SimpleNamespace(ask=ask, place=0)
    core.call_utility = partial(HostedCore.call_utility, core)

    async def play(engine: Any, listener: Listener) -> bytes:
        engine.call_utility(FrontendId(4), 7, "ask", CALL, 0)
        await asyncio.sleep(0)
        ((frontend_id, call_id, payload),) = listener.utility_results
        assert (frontend_id, call_id) == (FrontendId(4), 7)
        return payload

    output = decode_outputs(run_with_engine(core, play)).utility_output
    assert output is not None
    assert output.call_id == 7
    if failure is None:
        assert output.result is not None
        assert (output.result.result, output.failure_message) == (result, None)
    else:
        assert output.failure_message is not None
        assert output.failure_message.startswith(failure)


@pytest.mark.parametrize("place", [1, 0])
def test_the_ranks_of_an_engine_are_numbered_by_its_place(vllm_core: Any, place: int) -> None:
    """vLLM does so for the replicas of data parallelism. Without it, two instances were the same
    rank of a trainer's group, and gave two checksums one name."""
    from sterna.engine.vllm.payload import decode_outputs

    method = "compute_weight_checksums"

    async def play(engine: Any, listener: Listener) -> bytes:
        call = msgspec.msgpack.encode((4, 7, method, ()))
        engine.call_utility(FrontendId(4), 7, method, call, place)
        await asyncio.sleep(0)
        ((_, _, payload),) = listener.utility_results
        return payload

    output = decode_outputs(run_with_engine(vllm_core, play)).utility_output
    assert output is not None
    assert output.result is not None
    (of_worker,) = output.result.result
    assert {name.split(":")[0] for name in of_worker} == {f"dp{place}"}


@pytest.mark.parametrize(
    ("layout", "moves"), [("LBNHC", True), ("BLHNC", True), ("LHBNC", False), ("BHLNC", False)]
)
def test_a_cache_whose_pages_lie_in_pieces_does_not_move(
    vllm_core: Any, layout: str, moves: bool
) -> None:
    from sterna.engine.vllm.support import immovable_engine_features

    config = copy.deepcopy(vllm_core.vllm_config)
    config.cache_config.kv_cache_layout = layout
    features = immovable_engine_features(config, vllm_core.scheduler.kv_cache_config)
    assert features == (() if moves else (f"KV cache layout {layout}",))


def test_a_state_that_is_in_its_page_only_in_part_does_not_move(vllm_core: Any) -> None:
    from sterna.engine.vllm.support import immovable_engine_features

    config = copy.deepcopy(vllm_core.vllm_config)
    config.cache_config.use_replayssm = True
    features = immovable_engine_features(config, vllm_core.scheduler.kv_cache_config)
    assert features == ("ReplaySSM",)


def test_requests_whose_answers_name_the_experts_do_not_move(vllm_core: Any) -> None:
    """The worker of the destination lacks the experts of the tokens so far."""
    from sterna.engine.vllm.support import immovable_engine_features

    config = copy.deepcopy(vllm_core.vllm_config)
    config.aux_output_config.enable_return_routed_experts = True
    features = immovable_engine_features(config, vllm_core.scheduler.kv_cache_config)
    assert features == ("routed experts in answers",)


def test_a_model_without_a_cache_and_groups_of_an_unknown_kind_do_not_move(vllm_core: Any) -> None:
    from vllm.v1.kv_cache_interface import RSWASpec

    from sterna.engine.vllm.support import immovable_engine_features

    cache = copy.copy(vllm_core.scheduler.kv_cache_config)
    (group,) = cache.kv_cache_groups
    cache.kv_cache_groups = []
    config = vllm_core.vllm_config
    assert immovable_engine_features(config, cache) == ("a model without a KV cache",)
    spec = group.kv_cache_spec
    unknown = RSWASpec(
        block_size=spec.block_size,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        dtype=spec.dtype,
        rswa_window=64,
    )
    cache.kv_cache_groups = [replace(group, kv_cache_spec=unknown)]
    assert immovable_engine_features(config, cache) == ("a KV cache group of RSWAManager",)


def test_a_drain_that_nobody_waits_for_any_more_does_not_end_the_engine() -> None:
    """An instance that is closed cancels what it waits for."""
    core = SimpleNamespace(scheduler=SimpleNamespace(is_drained=lambda _: True))
    cancelled: Future[Any] = Future()
    cancelled.cancel()

    async def play(engine: Any, _: Listener) -> None:
        engine._waiting_drains = [(Drain(MIGRATION, REQUEST, Mode.LIVE, 0, 0, 1), cancelled)]
        engine._export_drained(core)
        assert not engine._waiting_drains

    run_with_engine(core, play)


@pytest.mark.parametrize(
    ("device", "outcome", "mode", "is_marked"),
    [
        ("cuda", Left(3, was_queuing=False), Mode.LIVE, True),
        ("cuda", Left(3, was_queuing=False), Mode.STOP_AND_COPY, True),
        ("cuda", Left(0, was_queuing=True), Mode.LIVE, False),
        ("cuda", Left(3, was_queuing=False), Mode.RECOMPUTE, False),
        ("cuda", Outgrown(), Mode.LIVE, False),
        ("cpu", Left(3, was_queuing=False), Mode.LIVE, False),
    ],
)
def test_the_steps_that_write_to_a_drained_request_are_marked_on_a_gpu(
    device: str, outcome: Any, mode: Mode, is_marked: bool
) -> None:
    """After the request has left the batch, and before anything else is queued."""
    calls: list[Any] = []

    def begin_drain(effect: Any) -> Any:
        calls.append("begin_drain")
        return outcome

    def call_ranks(method: str, args: tuple[Any, ...], non_block: bool) -> None:
        calls.append((method, args, non_block))

    def is_drained(request_id: str) -> bool:
        calls.append("is_drained")
        return False

    core = SimpleNamespace(
        scheduler=SimpleNamespace(begin_drain=begin_drain, is_drained=is_drained),
        vllm_config=SimpleNamespace(device_config=SimpleNamespace(device_type=device)),
        model_executor=SimpleNamespace(collective_rpc=call_ranks),
    )

    async def play(engine: Any, _: Listener) -> None:
        engine._transfers._endpoints = ("an endpoint",)
        draining = asyncio.create_task(engine.drain(Drain(MIGRATION, REQUEST, mode, 0, 0, 1)))
        # The thread is this one: it has called the engine when the task has begun.
        for _ in range(5):
            await asyncio.sleep(0)
        draining.cancel()
        engine._transfers._endpoints = ()

    run_with_engine(core, play)
    marks = [("sterna_mark_steps", (MIGRATION,), True)] * is_marked
    is_waiting = ["is_drained"] * isinstance(outcome, Left)
    assert calls == ["begin_drain", *marks, *is_waiting]


# ------------------------------------------------------------------- asynchronous scheduling


class InFlight:
    """Steps of vLLM's asynchronous scheduler, whose tokens the test says."""

    def __init__(self, core: Any, *, num_ranks: int = 1, policy: str = "fcfs") -> None:
        from sterna.engine.vllm.scheduler import MigratingAsyncScheduler

        config = copy.deepcopy(core.vllm_config)
        config.scheduler_config.async_scheduling = True
        config.parallel_config.world_size = num_ranks
        config.scheduler_config.policy = policy
        self._core = core
        self.scheduler = MigratingAsyncScheduler(
            vllm_config=config,
            kv_cache_config=core.scheduler.kv_cache_config,
            structured_output_manager=core.structured_output_manager,
            block_size=core.scheduler.block_size,
            hash_block_size=core.scheduler.hash_block_size,
        )
        self._steps: list[Any] = []

    def add(
        self, name: str, *, num_prompt_tokens: int = 75, priority: int = 0, **case: Any
    ) -> None:
        sent = wire_request(name, case)
        sent.prompt_token_ids = [*sent.prompt_token_ids, *range(100)][:num_prompt_tokens]
        sent.priority = priority
        request, _ = self._core.preprocess_add_request(sent)
        self.scheduler.add_request(request)

    def begin(self) -> list[str]:
        """Begin a step; returns the requests in it."""
        self._steps.append(self.scheduler.schedule())
        return list(self._steps[-1].num_scheduled_tokens)

    def end(self, token_id: int) -> None:
        """End the oldest step, which says this token for each of its requests."""
        from vllm.v1.outputs import ModelRunnerOutput

        output = self._steps.pop(0)
        names = list(output.num_scheduled_tokens)
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=[[token_id] for _ in names],
            ),
        )


DRAIN = Drain(MIGRATION, RequestId("a"), Mode.LIVE, 0, 0, 9)


def test_a_drain_waits_for_the_step_in_flight(vllm_core: Any) -> None:
    flight = InFlight(vllm_core)
    scheduler = flight.scheduler
    flight.add("a")
    flight.begin()
    flight.begin()
    flight.end(7)
    assert isinstance(scheduler.begin_drain(DRAIN), Left)
    assert not scheduler.is_drained("a")
    # The batch goes on without it.
    assert not scheduler.schedule().num_scheduled_tokens
    flight.end(8)
    assert scheduler.is_drained("a")
    request = scheduler.drained_request("a")
    assert request is not None
    assert list(request.output_token_ids) == [7, 8]
    assert request.num_computed_tokens == request.num_tokens - 1
    scheduler.resume("a")
    flight.begin()
    flight.end(9)
    assert list(request.output_token_ids) == [7, 8, 9]


def test_a_request_that_ends_in_the_step_in_flight_is_not_drained(vllm_core: Any) -> None:
    flight = InFlight(vllm_core)
    scheduler = flight.scheduler
    flight.add("a", stop_token_ids=[99])
    flight.begin()
    flight.begin()
    flight.end(7)
    assert isinstance(scheduler.begin_drain(DRAIN), Left)
    flight.end(99)
    assert scheduler.is_drained("a")
    assert scheduler.drained_request("a") is None
    assert not scheduler.requests


def test_a_request_that_is_aborted_while_it_is_drained_is_not_drained(vllm_core: Any) -> None:
    """vLLM takes the tokens of the step in flight off no count: the request is gone by then."""
    from vllm.v1.request import RequestStatus

    flight = InFlight(vllm_core)
    scheduler = flight.scheduler
    flight.add("a")
    flight.begin()
    flight.begin()
    flight.end(7)
    assert isinstance(scheduler.begin_drain(DRAIN), Left)
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    flight.end(8)
    assert scheduler.is_drained("a")
    assert scheduler.drained_request("a") is None
    assert not scheduler.requests


def test_a_preemption_waits_for_no_step_and_copies_into_its_blocks_do(vllm_core: Any) -> None:
    """With two ranks a step may write to a victim's blocks that has not been launched there. Those
    of the next request come behind it; a copy would not."""
    block_size = vllm_core.scheduler.block_size
    flight = InFlight(vllm_core, num_ranks=2, policy="priority")
    scheduler = flight.scheduler
    flight.add("victim", num_prompt_tokens=block_size + 1, priority=1)
    flight.begin()
    flight.add("urgent", num_prompt_tokens=2 * block_size - 1)
    flight.begin()
    flight.end(7)
    pool = scheduler.kv_cache_manager.block_pool
    pool.get_new_blocks(pool.get_num_free_blocks())
    assert flight.begin() == ["victim", "urgent"]
    flight.end(7)
    written = set(scheduler.groups.block_ids(RequestId("victim"))[0])
    # The urgent one needs another block, and the victim's last step is under way.
    assert flight.begin() == ["urgent"]
    assert scheduler.reserve(MIGRATION, (range(1),), needs_slot=False) is Reason.NO_MEMORY
    # Nor is a prefix read from them, which the cache finds although no rank has computed it.
    kept: list[set[int]] = []
    scheduler.cache_reports = SimpleNamespace(layout=SimpleNamespace(moves=True))
    scheduler.prefixes = SimpleNamespace(keep=lambda _, __, computed: kept.append(computed))
    scheduler.keep_prefix(PREFIX)
    assert written <= kept.pop()
    flight.end(7)
    scheduler.keep_prefix(PREFIX)
    assert not written <= kept.pop()
    reserved = scheduler.reserve(MIGRATION, (range(1),), needs_slot=False)
    assert not isinstance(reserved, Reason)
    assert set(reserved[0]) <= written


def test_no_blocks_are_reserved_that_a_rank_may_still_write_to(vllm_core: Any) -> None:
    """A request that has ended is part of one step more, which a rank may not have launched yet
    when the blocks for a migration are named to it."""
    flight = InFlight(vllm_core, num_ranks=2)
    scheduler = flight.scheduler
    flight.add("a", stop_token_ids=[99])
    flight.begin()
    flight.begin()
    written = set(scheduler.groups.block_ids("a")[0])
    flight.end(99)
    assert not scheduler.requests
    reserved = scheduler.reserve(MIGRATION, (range(5),), needs_slot=True)
    assert not isinstance(reserved, Reason)
    assert written.isdisjoint(reserved[0])
    flight.end(1)
    reserved = scheduler.reserve(MIGRATION, (range(60),), needs_slot=True)
    assert not isinstance(reserved, Reason)
    assert written <= set(reserved[0])
