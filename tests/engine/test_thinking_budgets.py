"""Thinking budgets by vLLM's own class: a request with a new row of the batch goes on as if it had
kept its row."""

from collections.abc import Collection, Sequence
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

pytestmark = [pytest.mark.vllm]

START, SECOND_START, END = 1, 2, 3
PHRASE = (3, 4, 5, 3, 6, 7)
NUM_WORDS = 8


def a_batch(start: Sequence[int], end: Sequence[int]) -> Any:
    """The counts of a batch of one request, as `sterna_prepare` leaves them."""
    import torch
    from vllm.config import ReasoningConfig
    from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

    from sterna.engine.vllm.sampling.thinking_budgets import count_earlier_outputs

    config = ReasoningConfig()
    config._reasoning_start_token_ids = list(start)
    config._reasoning_end_token_ids = list(end)
    holder = ThinkingBudgetStateHolder(config, 1, 0, torch.device("cpu"), False)
    batch = SimpleNamespace(thinking_budget_state_holder=holder)
    count_earlier_outputs(SimpleNamespace(input_batch=batch))
    return holder


def said(
    prompt: Sequence[int],
    words: Sequence[int],
    budget: int,
    *,
    start: Sequence[int] = (START,),
    end: Sequence[int] = (END,),
    moves: Collection[int] = (),
) -> list[int]:
    """The outputs of a request whose model says these words, unless its budget has run out.

    Args:
        moves: the steps before which it gets a new row.
    """
    import torch
    from vllm.sampling_params import SamplingParams
    from vllm.v1.sample.logits_processor import BatchUpdate

    params = SamplingParams(thinking_token_budget=budget)
    outputs: list[int] = []
    for number, word in enumerate(words):
        if number == 0 or number in moves:
            batch = a_batch(start, end)
            batch.sync_batch(BatchUpdate(1, [], [(0, params, list(prompt), outputs)], []))
        batch.update_state([outputs], [[]])
        logits = torch.nn.functional.one_hot(torch.tensor([word]), NUM_WORDS).float()
        outputs.append(int(batch.apply_to_logits(logits, False, [[]]).argmax()))
    return outputs


def test_a_second_section_of_thoughts_ends_where_it_would_without_a_move() -> None:
    """vLLM would take the end of the first section for that of the second, which is over, and end
    it once more in the answer."""
    words = [START, 0, END, 0, START, 0, END, *[0] * 8]
    stays = said([0], words, budget=4)
    assert stays == words
    assert said([0], words, budget=4, moves=[6]) == stays


def test_thoughts_after_those_that_the_prompt_begins_are_counted_after_a_move() -> None:
    """vLLM would take all outputs for the section that the prompt begins, and count no other."""
    words = [0, END, 0, START, *[0] * 8]
    stays = said([0, START], words, budget=4)
    assert stays == [0, END, 0, START, 0, 0, 0, 0, END, 0, 0, 0]
    assert said([0, START], words, budget=4, moves=[6]) == stays


@pytest.mark.parametrize("num_tokens", range(2, 7))
def test_an_end_of_several_tokens_is_said_once_wherever_it_is_cut(num_tokens: int) -> None:
    end = PHRASE[:num_tokens]
    stays = said([0, START], [0] * 20, budget=0, end=end)
    assert stays == [*end, *[0] * (20 - num_tokens)]
    for cut in range(1, 20):
        assert said([0, START], [0] * 20, budget=0, end=end, moves=[cut]) == stays


ENDS = (PHRASE[:1], PHRASE[:2], PHRASE[:3], PHRASE, (END, END))


def texts(max_size: int) -> st.SearchStrategy[list[int]]:
    """Tokens among which are whole starts and ends."""
    words = [(word,) for word in range(NUM_WORDS)]
    parts = st.sampled_from([*words, (START, SECOND_START), *ENDS])
    return st.lists(parts, max_size=max_size).map(lambda found: [*chain.from_iterable(found)])


@given(
    prompt=texts(6),
    words=texts(30),
    budget=st.integers(0, 8),
    start=st.sampled_from([(START,), (START, SECOND_START)]),
    end=st.sampled_from(ENDS),
    moves=st.sets(st.integers(1, 39), max_size=4),
)
def test_whatever_moves_a_request_makes_its_budget_holds_as_without_them(
    prompt: list[int],
    words: list[int],
    budget: int,
    start: tuple[int, ...],
    end: tuple[int, ...],
    moves: set[int],
) -> None:
    stays = said(prompt, words, budget, start=start, end=end)
    assert said(prompt, words, budget, start=start, end=end, moves=moves) == stays
