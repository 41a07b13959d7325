"""Grammars of requests whose model thinks first, on another engine: they begin where they began.

A request is restored by Sterna and compared with one that gets the same outputs by vLLM's own code,
in steps of one token or of several.
"""

from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

pytestmark = [pytest.mark.vllm]

START, END, SECOND_OF_END = 1, 2, 3
PROMPT = [9, START, 9]


class Counting:
    """A reasoning parser that counts the tokens that it is asked to look at."""

    def __init__(self) -> None:
        self.num_seen = 0

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        self.num_seen += len(input_ids)
        return self.is_end(list(input_ids))

    def is_end(self, token_ids: list[int]) -> bool:
        return END in token_ids

    def is_reasoning_end_streaming(
        self, input_ids: Sequence[int], delta_ids: Sequence[int]
    ) -> bool:
        """vLLM's default."""
        return self.is_reasoning_end(input_ids)


class OfNewTokens(Counting):
    """As vLLM's basic parsers."""

    def is_reasoning_end_streaming(
        self, input_ids: Sequence[int], delta_ids: Sequence[int]
    ) -> bool:
        return self.is_end(list(delta_ids))


class TwoTokens(Counting):
    """Of an end of two tokens, which steps may part."""

    def is_end(self, token_ids: list[int]) -> bool:
        return (END, SECOND_OF_END) in pairwise(token_ids)


class LastOf(Counting):
    """Thoughts begin again with a second start."""

    def is_end(self, token_ids: list[int]) -> bool:
        return next((each == END for each in reversed(token_ids) if each in (START, END)), False)


class Never(Counting):
    """Of a model that does not think, whatever its prompt."""

    def is_reasoning_end_streaming(
        self, input_ids: Sequence[int], delta_ids: Sequence[int]
    ) -> bool:
        return True


class Grammar:
    """Accepts what does not contain `refused`."""

    def __init__(self, refused: int) -> None:
        self.accepted: list[int] = []
        self._refused = refused

    def accept_tokens(self, request_id: str, token_ids: list[int]) -> bool:
        self.accepted += token_ids
        return self._refused not in token_ids


def a_request(
    reasoner: Counting, *, prompt: Sequence[int] = PROMPT, refused: int = -1
) -> tuple[Any, Any]:
    """A manager of structured outputs, and a request of its with a compiled grammar."""
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams
    from vllm.v1.request import Request

    from sterna.engine.vllm.sampling.structured_outputs import StructuredOutputs

    sampling = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    request = Request("r", list(prompt), sampling, None)
    structured = request.structured_output_request
    assert structured is not None
    structured.reasoner, structured._grammar = reasoner, Grammar(refused)
    manager = object.__new__(StructuredOutputs)
    manager.reasoner_cls, manager.enable_in_reasoning = Counting, False
    return manager, request


def restored(manager: Any, request: Any, outputs: Sequence[int]) -> None:
    from sterna.engine.vllm.request_state import RequestState, restore_history

    scheduler = SimpleNamespace(use_v2_model_runner=False)
    core = SimpleNamespace(structured_output_manager=manager, scheduler=scheduler)
    restore_history(core, request, RequestState(list(outputs), 0, 0))


def stepped(manager: Any, request: Any, outputs: Sequence[int], size: int) -> None:
    """The outputs come from steps of `size` tokens."""
    for first in range(0, len(outputs), size):
        step = list(outputs[first : first + size])
        request.append_output_token_ids(step)
        assert manager.accept_tokens(request, step)


def state_of(manager: Any, request: Any) -> tuple[bool, list[int], list[int], list[int]]:
    # A mask is made for each step, and asks whether the prompt has ended the thoughts.
    manager._get_constraint_bounds(request, ())
    structured = request.structured_output_request
    return (
        bool(structured.reasoning_ended),
        structured.grammar.accepted,
        list(request.output_token_ids),
        list(request.all_token_ids),
    )


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("parser", [Counting, OfNewTokens, TwoTokens, LastOf, Never])
def test_a_grammar_goes_on_wherever_thoughts_have_ended(parser: type[Counting], size: int) -> None:
    for num_outputs in range(36):
        for num_thoughts in range(num_outputs + 1):
            answer = list(range(20, 20 + num_outputs))
            outputs = [*[10] * num_thoughts, END, SECOND_OF_END, *answer][:num_outputs]
            here, there = a_request(parser()), a_request(parser())
            stepped(*here, outputs, size)
            restored(*there, outputs)
            assert state_of(*there) == state_of(*here)


@pytest.mark.parametrize("parser", [Counting, OfNewTokens, TwoTokens, Never])
@given(outputs=st.lists(st.integers(1, 5), max_size=40))
def test_any_outputs_leave_the_grammar_as_their_steps_did(
    parser: type[Counting], outputs: list[int]
) -> None:
    here, there = a_request(parser()), a_request(parser())
    stepped(*here, outputs, 1)
    restored(*there, outputs)
    assert state_of(*there) == state_of(*here)


def test_a_prompt_may_end_thoughts() -> None:
    manager, request = a_request(Counting(), prompt=[*PROMPT, END])
    restored(manager, request, [20, 21])
    assert state_of(manager, request)[1] == [20, 21]


def test_a_second_start_in_the_answer_does_not_matter() -> None:
    manager, request = a_request(LastOf())
    restored(manager, request, [10, END, *range(20, 40), START, 40])
    assert state_of(manager, request)[1] == [*range(20, 40), START, 40]


def test_a_grammar_that_refuses_the_outputs_is_an_error() -> None:
    manager, request = a_request(Counting(), refused=21)
    with pytest.raises(ValueError, match="refuses"):
        restored(manager, request, [10, END, 20, 21])


@pytest.mark.parametrize("is_thinking", [True, False])
def test_the_parser_looks_at_few_tokens_of_long_thoughts(is_thinking: bool) -> None:
    """One question for each of the outputs would make it look at half of their square."""
    num_outputs = 4000
    reasoner = Counting()
    manager, request = a_request(reasoner)
    outputs = [10] * num_outputs
    if not is_thinking:
        outputs[num_outputs // 2 + 100] = END
    restored(manager, request, outputs)
    assert state_of(manager, request)[0] is not is_thinking
    # At most 12 counts that double, 12 between two of them, and two questions of vLLM's.
    assert reasoner.num_seen < 26 * (num_outputs + len(PROMPT))
