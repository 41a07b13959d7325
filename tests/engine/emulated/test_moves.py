"""Drains, reservations and adoptions of an engine, for migrations; and aborts and views."""

import pytest

from sterna.engine.drains import Left, Outgrown, Stays
from sterna.engine.emulated.config import Preemption
from sterna.engine.emulated.core import EmulatedCore, Token
from sterna.engine.emulated.requests import decode_state
from sterna.errors import UnknownRequestError
from sterna.migration.messages import Reason, RequestPosition
from sterna.types import (
    HIGH,
    OUTPUT_LENGTHS,
    Immovable,
    InstanceId,
    InstanceView,
    RequestId,
    RequestStatus,
    RequestView,
)
from tests.engine.emulated.builders import (
    add,
    batch,
    chunked,
    drain,
    engine,
    named,
    queue,
    request,
    step,
    step_with_tokens,
    steps,
)


def two_running() -> EmulatedCore:
    """a and b, of 5 and 8 tokens of KV, in 2 blocks each of 10; both have one token."""
    core = engine()
    add(core, request("a", 5), request("b", 8, arrival_s=1.0))
    step(core)
    return core


# ------------------------------------------------------------------------------------ progress


def test_progress_tells_the_tokens_whose_kv_is_there() -> None:
    core = two_running()
    assert core.progress("a") == RequestPosition(
        is_queuing=False, num_full_blocks=1, num_blocks=2, num_preemptions=0, is_immovable=False
    )
    assert core.progress("b") == RequestPosition(
        is_queuing=False, num_full_blocks=2, num_blocks=2, num_preemptions=0, is_immovable=False
    )
    assert core.progress("c") is None


def test_the_block_of_the_step_under_way_is_not_progress() -> None:
    """Its KV is there when the step ends, not when it begins."""
    core = two_running()
    core.begin_step()
    assert named(core, "b").num_blocks == 3
    assert core.progress("b").num_blocks == 2
    core.end_step()
    assert core.progress("b").num_blocks == 3


def test_a_queuing_request_has_no_kv_and_can_move() -> None:
    core = engine()
    add(core, request("a", 100))
    step(core)
    assert core.progress("a") == RequestPosition(
        is_queuing=True, num_full_blocks=0, num_blocks=0, num_preemptions=0, is_immovable=False
    )


def test_a_prompt_in_chunks_cannot_move() -> None:
    core = chunked(max_num_batched_tokens=4)
    add(core, request("a", 6))
    step(core)
    assert core.progress("a").is_immovable
    step(core)
    assert not core.progress("a").is_immovable


# -------------------------------------------------------------------------------------- drains


def test_a_drained_request_leaves_the_batch_and_keeps_its_blocks() -> None:
    core = two_running()
    assert drain(core, "a") == Left(2, was_queuing=False)
    assert core.num_free_blocks == 6
    assert step(core).scheduled == (("b", 1),)
    assert core.progress("a").is_immovable
    assert not core.is_empty


def test_a_drained_queuing_request_leaves_the_queue() -> None:
    core = engine(max_num_seqs=1)
    add(core, request("a", 4, output_tokens=2), request("b"), request("c"))
    step(core)
    assert drain(core, "b") == Left(0, was_queuing=True)
    assert queue(core) == ["c"]
    steps(core, 1)
    assert step(core).admitted == ("c",)


def test_a_drain_is_refused_with_the_reason() -> None:
    core = two_running()
    add(core, request("queuing", 100, arrival_s=2.0))
    assert drain(core, "nobody") == Stays(Reason.REQUEST_UNKNOWN)
    assert drain(core, "a", num_preemptions=1) == Stays(Reason.REQUEST_PREEMPTED)
    assert drain(core, "a") == Left(2, was_queuing=False)
    assert drain(core, "a") == Stays(Reason.REQUEST_IMMOVABLE)
    assert step(core).scheduled == (("b", 1),)


def test_a_drain_waits_while_there_are_too_many_blocks_for_the_last_stage() -> None:
    """b has 2 blocks of KV: one from block 1 on, two from block 0 on."""
    core = two_running()
    assert drain(core, "b", max_blocks=1) == Outgrown()
    assert batch(core) == ["a", "b"]
    left = drain(core, "b", first_block=1, max_blocks=1)
    assert left == Left(2, was_queuing=False)


