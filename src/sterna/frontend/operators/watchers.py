"""Watching the cluster: frames of the dashboard, made while someone looks.

The first watcher starts the task that asks the other actors, and it ends with the last one. All
watchers get the same frames; one that does not read is cut off, and connects again.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from sterna.dashboard.cluster_frames import (
    LATENCY_WINDOW_S,
    Frame,
    Frames,
    ShownDecision,
    ShownInstance,
    ShownRequest,
    interval_s,
)
from sterna.dashboard.decisions import line_of
from sterna.dashboard.page import event
from sterna.errors import UnansweredError
from sterna.frontend.operators.questions import Described, Operators
from sterna.priority_classes import PriorityClasses
from sterna.types import InstanceId, RequestStatus

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 2.0
"""Time that an actor has to answer for a frame, which does without it then."""

MAX_UNREAD_FRAMES = 8
"""Of a watcher, before it is cut off."""

_Queue = asyncio.Queue[bytes | None]


class Watch:
    """The frames of one front end's watchers.

    Args:
        model: the name of the model that is served.
    """

    def __init__(self, operators: Operators, model: str, classes: PriorityClasses) -> None:
        self._operators = operators
        usual_first = sorted(classes.classes, key=lambda each: abs(each.scheduling_priority))
        ranks = {each.name: int(each.scheduling_priority) for each in usual_first}
        self._make_frames = partial(Frames, model, ranks)
        self._frames = self._make_frames()
        self._watchers: set[_Queue] = set()
        self._is_closed = False
        self._interval_s = 1.0
        self._task: asyncio.Task[None] | None = None
        # What was answered last: a frame without an answer shows the same again.
        self._instances: list[Described] = []
        self._requests: dict[InstanceId, list[Described]] = {}

    @property
    def num_watchers(self) -> int:
        """Those that are connected."""
        return len(self._watchers)

    async def events(self) -> AsyncIterator[bytes]:
        """A watcher's stream of server-sent events: a header, then frames."""
        if self._is_closed:
            return
        queue: _Queue = asyncio.Queue(MAX_UNREAD_FRAMES + 1)
        if not self._watchers:
            self._frames = self._make_frames()
        self._watchers.add(queue)
        header = event(msgspec.json.encode(self._frames.header()))
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        try:
            yield header
            while (frame := await queue.get()) is not None:
                yield frame
        finally:
            self._watchers.discard(queue)
            if not self._watchers and self._task is not None:
                self._task.cancel()
                self._task = None

    def close(self) -> None:
        """End all streams; there will be no others."""
        self._is_closed = True
        self._end_all()

    def _end_all(self) -> None:
        for queue in self._watchers:
            _end(queue)

    def send(self, encoded: bytes) -> None:
        """Send an event to all watchers; those that have not read the last ones are cut off."""
        for queue in self._watchers:
            if queue.qsize() < MAX_UNREAD_FRAMES:
                queue.put_nowait(encoded)
            else:
                _end(queue)

    async def _run(self) -> None:
        try:
            while True:
                begin_s = time.monotonic()
                frame = await self.frame()
                self.send(event(msgspec.json.encode(frame)))
                self._interval_s = interval_s(len(frame["instances"]))
                spent_s = time.monotonic() - begin_s
                await asyncio.sleep(max(0.1, self._interval_s - spent_s))
        except Exception:
            logger.exception("the dashboard's frames have ended")
            # The next watcher starts with the current state.
            self._task = None
            self._end_all()

    async def frame(self) -> Frame:
        """Ask the other actors, and make the next frame of what they answer in time."""
        (instances, error), recent, answers = await asyncio.gather(
            self._listed_instances(),
            self._operators.recent(max(LATENCY_WINDOW_S, 2 * self._interval_s), ANSWER_TIMEOUT_S),
            self._operators.requests_by_instance(ANSWER_TIMEOUT_S),
        )
        names = [InstanceId(each["id"]) for each in instances]
        known = {**self._requests, **answers}
        self._requests = {name: known.get(name, []) for name in names}
        return self._frames.frame(
            time.time(),
            [_instance(each, self._requests[InstanceId(each["id"])]) for each in instances],
            num_held=recent["waiting"],
            ttfts_s=recent["ttft_s"],
            tpots_s=recent["tpot_s"],
            decisions=[
                ShownDecision(each["time_s"], each["request"], each["event"], line_of(each))
                for each in recent["decisions"]
            ],
            error=error,
        )

    async def _listed_instances(self) -> tuple[list[Described], str | None]:
        """The instances, and the error without an answer: then those that were listed last."""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                self._instances = await self._operators.list_instances()
        except UnansweredError as error:
            return self._instances, str(error)
        except TimeoutError:
            return self._instances, "the scheduler does not answer"
        return self._instances, None


def _instance(instance: Described, requests: Sequence[Described]) -> ShownInstance:
    return ShownInstance(
        instance["id"],
        instance["state"],
        instance["total_tokens"],
        instance["used_tokens"],
        instance["freeness"],
        instance["running"],
        instance["queuing"],
        instance["note"],
        [_request(each) for each in requests],
    )


def _request(request: Described) -> ShownRequest:
    is_queuing = request["status"] == RequestStatus.QUEUING.value
    return ShownRequest(request["id"], request["class"], request["used_tokens"], is_queuing)


def _end(queue: _Queue) -> None:
    """End a watcher's stream behind what it has not read."""
    with suppress(asyncio.QueueFull):
        queue.put_nowait(None)
