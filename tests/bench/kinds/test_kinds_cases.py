"""Cases of `sterna bench kinds`, and the requests that they are measured with."""

import json

import pytest

from bench.kinds.__main__ import main
from bench.kinds.cases import CASES, SERVE_OPTIONS, as_arguments
from bench.kinds.tiny_models import KINDS
from bench.kinds.workload import (
    MAX_OUTPUTS,
    MOVES_A_REQUEST,
    NEIGHBOUR_TOKENS,
    PROMPT_TOKENS,
    prompt_of,
    shares,
)


def test_every_tiny_model_is_measured_and_every_case_has_a_title_of_its_own() -> None:
    assert {case.model for case in CASES.values()} == KINDS.keys()
    assert len({case.title for case in CASES.values()}) == len(CASES)


def test_the_readmes_table_is_short() -> None:
    assert sum(case.is_in_readme for case in CASES.values()) <= 10


def test_options_are_written_as_the_command_line_takes_them() -> None:
    options = {
        "block_size": 32,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "speculative_config": {"method": "ngram"},
    }
    assert as_arguments(options) == [
        *("--block-size", "32"),
        "--enforce-eager",
        "--no-enable-prefix-caching",
        *("--speculative-config", json.dumps({"method": "ngram"})),
    ]


@pytest.mark.parametrize(
    ("num_moves", "expected"),
    [
        (1, [(40, 1)]),
        (2, [(40, 1), (230, 1)]),
        (7, [(40, 4), (230, 3)]),
        (20, [(40, 10), (230, 10)]),
        (21, [(40, 7), (230, 7), (40, 7)]),
    ],
)
def test_moves_are_shared_by_requests_of_each_length(
    num_moves: int, expected: list[tuple[int, int]]
) -> None:
    assert shares(num_moves) == expected
    assert max(count for _, count in shares(num_moves)) <= MOVES_A_REQUEST


def test_prompts_of_one_measurement_begin_differently() -> None:
    """So that none of them finds its beginning in the prefix cache."""
    numbers = [*range(10), *(100 + 10 * i + n for i in range(2) for n in range(2)), 50]
    beginnings = {tuple(prompt_of(max(PROMPT_TOKENS), number)[:8]) for number in numbers}
    assert len(beginnings) == len(numbers)
    assert all(3 <= token < 512 for number in numbers for token in prompt_of(600, number))


def test_requests_fit_into_the_models_length() -> None:
    longest = max(*PROMPT_TOKENS, *NEIGHBOUR_TOKENS) + MAX_OUTPUTS
    assert longest <= SERVE_OPTIONS["max_model_len"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kinds", "gemma4"], "argument --kinds: invalid choice: 'gemma4' (choose from "),
        (["--moves", "0"], "argument --moves: must be at least 1"),
    ],
)
def test_an_option_that_cannot_work_is_refused_by_its_name(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err