def test_a_drained_request_keeps_its_slot() -> None:
    core = engine(max_num_seqs=2)
    add(core, request("a"), request("b", arrival_s=1.0))
    step(core)
    drain(core, "a")
    add(core, request("c", arrival_s=2.0))
    assert step(core).scheduled == (("b", 1),)
    core.release("a")
    assert step(core).admitted == ("c",)


def test_a_drained_request_is_never_preempted() -> None:
    """By hand: 4 blocks, 2 held by each; the drained one's come back only when it is released."""
    core = engine(4, watermark=0.0, keeps_block_free=False)
    add(core, request("a", 8), request("b", 8, arrival_s=1.0))
    step(core)
    drain(core, "b")
    begun = step(core)
    assert (begun.preempted, begun.scheduled) == (("a",), ())
    assert named(core, "b").num_blocks == 2


@pytest.mark.parametrize(
    ("preemption", "expected"),
    [(Preemption.LATEST_ARRIVED, ["a", "b"]), (Preemption.LAST_ADMITTED, ["b", "a"])],
)
def test_a_resumed_request_is_part_of_the_next_batch(
    preemption: Preemption, expected: list[str]
) -> None:
    core = engine(preemption=preemption)
    add(core, request("a", 5), request("b", 8, arrival_s=1.0))
    step(core)
    drain(core, "a")
    step(core)
    core.resume("a")
    begun, tokens = step_with_tokens(core)
    assert [name for name, _ in begun.scheduled] == expected
    assert Token("a", 1, False) in tokens
    assert Token("b", 2, False) in tokens


def test_a_resumed_queuing_request_is_the_head_of_its_priority_again() -> None:
    core = engine()
    add(core, request("a", 100), request("b", 100), request("urgent", 100, priority=HIGH))
    drain(core, "a")
    assert queue(core) == ["urgent", "b"]
    core.resume("a")
    assert queue(core) == ["urgent", "a", "b"]


def test_a_released_request_gives_its_blocks_back() -> None:
    core = two_running()
    drain(core, "a")
    core.release("a")
    assert core.num_free_blocks == 8
    assert core.progress("a") is None


def test_only_a_drained_request_can_be_resumed_or_released() -> None:
    core = two_running()
    for act in (core.resume, core.release):
        with pytest.raises(UnknownRequestError, match="a is not drained"):
            act("a")
    assert batch(core) == ["a", "b"]


# -------------------------------------------------------------------------------- reservations


def test_a_reservation_counts_as_used() -> None:
    core = two_running()
    assert core.reserve("m", 3, needs_slot=False) is None
    assert (core.num_free_blocks, core.num_reserved_blocks) == (3, 3)
    assert core.view(InstanceId("i0")).reserved_tokens == 12
    core.free_reservation("m")
    assert (core.num_free_blocks, core.num_reserved_blocks) == (6, 0)


def test_a_reservation_leaves_the_watermark_free() -> None:
    """By hand: 6 blocks are free, and 1 stays so."""
    core = two_running()
    assert core.reserve("m", 6, needs_slot=False) is Reason.NO_MEMORY
    assert core.reserve("m", 5, needs_slot=False) is None


def test_a_reservation_grows_to_the_blocks_that_are_asked_for() -> None:
    core = two_running()
    assert core.reserve("m", 2, needs_slot=False) is None
    assert core.reserve("m", 3, needs_slot=False) is None
    assert core.reserve("m", 1, needs_slot=False) is None
    assert core.num_reserved_blocks == 3


def test_a_refused_reservation_keeps_what_it_had() -> None:
    core = two_running()
    core.reserve("m", 2, needs_slot=False)
    assert core.reserve("m", 9, needs_slot=True) is Reason.NO_MEMORY
    assert (core.num_free_blocks, core.num_reserved_blocks) == (4, 2)


def test_a_slot_is_reserved_once_and_held() -> None:
    core = engine(max_num_seqs=2)
    add(core, request("a"))
    step(core)
    assert core.reserve("m", 1, needs_slot=True) is None
    assert core.reserve("m", 2, needs_slot=True) is None
    assert core.reserve("m", 2, needs_slot=False) is None
    assert core.reserve("n", 1, needs_slot=True) is Reason.NO_SLOT
    assert core.num_reserved_blocks == 2
    assert core.view(InstanceId("i0")).num_slots == 1
    add(core, request("b", arrival_s=1.0))
    assert step(core).scheduled == (("a", 1),)
    core.free_reservation("m")
    assert core.view(InstanceId("i0")).num_slots == 2
    assert step(core).admitted == ("b",)


