"""Step thread: builds vLLM's engine core, steps it, and runs commands between two steps; and the
views that it publishes."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from sterna.engine.cache_changes import CacheChanges
from sterna.engine.interface import EngineActivity
from sterna.types import InstanceId, InstanceView

logger = logging.getLogger(__name__)

T = TypeVar("T")

Core = Any
"""vLLM's EngineCore."""


class StepThread:
    """Owns an engine core: nothing else may touch it.

    Attributes:
        on_step: called on this thread after each step with the step's outputs, by client index.
        on_idle_command: called on this thread after commands that ran while nothing stepped.
        on_failure: called on this thread when a step raised; the thread ends.
    """

    def __init__(
        self,
        build: Callable[[], Core],
        *,
        on_step: Callable[[Core, dict[int, Any]], None],
        on_idle_command: Callable[[Core], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._build = build
        self._on_step = on_step
        self._on_idle_command = on_idle_command
        self._on_failure = on_failure
        self._commands: queue.SimpleQueue[Callable[[Core], None] | None] = queue.SimpleQueue()
        self._ready: Future[None] = Future()
        self._num_ended = 0
        self._is_busy = False
        self._thread = threading.Thread(target=self._run, name="sterna-step", daemon=True)

    def start(self) -> Future[None]:
        """Start the thread; the future ends when the core is built, or with the error."""
        self._thread.start()
        return self._ready

    @property
    def activity(self) -> EngineActivity:
        """The thread's activity. Only the thread sets these values; any thread may read them."""
        return EngineActivity(self._num_ended, self._is_busy)

    def call(self, command: Callable[[Core], T], *, may_last: bool = False) -> Future[T]:
        """Run the command between two steps; commands run in the order of the calls.

        Args:
            may_last: the command may take any time, which is not a hang.
        """
        future: Future[T] = Future()

        def run(core: Core) -> None:
            if not future.set_running_or_notify_cancel():
                # The caller was cancelled: the engine is being closed.
                return
            self._is_busy = not may_last
            try:
                result = command(core)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._commands.put(run)
        return future

    def close(self, timeout_s: float) -> None:
        """End the thread after the step in progress and shut the core down."""
        self._commands.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            core = self._build()
        except BaseException as error:
            self._ready.set_exception(error)
            return
        self._ready.set_result(None)
        try:
            while self._run_commands(core):
                self._step(core)
        except BaseException as error:
            logger.exception("engine failed")
            self._on_failure(error)
        finally:
            core.shutdown()

    def _run_commands(self, core: Core) -> bool:
        """Run the queued commands; wait while there is nothing to step. False: close."""
        while not self._commands.empty() or not _has_work(core):
            self._is_busy = False
            command = self._commands.get()
            if command is None:
                return False
            command(core)
            self._num_ended += 1
            if self._commands.empty() and not _has_work(core):
                self._on_idle_command(core)
        self._is_busy = True
        return True

    def _step(self, core: Core) -> None:
        outputs, is_executed = core.step_fn()
        self._on_step(core, outputs or {})
        core.post_step(is_executed)
        self._num_ended += 1
        if not is_executed and core.scheduler.has_requests():
            # The step waits for something else, such as the compilation of a grammar.
            time.sleep(0.001)


def _has_work(core: Core) -> bool:
    return bool(core.scheduler.has_requests() or core.batch_queue)


class Views:
    """Publishes the state of an engine at the beginning of each step and when it idles; belongs to
    the step thread.

    A step's state is published when it has been scheduled, not when it has ended: a step with a
    long prompt may take seconds, and the scheduler of the cluster must know meanwhile which
    requests run here. A state that equals the previous one is not published.

    Args:
        show: called with each view.
        show_cache: called before it with changes to the prefix cache, if they are recorded.
    """

    def __init__(
        self,
        instance_id: InstanceId,
        show: Callable[[InstanceView], None],
        show_cache: Callable[[CacheChanges], None],
    ) -> None:
        self._instance_id = instance_id
        self._show = show
        self._show_cache = show_cache
        self._last: InstanceView | None = None
        self.is_terminating = False

    def follow(self, core: Any) -> None:
        """Publish the state of each step of this core before it is computed."""
        core.scheduler.on_scheduled = lambda: self.publish(core)

    def on_step_end(self, core: Any) -> None:
        """Publish the state, unless another step follows at once, which will do so."""
        if not core.scheduler.has_requests():
            self.publish(core)

    def publish(self, core: Any) -> None:
        """Publish the current state if it has changed."""
        reports = core.scheduler.cache_reports
        if reports is not None and (changes := reports.take_changes()) is not None:
            self._show_cache(changes)
        view = core.scheduler.view(self._instance_id, self.is_terminating)
        if view != self._last:
            self._last = view
            self._show(view)
