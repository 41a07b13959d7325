"""What the simulation asks of the engines of all instances, plain or compiled. Pure.

An engine is named by its row; a row that was stopped can be started again for another instance.
A request is named by its place in the trace. A step begins and ends at known moments; whatever
changes an engine happens between two steps, but for `add`, which the step under way does not
notice.
"""

from typing import Protocol

from sterna.engine.emulated.outcomes import Core
from sterna.metrics.records import Records
from sterna.types import InstanceId, InstanceLoad, InstanceView, MigrationId, RequestId


def request_id_of(index: int) -> RequestId:
    """The id of a request of the trace; ids sort as the indexes do."""
    return RequestId(f"r{index:09d}")


def index_of(request_id: RequestId) -> int:
    """The request's place in the trace."""
    return int(request_id[1:])


class Engines(Protocol):
    """The engines of all instances."""

    steps_alone: bool
    """Whether `advance` ends and begins steps without being told to; else each step is to be
    ended and begun by the caller, at its time."""

    @property
    def num_ended(self) -> int:
        """Requests that have produced their last token."""

    @property
    def num_steps(self) -> int:
        """Steps begun."""

    def start(self, row: int, instance_id: InstanceId) -> None:
        """An engine without requests begins to exist."""

    def stop(self, row: int) -> None:
        """The engine, which is empty, ceases to exist."""

    # ------------------------------------------------------------------------------- steps

    def advance(self, until_s: float) -> None:
        """Let all steps pass that end by then."""

    def step_end_s(self, row: int, now_s: float) -> float | None:
        """When the step ends that is under way at this moment, or None between two steps."""

    def hold(self, row: int) -> None:
        """Have `advance` not begin a step after the one under way: the caller will."""

    def end_step(self, row: int, now_s: float) -> None:
        """The step under way ends now."""

    def begin_step(self, row: int, now_s: float) -> float | None:
        """Begin a step, when there is anything to compute; returns when it will end."""

    # ------------------------------------------------------------------------------- loads

    def set_terminating(self, row: int) -> None:
        """Have views and loads say that the instance is being emptied."""

    def set_migrating(self, row: int, num_outgoing: int, num_incoming: int) -> None:
        """Have loads say that so many migrations are in flight."""

    def changed_loads(self, now_s: float) -> list[InstanceLoad]:
        """What the llumlets report at this moment, in order: of the engines whose load may
        differ from the one that was returned last."""

    def view(self, row: int, now_s: float) -> InstanceView:
        """The engine's state at this moment."""

    def is_empty(self, row: int) -> bool:
        """Whether there are neither requests nor reservations."""

    def fragmented_tokens(self) -> tuple[int, int, list[int], int]:
        """Free memory of all instances, the part of it that they may admit requests into (each
        one's watermark left out), the demands of the requests that block the head of a line
        because they do not fit, and the total memory; in tokens."""

    # ---------------------------------------------------------------------------- requests

    def add(self, row: int, index: int, dispatch_number: int, now_s: float) -> None:
        """Queue a request of the trace."""

    def core(self, row: int) -> Core:
        """The engine as migrations use it."""

    def export(self, row: int, index: int) -> bytes:
        """The state of a drained request."""

    def adopt(
        self, row: int, migration_id: MigrationId, index: int, state: bytes, num_blocks: int
    ) -> None:
        """Take the migrated request in, with KV in the reservation's first blocks."""

    def records(self) -> Records:
        """What came of the requests."""
