"""The thread that steps an engine, with engines that compute nothing."""

import threading
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from sterna.engine.emulated.durations import StepTime
from sterna.engine.vllm.step_thread import Pace, StepThread

WAIT_S = 60.0


def test_a_command_that_nobody_waits_for_any_more_does_not_end_the_engine() -> None:
    """An instance that is closed cancels what it waits for."""
    failures: list[BaseException] = []
    core = SimpleNamespace(
        scheduler=SimpleNamespace(has_requests=lambda: False),
        batch_queue=None,
        shutdown=lambda: None,
    )
    thread = StepThread(
        lambda: core,
        on_step=lambda *_: None,
        on_idle_command=lambda _: None,
        on_failure=failures.append,
    )
    thread.start().result(WAIT_S)
    begun, go_on = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        begun.set()
        go_on.wait(WAIT_S)

    thread.call(hold)
    assert begun.wait(WAIT_S)
    cancelled = thread.call(lambda _: 1)
    assert cancelled.cancel()
    go_on.set()
    assert thread.call(lambda _: 2).result(WAIT_S) == 2
    thread.close(WAIT_S)
    assert not failures


def test_a_step_that_raises_is_reported_and_is_the_last_that_the_engine_does() -> None:
    calls: list[str] = []
    error = RuntimeError("the third step raises")
    failures: list[BaseException] = []
    has_failed = threading.Event()

    def fail(failure: BaseException) -> None:
        failures.append(failure)
        has_failed.set()

    def step() -> tuple[dict[int, object], bool]:
        calls.append("step")
        if len(calls) == 3:
            raise error
        return {}, True

    core = SimpleNamespace(
        scheduler=SimpleNamespace(has_requests=lambda: True),
        batch_queue=None,
        step_fn=step,
        post_step=lambda _: None,
        shutdown=lambda: calls.append("shutdown"),
    )
    thread = StepThread(
        lambda: core,
        on_step=lambda *_: None,
        on_idle_command=lambda _: None,
        on_failure=fail,
    )
    thread.start().result(WAIT_S)
    assert has_failed.wait(WAIT_S)
    late = thread.call(lambda _: calls.append("command"))
    thread.close(WAIT_S)
    assert failures == [error]
    assert calls == ["step", "step", "step", "shutdown"]
    assert thread.activity.num_ended == 2
    assert not late.done()


def test_a_command_that_raises_ends_the_engine_only_if_nothing_waits_for_it() -> None:
    """A caller that waits gets the error and knows what to do."""
    error = RuntimeError("the command raises")
    failures: list[BaseException] = []
    calls: list[str] = []
    core = SimpleNamespace(
        scheduler=SimpleNamespace(has_requests=lambda: False),
        batch_queue=None,
        shutdown=lambda: calls.append("shutdown"),
    )
    thread = StepThread(
        lambda: core,
        on_step=lambda *_: None,
        on_idle_command=lambda _: None,
        on_failure=failures.append,
    )

    def fail(_: object) -> None:
        raise error

    thread.start().result(WAIT_S)
    assert thread.call(fail).exception(WAIT_S) is error
    thread.post(lambda _: calls.append("command"))
    thread.post(fail)
    late = thread.call(lambda _: calls.append("late"))
    thread.close(WAIT_S)
    assert failures == [error]
    assert calls == ["command", "shutdown"]
    assert not late.done()


# ------------------------------------------------------------------------------------ pace

STEP_TIME = StepTime(
    prefill_s=0.01,
    prefill_token_s=0.001,
    prefill_pair_s=0.0001,
    prefill_min_s=0.02,
    decode_s=0.03,
    decode_request_s=0.002,
    decode_token_s=0.00001,
)


