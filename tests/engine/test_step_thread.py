"""The thread that steps an engine, with engines that compute nothing."""

import threading
from types import SimpleNamespace

from sterna.engine.vllm.step_thread import StepThread

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
