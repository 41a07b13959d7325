"""The source's side of one migration (Section 4.2, Figure 7), as a pure state machine.

::

    NEW -> INSPECTING -> RESERVING -> COPYING -> INSPECTING -> ...      stages, decoding goes on
                             |
                             +-> DRAINING -> COMMITTING -> OVER         the last stage
                                     |            |
                                  UNDOING     FORWARDING -> OVER

The request belongs to the source until `Commit` is sent: any failure before that ends the migration
here at once, and the destination learns of it from Abort or from its lease. Only a Drain under way
must be awaited, since it may have taken the request out of the batch already (UNDOING).

From Commit on only the destination decides. The source keeps the request suspended, with all its
blocks, and asks until it receives the verdict or the supervisor confirms the destination's death.
Time alone never ends this state: a source that resumed a request after a silence could run it
twice. (Departure from the paper, whose source releases its blocks before it sends the commit: a
lost commit would lose the request, and a stage still being sent would read blocks that belong to
another request.)

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
from sterna.migration.stages import Stage, plan_stage
from sterna.types import InstanceId, MigrationId, RequestId

SourceMessage = Reserved | StageCopied | Committed | Aborted
"""Messages from a destination to a source."""


class SourceState(Enum):
    """State of the source: the event that it waits for."""

    NEW = "new"
    INSPECTING = "inspecting"
    """Inspect is under way; the position of the request is awaited."""
    RESERVING = "reserving"
    """Reserve was sent; the answer of the destination is awaited."""
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


_STAGE_ASKED = (SourceState.RESERVING, SourceState.COPYING)
_VERDICT_ASKED = (SourceState.COMMITTING, SourceState.FORWARDING)
_SETTLED = (SourceState.FORWARDING, SourceState.OVER)


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
        # The stage under way, or an empty one that is to be planned.
        self._stage = Stage(number=0, first_block=0)
        self._receivers: tuple[str, ...] = ()
        self._num_reserved_stages = 0
        self._is_copying = False
        self._has_client_aborted = False
        self._undo_reason = Reason.CANCELLED
        self._ask_again_s = 0.0
        self._give_up_s = 0.0

    # ------------------------------------------------------------------------------ queries

    @property
    def state(self) -> SourceState:
        """The state of the migration."""
        return self._state

    @property
    def is_settled(self) -> bool:
        """Whether Ended was returned: no further effects on the engine follow."""
        return self._state in _SETTLED

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
        if self._state in _STAGE_ASKED:
            return min(self._ask_again_s, self._give_up_s)
        return self._ask_again_s if self._state in _VERDICT_ASKED else None

    # ------------------------------------------------------------------------------- events

    def start(self, now_s: float) -> list[Effect]:
        """Begin the migration.

        Raises:
            ProtocolError: it has begun already.
        """
        if self._state is not SourceState.NEW:
            raise ProtocolError(f"migration {self.migration_id} was started twice")
        return self._inspect(self._stage)

    def on_event(self, event: Event, now_s: float) -> list[Effect]:
        """Handle an event and return the effects, in order.

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
            case SourceState.FORWARDING | SourceState.OVER:
                effects = self._after_end(event, now_s)
            case SourceState.NEW:
                raise self._illegal(event)
        if isinstance(event, Received):
            self._give_up_s = now_s + self._config.lease_s
        return effects

    def _concerns(self, message: SourceMessage) -> bool:
        """Whether the message is for this reservation, and not for another one."""
        if self._reservation is None:
            # The first answer names the reservation; a refusal has none.
            return isinstance(message, Reserved | Aborted)
        return message.reservation == self._reservation

    # ---------------------------------------------------------------- the table, part by part

    def _before_drain(self, event: Event, now_s: float) -> list[Effect]:
        """Stages before the last. The request is untouched, so the migration can end at once."""
        this = self._stage.number
        match self._state, event:
            case SourceState.INSPECTING, Inspected():
                return self._plan_stage(event, now_s)
            case SourceState.RESERVING, Received(Reserved(stage=stage) as answer) if stage == this:
                return self._begin_stage(answer, now_s)
            case SourceState.COPYING, Received(StageCopied(stage=stage)) if stage == this:
                self._is_copying = False
                return self._inspect(self._stage.next_unplanned(self._stage.num_blocks))
            case SourceState.COPYING, Received(Reserved(stage=stage)) if stage == this:
                return []  # The answer to Reserve sent again: the stage is still being copied.
            case _, Received(Reserved(stage=stage) | StageCopied(stage=stage)) if stage < this:
                return []  # Repeated or overtaken.
            case SourceState.COPYING, CopyFailed(stage=stage) if stage == this:
                return self._abort(Reason.TRANSFER_FAILED)
            case _, CopyFailed(stage=stage) if stage < this:
                return []  # StageCopied has arrived: the stage is in place.
            case _, Received(Aborted(reason=reason)):
                return self._abort(reason, is_peer_told=False)
            case _, RequestEnded(reason):
                return self._abort(reason)
            case _, ClientAborted():
                return self._abort(Reason.REQUEST_ABORTED)
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
        """The engine is draining the request: only the outcome shows where the request is."""
        this = self._stage.number
        match self._state, event:
            case SourceState.DRAINING, Drained():
                return self._commit(event, now_s)
            case SourceState.DRAINING, DrainRefused(None):
                return self._inspect(self._stage.next_unplanned(0))
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
                return []  # The migration is being given up already.
            case _, RequestEnded():
                return []  # A hint only: the outcome of Drain decides.
            case _, Received(Reserved(stage=stage)) if stage <= this:
                return []  # Repeated or overtaken.
            case _, Received(StageCopied(stage=stage)) | CopyFailed(stage=stage) if stage < this:
                return []  # Late.
            case _, Tick():
                return []
            case _:
                raise self._illegal(event)

    def _until_verdict(self, event: Event, now_s: float) -> list[Effect]:
        """Commit was sent: the destination decides, the source asks."""
        this = self._stage.number
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
            case CopyFailed(stage=stage) if stage == this and self._is_copying:
                self._is_copying = False
                return [Send(self.peer, Abort(self.migration_id, Reason.TRANSFER_FAILED))]
            case Tick() if now_s >= self._ask_again_s and self._has_client_aborted:
                return [self._forward_abort(now_s)]
            case Tick() if now_s >= self._ask_again_s:
                assert self._reservation is not None
                self._ask_again_s = now_s + self._config.query_interval_s
                return [Send(self.peer, CommitQuery(self.migration_id, self._reservation))]
            case Tick():
                return []
            case Received(Reserved(stage=stage)) if stage <= this:
                return []  # Repeated or overtaken.
            case Received(StageCopied(stage=stage)) | CopyFailed(stage=stage) if stage < this:
                return []  # Late.
            case RequestEnded() | Cancelled():
                return []  # A late hint, since a drained request cannot end here; or too late.
            case _:
                raise self._illegal(event)

    def _after_end(self, event: Event, now_s: float) -> list[Effect]:
        """The migration is settled; in FORWARDING the client's abort may not have arrived yet."""
        is_forwarding = self._state is SourceState.FORWARDING
        match event:
            case Received(Aborted()) | PeerDead() if is_forwarding:
                self._state = SourceState.OVER
                return []
            case Tick() if is_forwarding and now_s >= self._ask_again_s:
                return [self._forward_abort(now_s)]
            case Received() | Inspected() | CopyFailed() | RequestEnded():
                return []  # Late.
            case ClientAborted() | PeerDead() | Cancelled() | Tick():
                return []  # These no longer concern this migration.
            case _:
                # An outcome of Drain is always awaited: to ignore it could lose the request.
                raise self._illegal(event)

    # ------------------------------------------------------------------------------- stages

    def _inspect(self, stage: Stage) -> list[Effect]:
        self._stage = stage
        self._state = SourceState.INSPECTING
        return [Inspect(self.migration_id, self.request_id)]

    def _plan_stage(self, inspected: Inspected, now_s: float) -> list[Effect]:
        """Begin the next stage: "the source instance also checks whether the request being
        migrated has completed or been preempted" (Section 4.2)."""
        position = inspected.progress
        if position is None:
            is_first = self._num_preemptions is None
            return self._abort(Reason.REQUEST_UNKNOWN if is_first else Reason.REQUEST_FINISHED)
        # A request that was preempted and runs again has other blocks than those that were
        # copied, so its presence alone is not enough.
        if self._num_preemptions not in (None, position.num_preemptions):
            return self._abort(Reason.REQUEST_PREEMPTED)
        if position.is_immovable:
            return self._abort(Reason.REQUEST_IMMOVABLE)
        stage = plan_stage(self._stage, position, self.mode, self._config)
        if isinstance(stage, Reason):
            return self._abort(stage)
        if self._num_preemptions is None:
            self._num_preemptions = position.num_preemptions
            self._request = inspected.request
        self._stage = stage
        self._state = SourceState.RESERVING
        self._wait_for_peer(now_s)
        return [self._reserve()]

    def _begin_stage(self, reserved: Reserved, now_s: float) -> list[Effect]:
        self._reservation = reserved.reservation
        self._receivers = reserved.receivers
        self._num_reserved_stages += 1
        if not self._stage.is_last:
            self._state = SourceState.COPYING
            self._wait_for_peer(now_s)
            return [self._copy_blocks(self._stage.num_blocks)]
        assert self._num_preemptions is not None
        self._state = SourceState.DRAINING
        drain = Drain(
            self.migration_id,
            self.request_id,
            self.mode,
            self._num_preemptions,
            first_block=self._stage.first_block,
            max_blocks=self._stage.num_blocks,
        )
        return [drain]

    def _commit(self, drained: Drained, now_s: float) -> list[Effect]:
        num_blocks = 0 if self.mode is Mode.RECOMPUTE else drained.num_blocks
        num_last_blocks = num_blocks - self._stage.first_block
        if not 0 <= num_last_blocks <= self._stage.num_blocks:
            raise self._illegal(drained)
        assert self._reservation is not None
        self._state = SourceState.COMMITTING
        self._ask_again_s = now_s + self._config.query_interval_s
        ids = (self.migration_id, self._reservation, self.request_id)
        commit = Commit(*ids, self._stage.number, num_blocks, drained.state)
        copies = [self._copy_blocks(num_last_blocks)] if num_last_blocks else []
        return [*copies, Send(self.peer, commit)]

    def _copy_blocks(self, num_blocks: int) -> CopyBlocks:
        self._is_copying = True
        return CopyBlocks(
            migration_id=self.migration_id,
            request_id=self.request_id,
            stage=self._stage.number,
            first_block=self._stage.first_block,
            num_blocks=num_blocks,
            receivers=self._receivers,
            is_last=self._stage.is_last,
            num_valid_tokens=self._stage.num_valid_tokens,
        )

    # --------------------------------------------------------------------------------- ends

    def _abort(self, reason: Reason, *, is_peer_told: bool = True) -> list[Effect]:
        """End the migration before the drain; the request never stopped."""
        is_client_gone = reason is Reason.REQUEST_ABORTED
        return [
            *self._stop_copying(),
            *([AbortRequest(self.request_id)] if is_client_gone else []),
            *self._notify_peer(reason, is_peer_told),
            self._end(reason),
        ]

    def _undo(self, reason: Reason, *, is_peer_told: bool = True) -> list[Effect]:
        """Give up the migration while Drain is under way."""
        self._has_client_aborted |= reason is Reason.REQUEST_ABORTED
        self._undo_reason = reason
        # In UNDOING the destination was notified, has aborted itself, or is dead.
        effects = self._notify_peer(reason, is_peer_told and self._state is SourceState.DRAINING)
        self._state = SourceState.UNDOING
        return effects

    def _keep_drained(self, reason: Reason) -> list[Effect]:
        """The drained request stays the source's: step it again, or free it for its client."""
        keep = AbortDrained if self._has_client_aborted else Resume
        kept = keep(self.migration_id, self.request_id)
        return [*self._stop_copying(), kept, self._end(reason)]

    def _release(self, now_s: float) -> list[Effect]:
        release = Release(self.migration_id, self.request_id)
        if not self._has_client_aborted:
            return [release, Send(self.peer, Released(self.migration_id)), self._end(None)]
        # Released must wait: the destination answers as long as it remembers the verdict.
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
        stage = self._stage
        reserve = Reserve(
            migration_id=self.migration_id,
            request_id=self.request_id,
            stage=stage.number,
            first_block=stage.first_block,
            num_blocks=stage.num_blocks,
            is_last=stage.is_last,
            reservation=self._reservation,
            request=self._request if self._reservation is None else None,
            num_valid_tokens=stage.num_valid_tokens,
        )
        return Send(self.peer, reserve)

    def _forward_abort(self, now_s: float) -> Send:
        assert self._reservation is not None
        self._ask_again_s = now_s + self._config.query_interval_s
        abort = ForwardedAbort(self.migration_id, self._reservation, self.request_id)
        return Send(self.peer, abort)

    def _notify_peer(self, reason: Reason, is_peer_told: bool) -> list[Effect]:
        is_known_there = self._num_preemptions is not None
        is_needed = is_peer_told and is_known_there
        return [Send(self.peer, Abort(self.migration_id, reason))] if is_needed else []

    def _stop_copying(self) -> list[Effect]:
        return [StopCopying(self.migration_id)] if self._is_copying else []

    def _wait_for_peer(self, now_s: float) -> None:
        self._ask_again_s = now_s + self._config.query_interval_s
        self._give_up_s = now_s + self._config.lease_s

    def _illegal(self, event: Event) -> ProtocolError:
        return ProtocolError(
            f"migration {self.migration_id}: the source cannot be told {event!r} "
            f"while {self._state.value}"
        )
