"""Refusals of the real engine, over a core that computes nothing."""

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from sterna.errors import InstanceStartError
from sterna.messages.actors import TokenSpan
from sterna.migration.messages import Adopt, AdoptFailed, Reason, ReserveBlocks, ReserveFailed
from sterna.types import FrontendId
from tests.engine.test_vllm_engine import MIGRATION, REQUEST, Listener, moving, run_with_engine
from tests.engine.test_vllm_histories import wire_request

pytest.importorskip("vllm")

from sterna.engine.vllm.payload import encode_request

pytestmark = pytest.mark.vllm


def core(**scheduler: Any) -> Any:
    """A core whose scheduler has these attributes; it takes every request."""
    return SimpleNamespace(
        scheduler=SimpleNamespace(**scheduler),
        preprocess_add_request=lambda sent: (SimpleNamespace(lora_request=None), 0),
    )


def test_an_engine_that_does_not_start_is_an_error_with_vllms_reason() -> None:
    failed: Future[None] = Future()
    failed.set_exception(ValueError("no memory for the KV cache"))

    async def play(engine: Any, _: Listener) -> None:
        engine._thread = SimpleNamespace(start=lambda: failed)
        with pytest.raises(InstanceStartError, match=r"^vLLM could not start: no memory for the"):
            await engine.start()

    run_with_engine(core(), play)


HAS_ROOM: dict[str, Any] = {
    "immovable_features": (),
    "requests": {},
    "may_be_reserved": lambda *_: True,
    "groups": SimpleNamespace(stage_columns=lambda *_, **__: []),
    "reserve": lambda *_, **__: Reason.NO_SLOT,
}
"""A scheduler with blocks for every request, and no place in its batch."""


@pytest.mark.parametrize(
    ("scheduler", "reason"),
    [
        pytest.param({}, Reason.NO_SLOT, id="the batch is full"),
        pytest.param(
            {"immovable_features": ("speculative decoding",)},
            Reason.UNSUPPORTED,
            id="blocks do not move",
        ),
        pytest.param({"requests": {REQUEST: None}}, Reason.DUPLICATE_REQUEST, id="it is here"),
        pytest.param({"may_be_reserved": lambda *_: False}, Reason.TOO_LONG, id="no such blocks"),
    ],
)
def test_a_scheduler_without_room_for_a_request_refuses_it(
    scheduler: dict[str, Any], reason: Reason
) -> None:
    async def play(engine: Any, _: Listener) -> None:
        effect = ReserveBlocks(MIGRATION, REQUEST, 2, 0, 3, False, moving({}))
        assert await engine.reserve(effect) == ReserveFailed(2, reason)

    run_with_engine(core(**{**HAS_ROOM, **scheduler}), play)


@pytest.mark.parametrize(
    ("arriving", "is_last"),
    [
        pytest.param(b"\xff", False, id="it cannot be read"),
        pytest.param(None, True, id="it did not come with an earlier stage"),
    ],
)
def test_nothing_is_reserved_for_a_request_that_is_not_known(
    arriving: bytes | None, is_last: bool
) -> None:
    async def play(engine: Any, _: Listener) -> None:
        effect = ReserveBlocks(MIGRATION, REQUEST, 2, 0, 3, is_last, arriving)
        assert await engine.reserve(effect) == ReserveFailed(2, Reason.UNSUPPORTED)

    run_with_engine(core(), play)


def test_a_request_that_has_never_come_is_not_adopted() -> None:
    async def play(engine: Any, listener: Listener) -> None:
        adopt = Adopt(MIGRATION, REQUEST, 0, b"state")
        assert await engine.adopt(adopt) == AdoptFailed(Reason.UNSUPPORTED)
        assert listener.adopted == []

    run_with_engine(core(), play)


def test_a_request_that_vllm_refuses_ends_behind_what_its_client_has() -> None:
    def refuse(sent: Any) -> None:
        raise ValueError("its grammar cannot be compiled")

    refusing = core()
    refusing.preprocess_add_request = refuse

    async def play(engine: Any, listener: Listener) -> None:
        engine.add(FrontendId(4), encode_request(wire_request(REQUEST, {})), [5, 6, 7])
        ((frontend_id, span, _),) = listener.outputs
        assert (frontend_id, span) == (FrontendId(4), TokenSpan(REQUEST, 3, 0, True))

    run_with_engine(refusing, play)


def test_a_grammar_may_take_long_where_a_request_goes_on_after_a_death(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many may be compiled one after the other then."""
    monkeypatch.setattr("sterna.engine.vllm.engine.GRAMMAR_TIMEOUT_S", 0.0)
    monkeypatch.setattr("sterna.engine.vllm.engine.is_too_long", lambda *_: False)
    grammar: Future[None] = Future()
    structured = SimpleNamespace(_grammar=grammar, grammar=None, is_grammar_ready=False)
    waiting = core()
    waiting.preprocess_add_request = lambda sent: (
        SimpleNamespace(
            request_id=REQUEST, lora_request=None, structured_output_request=structured
        ),
        0,
    )

    async def play(engine: Any, listener: Listener) -> None:
        added: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        engine._add = lambda sent, request, tokens: added.set_result(tokens)
        engine.add(FrontendId(4), encode_request(wire_request(REQUEST, {})), [5, 6, 7])
        for _ in range(3):
            await asyncio.sleep(0)
        assert not added.done()
        structured.is_grammar_ready = True
        grammar.set_result(None)
        assert await asyncio.wait_for(added, 60.0) == [5, 6, 7]
        assert listener.outputs == []

    run_with_engine(waiting, play)
