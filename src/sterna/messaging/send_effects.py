"""Effects of the cores of actors on their mailboxes. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from sterna.messages.actors import WireMessage


class ToMailbox(msgspec.Struct, frozen=True):
    """Send this to the mailbox at the address, with the payload frames if there are any.

    No dataclass: one is made for each message, and a frozen dataclass takes six times as long.
    """

    address: str
    message: WireMessage
    frames: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True)
class KeepOnly:
    """Close the connections to all mailboxes but these."""

    addresses: frozenset[str]


@dataclass(frozen=True, slots=True)
class Unexpected:
    """A fact for the log: this message is not for that actor."""

    message: WireMessage
