"""What a client did wrong is said in plain vLLM's words."""

import json
import re
from typing import cast

import pytest

from tests.serve.bad_requests import BAD_REQUESTS, BadRequest
from tests.serve.cases import Answer
from tests.serve.server import ServerProcess

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("bad", BAD_REQUESTS, ids=str)
def test_a_bad_request_gets_the_error_of_plain_vllm(
    bad: BadRequest, plain_answers: dict[str, Answer], sterna: ServerProcess
):
    answer = bad.send(sterna)
    assert _without_sizes(answer) == _without_sizes(plain_answers[bad.name])
    assert 400 <= answer["status"] < 500


def _without_sizes(answer: Answer) -> Answer:
    """Sterna tells vLLM's server the priority in the body, which has a field more then."""
    text = re.sub(r"<dict of \d+ items>", "<dict>", json.dumps(answer))
    return cast("Answer", json.loads(text))


def test_bad_requests_leave_nothing_behind(sterna: ServerProcess):
    for bad in BAD_REQUESTS:
        bad.send(sterna)
    assert sterna.is_empty()
    with sterna.http() as http:
        assert http.get("/health").status_code == 200
