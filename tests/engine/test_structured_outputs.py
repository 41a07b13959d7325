"""Requests with JSON schemas on engines whose first ones had another backend of vLLM's.

Requests come through vLLM's own checks, which choose guidance for `multipleOf`: xgrammar's
grammars do not have it.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.kinds import drafts
from tests.engine.kind_cores import KindCore, kind_core
from tests.engine.kind_moves import (
    NUM_OUTPUTS,
    Asked,
    Way,
    add,
    moved,
    recovered,
    run_until,
    unmoved,
)

pytest.importorskip("vllm")

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]


def tokens(token_ids: list[int]) -> dict[str, Any]:
    return {"prompt_token_ids": token_ids}


def numbers(**rules: int) -> Asked:
    """A request for many numbers."""
    schema = {"type": "array", "minItems": 99, "items": {"type": "integer", "minimum": 0, **rules}}
    return Asked(40, special_prompt=tokens, seed=7, schema=json.dumps(schema))


MULTIPLES = numbers(maximum=99_999, multipleOf=7)
BELOW = numbers(maximum=99_999)


def on_second(cores: list[Any], asked: Asked) -> list[int]:
    return unmoved(cores[1:], asked).token_ids


def together(cores: list[Any], *asked: Asked) -> list[list[int]]:
    """What requests say in the batches of the first core."""
    core = cores[0]
    requests = [add(core, f"together{number}", each) for number, each in enumerate(asked)]
    for request in requests:
        run_until(core, request, NUM_OUTPUTS - request.num_output_tokens)
    return [list(request.output_token_ids) for request in requests]


def text(cores: list[Any], token_ids: list[int]) -> str:
    said: str = cores[0].structured_output_manager.tokenizer.decode(token_ids)
    return said


@pytest.fixture(scope="module")
def cores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KindCore]:
    """The first core's first grammar is guidance's, and the second core's is xgrammar's."""
    folder: Path = tmp_path_factory.mktemp("models") / "llama"
    with kind_core("llama", folder, num_cores=2, skip_tokenizer_init=False) as made:
        made.run(unmoved, MULTIPLES)
        made.run(on_second, BELOW)
        yield made


@pytest.fixture(scope="module")
def expected(cores: KindCore) -> list[int]:
    token_ids = cores.run(unmoved, MULTIPLES).token_ids
    said = cores.run(text, token_ids)
    found = [int(number) for number in said.strip(" \n[").split(",")[:-1]]
    assert len(found) > 5
    assert all(number % 7 == 0 for number in found)
    return token_ids


def test_a_request_moves_to_an_engine_whose_first_one_had_another_backend(
    cores: KindCore, expected: list[int]
) -> None:
    for cuts in ((1,), (45,), (20, 60, 90)):
        assert cores.run(moved, MULTIPLES, Way(cuts)).token_ids == expected


def test_a_request_goes_on_after_a_death_on_such_an_engine(
    cores: KindCore, expected: list[int]
) -> None:
    for cut in (1, 50):
        assert cores.run(recovered, MULTIPLES, expected[:cut]) == expected[cut:]


def test_grammars_of_two_backends_are_in_one_batch(cores: KindCore, expected: list[int]) -> None:
    below = cores.run(on_second, BELOW)
    assert below != expected
    alternating = [MULTIPLES, BELOW, MULTIPLES, BELOW]
    assert cores.run(together, *alternating) == [expected, below, expected, below]


def test_grammars_of_two_backends_are_in_one_batch_with_drafts(tmp_path: Path) -> None:
    """Drafts change no token of greedy requests. The masks of each draft are the grammar's behind
    those before it."""
    asked = [replace(each, seed=None) for each in (MULTIPLES, BELOW)]
    with kind_core(
        "gemma3", tmp_path, num_cores=2, prepare=drafts.ngram, skip_tokenizer_init=False
    ) as cores:
        alone = [cores.run(unmoved, each) for each in asked]
        assert any(said.num_steps < NUM_OUTPUTS for said in alone), "no draft was right"
        assert cores.run(together, *asked) == [said.token_ids for said in alone]


def played(monkeypatch: pytest.MonkeyPatch, log: list[str], *, is_diffusion: bool = False) -> Any:
    """Structured outputs whose backends the test plays; "wide" has two words in each mask."""
    from vllm.v1.structured_output import StructuredOutputManager

    from sterna.engine.vllm.sampling.structured_outputs import StructuredOutputs

    def masks(manager: Any, requests: Any, ids: list[str], drafts: dict[str, list[int]]) -> Any:
        rows: list[int] = []
        for name in ids:
            num_tokens = len(drafts.get(name, ()))
            has_next = not (is_diffusion and num_tokens)
            rows += [ord(name) + row for row in range(num_tokens + has_next)]
        return np.array(rows, np.int32)[:, None].repeat(manager.num_words, axis=1)

    monkeypatch.setattr(StructuredOutputManager, "grammar_bitmask", masks)
    monkeypatch.setattr(StructuredOutputManager, "clear_backend", lambda _: log.append("threads"))
    outputs = object.__new__(StructuredOutputs)
    outputs.vllm_config = SimpleNamespace(model_config=SimpleNamespace(is_diffusion=is_diffusion))
    outputs._managers = {
        name: SimpleNamespace(
            num_words=num_words, backend=SimpleNamespace(destroy=partial(log.append, name))
        )
        for name, num_words in (("narrow", 1), ("wide", 2))
    }
    return outputs


def with_backend(name: str) -> Any:
    params = SimpleNamespace(_backend=name)
    return SimpleNamespace(structured_output_request=SimpleNamespace(params=params))


def test_masks_of_several_widths_stay_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a tokenizer has more tokens than its model, guidance's masks are wider."""
    backends = {"A": "narrow", "K": "wide", "U": "narrow"}
    requests = {name: with_backend(backend) for name, backend in backends.items()}
    outputs = played(monkeypatch, [])
    masks = outputs.grammar_bitmask(requests, ["U", "K", "A"], {"U": [5, 6], "K": [7]})
    assert masks.tolist() == [[85, -1], [86, -1], [87, -1], [75, 75], [76, 76], [65, -1]]
    assert outputs.grammar_bitmask(requests, ["A", "U"], {}).tolist() == [[65], [85]]
    assert outputs.grammar_bitmask(requests, [], {}) is None


def test_a_diffusion_model_samples_no_token_behind_those_of_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM writes no mask for one; a request without such tokens has its one mask all the same."""
    requests = {"A": with_backend("narrow"), "K": with_backend("wide"), "U": with_backend("wide")}
    outputs = played(monkeypatch, [], is_diffusion=True)
    masks = outputs.grammar_bitmask(requests, ["A", "K", "U"], {"A": [5, 6], "K": [7]})
    assert masks.tolist() == [[65, -1], [66, -1], [75, 75], [85, 85]]


def test_all_backends_end_with_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    outputs = played(monkeypatch, log)
    outputs.clear_backend()
    outputs.clear_backend()
    assert log == ["threads", "narrow", "wide", "threads"]
