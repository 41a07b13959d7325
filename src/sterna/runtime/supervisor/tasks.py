"""The supervisor's tasks: an error in one of them is an error of the supervisor."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

logger = logging.getLogger(__name__)


class Tasks:
    """Runs coroutines until `cancel`."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run it concurrently with the others."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_ended)
        return task

    async def failed(self) -> None:
        """Wait for the first error of a task, which is a bug, and raise it."""
        await asyncio.shield(self._failure)

    def cancel(self) -> None:
        """End all of them."""
        for task in self._tasks:
            task.cancel()

    def _on_ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("supervisor failed", exc_info=error)
            if not self._failure.done():
                self._failure.set_exception(error)
