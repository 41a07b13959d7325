"""Whose memory is taken back, and how it comes back; every example computed by hand."""

import pytest

from sterna.engine.emulated.config import Preemption, StepMode
from sterna.engine.emulated.core import EmulatedCore, Token
from sterna.types import HIGH, NORMAL, Priority
from tests.engine.emulated.builders import (
    add,
    batch,
    chunked,
    engine,
    named,
    queue,
    request,
    step,
    step_with_tokens,
    steps,
)


def full_engine(
    preemption: Preemption, *, first: Priority = NORMAL, second: Priority = NORMAL
) -> EmulatedCore:
    """Two requests that hold 3 of 6 blocks each, whose next tokens need a fourth.

    The first that was admitted arrived later. By hand: prompts of 8 in 2 blocks; the first
    decode begins the third block, which is full after the fourth.
    """
    core = engine(6, watermark=0.0, keeps_block_free=False, preemption=preemption)
    add(core, request("late", 8, arrival_s=1.0, priority=first))
    step(core)
    add(core, request("early", 8, arrival_s=0.0, priority=second))
    steps(core, 5)
    assert core.num_free_blocks == 0
    assert [each.num_computed_tokens for each in core.requests()] == [12, 12]
    return core


def test_the_latest_arrived_request_loses_its_memory() -> None:
    """vLLM 0.1: "latest-arrived victim" (Section 2, recompute preemption)."""
    begun = step(full_engine(Preemption.LATEST_ARRIVED))
    assert begun.preempted == ("late",)
    assert begun.scheduled == (("early", 1),)


def test_the_last_admitted_request_loses_its_memory() -> None:
    """vLLM 1 without priorities: the last of the batch."""
    begun = step(full_engine(Preemption.LAST_ADMITTED))
    assert begun.preempted == ("early",)
    assert begun.scheduled == (("late", 1),)


def test_a_request_of_higher_priority_keeps_its_memory_though_it_arrived_later() -> None:
    begun = step(full_engine(Preemption.LATEST_ARRIVED, first=HIGH))
    assert begun.preempted == ("early",)


def test_entry_into_the_batch_decides_whatever_the_priority() -> None:
    begun = step(full_engine(Preemption.LAST_ADMITTED, second=HIGH))
    assert begun.preempted == ("early",)


def test_a_preempted_request_loses_all_its_memory_and_computes_everything_again() -> None:
    """Section 2: the KV cache of a preempted request is recomputed when it is scheduled again:
    prompt and output so far, as one prompt."""
    core = full_engine(Preemption.LATEST_ARRIVED)
    step(core)
    late = named(core, "late")
    assert (late.num_blocks, late.num_computed_tokens, late.num_preemptions) == (0, 0, 1)
    assert late.is_preempted
    # The other one took its fourth block from the three.
    assert core.num_free_blocks == 2
    core.abort("early")
    begun, tokens = step_with_tokens(core)
    assert begun.admitted == ("late",)
    # 8 of the prompt and the 5 that it has produced; with them comes the sixth.
    assert begun.scheduled == (("late", 13),)
    assert begun.decoded == ()
    assert tokens == (Token("late", 5, False),)
    assert not late.is_preempted
    assert core.view("i0").num_preemptions == 1


def test_a_preempted_request_waits_until_it_fits() -> None:
    """By hand: 13 tokens are 4 blocks; 2 are free."""
    core = full_engine(Preemption.LATEST_ARRIVED)
    step(core)
    begun = step(core)
    assert (begun.admitted, begun.scheduled) == ((), (("early", 1),))


def test_a_preempted_request_queues_in_front_of_its_priority() -> None:
    core = full_engine(Preemption.LATEST_ARRIVED)
    add(
        core,
        request("earliest", 80, arrival_s=-1.0),
        request("urgent", 80, arrival_s=9.0, priority=HIGH),
    )
    step(core)
    assert queue(core) == ["urgent", "late", "earliest"]
    add(core, request("newcomer", 80, arrival_s=-2.0))
    assert queue(core) == ["urgent", "late", "newcomer", "earliest"]


def test_requests_lose_their_memory_from_the_end_until_the_rest_can_go_on() -> None:
    """By hand: three blocks are held by three requests whose next tokens need one more each. c
    gives a its block; none is left for b, which is then the last itself."""
    core = engine(3, watermark=0.0, keeps_block_free=False)
    add(core, *(request(name, 4, arrival_s=k) for k, name in enumerate("abc")))
    step(core)
    begun = step(core)
    assert begun.preempted == ("c", "b")
    assert begun.scheduled == (("a", 1),)
    assert queue(core) == ["b", "c"]
    assert core.num_free_blocks == 1


