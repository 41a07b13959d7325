"""The client of a pooling request is told why it has failed, by vLLM's own output processor."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from sterna.engine.vllm.payload import decode_outputs, encode_failure
from sterna.frontend.requests.request_effects import Failure
from sterna.frontend.vllm_server.pooling_failures import pass_on_reasons

pytestmark = pytest.mark.vllm


def add(processor: OutputProcessor, name: str) -> AsyncGenerator[Any, None]:
    """The outputs of a new request of this name; another one identifies it for the engine."""
    request = EngineCoreRequest(
        request_id=f"{name}-engine",
        prompt_token_ids=[1, 2, 3],
        mm_features=None,
        sampling_params=None,
        pooling_params=PoolingParams(task="embed"),
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    request.external_req_id = name
    queue = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, request.request_id)
    processor.add_request(request, None, queue=queue)

    async def outputs() -> AsyncGenerator[Any, None]:
        yield await queue.get()

    return outputs()


def fail(processor: OutputProcessor, name: str, reason: str) -> None:
    payload = encode_failure(f"{name}-engine", reason, is_pooling=True)
    processor.process_outputs(decode_outputs(payload).outputs)


@pytest.mark.parametrize(
    ("reason", "is_retryable", "message"),
    [
        (Failure.OWNER_DIED.value, True, "owner_died"),
        (Failure.KILLED_INSTANCES.value, False, "killed_instances"),
        ("the engine refused it", False, "the engine refused it"),
    ],
)
def test_a_failure_has_its_reason_and_says_whether_to_ask_again(
    reason: str, is_retryable: bool, message: str
) -> None:
    async def test() -> None:
        processor = OutputProcessor(None, log_stats=False)
        pass_on_reasons(processor)
        outputs = add(processor, "a")
        fail(processor, "unknown", "of a request whose client has left")
        fail(processor, "a", reason)
        error = (await anext(outputs)).error
        assert message in error.message
        assert error.retryable == is_retryable

    asyncio.run(test())


def test_an_embedding_is_passed_on() -> None:
    async def test() -> None:
        processor = OutputProcessor(None, log_stats=False)
        pass_on_reasons(processor)
        outputs = add(processor, "a")
        done = EngineCoreOutput(
            "a-engine", [], pooling_output=torch.ones(4), finish_reason=FinishReason.STOP
        )
        processor.process_outputs([done])
        output = await anext(outputs)
        assert output.error is None
        assert output.outputs.data.tolist() == [1.0] * 4

    asyncio.run(test())
