"""Migration over each transport: the paper's Gloo, TCP and shared memory.

Copies are cut into small chunks and slowed down, so that things happen while one is under way.
"""

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreRequest

from sterna.config import TransportConfig
from sterna.migration.messages import Mode, Reason
from sterna.types import InstanceId
from tests.cluster.conftest import MakePair, Run
from tests.cluster.pair import Generated, InstancePair, assert_same
from tests.cluster.requests import random_prompt

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

TRANSPORTS = ("gloo", "tcp", "shm")

# So slow that a copy of 28 blocks can be caught under way, and much faster than blocks are
# filled: a sender that the machine holds up pauses nine times as long.
BANDWIDTH_SHARE = 0.1

_numbers = itertools.count()


@pytest.fixture(scope="module", params=TRANSPORTS)
def shared_over(
    make_tiny: MakePair, run: Run, request: pytest.FixtureRequest
) -> Iterator[InstancePair]:
    transport = TransportConfig(
        kind=request.param,
        chunk_bytes=32 << 10,
        bandwidth_share=BANDWIDTH_SHARE,
        timeout_s=5.0,
    )
    pair = make_tiny("--num-gpu-blocks-override", "128", transport=transport)
    yield pair
    run(pair.close())


@pytest.fixture
def over(shared_over: InstancePair, run: Run) -> Iterator[InstancePair]:
    """Two instances with prefix caching, joined by one of the transports."""
    yield shared_over
    run(shared_over.settle())


def build(pair: InstancePair, seed: int = 0, **sampling: Any) -> EngineCoreRequest:
    """A request of 28 blocks."""
    asked = {"max_tokens": 60, "ignore_eos": True, "temperature": 0.8, "seed": seed} | sampling
    return pair.build(random_prompt(900, seed=seed), **asked)


def build_long(pair: InstancePair, seed: int) -> EngineCoreRequest:
    """A request that decodes far longer than its blocks take to be copied."""
    return pair.build(
        random_prompt(200, seed=seed), max_tokens=800, ignore_eos=True, temperature=0.8, seed=seed
    )


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.0}, {}, {"repetition_penalty": 1.2, "logprobs": 2}],
    ids=["greedy", "seeded", "penalty_and_logprobs"],
)
def test_a_request_says_the_same_whatever_carries_its_blocks(
    over: InstancePair, run: Run, sampling: dict[str, Any]
) -> None:
    expected = run(over.generate(build(over, **sampling)))
    moved = run(over.generate_moving(build(over, **sampling), [3, 20, 40], is_exact=True))

    assert_same(moved, expected)
    assert moved.moves == ["i1", "i0", "i1"]
    assert [report["stages"] for report in moved.reports] == [2, 2, 2]
    run(over.until_idle())


def test_stop_and_copy_says_the_same_whatever_carries_the_blocks(
    over: InstancePair, run: Run
) -> None:
    expected = run(over.generate(build(over)))
    moves = over.generate_moving(build(over), [3, 20], Mode.STOP_AND_COPY, is_exact=True)

    assert_same(run(moves), expected)
    run(over.until_idle())


def test_requests_that_decode_on_while_they_are_copied_say_the_same(
    over: InstancePair, run: Run
) -> None:
    """Three at once, in both directions, over the same connections; none is paused."""
    seeds = (1, 2, 3)
    ends = (("i0", "i1"), ("i1", "i0"), ("i0", "i1"))
    expected = [run(over.generate(build_long(over, seed))) for seed in seeds]

    async def together() -> list[Generated]:
        found = [
            over.submit(build_long(over, seed), here)
            for seed, (here, _) in zip(seeds, ends, strict=True)
        ]
        await asyncio.gather(*(each.until_tokens(2) for each in found))
        reports = await asyncio.gather(
            *(
                over.move(request_id, here, there)
                for request_id, (here, there) in zip(
                    [each.request_id for each in found], ends, strict=True
                )
            )
        )
        assert all(report.get("stages", 0) >= 2 for report in reports), reports
        return [await each.until_end() for each in found]

    for found, alone in zip(run(together()), expected, strict=True):
        assert_same(found, alone)
        assert len(found.moves) == 1
    run(over.until_idle())


def test_a_copy_whose_request_ends_under_way_leaves_nothing(over: InstancePair, run: Run) -> None:
    async def abort() -> None:
        request = build(over)
        generated = over.submit(request, "i0")
        await generated.until_tokens(2)
        moving = over.begin_move(request.request_id, "i0", "i1")
        await over.until_reported("i1", lambda load: load.num_migrating_in == 1)
        over.abort(request.request_id, "i0")
        answer = await over.hear(moving)
        assert answer.error == Reason.REQUEST_ABORTED.value
        await over.until_idle()

    run(abort())


@pytest.mark.parametrize("killed", ["source", "destination"])
def test_a_peer_killed_in_the_middle_of_a_copy_leaves_the_other_as_it_was(
    over: InstancePair, run: Run, killed: str
) -> None:
    """And the connections to a third instance are as good as before."""
    victim = InstanceId(f"victim{next(_numbers)}")
    expected = run(over.generate(build(over)))

    async def kill() -> Generated:
        await over.add_instance(victim)
        here, there = ("i0", victim) if killed == "destination" else (victim, "i0")
        request = build(over)
        await over.pause_at(request.request_id, here, 4)
        generated = over.submit(request, here)
        await generated.until_tokens(4)
        moving = over.begin_move(request.request_id, here, there)
        await over.until_reported(there, lambda load: load.num_migrating_in == 1)
        await over.kill(victim)
        if killed == "destination":
            assert (await over.hear(moving)).error in (
                Reason.TRANSFER_FAILED.value,
                Reason.PEER_SILENT.value,
            )
            await over.unpause(request.request_id, "i0")
            await generated.until_end()
        await over.until_idle("i0")
        over.bury(victim)
        return generated

    found = run(kill())
    if killed == "destination":
        assert_same(found, expected)
    else:
        assert len(found.token_ids) == 4
    again = run(over.generate_moving(build(over), [3, 20], is_exact=True))
    assert_same(again, expected)
    run(over.until_idle())
