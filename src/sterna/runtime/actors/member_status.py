"""Status of an actor that is up: its answer to a supervisor that takes over."""

from dataclasses import dataclass

from sterna.engine.interface import EngineFacts
from sterna.messages.actors import Membership
from sterna.supervisor.failure_detector import ProcessIdentity


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """One actor.

    Attributes:
        membership: the newest one that it knows.
        facts: those of an instance's engine.
        weight_updates: that of `EngineActivity`, of an instance.
    """

    address: str
    membership: Membership
    process: ProcessIdentity
    facts: EngineFacts | None = None
    weight_updates: str = ""
