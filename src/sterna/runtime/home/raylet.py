"""Ray's raylet of the home node: without it everything of the node ends, and nothing is started."""

import math

import ray

from sterna.errors import SternaError
from sterna.runtime.processes.process import ProcessWatch, watch_of_child


class RayletDiedError(SternaError):
    """The raylet of this node has ended."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"Ray's raylet of this machine has died ({reason}), and with it what ran there; start "
            "the server again"
        )


class Raylet:
    """The one that this process has started, by `ray.init`."""

    def __init__(self) -> None:
        self._watch: ProcessWatch | None = None

    def check(self) -> None:
        """Raises RayletDiedError: it has ended."""
        if self._watch is None:
            process = ray._private.worker._global_node.all_processes["raylet"][0].process
            # One that is stopped may go on. Ray gives its node up after a time, and then it ends.
            self._watch = watch_of_child(process.pid, math.inf)
        if self._watch is not None and (reason := self._watch.why_halted()) is not None:
            raise RayletDiedError(reason)
