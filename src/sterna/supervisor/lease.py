"""Leases: who cannot be reached cannot be killed, and must end by itself. Pure.

An instance on another node than its supervisor acts only as long as it holds a **lease**, which
lasts for so long from when it last asked. Every heartbeat asks; the supervisor's answer names the
heartbeat that it is to. No two clocks are compared, and no message needs to be in time:

- the instance counts from when it *sent* the heartbeat that was answered, by its own clock. That
  was before the supervisor got it, so that the supervisor, who counts from when it *answers*, by
  its own clock, counts longer;
- an answer that is late, is lost or comes twice extends nothing beyond that;
- clocks may show any time, but must run at nearly the same pace (`DRIFT`).

So an instance whose lease has ended on the supervisor's side has ended before, wherever it is: its
requests may go on elsewhere. A supervisor's successor counts from when it takes over: its
predecessor, who is dead by then, has answered nobody after that.

An instance on the supervisor's own node has no lease. There it can always be killed for certain,
and nothing would be won by its end should there be no supervisor for a while.
"""

DRIFT = 0.01
"""By so much, at most, one clock may be faster than the other."""

MARGIN_S = 0.5
"""What an instance has for noticing the end of its lease."""


class HeldLease:
    """The instance's side.

    Args:
        duration_s: how long it may act from when it asked.
        now_s: it has been begun now, and holds a lease. Its own clock, also below.
    """

    def __init__(self, duration_s: float, now_s: float) -> None:
        self._duration_s = duration_s
        self._ends_s = now_s + duration_s

    @property
    def ends_s(self) -> float:
        """When it ends, should nothing be heard."""
        return self._ends_s

    def on_answer(self, asked_s: float) -> None:
        """The supervisor has answered what was asked then."""
        self._ends_s = max(self._ends_s, asked_s + self._duration_s)

    def has_ended(self, now_s: float) -> bool:
        """Whether the instance must not act any more."""
        return now_s >= self._ends_s


class GrantedLeases:
    """The supervisor's side.

    Args:
        duration_s: as the instances have it.
    """

    def __init__(self, duration_s: float) -> None:
        self._certain_after_s = duration_s * (1 + DRIFT) + MARGIN_S
        self._granted_s: dict[str, float] = {}
        self._ending: set[str] = set()

    def grant(self, member: str, now_s: float) -> None:
        """The member's lease may have been extended until now: it has joined, or a supervisor that
        is dead may have answered it."""
        self._granted_s[member] = now_s

    def may_answer(self, member: str, now_s: float) -> bool:
        """Whether to answer a heartbeat of this member, which extends its lease.

        One that is to end is not answered any more, nor one that is not known.
        """
        if member not in self._granted_s or member in self._ending:
            return False
        self._granted_s[member] = now_s
        return True

    def end(self, member: str) -> None:
        """Extend the member's lease no more."""
        self._ending.add(member)

    def forget(self, member: str) -> None:
        """The member is dead."""
        self._granted_s.pop(member, None)
        self._ending.discard(member)

    def certain_s(self, member: str) -> float:
        """When the member's lease has ended for certain, unless it is extended."""
        return self._granted_s[member] + self._certain_after_s

    def ended(self, now_s: float) -> list[str]:
        """The members whose lease has ended for certain."""
        return [each for each in self._granted_s if now_s >= self.certain_s(each)]
