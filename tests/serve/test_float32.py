"""Concurrent requests: in float32, what shares a batch does not change what is generated."""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.serve.cases import CASES, Answer, Case, with_tier
from tests.serve.mover import Mover
from tests.serve.server import ServerProcess, start_plain, start_sterna, until

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(3000)]

NUM_CLIENTS = 6
GENERATING = [case for case in CASES if case.name.startswith(("chat", "text", "response"))]


def send_all(server: ServerProcess) -> dict[str, Answer]:
    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        answers = clients.map(lambda case: case.send(server), GENERATING)
        return dict(zip((case.name for case in GENERATING), answers, strict=True))


@pytest.fixture(scope="module")
def expected() -> dict[str, Answer]:
    server = start_plain("--dtype", "float32")
    try:
        return send_all(server)
    finally:
        server.end()


@pytest.fixture(scope="module")
def answers(expected: dict[str, Answer]) -> Iterator[dict[str, Answer]]:
    server = start_sterna("--dtype", "float32")
    try:
        with Mover(server, seed="float32", num_threads=3) as mover:
            answers = send_all(server)
        assert len(mover.num_moves) >= len(GENERATING) // 2, mover.refusals
        until(server.is_empty, "all blocks are free again")
        yield answers
    finally:
        server.end()


@pytest.mark.parametrize("case", GENERATING, ids=str)
def test_concurrent_moved_requests_get_the_answers_of_plain_vllm(
    case: Case, expected: dict[str, Answer], answers: dict[str, Answer]
):
    assert_same(answers[case.name], with_tier(expected[case.name]))


def assert_same(value: Any, expected: Any) -> None:
    """Equal, but for the last digits of logprobs."""
    if isinstance(expected, dict):
        assert value.keys() == expected.keys()
        for key in expected:
            assert_same(value[key], expected[key])
    elif isinstance(expected, list):
        assert len(value) == len(expected)
        for each, expected_each in zip(value, expected, strict=True):
            assert_same(each, expected_each)
    elif isinstance(expected, float):
        assert math.isclose(value, expected, abs_tol=1e-3)
    else:
        assert value == expected