def test_the_last_free_block_is_kept_where_the_engine_says_so() -> None:
    """vLLM 0.1 finds a free block before each token, needed or not. By hand: two requests of two
    blocks each, the second token of a block to come, and 1 of 5 blocks free, or none of 4."""
    for num_blocks, keeps_block_free, preempted in (
        (4, True, ("b",)),
        (4, False, ()),
        (5, True, ()),
    ):
        core = engine(num_blocks, watermark=0.0, keeps_block_free=keeps_block_free)
        add(core, request("a", 5), request("b", 5, arrival_s=1.0))
        step(core)
        assert step(core).preempted == preempted


def test_a_lone_request_that_loses_its_memory_is_admitted_again_in_the_same_step() -> None:
    """By hand: token 9 takes the third block of three, and none is left to be kept free for
    token 10. All memory was taken back; there is room again for the head of the line."""
    core = engine(3, watermark=0.0)
    add(core, request("a", 7, output_tokens=4))
    assert [each.scheduled for each in steps(core, 3)] == [(("a", 7),), (("a", 1),), (("a", 1),)]
    assert core.num_free_blocks == 0
    fourth, tokens = step_with_tokens(core)
    assert (fourth.preempted, fourth.admitted) == (("a",), ("a",))
    assert fourth.scheduled == (("a", 10),)
    assert tokens == (Token("a", 3, True),)


def test_a_request_whose_memory_was_taken_back_and_does_not_fit_waits() -> None:
    """The step is empty: a reservation holds what the request would need."""
    core = engine(4, watermark=0.0, keeps_block_free=False)
    add(core, request("a", 8))
    step(core)
    assert core.reserve("m", 2, needs_slot=False) is None
    begun = step(core)
    assert begun.scheduled == ()
    assert begun.duration_s == 0.0
    assert begun.preempted == ("a",)
    assert queue(core) == ["a"]
    core.free_reservation("m")
    assert step(core).scheduled == (("a", 9),)


def test_a_chunked_step_that_preempts_admits_nobody() -> None:
    """By hand: a takes one of the 4 blocks that b loses; 3 are free, and c, at the head of the
    line, needs 1."""
    core = chunked(8, watermark=0.0, keeps_block_free=False)
    add(core, request("a", 16), request("b", 16, arrival_s=1.0))
    step(core)
    add(core, request("c", 4, arrival_s=2.0, priority=HIGH))
    begun = step(core)
    assert (begun.preempted, begun.admitted) == (("b",), ())
    assert begun.scheduled == (("a", 1),)
    assert step(core).admitted == ("c",)


def test_a_prompt_in_chunks_loses_what_was_computed() -> None:
    """By hand, with 8 tokens a step and 4 blocks: a's second token takes the third block; b's
    chunk of 7 would take two more."""
    core = chunked(4, watermark=0.0, keeps_block_free=False, max_num_batched_tokens=8)
    add(core, request("a", 4), request("b", 12, arrival_s=1.0))
    assert step(core).scheduled == (("a", 4), ("b", 4))
    begun = step(core)
    assert (begun.scheduled, begun.preempted) == ((("a", 1),), ("b",))
    assert named(core, "b").num_computed_tokens == 0
    core.abort("a")
    begun, tokens = step_with_tokens(core)
    assert (begun.scheduled, tokens) == ((("b", 8),), ())
    assert step_with_tokens(core)[1] == (Token("b", 0, False),)


@pytest.mark.parametrize("step_mode", StepMode)
@pytest.mark.parametrize("preemption", Preemption)
@pytest.mark.parametrize("keeps_block_free", [True, False])
@pytest.mark.parametrize("max_num_batched_tokens", [1, 2, 3])
def test_a_request_as_large_as_the_usable_memory_ends(
    step_mode: StepMode,
    preemption: Preemption,
    keeps_block_free: bool,
    max_num_batched_tokens: int,
) -> None:
    """Also without a watermark, and where the last free block is never used. A prompt in chunks
    that came to that block would lose all its memory, again and again."""
    core = engine(
        10,
        watermark=0.0,
        step_mode=step_mode,
        preemption=preemption,
        keeps_block_free=keeps_block_free,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    num_tokens = core.view("i0").total_tokens
    add(core, request("a", 20, output_tokens=num_tokens - 20))
    for _ in range(500):
        step(core)
    assert core.is_empty
    assert batch(core) == []
