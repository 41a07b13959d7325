"""The source's side of one migration (Section 4.2, Figure 7), as a pure state machine.

::

    NEW -> INSPECTING -> RESERVING -> COPYING -> INSPECTING -> ...      stages, decoding goes on
                             |
                             +-> DRAINING -> COMMITTING -> OVER         the last stage
                                     |            |
                                  UNDOING     FORWARDING -> OVER

The request is the source's own until `Commit` is sent: whatever goes wrong by then ends the
migration here, at once, and the destination is told by Abort or finds out by its lease. Only a
Drain under way must be waited for, since it may have taken the request out of the batch already
(UNDOING).

From Commit on only the destination decides. The source keeps the request suspended, with all its
blocks, and asks until it hears the verdict or the supervisor confirms the destination's death.
Time alone never ends this state: a source that resumed a request because nothing was heard could
run it twice. (Departure from the paper, whose source releases its blocks before it tells the
destination to commit: a lost commit would lose the request, and a stage still being sent would
read blocks that belong to somebody else.)

`docs/migration_protocol.md` has the table of all states and events, which the tests read.
"""

from enum import Enum

from sterna.config import MigrationConfig
from sterna.errors import ProtocolError
from sterna.migration.messages import (
    Abort,
    AbortDrained,
    Aborted,
    AbortRequest,
    Cancelled,
    ClientAborted,
    Commit,
    CommitQuery,
    Committed,
    CopyBlocks,
    CopyFailed,
    Drain,
    Drained,
    DrainRefused,
    Effect,
    Ended,
    Event,
    ForwardedAbort,
    Inspect,
    Inspected,
    Mode,
    PeerDead,
    Progress,
    Reason,
    Received,
    Release,
    Released,
    RequestEnded,
    ReservationId,
    Reserve,
    Reserved,
    Resume,
    Send,
    StageCopied,
    StopCopying,
    Tick,
)
from sterna.types import InstanceId, MigrationId, RequestId

SourceMessage = Reserved | StageCopied | Committed | Aborted
"""What a destination says to a source."""

NUM_SPARE_BLOCKS = 1
"""Blocks that a last stage reserves beyond those there are: decoding goes on until the drain."""


class SourceState(Enum):
    """What the source waits for."""

    NEW = "new"
    INSPECTING = "inspecting"
    """Inspect is under way: how far is the request?"""
    RESERVING = "reserving"
    """Reserve was sent: has the destination room for the stage?"""
    COPYING = "copying"
    """A stage that is not the last is being copied; the request goes on decoding."""
    DRAINING = "draining"
    """Drain is under way; room for the last stage is reserved."""
    UNDOING = "undoing"
    """The migration was given up while Drain was under way; its outcome must be undone."""
    COMMITTING = "committing"
    """Commit was sent; the request is suspended until the verdict."""
    FORWARDING = "forwarding"
    """The verdict was Committed; the client's abort must still reach the destination."""
    OVER = "over"


