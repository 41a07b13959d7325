"""A client is told why its request has failed, and whether to ask again."""

import asyncio
from collections.abc import AsyncGenerator
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.exceptions import GenerationError

from sterna.frontend.http.request_errors import error_of, raising_failures
from sterna.frontend.requests.request_effects import Failure

pytestmark = pytest.mark.vllm

LASTING = {Failure.KILLED_INSTANCES, Failure.TOO_LARGE, Failure.RESUMABLE}


@pytest.mark.parametrize("failure", Failure)
def test_each_failure_has_a_message_of_its_own_and_says_whether_to_ask_again(
    failure: Failure,
) -> None:
    error = error_of(failure.value)
    assert f"({failure.name.lower()})" in str(error)
    assert failure.value in str(error)
    is_lasting = error.status_code == HTTPStatus.INTERNAL_SERVER_ERROR
    assert is_lasting == (failure in LASTING)
    assert is_lasting or error.status_code == HTTPStatus.SERVICE_UNAVAILABLE


@pytest.mark.parametrize("reason", [None, "the engine refused it"])
def test_what_an_engine_says_is_passed_on(reason: str | None) -> None:
    error = error_of(reason)
    assert error.status_code == HTTPStatus.INTERNAL_SERVER_ERROR
    assert (reason or "Internal server error") in str(error)


def test_outputs_are_passed_on_until_one_of_several_choices_fails() -> None:
    closed = []

    def output(*ends: tuple[str | None, str | None]) -> Any:
        return SimpleNamespace(
            outputs=[SimpleNamespace(finish_reason=end, stop_reason=why) for end, why in ends]
        )

    fine = output((None, None), ("stop", "word"))
    failed = output((None, None), ("error", Failure.NO_INSTANCE.value))

    async def outputs() -> AsyncGenerator[Any, None]:
        try:
            yield fine
            yield failed
            yield fine
        finally:
            closed.append(True)

    async def run() -> None:
        told = raising_failures(outputs())
        assert await anext(told) is fine
        with pytest.raises(GenerationError, match="no_instance"):
            await anext(told)

    asyncio.run(run())
    assert closed == [True]
