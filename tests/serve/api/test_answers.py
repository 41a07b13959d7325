"""A client cannot tell Sterna from plain vLLM, although its requests move while they run."""

import pytest

from tests.serve.cases import CASES, Answer, Case, with_tier, without_texts
from tests.serve.mover import Mover
from tests.serve.server import ServerProcess, until

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(1800)]

MAX_ATTEMPTS = 50
"""On a busy machine a short request may end before its first move."""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_moved_request_gets_the_answer_of_plain_vllm(
    case: Case, plain_answers: dict[str, Answer], sterna: ServerProcess
):
    for attempt in range(MAX_ATTEMPTS):
        with Mover(sterna, seed=f"{case.name}-{attempt}") as mover:
            answer = case.send(sterna)
        expected = with_tier(plain_answers[case.name])
        if case.in_batch:
            # Its sequences were batched otherwise, and so got other tokens; the test in float32
            # compares them.
            answer, expected = without_texts(answer), without_texts(expected)
        assert answer == expected
        if mover.total >= 1 or not case.is_moved:
            break
    else:
        pytest.fail(f"it was not moved in {MAX_ATTEMPTS} attempts: {mover.refusals}")
    until(sterna.is_empty, "the request's blocks are free")


def test_the_cases_show_what_they_are_about(plain_answers: dict[str, Answer]):
    assert len(CASES) >= 60
    stopped = [name for name in plain_answers if "-stop" in name and name.startswith(("ch", "te"))]
    assert stopped
    for name in stopped:
        choices = plain_answers[name]["choices"]
        choice = choices[0]
        reason = choice.get("ends") or choice["finish_reason"]
        assert "stop" in str(reason), name
    for name in ("chat-tool-named", "chat-tool-required"):
        assert plain_answers[name]["choices"][0]["message"]["tool_calls"], name
    assert plain_answers["chat-eos"]["choices"][0]["finish_reason"] == "stop"
    prompt_tokens = plain_answers["text-long-prompt"]["usage"]["prompt_tokens"]
    assert prompt_tokens > 2 * 512, "its prefill takes at least three chunks"