def test_a_request_that_will_queue_needs_neither_slot_nor_memory() -> None:
    """It waits in the queue for both, as every other. By hand: a takes the only slot, and with its
    second block it leaves 1 of 3 free, where the watermark is 2."""
    core = engine(3, max_num_seqs=1, watermark=0.7, keeps_block_free=False)
    add(core, request("a"))
    assert len(steps(core, 2)[1].scheduled) == core.num_free_blocks == 1
    assert core.reserve("m", 1, needs_slot=False) is Reason.NO_MEMORY
    assert core.reserve("m", 0, needs_slot=True) is None
    assert core.num_reservations == 1
    core.adopt("m", request("b", arrival_s=1.0), 0)
    assert queue(core) == ["b"]
    assert core.num_reservations == 0


def test_a_request_that_will_queue_takes_no_slot_from_those_that_do() -> None:
    core = engine(max_num_seqs=1)
    assert core.reserve("m", 0, needs_slot=True) is None
    add(core, request("a"))
    assert step(core).admitted == ("a",)


def test_a_reservation_that_is_not_there_is_given_back_in_vain() -> None:
    core = two_running()
    core.free_reservation("m")
    assert core.num_free_blocks == 6


# ----------------------------------------------------------------------------------- adoptions


def test_an_adopted_request_goes_on_where_it_was() -> None:
    """By hand: 9 tokens of KV are 3 blocks; the next token needs no other."""
    source, destination = two_running(), engine()
    step(source)
    drain(source, "b")
    state = decode_state(source.export("b").encode())
    assert destination.reserve("m", 3, needs_slot=True) is None
    destination.adopt("m", state, 3)
    source.release("b")
    assert (destination.num_free_blocks, destination.num_reserved_blocks) == (7, 0)
    begun, tokens = step_with_tokens(destination)
    assert (begun.scheduled, begun.admitted, begun.decoded) == ((("b", 1),), (), ("b",))
    assert tokens == (Token("b", 2, False),)
    assert destination.num_free_blocks == 7
    (view,) = destination.view(InstanceId("i1")).running
    assert (view.num_output_tokens, view.num_earlier_tokens) == (3, 2)


def test_blocks_that_were_reserved_in_vain_are_given_back() -> None:
    destination = engine()
    destination.reserve("m", 5, needs_slot=True)
    state = request("b", 8, num_output_tokens=2, num_computed_tokens=9)
    destination.adopt("m", state, 3)
    assert (destination.num_free_blocks, destination.num_reserved_blocks) == (7, 0)


def test_an_adopted_request_takes_its_place_in_the_batch() -> None:
    core = two_running()
    core.reserve("m", 1, needs_slot=True)
    core.adopt("m", request("c", 2, arrival_s=0.5, num_output_tokens=1, num_computed_tokens=2), 1)
    assert batch(core) == ["a", "c", "b"]


def test_a_request_that_was_never_started_is_adopted_by_its_arrival() -> None:
    core = engine()
    add(core, request("a", 100, arrival_s=1.0), request("b", 100, arrival_s=3.0))
    core.reserve("m", 0, needs_slot=True)
    core.adopt("m", request("c", 100, arrival_s=2.0), 0)
    assert queue(core) == ["a", "c", "b"]


def test_a_preempted_request_is_adopted_in_front_and_computed_again() -> None:
    """With 7 tokens of output, its prompt of 4 is one of 11."""
    core = engine()
    add(core, request("a", 100, arrival_s=1.0))
    core.reserve("m", 0, needs_slot=True)
    core.adopt("m", request("c", 4, arrival_s=2.0, num_output_tokens=7), 0)
    assert queue(core) == ["c", "a"]
    begun, tokens = step_with_tokens(core)
    assert begun.scheduled == (("c", 11),)
    assert tokens == (Token("c", 7, False),)


def test_a_request_is_adopted_into_a_reservation_only() -> None:
    core = engine()
    with pytest.raises(KeyError):
        core.adopt("m", request("a"), 0)


def test_decodes_that_find_no_tokens_left_wait_for_the_next_step() -> None:
    """With 2 tokens a step, the first two of three running requests decode."""
    core = chunked(max_num_batched_tokens=2)
    add(core, request("a", 1), request("b", 1, arrival_s=2.0))
    step(core)
    core.reserve("m", 1, needs_slot=True)
    core.adopt("m", request("c", 2, arrival_s=1.0, num_output_tokens=1, num_computed_tokens=2), 1)
    begun, tokens = step_with_tokens(core)
    assert begun.scheduled == (("a", 1), ("c", 1))
    assert tokens == (Token("a", 1, False), Token("c", 1, False))
    core.abort("a")
    assert step_with_tokens(core)[1] == (Token("c", 2, False), Token("b", 1, False))


