"""Interface of the engines of all instances, plain or compiled. Pure.

An engine is identified by its row; a row that was stopped can be started again for another
instance. A request is identified by its index in the trace. A step begins and ends at known times.
An engine changes only between two steps, except by `add`, which does not affect the step under way.
"""

from typing import Protocol

from sterna.config import PolicyConfig
from sterna.engine.emulated.outcomes import Core
from sterna.metrics.records import Records
from sterna.simulator.recorder import MemorySample
from sterna.types import (
    InstanceId,
    InstanceLoad,
    InstanceView,
    MigrationId,
    RequestId,
    whose_prefix,
)


def request_id_of(index: int) -> RequestId:
    """The id of a request of the trace; ids sort as the indexes do."""
    return RequestId(f"r{index:09d}")


def index_of(request_id: RequestId) -> int:
    """The index in the trace of the request, or of the one whose prefix this is."""
    return int((whose_prefix(request_id) or request_id).rpartition("r")[2])


class Engines(Protocol):
    """The engines of all instances."""

    steps_alone: bool
    """Whether `advance` ends and begins steps by itself; else the caller ends and begins each step
    at its time."""

    @property
    def num_ended(self) -> int:
        """Number of requests that have produced their last token."""

    @property
    def num_steps(self) -> int:
        """Number of steps begun."""

    def start(self, row: int, instance_id: InstanceId, policy: PolicyConfig) -> None:
        """Create an engine without requests.

        Args:
            policy: that of its instance, whose custom class may have state.
        """

    def stop(self, row: int) -> None:
        """Remove the engine, which is empty."""

    # ------------------------------------------------------------------------------- steps

    def advance(self, until_s: float) -> None:
        """Run all steps that end by this time."""

    def notices(
        self, until_s: float, room_tokens: int | None, growth_steps: float
    ) -> tuple[list[tuple[int, float]], float | None]:
        """Requests that ended, and when, whose sessions go on, and when an engine had room for
        another request of this memory: after the first step by this time behind which there is
        one or the other. Engines that step by themselves run up to that step, or this time; with
        others the caller looks for room itself.

        Args:
            room_tokens: None: room is not looked for.
            growth_steps: see `has_room`.
        """

    def has_room(self, row: int, num_tokens: int, growth_steps: float) -> bool:
        """Whether there is memory for a request of this demand beside all that run or queue and
        what they may need further in as many steps, and a place in the batch, after the last step
        or at its beginning."""

    def step_end_s(self, row: int, now_s: float) -> float | None:
        """The end of the step that is under way at this moment, or None between two steps."""

    def hold(self, row: int) -> None:
        """Stop `advance` after the step under way: the caller begins the next step."""

    def end_step(self, row: int, now_s: float) -> None:
        """End the step under way now."""

    def begin_step(self, row: int, now_s: float) -> float | None:
        """Begin a step; returns its end, or None when there is nothing to compute."""

    # ------------------------------------------------------------------------------- loads

    def set_terminating(self, row: int) -> None:
        """Mark the instance in views and loads as being emptied."""

    def set_migrating(self, row: int, num_outgoing: int, num_incoming: int) -> None:
        """Set the numbers of migrations in flight that loads show."""

    def changed_loads(self, now_s: float) -> list[InstanceLoad]:
        """The llumlets' load reports at this moment, by row, of the engines whose load may differ
        from the one that was returned last."""

    def view(self, row: int, now_s: float) -> InstanceView:
        """The engine's state at this moment."""

    def is_empty(self, row: int) -> bool:
        """Whether there are neither requests nor reservations."""

    def memory(self) -> MemorySample:
        """The memory of all instances at this moment."""

    # ---------------------------------------------------------------------------- requests

    def set_arrival(self, index: int, arrival_s: float) -> None:
        """Set when a later turn of a session came."""

    def add(self, row: int, index: int, dispatch_number: int, now_s: float) -> None:
        """Queue a request of the trace."""

    def prompt_hashes(self, index: int) -> bytes:
        """`DispatchRequest.block_hashes` of a request; empty without prefix caches."""

    def coming_tokens(self, index: int) -> dict[InstanceId, int]:
        """The tokens of a request of the trace that instances have in their prefix caches or will
        have for earlier requests, without instances that have none; as of the last loads."""

    def core(self, row: int) -> Core:
        """The engine's interface for migrations."""

    def export(self, row: int, index: int) -> bytes:
        """The state of a drained request."""

    def adopt(
        self, row: int, migration_id: MigrationId, index: int, state: bytes, num_blocks: int
    ) -> None:
        """Add the migrated request, with its KV in the reservation's first blocks."""

    def keep_prefix(self, row: int, moving_id: RequestId, first_token: int) -> None:
        """Hold what the prefix cache has of the request's prompt, from this token on."""

    def export_prefix(self, row: int, moving_id: RequestId) -> bytes:
        """The contents of the kept prefix."""

    def adopt_prefix(
        self, row: int, migration_id: MigrationId, index: int, state: bytes, num_blocks: int
    ) -> None:
        """Enter the reservation's first blocks, with these contents, into the prefix cache, and
        free all."""

    def records(self) -> Records:
        """The records of all requests."""
