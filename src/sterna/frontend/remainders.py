"""Tokens that instances may have on their way of requests that have gone on elsewhere. Pure.

The news of a move comes over another connection than the tokens from before it, and may overtake
them. An instance that is ended with such tokens on their way takes them along: they would have to
be computed again.
"""

from collections.abc import Callable

from sterna.types import InstanceId, RequestId

NumDelivered = Callable[[RequestId], int | None]
"""How many tokens of a request its client has, or None when it waits for none any more."""


class Remainders:
    """Which instances the requests of one front end have left, and where."""

    def __init__(self) -> None:
        # The token with which each request went on elsewhere at the latest; None: not known yet.
        self._ends: dict[RequestId, dict[InstanceId, int | None]] = {}

    def on_left(self, request_id: RequestId, instance_id: InstanceId, end: int | None) -> None:
        """The instance has made none of the request's tokens from this one on.

        Args:
            end: None where that is not known; `on_shown` tells it then.
        """
        self._ends.setdefault(request_id, {})[instance_id] = end

    def on_shown(self, request_id: RequestId, first_index: int) -> None:
        """Whoever has the request now has made its tokens from this one on."""
        ends = self._ends.get(request_id)
        if ends is not None and None in ends.values():
            self._ends[request_id] = {
                instance_id: first_index if end is None else end
                for instance_id, end in ends.items()
            }

    def forget(self, request_id: RequestId) -> None:
        """Nobody waits for its tokens any more."""
        self._ends.pop(request_id, None)

    def are_awaited(self, instance_id: InstanceId, num_delivered: NumDelivered) -> bool:
        """Whether a token that is still to come may be this instance's."""
        for request_id, ends in self._ends.items():
            if instance_id not in ends:
                continue
            end, num_tokens = ends[instance_id], num_delivered(request_id)
            if num_tokens is not None and (end is None or num_tokens < end):
                return True
        return False