class Hardware:
    """A clock that only sleeping and computing move on."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.pace = Pace(STEP_TIME, clock=lambda: self.now_s, sleep=self.spend)

    def spend(self, duration_s: float) -> None:
        self.now_s += duration_s

    def step(self, scheduled: Mapping[str, int], computing_s: float, **requests: Any) -> float:
        """When the step has ended."""
        self.pace.begin()
        self.pace.expect(scheduled, requests)
        self.spend(computing_s)
        self.pace.end()
        return self.now_s


def request(num_computed_tokens: int, num_tokens: int, num_output_tokens: int = 1) -> Any:
    """`num_computed_tokens` with those of the step that has been scheduled."""
    return SimpleNamespace(
        num_computed_tokens=num_computed_tokens,
        num_tokens=num_tokens,
        num_prompt_tokens=num_tokens - num_output_tokens,
    )


DECODE = {"a": 1}
DECODE_S = 0.03 + 0.002 + 50 * 0.00001


def test_a_step_lasts_as_long_as_its_contents_take_elsewhere() -> None:
    """By hand: a chunk of 20 after 30 tokens has 1,600 pairs; the decode has 50 tokens. Beside it
    only the pairs take time: reading the weights leaves 0.03 - 0.01 s to the other 0.02."""
    pairs_s = 0.0001 * (50 * 50 - 30 * 30)
    prompt_s = 0.01 + 0.001 * 20 + pairs_s
    assert Hardware().step({"p": 20}, 0.001, p=request(50, 100)) == pytest.approx(prompt_s)
    assert Hardware().step(DECODE, 0.001, a=request(50, 50)) == pytest.approx(DECODE_S)
    both_s = DECODE_S + pairs_s
    both = {"p": 20, "a": 1}
    assert Hardware().step(both, 0.001, p=request(50, 100), a=request(50, 50)) == pytest.approx(
        both_s
    )


def test_one_token_whose_others_are_cached_counts_as_a_decode_after_the_first_output() -> None:
    """As in the emulated engine (`EmulatedRequest.is_prefilling`): a new prompt's last token is a
    prompt of one token."""
    assert Hardware().step(DECODE, 0.0, a=request(50, 50)) == pytest.approx(DECODE_S)
    assert Hardware().step({"a": 2}, 0.0, a=request(50, 50)) != pytest.approx(DECODE_S)
    prompt_s = max(0.02, 0.01 + 0.001 + 0.0001 * (50 * 50 - 49 * 49))
    assert Hardware().step(DECODE, 0.0, a=request(50, 50, 0)) == pytest.approx(prompt_s)


def test_a_step_begins_where_the_one_before_it_ended() -> None:
    """The work between two steps is a part of the second one's time."""
    hardware = Hardware()
    hardware.step(DECODE, 0.001, a=request(50, 50))
    hardware.spend(0.005)
    assert hardware.step(DECODE, 0.001, a=request(50, 50)) == pytest.approx(2 * DECODE_S)


def test_after_a_pause_a_step_begins_when_it_begins() -> None:
    hardware = Hardware()
    hardware.step(DECODE, 0.001, a=request(50, 50))
    hardware.pace.pause()
    hardware.spend(10.0)
    assert hardware.step(DECODE, 0.001, a=request(50, 50)) == pytest.approx(10.0 + 2 * DECODE_S)


def test_after_a_step_that_could_compute_nothing_a_step_begins_when_it_begins() -> None:
    """As when all that waits here waits for memory."""
    hardware = Hardware()
    hardware.step(DECODE, 0.001, a=request(50, 50))
    hardware.step({}, 0.001)
    hardware.spend(10.0)
    assert hardware.step(DECODE, 0.001, a=request(50, 50)) == pytest.approx(10.001 + 2 * DECODE_S)


def test_a_late_step_is_counted_and_makes_the_next_one_no_shorter(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hardware = Hardware()
    hardware.step(DECODE, 1.0, a=request(50, 50))
    assert hardware.step(DECODE, 0.001, a=request(50, 50)) == pytest.approx(1.0 + DECODE_S)
    with caplog.at_level("INFO"):
        hardware.pace.report()
    expected = f"paced steps=2 seconds={2 * DECODE_S:.1f} late=1 late_seconds={1 - DECODE_S:.2f}"
    assert expected in caplog.text


def test_a_step_with_nothing_to_compute_takes_no_time() -> None:
    assert Hardware().step({}, 0.001) == pytest.approx(0.001)


def test_the_thread_steps_at_this_pace() -> None:
    sleeps_s: list[float] = []
    has_slept = threading.Event()

    def sleep(duration_s: float) -> None:
        sleeps_s.append(duration_s)
        has_slept.set()

    scheduler = SimpleNamespace(
        has_requests=lambda: not has_slept.is_set(),
        on_scheduled=(),
        requests={"a": request(50, 50)},
    )

    def step() -> tuple[dict[int, object], bool]:
        for tell in scheduler.on_scheduled:
            tell(SimpleNamespace(num_scheduled_tokens=DECODE))
        return {}, True

    core = SimpleNamespace(
        scheduler=scheduler,
        batch_queue=None,
        step_fn=step,
        post_step=lambda _: None,
        shutdown=lambda: None,
    )
    thread = StepThread(
        lambda: core,
        on_step=lambda *_: None,
        on_idle_command=lambda _: None,
        on_failure=lambda _: None,
        pace=Pace(STEP_TIME, clock=lambda: 0.0, sleep=sleep),
    )
    thread.start().result(WAIT_S)
    assert has_slept.wait(WAIT_S)
    thread.close(WAIT_S)
    assert sleeps_s[0] == pytest.approx(DECODE_S)
