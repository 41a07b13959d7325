"""Streams: requests as a front end sees them, with the arrival times of their tokens."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.migration.samples import Arrival
from sterna.engine.payload_parts import token_ids_of
from sterna.types import RequestId

HANG_TIMEOUT_S = 300.0
"""A wait of this time means that something hangs."""


@dataclass(eq=False)
class Stream:
    """One request, and its tokens so far.

    Attributes:
        payload: as it was sent.
        instance: where it runs, by the last report.
        arrivals: in the order of their arrival.
        outputs: the payload of each arrival.
    """

    request_id: RequestId
    payload: bytes
    num_prompt_tokens: int
    instance: str
    arrivals: list[Arrival] = field(default_factory=list)
    outputs: list[bytes] = field(default_factory=list)
    num_outputs: int = 0
    is_finished: bool = False
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return self.num_prompt_tokens + self.num_outputs

    def token_ids(self) -> list[int]:
        """Return the output tokens in order, up to the first one that is missing.

        Payloads are decoded here, so that nothing is decoded while the stream is timed.

        Raises:
            ValueError: instances sent different tokens for one place.
        """
        found: dict[int, int] = {}
        for arrival, payload in zip(self.arrivals, self.outputs, strict=True):
            for index, token_id in enumerate(token_ids_of(payload), arrival.first_index):
                if found.setdefault(index, token_id) != token_id:
                    raise ValueError(
                        f"output token {index} of {self.request_id} came twice, as "
                        f"{found[index]} and {token_id}"
                    )
        num_gapless = next((i for i in range(len(found)) if i not in found), len(found))
        return [found[index] for index in range(num_gapless)]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition, which depends on this stream, is met."""
        async with asyncio.timeout(HANG_TIMEOUT_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def until_outputs(self, count: int) -> None:
        """Wait until this number of output tokens has arrived.

        Raises:
            RuntimeError: the request has ended with fewer.
        """
        await self.until(lambda: self.num_outputs >= count or self.is_finished)
        if self.num_outputs < count:
            raise RuntimeError(
                f"{self.request_id} ended after {self.num_outputs} output tokens, before {count}"
            )

    def add(self, arrival: Arrival, payload: bytes) -> None:
        """Note tokens that have arrived."""
        self.arrivals.append(arrival)
        self.outputs.append(payload)
        self.num_outputs += arrival.num_tokens
        self._changed.set()

    def finish(self) -> None:
        """Note that no token follows."""
        self.is_finished = True
        self._changed.set()
