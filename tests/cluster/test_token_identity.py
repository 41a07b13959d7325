"""Section 4.2: a migrated request generates what it would have generated anyway."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from sterna.config import TransportConfig
from sterna.migration.messages import Mode
from tests.cluster.conftest import Run
from tests.cluster.pair import Generated, InstancePair
from tests.cluster.requests import PROMPTS, RequestBuilder

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 11},
    "top_k_top_p_min_p": {
        "temperature": 1.2,
        "seed": 3,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.02,
    },
    "repetition_penalty": {"repetition_penalty": 1.3},
    "presence_and_frequency_penalty": {"presence_penalty": 1.1, "frequency_penalty": 0.7},
    "logprobs": {"logprobs": 3},
    "min_tokens": {"min_tokens": 40, "ignore_eos": False},
    "logit_bias": {"logit_bias": {504: 6.0, 2: -100.0}},
    "bad_words": {"bad_words": ["the", " of"]},
    "stop_token": {"stop_token_ids": [30, 17], "min_tokens": 20},
}


@pytest.fixture(scope="module")
def pair(make_pair: Callable[..., InstancePair], run: Run) -> Any:
    pair = make_pair(transport=TransportConfig(kind="shm"))
    yield pair
    run(pair.close())


async def generate_moving(
    pair: InstancePair, request: Any, cuts: list[int], mode: Mode = Mode.LIVE
) -> Generated:
    """Run the request, starting on i0, moving it to the other instance at each cut."""
    generated = pair.submit(request, "i0")
    here, there = "i0", "i1"
    for cut in cuts:
        await generated.until_tokens(cut)
        if generated.finish_reason is not None:
            break
        report = await pair.move(request.request_id, here, there, mode)
        if "stages" not in report:
            # It finished while it was about to move.
            await generated.until_end()
            break
        here, there = there, here
    return await generated.until_end()


@pytest.mark.parametrize("name", SAMPLING)
def test_a_migrated_request_generates_the_same_tokens(
    pair: InstancePair, build: RequestBuilder, run: Run, name: str
) -> None:
    sampling = {"max_tokens": 64, "ignore_eos": True, **SAMPLING[name]}
    rng = random.Random(name)
    prompt = rng.choice(PROMPTS)
    cuts = sorted(rng.sample(range(2, 56), 3))

    expected = run(pair.submit(build(prompt, **sampling), "i0").until_end())
    moved = run(generate_moving(pair, build(prompt, **sampling), cuts))

    assert moved.token_ids == expected.token_ids
    assert moved.logprobs == expected.logprobs
    assert moved.finish_reason == expected.finish_reason
    assert moved.moves, "the request was to be migrated at least once"
    run(pair.until_idle())
