"""Section 4.2: a migrated request generates what it would have generated anyway.

Every request runs twice on real instances, alone each time: once where it was sent, and once
moved about. In bfloat16 tokens depend on the batch also without any migration, hence alone.
"""

import asyncio
import json
import random
import re
from typing import Any

import pytest

from sterna.migration.messages import Mode
from tests.cluster.conftest import Run
from tests.cluster.pair import Generated, InstancePair, assert_same
from tests.cluster.requests import PROMPTS, random_prompt

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(1800)]

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {
            "type": "array",
            "items": {"type": "string", "maxLength": 12},
            "minItems": 3,
            "maxItems": 3,
        },
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
REGEX = r"(\d{3}-[a-z]{5};){12}"

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "top_k_top_p_min_p": {
        "temperature": 1.2,
        "seed": 3,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.02,
    },
    "penalties": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.8,
        "frequency_penalty": 0.4,
        "logprobs": 3,
    },
    "words": {
        "temperature": 1.0,
        "seed": 11,
        "min_tokens": 40,
        "ignore_eos": False,
        "logit_bias": {504: 6.0, 2: -100.0},
        "bad_words": ["the", " of"],
    },
    "stop_token": {"stop_token_ids": [30, 17], "min_tokens": 40},
}


def moments(name: str, num: int, num_tokens: int) -> list[int]:
    """Return random moments to move at, in tokens, the same in every run.

    They lie in the first half, because the request goes on while its move begins.
    """
    return sorted(random.Random(name).sample(range(2, num_tokens // 2), num))


@pytest.mark.parametrize("name", SAMPLING)
def test_a_migrated_request_generates_the_same_tokens(
    small: InstancePair, run: Run, name: str
) -> None:
    sampling = {"max_tokens": 60, "ignore_eos": True, **SAMPLING[name]}
    prompt = random.Random(name).choice(PROMPTS)

    expected = run(small.generate(small.build(prompt, **sampling)))
    cuts = moments(name, 3, len(expected.token_ids))
    moved = run(small.generate_moving(small.build(prompt, **sampling), cuts))

    assert_same(moved, expected)
    assert moved.moves == ["i1", "i0", "i1"]
    run(small.until_idle())


@pytest.mark.parametrize(
    ("structured_outputs", "sampling"),
    [
        ({"regex": REGEX}, {}),
        ({"regex": REGEX}, {"temperature": 1.0, "seed": 2}),
        ({"json": SCHEMA}, {"temperature": 1.0, "seed": 8}),
    ],
    ids=["regex", "regex_sampled", "json_schema"],
)
def test_guided_output_of_a_request_moved_many_times_is_the_same_and_valid(
    small: InstancePair, run: Run, structured_outputs: dict[str, Any], sampling: dict[str, Any]
) -> None:
    prompt = "Describe one person as compactly as you can:"
    asked = {"max_tokens": 160, "structured_outputs": structured_outputs, **sampling}

    expected = run(small.generate(small.build(prompt, **asked)))
    cuts = moments(str(structured_outputs), 5, len(expected.token_ids))
    moved = run(small.generate_moving(small.build(prompt, **asked), cuts))

    assert_same(moved, expected)
    assert len(moved.moves) == 5
    assert moved.finish_reason == "stop"
    text = small.build.tokenizer.decode(moved.token_ids, skip_special_tokens=True)
    if "regex" in structured_outputs:
        assert re.fullmatch(REGEX, text)
    else:
        person = json.loads(text)
        assert set(person) == {"name", "age", "tags"}
        assert len(person["tags"]) == 3
    run(small.until_idle())


def test_three_choices_of_one_request_move_independently(small: InstancePair, run: Run) -> None:
    """With n = 3 the engine sees three requests that share their prompt's blocks; one moves
    often, one once and one not at all."""
    sampling = {"max_tokens": 40, "ignore_eos": True, "temperature": 1.0, "seed": 77}
    prompt = " ".join(PROMPTS[:2] * 4)
    plans = [[3, 9, 20], [15], []]

    async def alone() -> list[Generated]:
        return [
            await small.generate(child) for child in small.build.children(prompt, 3, **sampling)
        ]

    async def moving() -> list[Generated]:
        # One after the other, since bfloat16 tells batches apart.
        children = small.build.children(prompt, 3, **sampling)
        return [
            await small.generate_moving(child, cuts)
            for child, cuts in zip(children, plans, strict=True)
        ]

    for found, expected, cuts in zip(run(moving()), run(alone()), plans, strict=True):
        assert_same(found, expected)
        assert len(found.moves) == len(cuts)
    run(small.until_idle())


def test_a_request_that_ends_by_itself_ends_so_after_it_has_moved(
    small: InstancePair, run: Run
) -> None:
    """The end-of-sequence token is as good an end on the destination as on the source."""
    question = "Name the four seasons and say one word about each."
    prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    expected = run(small.generate(small.build(prompt, max_tokens=400)))
    assert expected.finish_reason == "stop"

    cuts = moments("eos", 2, len(expected.token_ids))
    moved = run(small.generate_moving(small.build(prompt, max_tokens=400), cuts))

    assert_same(moved, expected)
    assert len(moved.moves) == 2
    run(small.until_idle())


@pytest.mark.parametrize("name", ["top_k_top_p_min_p", "penalties"])
def test_stop_and_copy_generates_the_same_tokens(small: InstancePair, run: Run, name: str) -> None:
    """Section 6.2 compares with a blocking copy: the same in a single stage."""
    sampling = {"max_tokens": 60, "ignore_eos": True, **SAMPLING[name]}
    cuts = moments(f"stop and copy, {name}", 3, 60)

    expected = run(small.generate(small.build(PROMPTS[1], **sampling)))
    request = small.build(PROMPTS[1], **sampling)
    moved = run(small.generate_moving(request, cuts, Mode.STOP_AND_COPY))

    assert_same(moved, expected)
    assert [report["stages"] for report in moved.reports] == [1, 1, 1]
    run(small.until_idle())


def test_a_long_sequence_moves_in_two_stages(small: InstancePair, run: Run) -> None:
    """Section 6.2: "the migration needs only two stages for all sequence lengths"."""
    prompt = random_prompt(2_000, seed=3)
    # Without a salt the second one would find most of its prompt cached, and bfloat16 tells a
    # prompt's tail computed alone from one computed with the rest.
    requests = [
        small.build(prompt, max_tokens=60, ignore_eos=True, cache_salt=salt) for salt in "ab"
    ]

    expected = run(small.generate(requests[0]))
    moved = run(small.generate_moving(requests[1], [4, 22]))

    assert_same(moved, expected)
    assert [report["stages"] for report in moved.reports] == [2, 2]
    run(small.until_idle())


def test_a_prompt_in_chunks_stays_until_it_is_done_and_then_moves(
    small: InstancePair, run: Run
) -> None:
    """A request whose prompt is still being computed is not moved, and says why."""
    # Four steps of at most 512 tokens: on a busy machine the news of the first one takes time.
    prompt = random_prompt(1_900, seed=4)
    requests = [small.build(prompt, max_tokens=24, ignore_eos=True) for _ in range(2)]
    expected = run(small.generate(requests[0]))

    async def move_early_and_late() -> Generated:
        request = requests[1]
        request_id = request.request_id
        generated = small.submit(request, "i1")
        await small.until_reported("i1", lambda load: load.num_running == 1)
        assert not generated.token_ids, "the prompt was to be in chunks"
        early = await small.move(request_id, "i1", "i0")
        assert early["reason"] == "the request cannot be migrated at this moment"
        await generated.until_tokens(1)
        late = await small.move(request_id, "i1", "i0")
        assert late["stages"] == 2
        return await generated.until_end()

    assert_same(run(move_early_and_late()), expected)
    run(small.until_idle())


def test_prompts_that_share_cached_blocks_move_apart(small: InstancePair, run: Run) -> None:
    """With prefix caching a request's first blocks may be another's too: they are copied for the
    one that moves, and stay for the one that does not. Coming back it finds them cached."""
    prefix = random_prompt(200, seed=6)
    tails = [random_prompt(9, seed=seed) for seed in (7, 8)]
    sampling = {"max_tokens": 30, "ignore_eos": True, "temperature": 1.0, "seed": 5}

    async def both(cuts: list[int]) -> list[Generated]:
        requests = [small.build(prefix + tail, **sampling) for tail in tails]
        staying = small.submit(requests[0], "i0")
        await staying.until_tokens(2)
        moving = asyncio.create_task(small.generate_moving(requests[1], cuts, is_exact=True))
        return [await staying.until_end(), await moving]

    async def alone() -> list[Generated]:
        return [await small.generate(small.build(prefix + tail, **sampling)) for tail in tails]

    expected = run(alone())
    staying, moving = run(both([5, 15, 25]))

    # The two share batches, where bfloat16 is not exact: that the blocks are right is asserted by
    # the request that is alone again at its end, and by the third run below.
    assert len(moving.moves) == 3
    assert len(staying.token_ids) == len(moving.token_ids) == 30
    request = small.build(prefix + tails[1], **sampling)
    again = run(small.generate_moving(request, [5, 15, 25], is_exact=True))
    assert_same(again, expected[1])
    run(small.until_idle())
