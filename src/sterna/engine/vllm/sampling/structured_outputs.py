"""vLLM's structured outputs, with the backend that each request names.

Front ends choose a request's backend by its constraint: guidance, say, for JSON schemas with
keywords that xgrammar ignores. vLLM's engine compiles all grammars by the backend of its first one.
A request that moves, or goes on after a death, may then find another backend than it had: its
grammar does not compile, refuses its outputs so far, or lacks a part of the constraint.

A grammar of a model that thinks begins behind its thoughts. vLLM asks the model's reasoning parser
at each step whether they have ended, and many parsers look at all tokens so far to answer. For each
output of a request that goes on here, that would take a time that grows with their square.
"""

import copy
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from vllm.config import VllmConfig
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager


class StructuredOutputs(StructuredOutputManager):
    """The grammars of an engine's requests; each backend in use has a manager of vLLM's.

    Grammars are made on one thread, and masks on the step thread.
    """

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        self._managers: dict[str, StructuredOutputManager] = {}

    def grammar_init(self, request: Request) -> None:
        """Begin to compile the request's grammar.

        Raises:
            ValueError: there is no such backend, or it does not support the tokenizer.
        """
        backend = _backend(request)
        manager = self._managers.get(backend)
        if manager is None:
            # It shares the threads and the tokenizer, and makes the backend itself.
            manager = copy.copy(self)
        StructuredOutputManager.grammar_init(manager, request)
        self._managers[backend] = manager

    def accept_history(self, request: Request, token_ids: Sequence[int]) -> bool:
        """Append outputs of another engine to the request, and advance its grammar, which has been
        compiled, as there; returns whether the grammar accepts them."""
        num_thoughts = self._num_thoughts(request, token_ids)
        request.append_output_token_ids(list(token_ids[:num_thoughts]))
        for token_id in token_ids[num_thoughts:]:
            request.append_output_token_ids(token_id)
            if not self.accept_tokens(request, [token_id]):
                return False
        return True

    def _num_thoughts(self, request: Request, token_ids: Sequence[int]) -> int:
        """Return how many of these outputs precede the one that ends the request's thoughts.

        The parser is asked about all outputs up to one, as if they came in one step. The counts
        double until thoughts have ended, so that what the answer says later does not matter.
        """
        if self._get_constraint_bounds(request, ()).grammar_start == 0:
            return 0
        reasoner = request.structured_output_request.reasoner
        prompt = list(request._all_token_ids)

        def has_ended(num_outputs: int) -> bool:
            outputs = list(token_ids[:num_outputs])
            return bool(reasoner.is_reasoning_end_streaming(prompt + outputs, outputs))

        below, above = 0, 1
        while above < len(token_ids) and not has_ended(above):
            below, above = above, 2 * above
        counts = range(below + 1, min(above, len(token_ids)) + 1)
        return below + bisect_left(counts, True, key=has_ended)

    def grammar_bitmask(
        self,
        requests: dict[str, Request],
        structured_output_request_ids: list[str],
        scheduled_spec_decode_tokens: dict[str, list[int]],
    ) -> NDArray[np.int32] | None:
        """Return the masks of a step's positions: for each request, in this order, one for each of
        its drafts and one for the token behind them. A diffusion model samples no such token where
        it has others."""
        ids_of: dict[str, list[str]] = {}
        for request_id in structured_output_request_ids:
            ids_of.setdefault(_backend(requests[request_id]), []).append(request_id)
        masks = {
            backend: StructuredOutputManager.grammar_bitmask(
                self._managers[backend], requests, ids, scheduled_spec_decode_tokens
            )
            for backend, ids in ids_of.items()
        }
        if len(masks) < 2:
            return next(iter(masks.values()), None)
        # They are as wide as each backend takes the vocabulary to be; what lies beyond is allowed.
        shape = sum(map(len, masks.values())), max(mask.shape[1] for mask in masks.values())
        merged = np.full(shape, -1, np.int32)
        places = iter(merged)
        rows = {backend: iter(mask) for backend, mask in masks.items()}
        is_diffusion = self.vllm_config.model_config.is_diffusion
        for request_id in structured_output_request_ids:
            of_request = rows[_backend(requests[request_id])]
            num_drafts = len(scheduled_spec_decode_tokens.get(request_id, ()))
            has_next = not (is_diffusion and num_drafts)
            for _ in range(num_drafts + has_next):
                row = next(of_request)
                next(places)[: len(row)] = row
        return merged

    def clear_backend(self) -> None:
        """End the threads and all backends."""
        super().clear_backend()
        for manager in self._managers.values():
            manager.backend.destroy()
        self._managers.clear()


def _backend(request: Request) -> str:
    """The name of the backend that the request's front end has chosen."""
    return str(request.structured_output_request.params._backend)
