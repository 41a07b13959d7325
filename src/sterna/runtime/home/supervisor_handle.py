"""The supervisors of a run, as its driver sees them: the one that acts, and the one in reserve.

To start a process and import what a supervisor needs takes seconds where all processors are busy
with engines. The one in reserve has that behind it: it takes over when the other one dies.

They are actors that outlive the driver, so that another driver finds them.
"""

import asyncio
import contextlib
import time
from typing import Any, Self

import ray

from sterna.runtime.actors.addresses import staying_here
from sterna.runtime.processes.process import ProcessWatch, end_process
from sterna.runtime.supervisor.instance_actors import surviving_as
from sterna.runtime.supervisor.shell import ClusterActor
from sterna.supervisor.failure_detector import ProcessIdentity

NAME = "supervisor "
"""How the names of supervisors begin."""

STOPPED_TIMEOUT_S = 2.0
"""A supervisor that is stopped for so long is replaced."""


class SupervisorHandle:
    """One supervisor's actor, and its process.

    Args:
        actor: its handle in Ray.
        is_reserve: whether it is to stand by.
        has_begun: the answer, not there yet, of one that is taken for the one that acts.
    """

    def __init__(
        self,
        actor: Any,
        *,
        is_reserve: bool = False,
        has_begun: "ray.ObjectRef | None" = None,
    ) -> None:
        self.actor = actor
        self._is_reserve = is_reserve
        self._has_begun = has_begun
        self._asked = actor.process.remote()
        self._process: ProcessIdentity | None = None
        self._watch: ProcessWatch | None = None

    @classmethod
    def begin(
        cls,
        environment: dict[str, str],
        metrics_folder: str,
        *,
        is_successor: bool,
        is_reserve: bool = False,
    ) -> Self:
        """Start one. Args: as `Cluster`, and as this class."""
        # A name that was never used, also not by another driver; the latest one sorts last.
        name = f"{NAME}{time.time_ns():020}"
        actor = ClusterActor.options(**surviving_as(name), **staying_here()).remote(
            environment, metrics_folder, is_successor=is_successor
        )
        return cls(actor, is_reserve=is_reserve)

    def why_halted(self) -> str | None:
        """Say, once, that its process has ended or is stopped, or that it was wrongly taken for the
        one that acts. Where it is on another node, only Ray tells of its end."""
        if self._has_begun is not None and ray.wait([self._has_begun], timeout=0)[0]:
            answer, self._has_begun = self._has_begun, None
            with contextlib.suppress(ray.exceptions.RayError):
                if not ray.get(answer):
                    return "it is in reserve, and no other one acts"
        if self._process is None and ray.wait([self._asked], timeout=0)[0]:
            with contextlib.suppress(ray.exceptions.RayError):
                self._on_process(ray.get(self._asked))
        return None if self._watch is None else self._watch.why_halted()

    def _on_process(self, process: ProcessIdentity) -> None:
        self._process = process
        if process.node_id == ray.get_runtime_context().get_node_id():
            self._watch = ProcessWatch(process, STOPPED_TIMEOUT_S)
        if self._is_reserve:
            # Ray shows the latest call in the process's title, by which the two are told apart.
            self.actor.stand_by.remote()

    def end(self) -> None:
        """Kill it, whatever it does: it must not act beside a successor."""
        if self._watch is not None and self._process is not None:
            asyncio.run(end_process(self._process))
        ray.kill(self.actor)


def find_supervisors(timeout_s: float) -> tuple[SupervisorHandle | None, SupervisorHandle | None]:
    """Return the supervisor that acts, and the one in reserve, of those that another driver has
    started; None for one that there is not.

    Args:
        timeout_s: what they have for answering. One that does not is taken for the one that acts,
            where no other does: whoever watches it sees why.
    """
    asked: dict[ray.ObjectRef, Any] = {}
    for name in sorted(each for each in ray.util.list_named_actors() if each.startswith(NAME)):
        # It may have died meanwhile.
        with contextlib.suppress(ValueError):
            actor = ray.get_actor(name)
            asked[actor.has_begun.remote()] = actor
    if not asked:
        return None, None
    answered, silent = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s)
    acting: list[tuple[Any, ray.ObjectRef | None]] = [(asked[each], each) for each in silent]
    reserve = []
    for each in answered:
        with contextlib.suppress(ray.exceptions.RayError):
            if ray.get(each):
                acting.append((asked[each], None))
            else:
                reserve.append(asked[each])
    for actor in (*[actor for actor, _ in acting[:-1]], *reserve[:-1]):
        ray.kill(actor)
    return (
        SupervisorHandle(acting[-1][0], has_begun=acting[-1][1]) if acting else None,
        SupervisorHandle(reserve[-1], is_reserve=True) if reserve else None,
    )
