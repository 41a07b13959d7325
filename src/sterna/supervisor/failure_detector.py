"""Failure detector: finds the members of a cluster that have stopped working. Pure.

It judges members by their progress, not by answers. Three signs count:

- the **state of its process**, seen on its node: a process that is gone is dead, and one that stays
  stopped (SIGSTOP) will do nothing;
- its **heartbeats**, which come from the loop in which it does everything else: a member whose
  process runs without heartbeats for long hangs as a whole;
- the steps of its **engine** that heartbeats report: an engine that has work, and ends no step for
  very long, hangs even if its member answers.

A member on another node may be silent because of the network: while its node cannot be looked at,
its heartbeats and their contents do not count. Its lease limits this time (`lease`).

Times are measured on the watcher's clock, and not while the watcher itself does not run: a machine
that was asleep, or too busy to run anything, must not lose all its members at once.

A member that is found here must be *fenced*, killed for certain, before another one takes over its
work.
"""

from dataclasses import dataclass
from enum import Enum
from math import inf

import msgspec

from sterna.config import WatchConfig
from sterna.messages.actors import Heartbeat


class ProcessIdentity(msgspec.Struct, frozen=True, array_like=True):
    """Identity of one process, unique over all nodes and times.

    Attributes:
        node_id: Ray's id of the node.
        started_ticks: its start in the kernel's clock ticks, since process ids are used again.
    """

    node_id: str
    process_id: int
    started_ticks: int


class ProcessState(Enum):
    """State of a process on its node. *Unseen* means that it cannot be looked at, for instance
    because no file can be opened, which says nothing about it."""

    RUNNING = "running"
    STOPPED = "stopped"
    GONE = "gone"
    UNSEEN = "unseen"


@dataclass(frozen=True, slots=True)
class Halted:
    """This member has stopped working; `reason` is for the log."""

    member: str
    reason: str


@dataclass(slots=True)
class _Watched:
    """One member.

    Attributes:
        stopped_timeout_s: time for which its process may be stopped.
        silence_timeout_s: longest time between two heartbeats.
        stopped_s: when it was first seen stopped; None while it is not.
        is_gone: whether its process has ended.
        heard_s: when its last heartbeat came; None before the first one.
        num_ended: the number of steps that its engine had ended by then.
        ended_s: when that number last changed, or the engine last had no work.
        is_remote: whether it is on another node than its watcher.
        seen_s: when its process was last looked at; None before the first time.
    """

    stopped_timeout_s: float
    silence_timeout_s: float
    is_remote: bool = False
    seen_s: float | None = None
    stopped_s: float | None = None
    is_gone: bool = False
    heard_s: float | None = None
    num_ended: int = 0
    ended_s: float = 0.0

    def shift(self, delay_s: float, now_s: float) -> None:
        """Ignore this amount of the time until now."""
        self.ended_s = min(now_s, self.ended_s + delay_s)
        if self.stopped_s is not None:
            self.stopped_s = min(now_s, self.stopped_s + delay_s)
        if self.heard_s is not None:
            self.heard_s = min(now_s, self.heard_s + delay_s)
        if self.seen_s is not None:
            self.seen_s = min(now_s, self.seen_s + delay_s)


class FailureDetector:
    """The members that one watcher watches."""

    def __init__(self, config: WatchConfig) -> None:
        self._config = config
        self._watched: dict[str, _Watched] = {}
        self._looked_s: float | None = None

    def on_joined(
        self,
        member: str,
        *,
        stopped_timeout_s: float | None = None,
        silence_timeout_s: float | None = None,
        is_remote: bool = False,
    ) -> None:
        """Watch this member.

        Args:
            stopped_timeout_s, silence_timeout_s: values in place of the configured ones.
            is_remote: whether it is on another node than its watcher.
        """
        if stopped_timeout_s is None:
            stopped_timeout_s = self._config.stopped_timeout_s
        if silence_timeout_s is None:
            silence_timeout_s = self._config.instance_timeout_s
        self._watched[member] = _Watched(stopped_timeout_s, silence_timeout_s, is_remote)

    def on_left(self, member: str) -> None:
        """Stop watching this member, if it is watched."""
        self._watched.pop(member, None)

    def on_heartbeat(self, heartbeat: Heartbeat, now_s: float) -> None:
        """Take in a heartbeat. Silence counts from a member's first heartbeat on."""
        watched = self._watched.get(heartbeat.member)
        if watched is None:
            return
        has_ended_something = heartbeat.num_ended != watched.num_ended or watched.heard_s is None
        if has_ended_something or not heartbeat.is_busy:
            watched.ended_s = now_s
        watched.num_ended = heartbeat.num_ended
        watched.heard_s = now_s

    def on_state(self, member: str, state: ProcessState, now_s: float) -> None:
        """Take in the state of the member's process, seen on its node."""
        watched = self._watched.get(member)
        if watched is None:
            return
        if watched.is_remote:
            if self._is_out_of_sight(watched, now_s):
                unseen_s = inf if watched.seen_s is None else now_s - watched.seen_s
                watched.shift(unseen_s, now_s)
            watched.seen_s = now_s
        match state:
            case ProcessState.GONE:
                watched.is_gone = True
            case ProcessState.STOPPED if watched.stopped_s is None:
                watched.stopped_s = now_s
            case ProcessState.RUNNING | ProcessState.UNSEEN:
                # A process that cannot be looked at may run again.
                watched.stopped_s = None

    def on_time(self, now_s: float) -> list[Halted]:
        """Return the members that have stopped working, in the order in which they joined, and
        stop watching them. To be called several times a second, after all heartbeats and states
        that have arrived were taken in."""
        if self._looked_s is not None:
            delay_s = now_s - self._looked_s
            if delay_s > self._config.own_pause_s:
                for watched in self._watched.values():
                    watched.shift(delay_s, now_s)
        self._looked_s = now_s
        halted = [
            Halted(member, reason)
            for member, watched in self._watched.items()
            if (reason := self._reason(watched, now_s)) is not None
        ]
        for each in halted:
            del self._watched[each.member]
        return halted

    def _reason(self, watched: _Watched, now_s: float) -> str | None:
        if watched.is_gone:
            return "its process has ended"
        stopped_s = watched.stopped_s
        if stopped_s is not None and now_s - stopped_s >= watched.stopped_timeout_s:
            return f"its process is stopped, for {now_s - stopped_s:.1f} s"
        if watched.heard_s is None or self._is_out_of_sight(watched, now_s):
            return None
        if now_s - watched.heard_s >= watched.silence_timeout_s:
            return f"nothing was heard of it for {now_s - watched.heard_s:.1f} s"
        if now_s - watched.ended_s >= self._config.step_timeout_s:
            return f"its engine has work and has ended no step for {now_s - watched.ended_s:.1f} s"
        return None

    def _is_out_of_sight(self, watched: _Watched, now_s: float) -> bool:
        if not watched.is_remote:
            return False
        return watched.seen_s is None or now_s - watched.seen_s > self._config.own_pause_s
