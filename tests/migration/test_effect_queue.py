"""Rules 1 and 2 of the interpreter's contract, kept by `EffectQueue` and nowhere else."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fault_simulation.run import run_seed
from sterna.config import LlumletConfig
from sterna.instance.effect_runner import EffectRunner
from sterna.messages.actors import MigrationMessage
from sterna.migration.effect_queue import EffectQueue
from sterna.migration.messages import (
    AbortRequest,
    Adopt,
    CopyBlocks,
    Drain,
    Effect,
    EffectWithOutcome,
    Ended,
    FreeReservation,
    Inspect,
    Inspected,
    Mode,
    Outcome,
    Release,
    Released,
    ReserveBlocks,
    Resume,
    Send,
)
from sterna.policy.presets import LLUMNIX
from sterna.simulator.plain import PlainEngines
from sterna.simulator.simulated_instance import SimulatedInstance
from sterna.types import InstanceId, MigrationId, RequestId
from tests.migration.machines import A, B, M, R
from tests.simulator.builders import configuration, requests

OTHER = MigrationId("A-2")


INSPECT = Inspect(M, R)
DRAIN = Drain(M, R, Mode.LIVE, 0, 0, 2)
SEND = Send(B, Released(M))
COPY = CopyBlocks(M, R, 0, 0, 4, ("b:1",), True)
ENDED = Ended(M, R, B, True, None, 1)

WITH_OUTCOME = [
    INSPECT,
    DRAIN,
    ReserveBlocks(M, R, 0, 0, 4, False, None),
    FreeReservation(M),
    Adopt(M, R, 4, b"state"),
]


def queue_after(*effects: Effect) -> EffectQueue:
    queue = EffectQueue()
    for effect in effects:
        queue.push(effect)
    return queue


# ---------------------------------------------------------------------------------- one by one


@pytest.mark.parametrize("effect", [SEND, COPY, Resume(M, R), Release(M, R), ENDED], ids=repr)
def test_an_effect_without_an_outcome_holds_nothing_up(effect: Effect) -> None:
    queue = EffectQueue()
    assert queue.push(effect)
    assert queue.push(SEND)
    assert len(queue) == 0


@pytest.mark.parametrize("effect", WITH_OUTCOME, ids=repr)
def test_an_effect_with_an_outcome_holds_up_its_migration(effect: EffectWithOutcome) -> None:
    queue = EffectQueue()
    assert queue.push(effect)
    assert not queue.push(SEND)
    assert not queue.push(ENDED)
    assert len(queue) == 1
    assert list(queue.done(M)) == [SEND, ENDED]
    assert len(queue) == 0


def test_other_migrations_are_not_held_up() -> None:
    queue = queue_after(INSPECT)
    other = Send(B, Released(OTHER))
    assert queue.push(other)


def test_the_end_of_a_request_is_not_held_up() -> None:
    effect = AbortRequest(R)
    assert queue_after(INSPECT).push(effect)


def test_what_follows_from_an_outcome_waits_behind_what_was_there_before() -> None:
    queue = queue_after(INSPECT, SEND)
    assert not queue.push(ENDED)
    assert list(queue.done(M)) == [SEND, ENDED]


def test_a_waiting_effect_with_an_outcome_holds_up_the_rest() -> None:
    queue = queue_after(INSPECT, SEND, DRAIN, COPY)
    assert list(queue.done(M)) == [SEND, DRAIN]
    assert list(queue.done(M)) == [COPY]


def test_what_an_effect_leads_to_at_once_waits_behind_the_others() -> None:
    """A copy that fails as it is begun, say."""
    queue = queue_after(DRAIN, COPY, SEND)
    begun: list[Effect] = []
    for effect in queue.done(M):
        begun.append(effect)
        if effect == COPY:
            assert not queue.push(ENDED)
    assert begun == [COPY, SEND, ENDED]


def test_an_outcome_that_is_not_due_is_an_error() -> None:
    queue = queue_after(SEND)
    with pytest.raises(KeyError):
        list(queue.done(M))


# ------------------------------------------------------------------------------- in any order


def numbered(number: int, migration_id: MigrationId, kind: int) -> Effect:
    """An effect that no other one equals."""
    request_id = RequestId(f"r{number}")
    if kind == 0:
        return Send(InstanceId(f"i{number}"), Released(migration_id))
    if kind == 1:
        return Resume(migration_id, request_id)
    return replace((INSPECT, DRAIN)[kind - 2], migration_id=migration_id, request_id=request_id)


@given(
    st.lists(
        st.tuples(st.sampled_from([M, OTHER]), st.sampled_from(["done", 0, 1, 2, 3])), max_size=40
    )
)
def test_effects_of_a_migration_begin_in_order_and_never_while_an_outcome_is_due(
    steps: list[tuple[MigrationId, str | int]],
) -> None:
    queue = EffectQueue()
    pushed: dict[MigrationId, list[Effect]] = {M: [], OTHER: []}
    begun: dict[MigrationId, list[Effect]] = {M: [], OTHER: []}
    due: set[MigrationId] = set()

    def begin(migration_id: MigrationId, effect: Effect) -> None:
        assert migration_id not in due
        begun[migration_id].append(effect)
        if isinstance(effect, EffectWithOutcome):
            due.add(migration_id)

    def done(migration_id: MigrationId) -> None:
        due.remove(migration_id)
        for effect in queue.done(migration_id):
            begin(migration_id, effect)

    for number, (migration_id, kind) in enumerate(steps):
        if isinstance(kind, int):
            effect = numbered(number, migration_id, kind)
            pushed[migration_id].append(effect)
            if queue.push(effect):
                begin(migration_id, effect)
        elif migration_id in due:
            done(migration_id)
        for each in pushed:
            num_begun = len(begun[each])
            assert begun[each] == pushed[each][:num_begun]
            assert each in due or num_begun == len(pushed[each]), "what could begin has begun"
        assert len(queue) == len(due)
    while due:
        done(next(iter(due)))
    assert begun == pushed


# -------------------------------------------------------------------------- in no other place


class Recorder:
    """An engine and a network; says what is asked of them, in order."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.has_looked = asyncio.Event()

    async def inspect(self, migration_id: MigrationId, request_id: RequestId) -> Inspected:
        await self.has_looked.wait()
        self.asked.append("inspect")
        return Inspected(None)

    def send(self, peer: InstanceId, message: MigrationMessage) -> None:
        self.asked.append("send")

    def on_outcome(self, migration_id: MigrationId, outcome: Outcome) -> None:
        self.asked.append("outcome")

    def on_ended(self, ended: Ended) -> None:
        self.asked.append("ended")

    def on_activity(self, instance: SimulatedInstance, now_s: float) -> None:
        """It is not asked for anything."""


