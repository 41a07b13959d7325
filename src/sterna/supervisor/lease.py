"""Leases: an instance that cannot be reached cannot be killed, and must end by itself. Pure.

An instance on another node than its supervisor acts only as long as it holds a **lease**. It lasts
for a fixed time after a heartbeat that was answered; the supervisor's answer names the heartbeat.
No two clocks are compared, and no message needs to be in time:

- the instance counts, on its own clock, from when it *sent* the heartbeat that was answered. That
  was before the supervisor got it. The supervisor counts, on its own clock, from when it *answers*,
  and therefore longer;
- an answer that is late, is lost or comes twice extends nothing beyond that;
- clocks may show any time, but must run at nearly the same pace (`DRIFT`).

So an instance whose lease has ended on the supervisor's side has ended before, wherever it is: its
requests may go on elsewhere. A supervisor's successor counts from its takeover: the predecessor is
dead by then, and answers no more heartbeats.

An instance on the supervisor's own node has no lease. There it can always be killed for certain,
and its end while there is no supervisor would gain nothing.
"""

DRIFT = 0.01
"""Largest relative difference between the paces of two clocks."""

MARGIN_S = 0.5
"""Time for an instance to notice the end of its lease."""


class HeldLease:
    """A lease on the instance's side.

    Args:
        duration_s: time for which it may act after it sent an answered heartbeat.
        now_s: the beginning of the lease, on the instance's own clock, as are all times below.
    """

    def __init__(self, duration_s: float, now_s: float) -> None:
        self._duration_s = duration_s
        self._ends_s = now_s + duration_s

    @property
    def ends_s(self) -> float:
        """When the lease ends without a further answer."""
        return self._ends_s

    def on_answer(self, asked_s: float) -> None:
        """The supervisor has answered the heartbeat that was sent at this time."""
        self._ends_s = max(self._ends_s, asked_s + self._duration_s)

    def has_ended(self, now_s: float) -> bool:
        """Whether the instance may no longer act."""
        return now_s >= self._ends_s


class GrantedLeases:
    """All leases on the supervisor's side.

    Args:
        duration_s: that of the instances.
    """

    def __init__(self, duration_s: float) -> None:
        self._certain_after_s = duration_s * (1 + DRIFT) + MARGIN_S
        self._granted_s: dict[str, float] = {}
        self._ending: set[str] = set()

    def grant(self, member: str, now_s: float) -> None:
        """The member's lease may have been extended until now: it has joined, or a supervisor that
        is dead by now may have answered it."""
        self._granted_s[member] = now_s

    def may_answer(self, member: str, now_s: float) -> bool:
        """Whether to answer a heartbeat of this member, which extends its lease.

        A member that is unknown or is to end gets no answer.
        """
        if member not in self._granted_s or member in self._ending:
            return False
        self._granted_s[member] = now_s
        return True

    def end(self, member: str) -> None:
        """Stop extending the member's lease."""
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
