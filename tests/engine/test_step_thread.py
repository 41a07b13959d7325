"""The thread that steps an engine, with an engine that has nothing to do."""

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
