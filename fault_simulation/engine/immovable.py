"""Requests that cannot move, as some of vLLM's: an instance that is emptied hands them back.

In the seeds that have some, instances have little time to be emptied, so that some stay behind.
"""

from collections.abc import Container, Iterable
from dataclasses import replace
from random import Random

from msgspec import structs

from fault_simulation.virtual.settings import LLUMLET
from sterna.config import PolicyConfig
from sterna.types import Immovable, InstanceView, RequestId, RequestView

SEEDS_SHARE = 0.2
"""Of the seeds: those with requests that cannot move."""

REQUESTS_SHARE = 0.3
"""Of the requests, in these seeds: those that cannot move."""

DRAIN_LIMIT_S = 0.4
"""The time to empty an instance in these seeds."""


class Immovables:
    """Draws which requests of a seed cannot move.

    Attributes:
        llumlet: the options of its instances.
    """

    def __init__(self, seed: int, policy: PolicyConfig) -> None:
        # Drawn apart, so that the other seeds are what they would be without it.
        self._rng = Random(f"staying of {seed}")
        self._is_there = self._rng.random() < SEEDS_SHARE
        self.llumlet = replace(LLUMLET, policy=policy)
        if self._is_there:
            self.llumlet = replace(self.llumlet, drain_limit_s=DRAIN_LIMIT_S)

    def draw(self) -> bool:
        """Whether the next request is one that cannot move."""
        return self._is_there and self._rng.random() < REQUESTS_SHARE


def shown_as_immovable(view: InstanceView, immovable: Container[RequestId]) -> InstanceView:
    """The view in which these requests cannot move."""

    def shown(requests: Iterable[RequestView]) -> tuple[RequestView, ...]:
        return tuple(
            structs.replace(each, immovable=Immovable.UNSUPPORTED_REQUEST_FEATURE)
            if each.request_id in immovable
            else each
            for each in requests
        )

    return replace(view, running=shown(view.running), queuing=shown(view.queuing))