# -------------------------------------------------------------------------------------- aborts


@pytest.mark.parametrize("where", ["running", "queuing", "drained"])
def test_an_aborted_request_is_gone_with_its_blocks(where: str) -> None:
    core = engine(max_num_seqs=1)
    add(core, request("running"), request("queuing", arrival_s=1.0))
    step(core)
    if where == "drained":
        drain(core, "running")
    name = RequestId("queuing" if where == "queuing" else "running")
    core.abort(name)
    assert core.progress(name) is None
    assert not core.is_drained(name)
    assert core.num_free_blocks == (9 if where == "queuing" else 10)
    begun = step(core)
    assert name not in [each for each, _ in begun.scheduled]
    core.abort(RequestId("running"))
    core.abort(RequestId("queuing"))
    assert core.is_empty


def test_an_abort_of_a_request_that_is_not_here_is_ignored() -> None:
    core = two_running()
    core.abort("nobody")
    assert batch(core) == ["a", "b"]


# --------------------------------------------------------------------------------------- views


def test_a_view_shows_requests_with_their_memory_and_demands() -> None:
    """By hand: M is 9 blocks of 4, the watermark left out. a holds 2 blocks and is drained; b
    holds 2; c needs 25 blocks for its 99 tokens."""
    core = two_running()
    add(core, request("c", 99, arrival_s=2.0, priority=HIGH))
    core.reserve("m", 3, needs_slot=False)
    drain(core, "a")
    assert core.view(InstanceId("i3"), is_terminating=True) == InstanceView(
        instance_id=InstanceId("i3"),
        total_tokens=36,
        block_size=4,
        running=(
            RequestView(
                RequestId("b"),
                RequestStatus.RUNNING,
                num_tokens=9,
                physical_usage_tokens=8,
                num_output_tokens=1,
                arrival_s=1.0,
            ),
            RequestView(
                RequestId("a"),
                RequestStatus.RUNNING,
                num_tokens=6,
                physical_usage_tokens=8,
                num_output_tokens=1,
                immovable=Immovable.MIGRATING,
            ),
        ),
        queuing=(
            RequestView(
                RequestId("c"),
                RequestStatus.QUEUING,
                num_tokens=99,
                demand_tokens=100,
                scheduling_priority=HIGH,
                execution_priority=HIGH,
                arrival_s=2.0,
                uncomputed_tokens=99,
            ),
        ),
        reserved_tokens=12,
        is_terminating=True,
        num_slots=256,
        num_ended=(0,) * len(OUTPUT_LENGTHS),
    )


def test_outputs_that_ended_or_were_aborted_here_are_counted_and_those_that_left_are_not() -> None:
    core = two_running()
    drain(core, "a")
    core.release(RequestId("a"))
    core.abort(RequestId("b"))
    add(core, request("c", 5, output_tokens=20))
    add(core, request("waits", 5))
    core.abort(RequestId("waits"))
    while not core.is_empty:
        core.begin_step()
        core.end_step()
    counts = core.view(InstanceId("i0")).num_ended
    assert {OUTPUT_LENGTHS[k]: num for k, num in enumerate(counts) if num} == {0: 1, 16: 1}


def test_a_request_demands_memory_until_its_prompt_is_computed() -> None:
    """By hand, with 5 tokens a step: a prompt of 11 takes 3 blocks of 4 in the end, and holds 2, 3
    and 3 of them in its three steps; then it decodes."""
    core = chunked(max_num_batched_tokens=5)
    add(core, request("a", 11))
    held = []
    for _ in range(4):
        core.begin_step()
        (view,) = core.view(InstanceId("i0")).running
        held.append((view.physical_usage_tokens, view.demand_tokens))
        core.end_step()
    assert held == [(8, 12), (12, 12), (12, 12), (12, 0)]


def test_a_preempted_request_demands_memory_for_its_output_too() -> None:
    """Section 4.4.2, demand: prompt and generated tokens where it was preempted."""
    core = engine(3, watermark=0.0, keeps_block_free=False)
    add(core, request("a", 4), request("b", 7, arrival_s=1.0))
    step(core)
    assert step(core).preempted == ("b",)
    (waiting,) = core.view(InstanceId("i0")).queuing
    assert (waiting.num_tokens, waiting.demand_tokens, waiting.num_preemptions) == (8, 8, 1)
