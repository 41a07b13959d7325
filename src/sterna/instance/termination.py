"""Condition for the end of an instance that is being emptied. Pure.

The instance may end when no request is on it and every front end has sent a FinalAck. With this
message a front end states that it has seen the end or the move of every request that it had here,
and will send nothing more. Each emptying has its own number (`InstanceMember.emptied_since`), and a
FinalAck belongs to one of them: when an emptying is undone, its FinalAcks do not count for the
next one.

A message that an instance has sent and a front end has not received is lost with the instance. A
front end cannot know what is on its way: the notice that a request has moved on arrives over
another connection than the earlier tokens, a migration under way may still bring a request, and a
request may come back from a destination that has died. So both sides count the messages of the
instance, and a FinalAck that was sent before the front end had received all of them is void.
"""

from collections import Counter
from collections.abc import Iterable

from sterna.types import FrontendId


class Termination:
    """The FinalAcks of one instance's front ends."""

    def __init__(self) -> None:
        self._since: int | None = None
        # The emptying of each, and the number of messages received when it was sent.
        self._final_acks: dict[FrontendId, tuple[int, int]] = {}
        self._num_sent: Counter[FrontendId] = Counter()
        self._notified_version: int | None = None

    def on_membership(self, emptied_since: int | None) -> None:
        """The newest membership names the emptying under way, or None."""
        self._since = emptied_since

    def on_sent(self, frontend_id: FrontendId) -> None:
        """A message about its requests is sent to the front end."""
        self._num_sent[frontend_id] += 1

    def on_dropped(self, frontend_id: FrontendId) -> None:
        """The last of these messages could not be sent, and will never arrive."""
        self._num_sent[frontend_id] -= 1

    def on_final_ack(self, frontend_id: FrontendId, emptied_since: int, num_heard: int = 0) -> None:
        """A front end sent a FinalAck, perhaps before the instance knows of the emptying.

        Args:
            num_heard: the messages of this instance that it has ever received.
        """
        self._final_acks[frontend_id] = (emptied_since, num_heard)

    def next_notice(self, frontends: Iterable[FrontendId], version: int) -> int | None:
        """Return the emptying of which the supervisor is to be notified now, or None.

        All these front ends have sent their FinalAck, and no notice was returned for this version
        of the membership.
        """
        since = self._since
        if since is None or self._notified_version == version:
            return None
        for each in frontends:
            if self._final_acks.get(each) != (since, self._num_sent[each]):
                return None
        self._notified_version = version
        return since
