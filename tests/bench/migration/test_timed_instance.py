"""Points of a migration that two instances note; its messages and outcomes come one by one."""

from collections import deque

from bench.migration.samples import Moments
from bench.migration.timed_instance import TimedCore
from sterna.config import LlumletConfig
from sterna.instance.core import InstanceEffect
from sterna.messages.actors import (
    AddRequest,
    InstanceMember,
    Membership,
    MigrateRequest,
    MigrationMessage,
    TokenSpan,
)
from sterna.migration.messages import (
    Adopt,
    Adopted,
    BlocksReserved,
    CopyBlocks,
    Drain,
    Drained,
    Event,
    Inspect,
    Inspected,
    Mode,
    RequestPosition,
    ReserveBlocks,
    Send,
    StageReceived,
)
from sterna.policy.presets import LLUMNIX
from sterna.types import FrontendId, InstanceId, RequestId

F0, R = FrontendId(0), RequestId("r")
I0, I1 = InstanceId("i0"), InstanceId("i1")
NUM_BLOCKS = 2


class Pair:
    """Two cores; something happens on one of them every second."""

    def __init__(self) -> None:
        members = tuple(InstanceMember(each, str(each)) for each in (I0, I1))
        self.cores = {each: TimedCore(each, LlumletConfig(policy=LLUMNIX)) for each in (I0, I1)}
        self.happened: dict[str, float] = {}
        for core in self.cores.values():
            core.on_membership(Membership(1, members, (), None), 0.0)
        self.cores[I0].on_message(AddRequest(F0, R, 1), [b"request"], 0.0)

    def move(self, mode: Mode) -> None:
        order = MigrateRequest("operator", 1, R, I1, mode)
        waiting = deque((I0, each) for each in self.cores[I0].on_message(order, [], 0.0))
        now_s = 0.0
        while waiting:
            now_s += 1.0
            here, effect = waiting.popleft()
            there, following = self._follow(here, effect, now_s)
            waiting += [(there, each) for each in following]

    def _follow(
        self, here: InstanceId, effect: InstanceEffect, now_s: float
    ) -> tuple[InstanceId, list[InstanceEffect]]:
        there = I1 if here == I0 else I0
        match effect:
            case Send(_, inner):
                self.happened[type(inner).__name__] = now_s
                message = MigrationMessage(here, inner)
                return there, self.cores[there].on_message(message, [], now_s)
            case Inspect():
                position = RequestPosition(False, NUM_BLOCKS, NUM_BLOCKS, 0)
                return here, self._outcome(here, effect, Inspected(position, b"request"), now_s)
            case ReserveBlocks(stage=stage):
                return here, self._outcome(here, effect, BlocksReserved(stage, ("i1",)), now_s)
            case Drain():
                return here, self._outcome(here, effect, Drained(NUM_BLOCKS, b"state"), now_s)
            case CopyBlocks(stage=stage):
                return there, self._outcome(there, effect, StageReceived(stage), now_s)
            case Adopt():
                return here, self._outcome(here, effect, Adopted(), now_s)
        return here, []

    def _outcome(
        self,
        at: InstanceId,
        effect: Inspect | ReserveBlocks | Drain | CopyBlocks | Adopt,
        event: Event,
        now_s: float,
    ) -> list[InstanceEffect]:
        self.happened[type(event).__name__] = now_s
        return self.cores[at].on_outcome(effect.migration_id, event, now_s)


def test_source_and_destination_note_their_points() -> None:
    pair = Pair()

    pair.move(Mode.STOP_AND_COPY)

    at = pair.happened
    assert pair.cores[I0].take_moments() == Moments(drained_s=at["Drained"])
    assert pair.cores[I1].take_moments() == Moments(
        commit_s=at["Commit"], received_s=at["StageReceived"], adopted_s=at["Adopted"]
    )
    assert at["Drained"] < min(at["Commit"], at["StageReceived"]) < at["Adopted"]


def test_outputs_are_noted_until_they_are_taken() -> None:
    (core, _) = Pair().cores.values()
    core.on_outputs(F0, (TokenSpan(R, 4, 1, False),), [b"output"], 2.5)

    assert core.take_moments() == Moments(outputs_s={(R, 4): 2.5})
    assert core.take_moments() == Moments()