class MigrationSource:
    """One migration, seen from the instance that the request leaves."""

    def __init__(
        self,
        migration_id: MigrationId,
        request_id: RequestId,
        peer: InstanceId,
        mode: Mode,
        config: MigrationConfig,
    ) -> None:
        self.migration_id = migration_id
        self.request_id = request_id
        self.peer = peer
        self.mode = mode
        self._config = config
        self._state = SourceState.NEW
        self._reservation: ReservationId | None = None
        self._request: bytes | None = None
        self._num_preemptions: int | None = None
        # The stage under way or planned, its blocks at most, and those before it, which are in
        # place on the destination.
        self._stage = 0
        self._is_last = False
        self._num_stage_blocks = 0
        self._num_copied_blocks = 0
        self._receivers: tuple[str, ...] = ()
        self._num_reserved_stages = 0
        self._has_reserve_been_sent = False
        self._is_copying = False
        self._has_client_aborted = False
        self._undo_reason = Reason.CANCELLED
        self._ask_again_s = 0.0
        self._give_up_s = 0.0

    # -------------------------------------------------------------------------- what is asked

    @property
    def state(self) -> SourceState:
        """Where the migration stands."""
        return self._state

    @property
    def is_settled(self) -> bool:
        """Whether Ended was returned: nothing is asked of the engine any more."""
        return self._state in (SourceState.FORWARDING, SourceState.OVER)

    @property
    def is_over(self) -> bool:
        """Whether the machine can be forgotten."""
        return self._state is SourceState.OVER

    @property
    def is_holding_request(self) -> bool:
        """Whether the request is drained and waits here, suspended, for the verdict."""
        return self._state is SourceState.COMMITTING

    @property
    def next_deadline_s(self) -> float | None:
        """When a Tick is due, or None."""
        match self._state:
            case SourceState.RESERVING | SourceState.COPYING:
                return min(self._ask_again_s, self._give_up_s)
            case SourceState.COMMITTING | SourceState.FORWARDING:
                return self._ask_again_s
            case _:
                return None

    # -------------------------------------------------------------------------- what happens

    def start(self, now_s: float) -> list[Effect]:
        """Begin the migration.

        Raises:
            ProtocolError: it has begun already.
        """
        if self._state is not SourceState.NEW:
            raise ProtocolError(f"migration {self.migration_id} was started twice")
        return self._inspect()

    def on_event(self, event: Event, now_s: float) -> list[Effect]:
        """Take an event in and return what is to be done, in order.

        Raises:
            ProtocolError: the event is illegal in this state; nothing was changed.
        """
        if isinstance(event, Received):
            if not isinstance(event.message, SourceMessage):
                raise self._illegal(event)
            if self._state is not SourceState.NEW and not self._concerns(event.message):
                return []
        match self._state:
            case SourceState.INSPECTING | SourceState.RESERVING | SourceState.COPYING:
                effects = self._before_drain(event, now_s)
            case SourceState.DRAINING | SourceState.UNDOING:
                effects = self._until_drained(event, now_s)
            case SourceState.COMMITTING:
                effects = self._until_verdict(event, now_s)
            case SourceState.FORWARDING:
                effects = self._until_abort_heard(event, now_s)
            case SourceState.OVER:
                effects = self._after_end(event)
            case SourceState.NEW:
                raise self._illegal(event)
        if isinstance(event, Received):
            self._give_up_s = now_s + self._config.lease_s
        return effects

    def _concerns(self, message: SourceMessage) -> bool:
        """Whether the message belongs to this conversation, and not to another reservation."""
        if self._reservation is None:
            # The first answer names the reservation; a refusal has none to name.
            return isinstance(message, Reserved | Aborted)
        return message.reservation == self._reservation

    # ---------------------------------------------------------------- the table, part by part

    def _before_drain(self, event: Event, now_s: float) -> list[Effect]:
        """Stages before the last. Nothing has been taken from the request: any end is at once."""
        match self._state, event:
            case SourceState.INSPECTING, Inspected():
                return self._plan_stage(event, now_s)
            case SourceState.RESERVING, Received(Reserved(stage=stage) as reserved) if (
                stage == self._stage
            ):
                return self._begin_stage(reserved, now_s)
            case SourceState.COPYING, Received(StageCopied(stage=stage)) if stage == self._stage:
                self._num_copied_blocks += self._num_stage_blocks
                self._is_copying = False
                return self._inspect_for_next_stage()
            case SourceState.COPYING, Received(Reserved(stage=stage)) if stage == self._stage:
                return []  # The answer to Reserve sent again: the stage is still being copied.
            case _, Received(Reserved(stage=stage) | StageCopied(stage=stage)) if (
                stage < self._stage
            ):
                return []  # Repeated or overtaken.
            case SourceState.COPYING, CopyFailed(stage=stage) if stage == self._stage:
                return self._abort(Reason.TRANSFER_FAILED)
            case _, CopyFailed(stage=stage) if stage < self._stage:
                return []  # The destination had said already that the stage is in place.
            case _, Received(Aborted(reason=Reason.REQUEST_ABORTED)):
                return self._abort_for_client(is_peer_told=False)
            case _, Received(Aborted(reason=reason)):
                return self._abort(reason, is_peer_told=False)
            case _, RequestEnded(reason):
                return self._abort(reason)
            case _, ClientAborted():
                return self._abort_for_client()
            case _, PeerDead():
                return self._abort(Reason.PEER_DEAD, is_peer_told=False)
            case _, Cancelled():
                return self._abort(Reason.CANCELLED)
            case SourceState.RESERVING | SourceState.COPYING, Tick() if now_s >= self._give_up_s:
                return self._abort(Reason.PEER_SILENT)
            case SourceState.RESERVING | SourceState.COPYING, Tick() if now_s >= self._ask_again_s:
                self._ask_again_s = now_s + self._config.query_interval_s
                return [self._reserve()]
            case _, Tick():
                return []
            case _:
                raise self._illegal(event)

    def _until_drained(self, event: Event, now_s: float) -> list[Effect]:
        """The engine is draining the request: only its outcome tells where the request is."""
        match self._state, event:
            case SourceState.DRAINING, Drained():
                return self._commit(event, now_s)
            case SourceState.DRAINING, DrainRefused(None):
                return self._inspect_for_next_stage()
            case SourceState.DRAINING, DrainRefused(Reason() as reason):
                return self._abort(reason)
            case SourceState.UNDOING, Drained():
                return self._keep_drained(self._undo_reason)
            case SourceState.UNDOING, DrainRefused():
                aborts = [AbortRequest(self.request_id)] if self._has_client_aborted else []
                return [*aborts, self._end(self._undo_reason)]
            case _, ClientAborted():
                return self._undo(Reason.REQUEST_ABORTED)
            case _, Received(Aborted(reason=Reason.REQUEST_ABORTED)):
                return self._undo(Reason.REQUEST_ABORTED, is_peer_told=False)
            case SourceState.DRAINING, Received(Aborted(reason=reason)):
                return self._undo(reason, is_peer_told=False)
            case SourceState.DRAINING, PeerDead():
                return self._undo(Reason.PEER_DEAD, is_peer_told=False)
            case SourceState.DRAINING, Cancelled():
                return self._undo(Reason.CANCELLED)
            case SourceState.UNDOING, Received(Aborted()) | PeerDead() | Cancelled():
                return []  # It is being given up already.
            case _, RequestEnded():
                return []  # A hint only: the outcome of Drain tells.
            case _, Received(Reserved(stage=stage)) if stage <= self._stage:
                return []  # Repeated or overtaken.
            case _, Received(StageCopied(stage=stage)) | CopyFailed(stage=stage) if (
                stage < self._stage
            ):
                return []  # Late.
            case _, Tick():
                return []
            case _:
                raise self._illegal(event)

    def _until_verdict(self, event: Event, now_s: float) -> list[Effect]:
        """Commit was sent: the destination decides, the source asks."""
        match event:
            case Received(Committed()):
                return self._release(now_s)
            case Received(Aborted(reason=reason)):
                self._has_client_aborted |= reason is Reason.REQUEST_ABORTED
                return self._keep_drained(reason)
            case PeerDead():
                return self._keep_drained(Reason.PEER_DEAD)
            case ClientAborted() if self._has_client_aborted:
                return []
            case ClientAborted():
                self._has_client_aborted = True
                return [self._forward_abort(now_s)]
            case CopyFailed(stage=stage) if stage == self._stage and self._is_copying:
                self._is_copying = False
                return [self._send(Abort(self.migration_id, Reason.TRANSFER_FAILED))]
            case Tick() if now_s >= self._ask_again_s and self._has_client_aborted:
                return [self._forward_abort(now_s)]
            case Tick() if now_s >= self._ask_again_s:
                assert self._reservation is not None
                self._ask_again_s = now_s + self._config.query_interval_s
                return [self._send(CommitQuery(self.migration_id, self._reservation))]
            case Tick():
                return []
            case Received(Reserved(stage=stage)) if stage <= self._stage:
                return []  # Repeated or overtaken.
            case Received(StageCopied(stage=stage)) | CopyFailed(stage=stage) if (
                stage < self._stage
            ):
                return []  # Late.
            case RequestEnded():
                return []  # A late hint: a drained request cannot end here.
            case Cancelled():
                return []  # Too late to be cancelled.
            case _:
                raise self._illegal(event)

    def _until_abort_heard(self, event: Event, now_s: float) -> list[Effect]:
        """The request is the destination's, and its client has gone."""
        match event:
            case Received(Aborted()) | PeerDead():
                self._state = SourceState.OVER
                return []
            case Tick() if now_s >= self._ask_again_s:
                return [self._forward_abort(now_s)]
            case Drained() | DrainRefused() | Inspected():
                raise self._illegal(event)
            case (
                Received() | CopyFailed() | RequestEnded() | ClientAborted() | Cancelled() | Tick()
            ):
                return []  # Late, or about a request that is not here any more.
            case _:
                raise self._illegal(event)

    def _after_end(self, event: Event) -> list[Effect]:
        match event:
            case (
                Received()
                | Inspected()
                | CopyFailed()
                | RequestEnded()
                | ClientAborted()
                | PeerDead()
                | Cancelled()
                | Tick()
            ):
                return []  # Late. An outcome of Drain is not among them: it is waited for.
            case _:
                raise self._illegal(event)

    # ------------------------------------------------------------------------------- stages

    def _inspect(self) -> list[Effect]:
        self._state = SourceState.INSPECTING
        return [Inspect(self.migration_id, self.request_id)]

    def _inspect_for_next_stage(self) -> list[Effect]:
        self._stage += 1
        return self._inspect()

    def _plan_stage(self, inspected: Inspected, now_s: float) -> list[Effect]:
        """Begin the next stage: "the source instance also checks whether the request being
        migrated has completed or been preempted" (Section 4.2)."""
        progress = inspected.progress
        if progress is None:
            is_first = self._num_preemptions is None
            return self._abort(Reason.REQUEST_UNKNOWN if is_first else Reason.REQUEST_FINISHED)
        # A request that was preempted and runs again has other blocks than those that were
        # copied: its presence alone proves nothing.
        if self._num_preemptions not in (None, progress.num_preemptions):
            return self._abort(Reason.REQUEST_PREEMPTED)
        if progress.immovable:
            return self._abort(Reason.REQUEST_IMMOVABLE)
        num_blocks, is_last = self._next_stage(progress)
        if self._stage + (0 if is_last else 1) >= self._config.max_stages:
            return self._abort(Reason.TOO_MANY_STAGES)
        if self._num_preemptions is None:
            self._num_preemptions = progress.num_preemptions
            self._request = inspected.request
        self._num_stage_blocks = num_blocks
        self._is_last = is_last
        self._state = SourceState.RESERVING
        self._has_reserve_been_sent = True
        self._wait_for_peer(now_s)
        return [self._reserve()]

    def _next_stage(self, progress: Progress) -> tuple[int, bool]:
        """How many blocks the next stage may have, and whether it is the last one."""
        if progress.is_queuing or self.mode is Mode.RECOMPUTE:
            return 0, True
        num_full = progress.num_full_blocks - self._num_copied_blocks
        num_remaining = progress.num_blocks - self._num_copied_blocks
        if (
            self.mode is Mode.STOP_AND_COPY
            or num_remaining <= self._config.last_stage_max_blocks
            or num_full <= 0
        ):
            return num_remaining + NUM_SPARE_BLOCKS, True
        return num_full, False

    def _begin_stage(self, reserved: Reserved, now_s: float) -> list[Effect]:
        self._reservation = reserved.reservation
        self._receivers = reserved.receivers
        self._num_reserved_stages += 1
        if not self._is_last:
            self._state = SourceState.COPYING
            self._wait_for_peer(now_s)
            return [self._copy_blocks(self._num_stage_blocks)]
        assert self._num_preemptions is not None
        self._state = SourceState.DRAINING
        drain = Drain(
            migration_id=self.migration_id,
            request_id=self.request_id,
            mode=self.mode,
            num_preemptions=self._num_preemptions,
            first_block=self._num_copied_blocks,
            max_blocks=self._num_stage_blocks,
        )
        return [drain]

    def _commit(self, drained: Drained, now_s: float) -> list[Effect]:
        num_blocks = 0 if self.mode is Mode.RECOMPUTE else drained.num_blocks
        num_last_blocks = num_blocks - self._num_copied_blocks
        if not 0 <= num_last_blocks <= self._num_stage_blocks:
            raise self._illegal(drained)
        assert self._reservation is not None
        commit = Commit(
            migration_id=self.migration_id,
            reservation=self._reservation,
            request_id=self.request_id,
            stage=self._stage,
            num_blocks=num_blocks,
            state=drained.state,
        )
        self._state = SourceState.COMMITTING
        self._ask_again_s = now_s + self._config.query_interval_s
        copies = [self._copy_blocks(num_last_blocks)] if num_last_blocks else []
        return [*copies, self._send(commit)]

    def _copy_blocks(self, num_blocks: int) -> CopyBlocks:
        self._is_copying = True
        return CopyBlocks(
            migration_id=self.migration_id,
            request_id=self.request_id,
            stage=self._stage,
            first_block=self._num_copied_blocks,
            num_blocks=num_blocks,
            receivers=self._receivers,
            is_last=self._is_last,
        )

    # --------------------------------------------------------------------------------- ends

    def _abort(self, reason: Reason, *, is_peer_told: bool = True) -> list[Effect]:
        """End the migration before the drain; the request never stopped."""
        return [*self._stop_copying(), *self._tell(reason, is_peer_told), self._end(reason)]

    def _abort_for_client(self, *, is_peer_told: bool = True) -> list[Effect]:
        reason = Reason.REQUEST_ABORTED
        return [
            *self._stop_copying(),
            AbortRequest(self.request_id),
            *self._tell(reason, is_peer_told),
            self._end(reason),
        ]

    def _undo(self, reason: Reason, *, is_peer_told: bool = True) -> list[Effect]:
        """Give the migration up while Drain is under way."""
        self._has_client_aborted |= reason is Reason.REQUEST_ABORTED
        self._undo_reason = reason
        # In UNDOING the destination has been told, or told us, or is dead.
        effects = self._tell(reason, is_peer_told and self._state is SourceState.DRAINING)
        self._state = SourceState.UNDOING
        return effects

    def _keep_drained(self, reason: Reason) -> list[Effect]:
        """The drained request stays the source's: step it again, or free it for its client."""
        keep = AbortDrained if self._has_client_aborted else Resume
        return [
            *self._stop_copying(),
            keep(self.migration_id, self.request_id),
            self._end(reason),
        ]

    def _release(self, now_s: float) -> list[Effect]:
        release = Release(self.migration_id, self.request_id)
        if not self._has_client_aborted:
            return [release, self._send(Released(self.migration_id)), self._end(None)]
        # Released must wait: as long as the destination remembers the verdict, it answers.
        ended = self._end(None)
        self._state = SourceState.FORWARDING
        return [release, self._forward_abort(now_s), ended]

    def _end(self, aborted: Reason | None) -> Ended:
        self._state = SourceState.OVER
        return Ended(
            migration_id=self.migration_id,
            request_id=self.request_id,
            peer=self.peer,
            is_outgoing=True,
            aborted=aborted,
            stages=self._num_reserved_stages,
        )

    # ------------------------------------------------------------------------------ messages

    def _reserve(self) -> Send:
        is_first = self._reservation is None
        return self._send(
            Reserve(
                migration_id=self.migration_id,
                request_id=self.request_id,
                stage=self._stage,
                first_block=self._num_copied_blocks,
                num_blocks=self._num_stage_blocks,
                is_last=self._is_last,
                reservation=self._reservation,
                request=self._request if is_first else None,
            )
        )

    def _forward_abort(self, now_s: float) -> Send:
        assert self._reservation is not None
        self._ask_again_s = now_s + self._config.query_interval_s
        return self._send(ForwardedAbort(self.migration_id, self._reservation, self.request_id))

    def _tell(self, reason: Reason, is_peer_told: bool) -> list[Effect]:
        if not (is_peer_told and self._has_reserve_been_sent):
            return []
        return [self._send(Abort(self.migration_id, reason))]

    def _stop_copying(self) -> list[Effect]:
        return [StopCopying(self.migration_id)] if self._is_copying else []

    def _send(
        self, message: Reserve | Commit | CommitQuery | Abort | Released | ForwardedAbort
    ) -> Send:
        return Send(self.peer, message)

    def _wait_for_peer(self, now_s: float) -> None:
        self._ask_again_s = now_s + self._config.query_interval_s
        self._give_up_s = now_s + self._config.lease_s

    def _illegal(self, event: Event) -> ProtocolError:
        return ProtocolError(
            f"migration {self.migration_id}: the source cannot be told {event!r} "
            f"while {self._state.value}"
        )
