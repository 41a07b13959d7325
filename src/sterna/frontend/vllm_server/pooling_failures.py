"""Reasons of failed pooling requests, which vLLM's output processor does not pass on.

A pooling request can end with an error in one way only: as one whose images an engine does not have
(`payload.encode_failure`), and its client would be told that. The reason is read from the outputs
before vLLM processes them.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor

from sterna.frontend.http.request_errors import error_of


class PoolingFailures:
    """The reasons of pooling requests that have failed.

    Args:
        processor: of the client; it is made to note reasons.
    """

    def __init__(self, processor: OutputProcessor) -> None:
        self._processor = processor
        self._reasons: dict[str, str] = {}
        self._process = processor.process_outputs
        processor.process_outputs = self._process_noting

    def _process_noting(
        self, outputs: Sequence[EngineCoreOutput], *args: Any, **kwargs: Any
    ) -> Any:
        for output in outputs:
            if output.finish_reason == FinishReason.ERROR:
                state = self._processor.request_states.get(output.request_id)
                if state is not None and output.stop_reason is not None:
                    self._reasons[state.external_req_id] = str(output.stop_reason)
        return self._process(outputs, *args, **kwargs)

    async def raising(
        self, request_id: str, outputs: AsyncGenerator[Any, None]
    ) -> AsyncGenerator[Any, None]:
        """Return the outputs of a pooling request.

        Args:
            request_id: its name for the client, not for the engine.

        Raises:
            GenerationError: the request has failed; the message says why.
        """
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    if output.error is not None:
                        raise error_of(self._reasons.get(request_id))
                    yield output
        finally:
            self._reasons.pop(request_id, None)
