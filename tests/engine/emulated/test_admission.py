"""Who enters the batch, when, and with how many tokens; every example computed by hand.

The engines have blocks of four tokens. Of ten blocks, an admission leaves one free.
"""

from sterna.engine.emulated.core import Step, Token
from sterna.types import HIGH
from tests.engine.emulated.builders import (
    add,
    batch,
    chunked,
    engine,
    named,
    names,
    queue,
    request,
    step,
    step_with_tokens,
    steps,
)

# ------------------------------------------------------------------------------------- order


def test_requests_are_admitted_in_the_order_of_their_arrival() -> None:
    """Section 4.4.3: "Within the same priority, it adopts a simple first-come-first-serve order.
    On each instance, requests are scheduled in the same order." """
    core = engine()
    add(core, request("late", arrival_s=2.0), request("early", arrival_s=1.0))
    assert step(core).admitted == ("early", "late")


def test_requests_that_arrive_together_are_admitted_in_the_order_of_their_coming() -> None:
    core = engine()
    add(core, request("b"), request("a"))
    assert step(core).admitted == ("b", "a")


def test_a_higher_scheduling_priority_is_admitted_first() -> None:
    """Section 4.4.1: "Requests with higher scheduling priorities will get scheduled earlier to
    reduce their queuing delays." """
    core = engine()
    add(
        core,
        request("normal", arrival_s=0.0),
        request("second", arrival_s=2.0, priority=HIGH),
        request("first", arrival_s=1.0, priority=HIGH),
    )
    assert step(core).admitted == ("first", "second", "normal")


def test_a_head_of_line_that_does_not_fit_blocks_those_behind_it() -> None:
    """By hand: 5 blocks of 10 are taken; 5 more and the watermark's 1 do not fit into the other
    5, though the third request's 1 would."""
    core = engine()
    add(core, request("a", 20), request("b", 20, arrival_s=1.0), request("c", 4, arrival_s=2.0))
    assert step(core).admitted == ("a",)
    assert queue(core) == ["b", "c"]


# ------------------------------------------------------------------------------------ memory


def test_an_admission_leaves_the_watermark_free() -> None:
    """By hand: 36 tokens are 9 blocks and leave 1 of 10 free; 37 are 10 and leave none."""
    fits, too_long = engine(), engine()
    add(fits, request("a", 36))
    add(too_long, request("a", 37))
    assert step(fits).admitted == ("a",)
    assert fits.num_free_blocks == 1
    assert step(too_long) == Step(duration_s=0.0, scheduled=())
    assert too_long.num_free_blocks == 10


def test_a_prompt_takes_whole_blocks() -> None:
    core = engine()
    add(core, request("a", 5))
    step(core)
    assert named(core, "a").num_blocks == 2
    assert core.num_free_blocks == 8


def test_a_token_takes_a_block_when_it_begins_one() -> None:
    """The first token's KV is computed by the step that produces the second: with a prompt of 4
    in 1 block, the second step writes token 5 into a second block, and the sixth step token 9
    into a third."""
    core = engine()
    add(core, request("a", 4))
    held = []
    for _ in range(6):
        step(core)
        held.append(named(core, "a").num_blocks)
    assert held == [1, 2, 2, 2, 2, 3]


def test_a_finished_request_gives_its_blocks_back() -> None:
    core = engine()
    add(core, request("a", 4, output_tokens=2))
    assert steps(core, 2)[1].scheduled == (("a", 1),)
    assert core.num_free_blocks == 10
    assert core.is_empty


# ------------------------------------------------------------------------------------- limits


def test_no_more_requests_run_than_the_limit_of_sequences() -> None:
    core = engine(max_num_seqs=2)
    add(core, *(request(name) for name in "abc"))
    assert step(core).admitted == ("a", "b")
    assert step(core).scheduled == (("a", 1), ("b", 1))


def test_whole_prompts_share_the_limit_of_batched_tokens() -> None:
    """By hand: 6 + 4 = 10 fit; 6 + 5 = 11 do not."""
    fitting, too_many = (engine(max_num_batched_tokens=10) for _ in range(2))
    add(fitting, request("a", 6), request("b", 4), request("c", 1))
    add(too_many, request("a", 6), request("b", 5), request("c", 1))
    assert step(fitting).scheduled == (("a", 6), ("b", 4))
    assert step(too_many).scheduled == (("a", 6),)


def test_a_prompt_longer_than_the_limit_of_batched_tokens_runs_alone() -> None:
    core = engine(max_num_batched_tokens=10)
    add(core, request("a", 2), request("long", 12, arrival_s=1.0), request("b", 2, arrival_s=2.0))
    assert [each.scheduled for each in steps(core, 3)] == [
        (("a", 2),),
        (("long", 12),),
        (("b", 2),),
    ]


