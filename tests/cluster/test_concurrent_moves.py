"""Section 4.2 with several requests at once, over TCP, without prefix caching and in float32, in
which the tokens of a request depend neither on its batch nor on how its KV cache was computed."""

import asyncio
import random
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreRequest

from sterna.migration.messages import Mode
from tests.cluster.conftest import Run
from tests.cluster.pair import Generated, InstancePair, assert_same
from tests.cluster.requests import random_prompt

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "seed": 1},
    {"temperature": 1.0, "seed": 2, "top_p": 0.9},
    {"repetition_penalty": 1.2},
    {"presence_penalty": 0.9, "frequency_penalty": 0.4, "temperature": 0.5, "seed": 3},
    {"logprobs": 2},
]

MATRIX: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 11},
    "top_k": {"temperature": 1.1, "seed": 4, "top_k": 20},
    "top_p": {"temperature": 1.1, "seed": 5, "top_p": 0.8},
    "min_p": {"temperature": 1.1, "seed": 6, "min_p": 0.05},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 1.2},
    "logprobs": {"logprobs": 3},
    "prompt_logprobs": {"prompt_logprobs": 2, "logprobs": 1},
    "min_tokens": {"min_tokens": 40, "ignore_eos": False},
    "logit_bias": {"logit_bias": {504: 6.0, 2: -100.0}},
    "bad_words": {"bad_words": ["the", " of"], "temperature": 1.0, "seed": 2},
    "allowed_token_ids": {
        "allowed_token_ids": list(range(300, 330)),
        "temperature": 1.0,
        "seed": 1,
    },
    "stop_token": {
        "stop_token_ids": [305],
        "allowed_token_ids": list(range(300, 310)),
        "temperature": 1.0,
        "seed": 7,
        "min_tokens": 52,
    },
}


def build_six(tiny: InstancePair) -> list[EngineCoreRequest]:
    return [
        tiny.build(
            random_prompt(20 + 9 * index, seed=index), max_tokens=70, ignore_eos=True, **sampling
        )
        for index, sampling in enumerate(SAMPLING)
    ]


async def one_by_one(tiny: InstancePair, requests: list[EngineCoreRequest]) -> list[Generated]:
    return [await tiny.generate(request) for request in requests]


def test_requests_in_one_batch_that_move_at_the_same_time_say_what_they_say_alone(
    tiny: InstancePair, run: Run
) -> None:
    expected = run(one_by_one(tiny, build_six(tiny)))

    async def together() -> list[Generated]:
        # Two of each three move, from both sides, so that moves cross and share instances.
        cuts: list[list[int]] = [[5, 20, 35], [5, 20, 35], [], [6, 30], [6, 30], []]
        return await asyncio.gather(
            *(
                tiny.generate_moving(
                    request,
                    cuts[index],
                    between=("i0", "i1") if index < 3 else ("i1", "i0"),
                    is_exact=True,
                )
                for index, request in enumerate(build_six(tiny))
            )
        )

    found = run(together())
    for each, alone in zip(found, expected, strict=True):
        assert_same(each, alone, may_round=True)
    assert [len(each.moves) for each in found] == [3, 3, 0, 2, 2, 0]
    run(tiny.until_idle())


@pytest.mark.parametrize("name", MATRIX)
def test_a_migrated_request_generates_the_same_tokens(
    tiny: InstancePair, run: Run, name: str
) -> None:
    """Moved at three exact points: what a request carries besides its KV cache."""
    asked = {"max_tokens": 60, "ignore_eos": True, **MATRIX[name]}
    prompt = random_prompt(75, seed=8)
    cuts = sorted(random.Random(name).sample(range(1, 50), 3))

    expected = run(tiny.generate(tiny.build(prompt, **asked)))
    moved = run(tiny.generate_moving(tiny.build(prompt, **asked), cuts, is_exact=True))

    assert_same(moved, expected)
    # Of each token of the prompt but the first, once.
    assert len(moved.prompt_logprobs) == (len(prompt) - 1 if "prompt_logprobs" in asked else 0)
    assert moved.moves == ["i1", "i0", "i1"]
    run(tiny.until_idle())


def test_a_seeded_request_samples_the_same_when_its_prompt_comes_in_chunks(
    tiny: InstancePair, run: Run
) -> None:
    """The engine throws away what it samples behind an incomplete prompt; the request's random
    numbers must not be used up by that."""
    asked = {"max_tokens": 30, "ignore_eos": True, "temperature": 1.0, "seed": 5}
    prompt = random_prompt(200, seed=9)
    expected = run(tiny.generate(tiny.build(prompt, **asked)))

    async def in_chunks() -> Generated:
        # 590 tokens are two steps of 256 and 78 more: 178 of the other prompt fit beside them.
        other = tiny.build(random_prompt(590, seed=10), max_tokens=2)
        await tiny.pause_at(other.request_id, "i0", 0)
        tiny.submit(other, "i0")
        await tiny.until_reported("i0", lambda load: load.num_running == 1)
        generated = tiny.submit(tiny.build(prompt, **asked), "i0")
        await tiny.until_reported("i0", lambda load: load.num_queuing == 1)
        await tiny.unpause(other.request_id, "i0")
        return await generated.until_end()

    assert_same(run(in_chunks()), expected)
    run(tiny.until_idle())


@pytest.mark.parametrize("index", range(len(SAMPLING)))
def test_recomputing_instead_of_copying_generates_the_same_tokens(
    tiny: InstancePair, run: Run, index: int
) -> None:
    """Section 6.2's baseline: the destination computes the KV cache of prompt and outputs again."""
    request, again = build_six(tiny)[index], build_six(tiny)[index]

    expected = run(tiny.generate(request))
    moves = tiny.generate_moving(again, [3, 17, 34], Mode.RECOMPUTE, is_exact=True)
    moved = run(moves)

    assert_same(moved, expected, may_round=True)
    assert [report["stages"] for report in moved.reports] == [1, 1, 1]
    run(tiny.until_idle())


def test_a_grammar_survives_a_move_without_kv(tiny: InstancePair, run: Run) -> None:
    asked = {
        "max_tokens": 90,
        "structured_outputs": {"regex": r"(\d{3}-[a-z]{5};){8}"},
        "temperature": 0.8,
        "seed": 1,
    }
    expected = run(tiny.generate(tiny.build("Codes:", **asked)))
    request = tiny.build("Codes:", **asked)
    moved = run(tiny.generate_moving(request, [4, 20], Mode.RECOMPUTE, is_exact=True))

    assert_same(moved, expected)
    assert len(moved.moves) == 2
    run(tiny.until_idle())
