"""The driver's handles of the supervisors of a run: the acting one, and the one in reserve.

Starting a process and importing a supervisor's modules takes seconds while engines keep all
processors busy. The one in reserve has done both, and takes over when the acting one dies.

They are actors that outlive the driver, so that another driver finds them.

docs/internals/parts.md compares a server without this.
"""

import asyncio
import contextlib
import time
from typing import Any, Self

import ray

from sterna.runtime.actors.addresses import staying_here
from sterna.runtime.processes.process import ProcessWatch, end_process
from sterna.runtime.supervisor.instance_actors import surviving_as
from sterna.runtime.supervisor.shell import SupervisorActor
from sterna.supervisor.failure_detector import ProcessIdentity

NAME = "supervisor "
"""Prefix of the names of supervisors in Ray."""

STOPPED_TIMEOUT_S = 2.0
"""A supervisor that is stopped for this time is replaced."""


class SupervisorHandle:
    """The actor of one supervisor, and its process.

    Args:
        actor: Ray's handle of it.
        is_reserve: whether it is to stand by.
        has_begun: the pending call of `has_begun` if this supervisor is taken for the acting one
            before it has answered.
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
        """Start a supervisor. Args: those of `Supervisor` and of this class."""
        # A name that no driver has used before; the latest one sorts last.
        name = f"{NAME}{time.time_ns():020}"
        actor = SupervisorActor.options(**surviving_as(name), **staying_here()).remote(
            environment, metrics_folder, is_successor=is_successor
        )
        return cls(actor, is_reserve=is_reserve)

    def why_halted(self) -> str | None:
        """Return, once, the reason why it is lost: its process has ended or is stopped, or it was
        wrongly taken for the acting one. Its end on another node is known to Ray only."""
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
            # Ray shows the latest call in the title of a process, which distinguishes the two.
            self.actor.stand_by.remote()

    def end(self) -> None:
        """Kill it, since it must not act beside a successor."""
        if self._watch is not None and self._process is not None:
            asyncio.run(end_process(self._process))
        ray.kill(self.actor)


def find_supervisors(timeout_s: float) -> tuple[SupervisorHandle | None, SupervisorHandle | None]:
    """Return the acting supervisor and the one in reserve that another driver has started; None for
    one that does not exist.

    Args:
        timeout_s: time for their answers. A supervisor that does not answer is taken for the acting
            one if no other acts: `why_halted` then finds out.
    """
    asked: dict[ray.ObjectRef, Any] = {}
    for name in sorted(each for each in ray.util.list_named_actors() if each.startswith(NAME)):
        # The supervisor may have died meanwhile.
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
