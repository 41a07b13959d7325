"""Step thread: builds vLLM's engine core, steps it, and runs commands between two steps; the views
that it publishes; and the pace of its steps in experiments."""

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from sterna.engine.cache_changes import CacheChanges
from sterna.engine.emulated.durations import StepTime
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
        on_failure: called on this thread when a step, or a command of `post`, raised; the thread
            ends.
        pace: how long steps last; None: as long as they take.
    """

    def __init__(
        self,
        build: Callable[[], Core],
        *,
        on_step: Callable[[Core, dict[int, Any]], None],
        on_idle_command: Callable[[Core], None],
        on_failure: Callable[[BaseException], None],
        pace: "Pace | None" = None,
    ) -> None:
        self._build = build
        self._pace = pace
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

    def post(self, command: Callable[[Core], None], *, may_last: bool = False) -> None:
        """Run the command as `call` does, where nothing waits for its end.

        If it raises, the engine has failed, as by a step. Otherwise the error would stay unnoticed,
        and a request, for example, might be held for ever.
        """

        def run(core: Core) -> None:
            self._is_busy = not may_last
            command(core)

        self._commands.put(run)

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
        if self._pace is not None:
            self._pace.follow(core)
        try:
            while self._run_commands(core):
                self._step(core)
        except BaseException as error:
            logger.exception("engine failed")
            self._on_failure(error)
        finally:
            if self._pace is not None:
                self._pace.report()
            core.shutdown()

    def _run_commands(self, core: Core) -> bool:
        """Run the queued commands; wait while there is nothing to step. False: close."""
        while not self._commands.empty() or not _has_work(core):
            self._is_busy = False
            if self._pace is not None and not _has_work(core):
                self._pace.pause()
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
        if self._pace is not None:
            self._pace.begin()
        outputs, is_executed = core.step_fn()
        if self._pace is not None:
            self._pace.end()
        self._on_step(core, outputs or {})
        core.post_step(is_executed)
        self._num_ended += 1
        if not is_executed and core.scheduler.has_requests():
            # The step waits for something else, such as the compilation of a grammar.
            time.sleep(0.001)


def _has_work(core: Core) -> bool:
    return bool(core.scheduler.has_requests() or core.batch_queue)


class Pace:
    """Lets each step last as long as on other hardware: the thread sleeps for the rest of it.

    Engines that share the cores of one machine then behave as if each had hardware of its own, as
    long as their own work leaves the cores time. A step begins where the one before it ended, also
    if the thread was busy in between. A step that takes longer than its time makes the following
    ones no shorter. Belongs to the step thread.

    Args:
        step_time: the durations of steps, by their contents.
        report_interval_s: time between two lines of the log that say whether steps kept the pace.
    """

    def __init__(
        self,
        step_time: StepTime,
        *,
        report_interval_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._step_time = step_time
        self._report_interval_s = report_interval_s
        self._clock, self._sleep = clock, sleep
        self._begun_s = self._last_end_s = -math.inf
        self._duration_s = 0.0
        self._reported_s = clock()
        self._num_steps = self._num_late = 0
        self._paced_s = self._late_s = 0.0

    def follow(self, core: Core) -> None:
        """Learn of the contents of this core's steps."""
        scheduler = core.scheduler
        scheduler.on_scheduled = (
            *scheduler.on_scheduled,
            lambda output: self.expect(output.num_scheduled_tokens, scheduler.requests),
        )

    def expect(self, num_scheduled_tokens: Mapping[str, int], requests: Mapping[str, Any]) -> None:
        """Take the duration of a step that has been scheduled.

        Args:
            num_scheduled_tokens: tokens of each request that it computes.
            requests: those of the engine, where vLLM has counted these tokens as computed.
        """
        num_prompt_tokens = num_pairs = num_decodes = num_context_tokens = 0
        for request_id, num_tokens in num_scheduled_tokens.items():
            request = requests[request_id]
            end = request.num_computed_tokens
            first = end - num_tokens
            # Asynchronously scheduled steps do not know the tokens of the one before them yet.
            if end > request.num_prompt_tokens and first >= request.num_tokens - 1:
                num_decodes += 1
                num_context_tokens += end
            else:
                num_prompt_tokens += num_tokens
                num_pairs += end * end - first * first
        self._duration_s = 0.0
        if num_scheduled_tokens:
            self._duration_s = self._step_time.duration_s(
                num_prompt_tokens, num_pairs, num_decodes, num_context_tokens
            )

    def pause(self) -> None:
        """Nothing is computed meanwhile: the next step begins when it begins."""
        self._last_end_s = -math.inf

    def begin(self) -> None:
        """A step begins."""
        self._duration_s = 0.0
        self._begun_s = self._clock() if self._last_end_s == -math.inf else self._last_end_s

    def end(self) -> None:
        """A step has been computed: wait until its time is over."""
        if self._duration_s == 0.0:
            # Nothing could be computed, and the hardware was idle.
            self.pause()
            return
        end_s, now_s = self._begun_s + self._duration_s, self._clock()
        self._num_steps += 1
        self._paced_s += self._duration_s
        if now_s < end_s:
            self._sleep(end_s - now_s)
        else:
            self._num_late += 1
            self._late_s += now_s - end_s
        self._last_end_s = max(now_s, end_s)
        if now_s >= self._reported_s + self._report_interval_s:
            self._reported_s = now_s
            self.report()

    def report(self) -> None:
        """Log how many steps there were, and how far they were late."""
        logger.info(
            "paced steps=%d seconds=%.1f late=%d late_seconds=%.2f",
            self._num_steps,
            self._paced_s,
            self._num_late,
            self._late_s,
        )


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
        scheduler = core.scheduler
        scheduler.on_scheduled = (*scheduler.on_scheduled, lambda _: self.publish(core))

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
