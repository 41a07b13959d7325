"""Mistakes in the machines by which messages arrive once and in order."""

from collections.abc import Set as AbstractSet

from sterna.messaging.mailbox_core import MailboxCore
from sterna.messaging.reliable_channel import GAP, RECEIPT, Frames, Head, ReceivingEnd, SendingEnd


class _WithChannels(MailboxCore):
    """Sends and receives by other machines."""

    outgoing: type[SendingEnd] = SendingEnd
    incoming: type[ReceivingEnd] = ReceivingEnd

    def _new_outgoing(self, channel: bytes) -> SendingEnd:
        return self.outgoing(channel, self._capacity, self._capacity_bytes)

    def _new_incoming(self, channel: bytes) -> ReceivingEnd:
        return self.incoming(channel)


class _Silent(SendingEnd):
    def probe(self, now_s: float) -> Head | None:
        return None


class NeverProbes(_WithChannels):
    """Does not ask whether everything has arrived."""

    outgoing = _Silent


class _Content(SendingEnd):
    def on_receipt(self, head: Head, now_s: float) -> list[tuple[Head, Frames]]:
        again = super().on_receipt(head, now_s)
        if not again:
            self._probe_due_s = None
        return again


class IsContentWithAPart(_WithChannels):
    """Does not ask for the rest, once it has a receipt for a part."""

    outgoing = _Content


class _Boastful(ReceivingEnd):
    _highest = -1

    def on_message(self, number: int, now_s: float, is_periodic: bool = False) -> bool:
        self._highest = max(self._highest, number)
        return super().on_message(number, now_s, is_periodic)

    def receipt(self, now_s: float) -> Head | None:
        head = super().receipt(now_s)
        return None if head is None else head._replace(number=max(head.number, self._highest + 1))


class ConfirmsTooFar(_WithChannels):
    """Confirms what came behind a gap, and with it what is missing."""

    incoming = _Boastful


class _Undemanding(ReceivingEnd):
    def receipt(self, now_s: float) -> Head | None:
        head = super().receipt(now_s)
        return None if head is None else head._replace(kind=RECEIPT)


class NeverAsksForGaps(_WithChannels):
    """Drops what comes behind a gap, and does not ask for what is missing."""

    incoming = _Undemanding


class _Stubborn(ReceivingEnd):
    def on_probe(self, number: int, now_s: float) -> None:
        has_asked = self._has_asked
        super().on_probe(number, now_s)
        if has_asked:
            self._receipt_due_s = None


class AsksOnceForAGap(_WithChannels):
    """Asks for a gap once, though the question, or the answer, may be lost."""

    incoming = _Stubborn


class _Credulous(ReceivingEnd):
    def on_message(self, number: int, now_s: float, is_periodic: bool = False) -> bool:
        return super().on_message(number, now_s, is_periodic) or number < self._expected


class HandsRepeatsOver(_WithChannels):
    """Hands over what came before, too."""

    incoming = _Credulous


class _Mute(ReceivingEnd):
    def receipt(self, now_s: float) -> Head | None:
        head = super().receipt(now_s)
        return None if head is None or head.kind != GAP else head


class ConfirmsNothing(_WithChannels):
    """Asks for what is missing, and says nothing of what has come."""

    incoming = _Mute


class _Forward(ReceivingEnd):
    def on_message(self, number: int, now_s: float, is_periodic: bool = False) -> bool:
        self._expected = max(self._expected, number)
        return super().on_message(number, now_s, is_periodic)


class TakesWhatIsAhead(_WithChannels):
    """Takes whatever comes next for the next message."""

    incoming = _Forward


class KeepsForgottenChannels(MailboxCore):
    """Takes a receipt for an address that it has forgotten."""

    def keep_only(self, addresses: AbstractSet[str]) -> None:
        channels = dict(self._addresses)
        super().keep_only(addresses)
        self._addresses = channels