# ------------------------------------------------------------------------------ prefill first


def test_running_requests_wait_while_prompts_are_prefilled() -> None:
    """A step holds whole prompts, or one token of every running request, never both."""
    core = engine()
    add(core, request("a", 4))
    step(core)
    add(core, request("b", 6, arrival_s=1.0))
    second, third = steps(core, 2)
    assert (second.scheduled, second.admitted) == ((("b", 6),), ("b",))
    assert (third.scheduled, third.admitted) == ((("a", 1), ("b", 1)), ())


def test_a_request_that_comes_during_a_step_waits_for_the_next() -> None:
    core = engine()
    add(core, request("a", 4))
    begun = core.begin_step()
    add(core, request("b", 4, arrival_s=-1.0))
    assert begun.scheduled == (("a", 4),)
    assert [each.request_id for each in core.end_step()] == ["a"]
    assert step(core).admitted == ("b",)


def test_a_prefill_produces_the_first_token() -> None:
    core = engine()
    add(core, request("a", 4, output_tokens=1), request("b", 4, output_tokens=2))
    begun, tokens = step_with_tokens(core)
    assert begun.decoded == ()
    assert tokens == (Token("a", 0, True), Token("b", 0, False))
    begun, tokens = step_with_tokens(core)
    assert begun.decoded == ("b",)
    assert tokens == (Token("b", 1, True),)


def test_an_engine_without_requests_has_an_empty_step() -> None:
    core = engine()
    assert core.begin_step() == Step(duration_s=0.0, scheduled=())
    assert not core.is_stepping
    assert core.begin_step() == Step(duration_s=0.0, scheduled=())


# ------------------------------------------------------------------------------------ chunked


def test_a_chunked_step_holds_decodes_first_and_fills_up_with_chunks() -> None:
    """By hand, with 8 tokens a step: the prompt of 10 gets what the decode leaves, 7, then 3."""
    core = chunked(max_num_batched_tokens=8)
    add(core, request("a", 4))
    step(core)
    add(core, request("b", 10, arrival_s=1.0))
    second, tokens = step_with_tokens(core)
    assert second.scheduled == (("a", 1), ("b", 7))
    assert (second.admitted, second.decoded) == (("b",), ("a",))
    assert tokens == (Token("a", 1, False),)
    third, tokens = step_with_tokens(core)
    assert third.scheduled == (("a", 1), ("b", 3))
    assert (third.admitted, third.decoded) == ((), ("a",))
    assert tokens == (Token("a", 2, False), Token("b", 0, False))


def test_a_chunk_takes_only_the_blocks_that_it_computes() -> None:
    core = chunked(max_num_batched_tokens=8)
    add(core, request("a", 20))
    step(core)
    assert named(core, "a").num_blocks == 2
    step(core)
    assert named(core, "a").num_blocks == 4


def test_a_chunked_admission_asks_for_the_memory_of_the_whole_prompt() -> None:
    """By hand: 4 blocks are free. 13 tokens take 4 blocks and the watermark 1, though the first
    chunk of 3 would take 1; 12 tokens take 3."""
    for prompt_tokens, admitted in ((13, ()), (12, ("b",))):
        core = chunked(max_num_batched_tokens=4)
        add(core, request("a", 21))
        steps(core, 6)
        assert core.num_free_blocks == 4
        add(core, request("b", prompt_tokens, arrival_s=1.0))
        assert step(core).admitted == admitted


def test_the_watermark_of_chunked_admissions_is_for_running_requests() -> None:
    """Where none runs, it may be used: 40 tokens fill all 10 blocks."""
    alone, beside = chunked(), chunked()
    add(alone, request("a", 40, output_tokens=1))
    assert step(alone).admitted == ("a",)
    add(beside, request("b", 4))
    step(beside)
    add(beside, request("a", 32, arrival_s=1.0))
    assert beside.num_free_blocks == 9
    # b's second token takes a block; the other 8 would do, but not for the watermark's 1, too.
    assert step(beside).admitted == ()


def test_nobody_is_admitted_where_decodes_take_all_tokens_of_a_step() -> None:
    core = chunked(max_num_batched_tokens=3)
    add(core, *(request(name, 1) for name in "abc"))
    step(core)
    add(core, request("d", 1, arrival_s=-1.0))
    assert names(step(core).scheduled) == ["a", "b", "c"]
    assert queue(core) == ["d"]


def test_chunked_steps_admit_in_the_queues_order() -> None:
    core = chunked(max_num_batched_tokens=6)
    add(core, request("b", 4, arrival_s=1.0), request("a", 4), request("c", 4, arrival_s=2.0))
    assert step(core).scheduled == (("a", 4), ("b", 2))
    assert step(core).scheduled == (("a", 1), ("b", 2), ("c", 3))
    assert batch(core) == ["a", "b", "c"]
