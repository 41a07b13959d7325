"""Peers of a front end: the addresses of the other actors, and questions that await answers."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from sterna.errors import UnansweredError
from sterna.messages.actors import Membership, WireMessage
from sterna.messaging.mailbox import Mailbox
from sterna.types import FrontendId, InstanceId

Answer = TypeVar("Answer")

SCHEDULER = "the scheduler"
SUPERVISOR = "the supervisor"
"""Names of the actors in error messages."""


class Peers:
    """Sends to the members of the newest membership."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._membership = Membership(-1, (), (), None)
        self._addresses: dict[InstanceId, str] = {}
        self._frontends: dict[FrontendId, str] = {}
        self._is_served = asyncio.Event()

    @property
    def membership(self) -> Membership:
        """The newest membership that has arrived."""
        return self._membership

    @property
    def own_address(self) -> str:
        """The address of the mailbox to which the others answer."""
        return self._mailbox.address

    @property
    def first_frontend(self) -> FrontendId | None:
        """The front end with the smallest id; None in an empty membership."""
        return min(self._frontends, default=None)

    @property
    def instances(self) -> tuple[InstanceId, ...]:
        """The live instances."""
        return tuple(self._addresses)

    async def served(self) -> None:
        """Wait until at least one instance lives."""
        await self._is_served.wait()

    def on_membership(self, membership: Membership) -> bool:
        """Take in a membership; returns False if it is no news."""
        if membership.version <= self._membership.version:
            return False
        self._membership = membership
        self._addresses = {each.instance_id: each.address for each in membership.instances}
        if self._addresses:
            self._is_served.set()
        else:
            self._is_served.clear()
        others = (membership.scheduler, membership.supervisor)
        self._frontends = {each.frontend_id: each.address for each in membership.frontends}
        addresses = {
            *self._addresses.values(),
            *self._frontends.values(),
            *(each for each in others if each is not None),
        }
        self._mailbox.keep_only(addresses)
        return True

    def send_to_instance(
        self, instance_id: InstanceId, message: WireMessage, frames: Sequence[bytes] = ()
    ) -> bool:
        """Send, unless the instance has gone: then the message has no meaning. Returns False if a
        live instance does not get it."""
        address = self._addresses.get(instance_id)
        return address is None or self._mailbox.send(address, message, frames)

    def send_to_frontend(
        self, frontend_id: FrontendId, message: WireMessage, frames: Sequence[bytes] = ()
    ) -> bool:
        """Send, unless the front end has gone; returns False if a live one cannot be sent to."""
        address = self._frontends.get(frontend_id)
        return address is None or self._mailbox.send(address, message, frames)

    def send_to_supervisor(self, message: WireMessage) -> bool:
        """Send; returns False if there is no supervisor."""
        if self._membership.supervisor is None:
            return False
        self._mailbox.send(self._membership.supervisor, message)
        return True

    def send_to_scheduler(self, message: WireMessage) -> bool:
        """Send; returns False if there is no scheduler."""
        if self._membership.scheduler is None:
            return False
        self._mailbox.send(self._membership.scheduler, message)
        return True


class Questions(Generic[Answer]):
    """Questions and their answers, which are messages of their own, matched by number.

    Args:
        timeout_s: a question fails after this time; None for no limit.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        # By question: the instance that was asked, or None; the name for errors; the answer.
        self._waiting: dict[int, tuple[InstanceId | None, str, asyncio.Future[Answer]]] = {}
        # None until `on_instances` says it.
        self._live: frozenset[InstanceId] | None = None
        self._next_id = 1

    async def ask(
        self,
        instance_id: InstanceId | None,
        send: Callable[[int], object],
        *,
        name: str = SCHEDULER,
    ) -> Answer:
        """Number the question, send it, and wait for the answer.

        Args:
            instance_id: the instance to ask; None for another actor.
            name: the name of that actor, for the error.

        Raises:
            UnansweredError: the actor died, or did not answer in time.
        """
        name = name if instance_id is None else f"instance {instance_id}"
        if instance_id is not None and self._live is not None and instance_id not in self._live:
            # It may have gone since the caller chose it. Nothing would be sent to it.
            raise UnansweredError(_death(name))
        question_id = self._next_id
        self._next_id += 1
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[question_id] = (instance_id, name, future)
        try:
            send(question_id)
            async with asyncio.timeout(self._timeout_s):
                return await future
        except TimeoutError:
            raise UnansweredError(
                f"{name} did not answer within {self._timeout_s:g} s; try again"
            ) from None
        finally:
            del self._waiting[question_id]

    def on_answer(self, question_id: int, answer: Answer) -> None:
        """An answer has arrived; it is dropped if its question has been given up."""
        *_, future = self._waiting.get(question_id, (None,))
        if future is not None and not future.done():
            future.set_result(answer)

    def on_instances(self, live: Sequence[InstanceId]) -> None:
        """Give up the questions to instances that are not among these, those of the future too."""
        self._live = frozenset(live)
        for instance_id, name, future in self._waiting.values():
            if instance_id is not None and instance_id not in self._live:
                _give_up(name, future)

    def on_gone(self, gone: str) -> None:
        """Give up the questions to the actor of this name, which is no instance."""
        for instance_id, name, future in self._waiting.values():
            if instance_id is None and name == gone:
                _give_up(name, future)


def _give_up(name: str, future: asyncio.Future[Answer]) -> None:
    if not future.done():
        future.set_exception(UnansweredError(_death(name)))


def _death(name: str) -> str:
    return f"{name} died; try again"
