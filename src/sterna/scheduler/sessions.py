"""The last turns of sessions, whose prefixes may be copied ahead of the next ones. Pure."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from msgspec import structs

from sterna.messages.actors import DispatchRequest
from sterna.types import InstanceId, RequestId

MAX_SESSIONS = 1024
"""Those that are remembered: the ones with the newest turns."""

IDLE_AFTER_S = 2.0
"""A turn is taken for computed after this time: a copy would find a part of its prefix before."""


AHEAD = "next turn of "
"""Begins the ids under which prefixes are copied ahead."""


@dataclass(slots=True)
class _Session:
    request: DispatchRequest
    instance_id: InstanceId
    since_s: float
    is_done: bool = False


class Sessions:
    """The sessions whose turns the scheduler has sent to instances.

    It does not know when a turn has ended: the prompt, which the next turn begins with, is in the
    prefix cache long before, and the answer is a small part of what an agent sends again.
    """

    def __init__(self) -> None:
        # In the order of their last turns.
        self._sessions: OrderedDict[str, _Session] = OrderedDict()

    def on_dispatched(
        self, request: DispatchRequest, instance_id: InstanceId, now_s: float
    ) -> None:
        """A turn of a session is sent to the instance; other requests are not remembered."""
        if not request.session:
            return
        self._sessions[request.session] = _Session(request, instance_id, now_s)
        self._sessions.move_to_end(request.session)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)

    def on_instance_left(self, instance_id: InstanceId) -> None:
        """What an instance had cached has gone with it."""
        gone = [name for name, each in self._sessions.items() if each.instance_id == instance_id]
        for name in gone:
            del self._sessions[name]

    def take(self, instance_id: InstanceId, now_s: float) -> Iterator[DispatchRequest]:
        """The last turns that went to this instance, the newest first, each of them once."""
        for each in reversed(self._sessions.values()):
            is_idle = now_s >= each.since_s + IDLE_AFTER_S
            if each.instance_id == instance_id and is_idle and not each.is_done:
                each.is_done = True
                yield each.request


def ahead_of_next(request: DispatchRequest) -> DispatchRequest:
    """The request as the one on behalf of which its prefix is copied: no front end waits for it."""
    return structs.replace(request, request_id=RequestId(AHEAD + request.request_id))
