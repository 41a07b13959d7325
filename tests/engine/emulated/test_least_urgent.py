"""vLLM 1 with priority scheduling gives memory by entry into the batch and takes it by urgency.

`test_against_vllm` compares whole runs; these are its surprising cases, by hand. Blocks hold four
tokens.
"""

from sterna.engine.emulated.config import Preemption
from sterna.engine.emulated.core import EmulatedCore
from sterna.types import HIGH, NORMAL, Priority
from tests.engine.emulated.builders import add, batch, chunked, queue, request, step


def full_engine(first: Priority, second: Priority, num_blocks: int = 5) -> EmulatedCore:
    """Two running requests of eight tokens each, which both need a block in the next step."""
    core = chunked(
        num_blocks,
        watermark=0.0,
        preemption=Preemption.LEAST_URGENT,
        keeps_block_free=False,
        max_num_batched_tokens=16,
    )
    add(core, request("first", 7, priority=first))
    step(core)
    add(core, request("second", 8, arrival_s=1.0, priority=second))
    return core


def test_a_request_loses_what_it_was_given_in_the_same_step() -> None:
    """The less urgent one stands in front of the batch and gets the last block first."""
    core = full_engine(NORMAL, HIGH)
    begun = step(core)
    assert begun.scheduled == (("first", 1), ("second", 8))
    begun = step(core)
    assert begun.preempted == ("first",)
    assert begun.scheduled == (("second", 1),)
    assert (batch(core), queue(core)) == (["second"], ["first"])


def test_a_request_that_loses_its_own_memory_ends_the_scheduling_of_the_step() -> None:
    """Whoever stands behind it waits for the next step, however urgent."""
    core = full_engine(NORMAL, HIGH, num_blocks=4)
    assert step(core).scheduled == (("first", 1), ("second", 8))
    begun = core.begin_step()
    assert begun.preempted == ("first",)
    # A step without anything to compute is made up for at once.
    assert begun.scheduled == (("second", 1),)


def test_nobody_loses_memory_while_there_is_enough() -> None:
    core = full_engine(NORMAL, HIGH, num_blocks=8)
    assert step(core).preempted == step(core).preempted == ()
    assert batch(core) == ["first", "second"]


def test_a_preempted_request_queues_by_its_arrival() -> None:
    """One that came to the engine late, but had arrived before, stays in front of it."""
    core = full_engine(NORMAL, NORMAL)
    assert step(core).scheduled == (("first", 1), ("second", 8))
    add(core, request("early", 8, arrival_s=0.5))
    assert step(core).preempted == ("second",)
    assert queue(core) == ["early", "second"]


def test_with_what_it_had_computed_it_queues_by_its_arrival_too() -> None:
    core = full_engine(NORMAL, NORMAL)
    step(core)
    add(core, request("early", 8, arrival_s=0.5))
    add(core, request("sent again", 8, arrival_s=0.7, num_output_tokens=2))
    assert queue(core) == ["early", "sent again"]
