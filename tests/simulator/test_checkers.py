"""The checks pass on what is well and find every kind of violation that is planted."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from sterna.engine.emulated.config import EmulatedEngineConfig, StepMode
from sterna.engine.emulated.core import EmulatedCore
from sterna.engine.emulated.requests import RequestState
from sterna.policy.presets import LLUMNIX
from sterna.simulator import simulate
from sterna.simulator.plain import PlainEngines
from sterna.types import InstanceId, RequestId
from tests.engine.emulated.builders import drain
from tests.simulator.builders import STEP_TIME, configuration, crowded_trace, differences, run
from tests.simulator.checkers import Checker

CONFIG = EmulatedEngineConfig(num_blocks=20, block_size=4, watermark=0.0)
A, B = InstanceId("i0"), InstanceId("i1")
R, Q = RequestId("r"), RequestId("q")


class Scene:
    """Two engines: r runs on the first, where q queues; their clients; and the checker."""

    def __init__(self) -> None:
        self.cores = {each: EmulatedCore(CONFIG, STEP_TIME) for each in (A, B)}
        self.delivered: dict[RequestId, int] = {R: 0, Q: 0}
        self.checker = Checker(CONFIG, lambda request_id: self.delivered[request_id])
        self.cores[A].add(RequestState(R, 10, 5, 0.0))
        self.cores[A].add(RequestState(Q, 79, 1, 1.0))
        self.step(A)
        assert self.violations() == []

    def step(self, instance_id: InstanceId) -> None:
        self.cores[instance_id].begin_step()
        for token in self.cores[instance_id].end_step():
            self.delivered[token.request_id] += 1

    def request(self, request_id: RequestId):
        return next(each for each in self.cores[A].requests() if each.request_id == request_id)

    def violations(self) -> list[str]:
        return self.checker.violations(self.cores)

    def final_violations(self) -> list[str]:
        return self.checker.final_violations(self.cores, [R, Q], [5, 1])


def move(scene: Scene, *, releases: bool) -> None:
    """r goes to the second engine, which runs it."""
    drain(scene.cores[A], R)
    state = scene.cores[A].export(R)
    scene.cores[B].reserve("m", 3, needs_slot=True)
    scene.cores[B].adopt("m", state, 3)
    if releases:
        scene.cores[A].release(R)


def test_a_request_may_be_suspended_on_its_source_and_run_on_its_destination() -> None:
    scene = Scene()
    move(scene, releases=False)
    assert scene.violations() == []
    scene.step(B)
    assert scene.violations() == []
    scene.cores[A].release(R)
    assert scene.violations() == []


def test_all_is_well_when_everything_has_ended() -> None:
    scene = Scene()
    for _ in range(5):
        scene.step(A)
        assert scene.violations() == []
    assert scene.final_violations() == []


def run_twice(scene: Scene) -> None:
    move(scene, releases=False)
    scene.cores[A].resume(R)


def lose_the_request(scene: Scene) -> None:
    drain(scene.cores[A], R)
    scene.cores[A].release(R)


def leak_blocks(scene: Scene) -> None:
    scene.cores[A]._num_free_blocks -= 2


def free_blocks_twice(scene: Scene) -> None:
    scene.cores[A]._num_free_blocks += 1


def give_away_blocks_that_are_not_there(scene: Scene) -> None:
    scene.cores[B].reserve("m", 20, needs_slot=False)
    scene.cores[B]._num_free_blocks -= 1
    scene.cores[B]._reservations["m"].num_blocks += 1


def hold_too_few_blocks(scene: Scene) -> None:
    scene.request(R).num_blocks -= 1
    scene.cores[A]._num_free_blocks += 1


def hold_too_many_blocks(scene: Scene) -> None:
    scene.request(R).num_blocks += 1
    scene.cores[A]._num_free_blocks -= 1


def skip_a_token(scene: Scene) -> None:
    scene.request(R).num_output_tokens += 1


def repeat_a_token(scene: Scene) -> None:
    scene.delivered[R] += 1


def run_on_after_the_end(scene: Scene) -> None:
    scene.delivered[R] = scene.request(R).num_output_tokens = 5


@pytest.mark.parametrize(
    ("corrupt", "expected"),
    [
        (run_twice, ["r can run on i0 and i1"]),
        (lose_the_request, ["r has not ended and is on no instance"]),
        (leak_blocks, ["i0 has 15 free, 3 held and 0 reserved blocks of 20"]),
        (free_blocks_twice, ["i0 has 18 free, 3 held and 0 reserved blocks of 20"]),
        (
            give_away_blocks_that_are_not_there,
            ["i1 has -1 free, 0 held and 21 reserved blocks of 20"],
        ),
        (hold_too_few_blocks, ["r holds 2 blocks on i0, its tokens take 3 to 3"]),
        (hold_too_many_blocks, ["r holds 4 blocks on i0, its tokens take 3 to 3"]),
        (skip_a_token, ["r is at token 2 on i0, its client at 1"]),
        (repeat_a_token, ["r is at token 1 on i0, its client at 2"]),
        (run_on_after_the_end, ["r has ended and can run on i0"]),
    ],
)
def test_a_planted_violation_is_found(
    corrupt: Callable[[Scene], None], expected: list[str]
) -> None:
    scene = Scene()
    corrupt(scene)
    assert scene.violations() == expected


def test_what_is_left_at_the_end_is_found() -> None:
    scene = Scene()
    scene.cores[B].reserve("m", 0, needs_slot=True)
    assert scene.final_violations() == [
        "r has 1 of 5 tokens at the end",
        "q has 0 of 1 tokens at the end",
        "i0 still holds r",
        "i0 still holds q",
        "i1 still holds 1 reservations",
    ]


# ------------------------------------------------------------------------- in the simulator


@pytest.mark.parametrize("step_mode", StepMode)
def test_the_checks_pass_on_a_crowded_cluster(step_mode: StepMode) -> None:
    """And look at something: requests were preempted and migrated."""
    policy = replace(LLUMNIX, num_concurrent_migrations=2)
    config = configuration(policy)
    config = replace(config, engine=replace(config.engine, step_mode=step_mode))
    records, cluster = run(crowded_trace(80, fraction_high=0.2), config)
    assert records.num_preemptions.sum() > 5
    assert cluster.migrations_committed > 10
    assert cluster.migrations_aborted > 0


def test_a_checked_run_has_the_same_results() -> None:
    """The checks only look, also where migrations were in flight at the end."""
    trace, config = crowded_trace(60), configuration(is_fast=False)
    assert differences(simulate(trace, config), run(trace, config)) == []


def test_a_violation_ends_a_checked_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here: engines whose adoptions leave a block behind."""
    adopt = PlainEngines.adopt

    def leaky(self: PlainEngines, row: int, *rest: object) -> None:
        adopt(self, row, *rest)
        self.cores()[InstanceId(f"i{row:05d}")]._num_free_blocks -= 1

    monkeypatch.setattr(PlainEngines, "adopt", leaky)
    with pytest.raises(AssertionError, match=r"at .* s: i0000. has .* blocks of 60"):
        run(crowded_trace(60), configuration())
