"""Reasons of failed pooling requests, which vLLM's output processor does not pass on.

A pooling request can end with an error in one way only: as one whose images an engine does not have
(`payload.encode_failure`), and its client would be told that. The error is replaced on its way from
the processor to the request's queue.
"""

from collections.abc import Sequence
from typing import Any

from vllm.exceptions import RetryableRequestError
from vllm.outputs import PoolingRequestOutput, RequestError
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor

from sterna.frontend.http.request_errors import error_of


def pass_on_reasons(processor: OutputProcessor) -> None:
    """Have the processor of a client of pooling requests pass on why they have failed."""
    process = processor.process_outputs

    def process_outputs(outputs: Sequence[EngineCoreOutput], *args: Any, **kwargs: Any) -> Any:
        for output in outputs:
            if output.finish_reason == FinishReason.ERROR and output.stop_reason is not None:
                state = processor.request_states.get(output.request_id)
                if state is not None and state.queue is not None:
                    state.queue = _Explaining(state.queue, str(output.stop_reason))
        return process(outputs, *args, **kwargs)

    processor.process_outputs = process_outputs


class _Explaining:
    """The queue of a request that is about to fail."""

    def __init__(self, queue: Any, reason: str) -> None:
        self._queue = queue
        error = error_of(reason)
        is_retryable = isinstance(error, RetryableRequestError)
        self._error = RequestError("request_failed", str(error), is_retryable)

    def put(self, output: PoolingRequestOutput) -> None:
        output.error = self._error
        self._queue.put(output)
