"""Operators and clients call requests by other names than engines do."""

import pytest

from sterna.frontend.requests.request_ids import choice_of, client_id, meant, name_of_slot, slot_of
from sterna.types import RequestId, prefix_id, whose_prefix

CHAT = RequestId("chatcmpl-tern-9f86d081")
CHOICES = [RequestId("0_chatcmpl-gull-0a1b2c3d"), RequestId("1_chatcmpl-gull-0a1b2c3d")]
PROMPTS = [RequestId("cmpl-skua-0-11111111"), RequestId("cmpl-skua-1-22222222")]
ALL = [CHAT, *CHOICES, *PROMPTS]
DIGITS = "0123456789abcdef" * 2


@pytest.mark.parametrize("name", ["tern", "chatcmpl-tern", "chatcmpl-tern-9f86d081"])
def test_a_request_is_known_by_header_response_and_engine_id(name: str):
    assert meant(name, ALL) == [CHAT]


@pytest.mark.parametrize("name", ["gull", "chatcmpl-gull", "chatcmpl-gull-0a1b2c3d"])
def test_the_name_of_a_response_with_several_choices_means_all_of_them(name: str):
    assert meant(name, ALL) == CHOICES


@pytest.mark.parametrize("name", ["skua", "cmpl-skua"])
def test_the_name_of_a_batch_means_all_its_prompts(name: str):
    assert meant(name, ALL) == PROMPTS


@pytest.mark.parametrize("name", ["cmpl-skua-1", "skua-1", "cmpl-skua-1-22222222"])
def test_one_prompt_of_a_batch_can_be_meant_alone(name: str):
    assert meant(name, ALL) == [PROMPTS[1]]


@pytest.mark.parametrize(
    ("name", "request_id"),
    [
        ("tern", "embd-tern-0-9f86d081"),
        ("embd-tern", "embd-tern-1-9f86d081"),
        ("tern", "embd-tern-prompt-0-chunk-2-9f86d081"),
        ("tern", "score-tern-3-9f86d081"),
        ("tern", "generate-tokens-tern-9f86d081"),
        ("generate-tokens-tern", "generate-tokens-tern-9f86d081"),
        ("resp_abc", "resp_abc_0-9f86d081"),
        ("abc", "resp_abc_12-9f86d081"),
        ("resp_abc_12", "resp_abc_12-9f86d081"),
        ("7_tern", "7_tern_0-9f86d081"),
        ("chatcmpl-tern", "chatcmpl-tern_1-9f86d081"),
        ("tern", "2_chatcmpl-tern_1-9f86d081"),
        ("chatcmpl-tern", f"chatcmpl-tern-{DIGITS}-beam-3-9f86d081"),
        ("tern", f"chatcmpl-tern-{DIGITS}-beam-3-9f86d081"),
        ("tern", f"cmpl-tern-0-{DIGITS}-beam-3-9f86d081"),
        ("cmpl-tern-0", f"cmpl-tern-0-{DIGITS}-beam-3-9f86d081"),
        (f"chatcmpl-{DIGITS}", f"chatcmpl-{DIGITS}-{DIGITS}-beam-3-9f86d081"),
        ("generative-scoring-tern", "generative-scoring-tern-1-9f86d081"),
        ("tern", "generative-scoring-tern-1-9f86d081"),
        ("decision-tern", "decision-tern-1-9f86d081"),
        ("tern", "decision-tern-1-9f86d081"),
    ],
)
def test_answers_of_other_kinds_are_known_by_their_names(name: str, request_id: str):
    assert meant(name, [RequestId(request_id)]) == [request_id]


def test_a_name_of_another_client_that_ends_like_a_turn_is_not_meant():
    requests = [RequestId("chatcmpl-job-9f86d081"), RequestId("chatcmpl-job_1-0a1b2c3d")]
    assert meant("job", requests) == requests[:1]
    assert meant("job_1", requests) == requests[1:]


def test_one_choice_can_be_meant_alone():
    assert meant(CHOICES[1], ALL) == [CHOICES[1]]


@pytest.mark.parametrize("name", ["ter", "chatcmpl", "chatcmpl-", "", "9f86d081", "0"])
def test_part_of_a_name_is_not_a_name(name: str):
    assert meant(name, ALL) == []


def test_an_id_of_the_default_form_is_known_by_its_response_id():
    request_id = RequestId("chatcmpl-8d3c7e8f0a1b4c5d9e6f7a8b9c0d1e2f-0a1b2c3d")
    assert meant("chatcmpl-8d3c7e8f0a1b4c5d9e6f7a8b9c0d1e2f", [request_id]) == [request_id]


@pytest.mark.parametrize(
    "name", ["tern", "chatcmpl-tern", "chatcmpl-tern-9f86d081", "chatcmpl-tern-9f86d081+2"]
)
def test_a_request_that_was_sent_again_keeps_its_names(name: str):
    attempt = RequestId("chatcmpl-tern-9f86d081+2")
    assert meant(name, [*CHOICES, attempt]) == [attempt]


def test_a_clients_own_plus_sign_is_part_of_its_name():
    request_id = RequestId("chatcmpl-a+1-9f86d081")
    assert meant("a+1", [request_id]) == [request_id]
    assert meant("a", [request_id]) == []


@pytest.mark.parametrize(
    ("slot", "name"),
    [
        ("chatcmpl-tern", "chatcmpl-tern"),
        ("2_chatcmpl-tern", "chatcmpl-tern"),
        ("cmpl-tern-0", "cmpl-tern-0"),
        ("1_cmpl-tern-3", "cmpl-tern-3"),
        ("chatcmpl-tern-0123abcd", "chatcmpl-tern-0123abcd"),
        # A client's own name, of /v1/responses.
        ("7_tern_0", "7_tern_0"),
    ],
)
def test_an_engine_request_has_a_name_that_is_the_same_in_every_run(slot: str, name: str):
    for suffix in ("-9f86d081", "-00000000"):
        assert slot_of(RequestId(slot + suffix)) == slot
        assert client_id(RequestId(slot + suffix)) == name
    assert name_of_slot(slot) == name


def test_an_engine_request_says_which_choice_it_computes():
    assert [choice_of(each) for each in (CHAT, *CHOICES)] == [0, 0, 1]


def test_a_name_that_begins_like_a_choice_is_none():
    """A client's own, of /v1/responses."""
    request_id = RequestId("7_tern_0-9f86d081")
    assert choice_of(request_id) == 0
    assert meant("tern_0", [request_id]) == []


@pytest.mark.parametrize("name", ["prefix of tern", "tern/prefix", "/prefix"])
def test_no_name_of_a_client_is_taken_for_a_moving_prefix(name: str):
    assert whose_prefix(RequestId(f"{name}_0-9f86d081")) is None
    assert whose_prefix(prefix_id(RequestId(name))) == name
