"""That the other tests can fail: a migration that leaves something out shows in the tokens.

The destination drops one part of what it receives; from the hand-over on, and not before, the
request says something else.
"""

from typing import Any

import pytest

from tests.cluster.conftest import Run
from tests.cluster.pair import Generated, InstancePair, assert_same
from tests.cluster.requests import random_prompt

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

CUT = 15


@pytest.mark.parametrize(
    ("part", "sampling"),
    [
        ("kv", {}),
        ("generator", {"temperature": 1.5, "seed": 3}),
        ("history", {"repetition_penalty": 1.4, "presence_penalty": 1.2}),
    ],
    ids=["kv", "generator", "history"],
)
def test_a_migration_without_a_part_of_the_state_changes_the_output_at_the_hand_over(
    tiny: InstancePair, run: Run, part: str, sampling: dict[str, Any]
) -> None:
    asked = {"max_tokens": 40, "ignore_eos": True} | sampling
    prompt = random_prompt(140, seed=21)
    expected = run(tiny.generate(tiny.build(prompt, **asked)))

    async def move_without() -> Generated:
        # Other KV than the right one, instead of what an earlier request may have left.
        await tiny.generate(tiny.build(random_prompt(600, seed=22), max_tokens=2), "i1")
        await tiny.actors["i1"].leave_out.remote(part)
        return await tiny.generate_moving(tiny.build(prompt, **asked), [CUT], is_exact=True)

    found = run(move_without())
    assert found.token_ids[:CUT] == expected.token_ids[:CUT]
    assert found.token_ids[CUT:] != expected.token_ids[CUT:]

    run(tiny.settle())
    whole = run(tiny.generate_moving(tiny.build(prompt, **asked), [CUT], is_exact=True))
    assert_same(whole, expected)
