"""What an actor that is up says of itself to a supervisor that takes the place of another."""

from dataclasses import dataclass

from sterna.engine.interface import EngineFacts
from sterna.messages.actors import Membership
from sterna.supervisor.failure_detector import ProcessIdentity


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """One actor.

    Attributes:
        membership: the newest that it has heard of.
        facts: of an instance's engine.
    """

    address: str
    membership: Membership
    process: ProcessIdentity
    facts: EngineFacts | None = None
