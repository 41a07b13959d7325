"""Mistakes with leases, of either side."""

from sterna.supervisor.lease import GrantedLeases, HeldLease


class NeverEnds(HeldLease):
    """Acts on, though nobody has answered."""

    def has_ended(self, now_s: float) -> bool:
        return False


class DoesNotWait(GrantedLeases):
    """Takes who is to end for dead at once, though it could not be killed."""

    def certain_s(self, member: str) -> float:
        return self._granted_s[member] if member in self._ending else super().certain_s(member)


class ExtendsWhatEnds(GrantedLeases):
    """Answers who is to end as well."""

    def may_answer(self, member: str, now_s: float) -> bool:
        return member in self._granted_s


class ForgetsThePredecessor(GrantedLeases):
    """Takes it that nobody has been answered lately by a supervisor that is dead."""

    def grant(self, member: str, now_s: float) -> None:
        super().grant(member, now_s - self._certain_after_s + 0.6)
