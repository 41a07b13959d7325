"""Which members of a cluster have stopped working, although nobody has told of their deaths. Pure.

A member is noticed by its progress, not by an answer. Three things are looked at:

- the **state of its process**, seen on its node: one that is gone is dead, one that stays stopped
  (SIGSTOP) will do nothing;
- its **heartbeats**, which come from the loop in which it does everything else: one whose process
  runs but that says nothing for long hangs as a whole;
- what its heartbeats say of its **engine**: one that has something in hand, and ends nothing for
  very long, hangs in it, however well its member answers.

A member on another node may be silent because of the network: while its node cannot be looked at,
neither its heartbeats nor what they say count. How long that may last is for its lease to say
(`lease`).

All that counts is counted on the watcher's clock, and not while the watcher itself did not run: a
machine that was asleep, or was too busy to let anybody run, must not lose all its members at
once.

Whoever is found here is to be *fenced*, killed for certain, before anybody takes its work over.
"""

from dataclasses import dataclass
from enum import Enum
from math import inf

import msgspec

from sterna.config import WatchConfig
from sterna.messages.actors import Heartbeat


class ProcessIdentity(msgspec.Struct, frozen=True, array_like=True):
    """One process, of all that there have been on any node.

    Attributes:
        node_id: the cluster engine's name of the node.
        started_ticks: when it started, as the kernel counts: process ids are used again.
    """

    node_id: str
    process_id: int
    started_ticks: int


class ProcessState(Enum):
    """What its node says of a process. One that cannot be looked at, as where no file can be
    opened, is *unseen*: that says nothing of it."""

    RUNNING = "running"
    STOPPED = "stopped"
    GONE = "gone"
    UNSEEN = "unseen"


@dataclass(frozen=True, slots=True)
class Halted:
    """This member works no more; `reason` is for the log."""

    member: str
    reason: str


@dataclass(slots=True)
class _Watched:
    """One member.

    Attributes:
        stopped_timeout_s: how long its process may be stopped.
        silence_timeout_s: how long nothing may be heard of it.
        stopped_s: when it was first seen stopped, or None while it is not.
        is_gone: whether its process has ended.
        heard_s: when it was last heard of; None before the first time.
        num_ended: what its engine had ended by then.
        ended_s: when that number last changed, or the engine had nothing in hand.
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
        """Count so much of the time until now for nothing."""
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
            stopped_timeout_s, silence_timeout_s: where they are not those configured.
            is_remote: whether it is on another node than its watcher.
        """
        if stopped_timeout_s is None:
            stopped_timeout_s = self._config.stopped_timeout_s
        if silence_timeout_s is None:
            silence_timeout_s = self._config.instance_timeout_s
        self._watched[member] = _Watched(stopped_timeout_s, silence_timeout_s, is_remote)

    def on_left(self, member: str) -> None:
        """Watch this member no more; one that is not watched is ignored."""
        self._watched.pop(member, None)

    def on_heartbeat(self, heartbeat: Heartbeat, now_s: float) -> None:
        """The member is alive as a whole. Silence counts from its first heartbeat on."""
        watched = self._watched.get(heartbeat.member)
        if watched is None:
            return
        has_ended_something = heartbeat.num_ended != watched.num_ended or watched.heard_s is None
        if has_ended_something or not heartbeat.is_busy:
            watched.ended_s = now_s
        watched.num_ended = heartbeat.num_ended
        watched.heard_s = now_s

    def on_state(self, member: str, state: ProcessState, now_s: float) -> None:
        """Its node says so of the member's process."""
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
                # Whether one that is not seen is still stopped, nobody knows.
                watched.stopped_s = None

    def on_time(self, now_s: float) -> list[Halted]:
        """Return the members that work no more, in the order in which they joined; they are
        watched no longer. To be called several times a second, after what has come in was
        handed on."""
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