def of_the_runtime() -> list[str]:
    """A message behind an inspection."""

    async def scenario() -> list[str]:
        recorder = Recorder()
        runner = EffectRunner(
            A,
            recorder,
            send=recorder.send,
            on_outcome=recorder.on_outcome,
            on_failure=lambda error: recorder.asked.append(repr(error)),
        )
        runner.run(INSPECT)
        runner.run(SEND)
        recorder.has_looked.set()
        (task,) = runner._tasks
        await task
        return recorder.asked

    return asyncio.run(scenario())


def of_the_simulator() -> list[str]:
    """The end of a migration, whose destination is gone, behind an inspection."""
    recorder, engines = Recorder(), PlainEngines(requests((0.0, 16, 9)), configuration())
    engines.start(0, A, LLUMNIX)
    engines.add(0, 0, 1, 0.0)
    engines.end_step(0, engines.begin_step(0, 0.0))
    instance = SimulatedInstance(A, 0, LlumletConfig(policy=LLUMNIX), engines, recorder)
    instance.on_destination(B, 1.0)
    assert instance.has_commands
    instance.on_peer_gone(B, 1.0)
    recorder.asked.append("between steps")
    instance.run_commands(1.0)
    return recorder.asked


def of_the_fault_simulation() -> str:
    return run_seed(0).digest


@pytest.mark.parametrize("run", [of_the_runtime, of_the_simulator, of_the_fault_simulation])
def test_without_the_queue_nothing_waits(
    run: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By deletion: an interpreter that had the rule once more would go on as before."""
    before = run()
    monkeypatch.setattr(EffectQueue, "push", lambda self, effect: True)
    monkeypatch.setattr(EffectQueue, "done", lambda self, migration_id: ())
    assert run() != before


def test_interpreters_carry_out_what_waited() -> None:
    assert of_the_runtime() == ["inspect", "outcome", "send"]
    assert of_the_simulator() == ["between steps", "ended"]
