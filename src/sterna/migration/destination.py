"""The destination's side of one migration (Section 4.2, Figure 7), as a pure state machine.

::

    NEW -> RESERVING -> RECEIVING -> RECEIVED -> RESERVING -> ...       stages
                            |            |
                            +-> COMMITTING -> ADOPTING -> COMMITTED -> OVER
    any before ADOPTING -> (GIVING_UP ->) FREEING -> OVER

The destination holds only reserved memory until it adopts the request, which it does when it has
both the Commit and the last stage's blocks. Before that it may give up at any time, after Commit
too: it alone decides then, so its decision cannot conflict with another one. It sends Aborted only
when the reservation is gone, because the source may step the request again as soon as it receives
that.

A verdict Committed is remembered until the source has received it or is dead, so that every later
question gets the same answer. A verdict Aborted needs no memory: the answer to a question about an
unknown reservation is Aborted as well.

`docs/migration_protocol.md` has the table of all states and events, which the tests read.
"""

from enum import Enum

from sterna.config import MigrationConfig
from sterna.errors import ProtocolError
from sterna.migration.messages import (
    Abort,
    Aborted,
    AbortRequest,
    Adopt,
    Adopted,
    AdoptFailed,
    BlocksReserved,
    Cancelled,
    ClientAborted,
    Commit,
    CommitQuery,
    Committed,
    Effect,
    Ended,
    Event,
    ForwardedAbort,
    FreeReservation,
    PeerDead,
    Reason,
    Received,
    Released,
    ReservationFreed,
    ReservationId,
    Reserve,
    ReserveBlocks,
    Reserved,
    ReserveFailed,
    Send,
    StageCopied,
    StageFailed,
    StageReceived,
    Tick,
)
from sterna.types import InstanceId, MigrationId, RequestId

DestinationMessage = Reserve | Commit | CommitQuery | Abort | Released | ForwardedAbort
"""Messages from a source to a destination."""


class DestinationState(Enum):
    """State of the destination: the event that it waits for."""

    NEW = "new"
    RESERVING = "reserving"
    """ReserveBlocks is under way."""
    RECEIVING = "receiving"
    """The stage's blocks are reserved; its receivers listen."""
    RECEIVED = "received"
    """The stage's blocks are in place; the next Reserve or the Commit comes next."""
    COMMITTING = "committing"
    """Commit has arrived, the last stage's blocks have not."""
    ADOPTING = "adopting"
    """Adopt is under way."""
    COMMITTED = "committed"
    """The request runs here; the source may not know yet."""
    GIVING_UP = "giving up"
    """ReserveBlocks is under way; its reservation is to be freed."""
    FREEING = "freeing"
    """FreeReservation is under way."""
    OVER = "over"


_LEASED = (
    DestinationState.RESERVING,
    DestinationState.RECEIVING,
    DestinationState.RECEIVED,
    DestinationState.COMMITTING,
)
_SETTLED = (DestinationState.COMMITTED, DestinationState.OVER)


class MigrationDestination:
    """One migration, seen from the instance that the request enters."""

    def __init__(
        self,
        migration_id: MigrationId,
        request_id: RequestId,
        peer: InstanceId,
        reservation: ReservationId,
        config: MigrationConfig,
    ) -> None:
        self.migration_id = migration_id
        self.request_id = request_id
        self.peer = peer
        self.reservation = reservation
        self._config = config
        self._state = DestinationState.NEW
        # The stage that was last requested.
        self._stage = 0
        self._first_block = 0
        self._num_stage_blocks = 0
        self._is_last = False
        self._receivers: tuple[str, ...] = ()
        self._num_reserved_stages = 0
        self._commit: Commit | None = None
        self._has_source_aborted = False
        self._has_client_aborted = False
        self._is_peer_dead = False
        self._give_up_reason = Reason.CANCELLED
        self._lease_ends_s = 0.0
        self._repeat_s = 0.0

    # ------------------------------------------------------------------------------ queries

    @property
    def state(self) -> DestinationState:
        """The state of the migration."""
        return self._state

    @property
    def is_settled(self) -> bool:
        """Whether Ended was returned: the request is adopted, or the reservation is gone."""
        return self._state in _SETTLED

    @property
    def is_over(self) -> bool:
        """Whether the machine can be forgotten."""
        return self._state is DestinationState.OVER

    @property
    def next_deadline_s(self) -> float | None:
        """When a Tick is due, or None."""
        if self._state in _LEASED:
            return self._lease_ends_s
        return self._repeat_s if self._state is DestinationState.COMMITTED else None

    # ------------------------------------------------------------------------------- events

    def on_event(self, event: Event, now_s: float) -> list[Effect]:
        """Handle an event and return the effects, in order.

        The first event is the Reserve of stage 0.

        Raises:
            ProtocolError: the event is illegal in this state; nothing was changed.
        """
        if isinstance(event, Received):
            message = event.message
            if not isinstance(message, DestinationMessage):
                raise self._illegal(event)
            if self._state is not DestinationState.OVER and not self._concerns(message):
                return [self._disown(message)]
        match self._state:
            case DestinationState.NEW:
                effects = self._at_first(event)
            case DestinationState.RESERVING:
                effects = self._until_reserved(event, now_s)
            case DestinationState.RECEIVING | DestinationState.RECEIVED:
                effects = self._between_stages(event, now_s)
            case DestinationState.COMMITTING:
                effects = self._until_last_stage(event, now_s)
            case DestinationState.ADOPTING:
                effects = self._until_adopted(event, now_s)
            case DestinationState.COMMITTED:
                effects = self._until_released(event, now_s)
            case DestinationState.GIVING_UP | DestinationState.FREEING:
                effects = self._until_freed(event)
            case DestinationState.OVER:
                effects = self._after_end(event)
        if isinstance(event, Received | BlocksReserved | StageReceived):
            self._lease_ends_s = now_s + self._config.lease_s
        return effects

    def _concerns(self, message: DestinationMessage) -> bool:
        """Whether the message is for this reservation, and not for another one."""
        match message:
            case Reserve(reservation=None) | Abort() | Released():
                return True
            case _:
                return message.reservation == self.reservation

    def _disown(self, message: DestinationMessage) -> Send:
        """Answer a message for another reservation of this migration, which is gone."""
        assert isinstance(message, Reserve | Commit | CommitQuery | ForwardedAbort)
        return Send(
            self.peer,
            Aborted(self.migration_id, message.reservation, Reason.UNKNOWN_MIGRATION),
        )

    # ---------------------------------------------------------------- the table, part by part

    def _at_first(self, event: Event) -> list[Effect]:
        match event:
            case Received(Reserve(stage=0) as reserve):
                return self._reserve(reserve)
            case _:
                raise self._illegal(event)

    def _until_reserved(self, event: Event, now_s: float) -> list[Effect]:
        """The engine is reserving: its outcome is awaited in any case."""
        match event:
            case BlocksReserved(stage=stage) if stage == self._stage:
                self._receivers = event.receivers
                self._num_reserved_stages += 1
                self._state = DestinationState.RECEIVING
                return [self._answer_reserved()]
            case ReserveFailed(stage=stage, reason=reason) if stage == self._stage:
                return self._free(reason)
            case StageFailed(stage=stage) | StageReceived(stage=stage) if stage == self._stage:
                # It overtook the outcome. No source has a request to send this stage yet: the
                # bytes came from a sender that serves another reservation.
                return self._give_up(Reason.TRANSFER_FAILED)
            case Received(Reserve(stage=stage)) if stage <= self._stage:
                return []  # Repeated or overtaken; the outcome answers.
            case Received(Commit() | CommitQuery()):
                raise self._illegal(event)  # They follow Reserved of the last stage.
            case _:
                return self._give_up_or_wait(event, now_s)

    def _between_stages(self, event: Event, now_s: float) -> list[Effect]:
        """The stage is being received, or is in place."""
        is_received = self._state is DestinationState.RECEIVED
        match event:
            case Received(Reserve(stage=stage) as reserve) if stage == self._stage + 1 and (
                # A last stage that the drain refused is followed by another one.
                is_received or self._is_last
            ):
                return self._reserve(reserve)
            case Received(Reserve(stage=stage)) if stage == self._stage and not is_received:
                return [self._answer_reserved()]
            case Received(Reserve(stage=stage)) if stage == self._stage:
                # For a last stage this is a late copy: the source has sent the blocks, and waits
                # for the verdict.
                return [] if self._is_last else [self._answer_copied()]
            case Received(Reserve(stage=stage)) if stage < self._stage:
                return []  # Overtaken.
            case StageReceived(stage=stage) if stage == self._stage and not is_received:
                self._state = DestinationState.RECEIVED
                return [] if self._is_last else [self._answer_copied()]
            case StageFailed(stage=stage) if stage == self._stage and not is_received:
                return self._give_up(Reason.TRANSFER_FAILED)
            case Received(Commit() as commit) if self._fits(commit):
                self._commit = commit
                if is_received or commit.num_blocks == self._first_block:
                    return self._adopt(commit)
                self._state = DestinationState.COMMITTING
                return []
            case Received(CommitQuery()) if self._is_last:
                return self._give_up(Reason.COMMIT_LOST)
            case _:
                return self._give_up_or_wait(event, now_s)

    def _until_last_stage(self, event: Event, now_s: float) -> list[Effect]:
        """Commit has arrived; the last stage's blocks are on their way."""
        assert self._commit is not None
        match event:
            case StageReceived(stage=stage) if stage == self._stage:
                return self._adopt(self._commit)
            case StageFailed(stage=stage) if stage == self._stage:
                return self._give_up(Reason.TRANSFER_FAILED)
            case Received(Reserve(stage=stage)) if stage <= self._stage:
                return []  # Repeated or overtaken.
            case Received(Commit() | CommitQuery()):
                return []  # The verdict follows the blocks.
            case Cancelled():
                return []  # Too late to be cancelled.
            case _:
                return self._give_up_or_wait(event, now_s)

    def _give_up_or_wait(self, event: Event, now_s: float) -> list[Effect]:
        """The events that end a migration in any state before Adopt."""
        match event:
            case Received(Abort(reason=reason)):
                return self._give_up(reason)
            case Received(ForwardedAbort()) | ClientAborted():
                return self._give_up(Reason.REQUEST_ABORTED)
            case Received(Released()) | Cancelled():
                return self._give_up(Reason.CANCELLED)
            case PeerDead():
                # Nothing more will arrive; and the front end may admit the request elsewhere.
                self._is_peer_dead = True
                return self._give_up(Reason.PEER_DEAD)
            case Tick() if now_s >= self._lease_ends_s:
                return self._give_up(Reason.LEASE_EXPIRED)
            case Tick():
                return []
            case StageReceived(stage=stage) | StageFailed(stage=stage) if stage < self._stage:
                return []  # Of a last stage that was given up: it is no longer sent.
            case _:
                raise self._illegal(event)

    def _until_adopted(self, event: Event, now_s: float) -> list[Effect]:
        """The engine is adopting: too late to give up, too early for the verdict."""
        match event:
            case Adopted():
                return self._settle(now_s)
            case AdoptFailed(reason):
                return self._free(Reason.REQUEST_ABORTED if self._is_aborted else reason)
            case Received(ForwardedAbort()):
                self._has_source_aborted = True
            case ClientAborted():
                self._has_client_aborted = True
            case PeerDead():
                self._is_peer_dead = True
            case Received(Reserve(stage=stage)) if stage > self._stage:
                raise self._illegal(event)
            case Received() | Cancelled() | Tick():
                pass  # The verdict answers every question.
            case StageReceived(stage=stage) | StageFailed(stage=stage) if stage <= self._stage:
                pass  # Of a receiver that Adopt stops.
            case _:
                raise self._illegal(event)
        return []

    def _until_released(self, event: Event, now_s: float) -> list[Effect]:
        """The request is an ordinary one here; the verdict is kept for the source."""
        match event:
            case Received(Released()) | PeerDead():
                self._state = DestinationState.OVER
                return []
            case Received(ForwardedAbort()):
                # The source sends this only for a request whose client has gone, and frees its own
                # copy after any answer: this verdict needs no memory.
                self._state = DestinationState.OVER
                return [AbortRequest(self.request_id), self._answer_aborted(Reason.REQUEST_ABORTED)]
            case ClientAborted():
                return [AbortRequest(self.request_id)]
            case Received(Commit() | CommitQuery() | Abort()):
                return [self._answer_committed(now_s)]
            case Tick() if now_s >= self._repeat_s:
                return [self._answer_committed(now_s)]
            case Received(Reserve(stage=stage)) if stage <= self._stage:
                return []  # Repeated or overtaken.
            case StageReceived(stage=stage) | StageFailed(stage=stage) if stage <= self._stage:
                return []  # Of a receiver that Adopt stopped.
            case Cancelled() | Tick():
                return []
            case _:
                raise self._illegal(event)

    def _until_freed(self, event: Event) -> list[Effect]:
        """The migration was given up; Aborted is sent when the reservation is gone."""
        match self._state, event:
            case DestinationState.GIVING_UP, BlocksReserved(stage=stage) if stage == self._stage:
                self._num_reserved_stages += 1
                return self._free(self._give_up_reason)
            case DestinationState.GIVING_UP, ReserveFailed(stage=stage) if stage == self._stage:
                return self._free(self._give_up_reason)
            case DestinationState.FREEING, ReservationFreed():
                return self._end(self._give_up_reason)
            case _, PeerDead():
                self._is_peer_dead = True
                return []
            case _, Received() | ClientAborted() | Cancelled() | Tick():
                return []  # Aborted will answer.
            case _, StageReceived(stage=stage) | StageFailed(stage=stage) if stage <= self._stage:
                return []  # Of a receiver that is being stopped.
            case _:
                raise self._illegal(event)

    def _after_end(self, event: Event) -> list[Effect]:
        match event:
            case (
                Received()
                | StageReceived()
                | StageFailed()
                | ClientAborted()
                | PeerDead()
                | Cancelled()
                | Tick()
            ):
                return []  # Late. Outcomes of effects cannot be: each is awaited.
            case _:
                raise self._illegal(event)

    # ------------------------------------------------------------------------------- stages

    def _reserve(self, reserve: Reserve) -> list[Effect]:
        self._stage = reserve.stage
        self._first_block = reserve.first_block
        self._num_stage_blocks = reserve.num_blocks
        self._is_last = reserve.is_last
        self._state = DestinationState.RESERVING
        effect = ReserveBlocks(
            migration_id=self.migration_id,
            request_id=self.request_id,
            stage=reserve.stage,
            first_block=reserve.first_block,
            num_blocks=reserve.num_blocks,
            is_last=reserve.is_last,
            request=reserve.request,
            num_valid_tokens=reserve.num_valid_tokens,
        )
        return [effect]

    def _fits(self, commit: Commit) -> bool:
        """Whether this is the commit of the last stage, with no more blocks than reserved."""
        num_last_blocks = commit.num_blocks - self._first_block
        return (
            self._is_last
            and commit.stage == self._stage
            and 0 <= num_last_blocks <= self._num_stage_blocks
        )

    def _adopt(self, commit: Commit) -> list[Effect]:
        self._state = DestinationState.ADOPTING
        return [Adopt(self.migration_id, self.request_id, commit.num_blocks, commit.state)]

    # --------------------------------------------------------------------------------- ends

    def _settle(self, now_s: float) -> list[Effect]:
        """The request is adopted: send the verdict, unless its client or source has gone."""
        aborts = [AbortRequest(self.request_id)] if self._is_aborted else []
        if self._has_source_aborted:
            return [*aborts, *self._end(Reason.REQUEST_ABORTED)]
        if self._is_peer_dead:
            return [*aborts, *self._end(None)]
        self._state = DestinationState.COMMITTED
        return [*aborts, self._answer_committed(now_s), self._ended(None)]

    def _give_up(self, reason: Reason) -> list[Effect]:
        if self._state is not DestinationState.RESERVING:
            return self._free(reason)
        # A reservation under way can be freed only once it is complete.
        self._give_up_reason = reason
        self._state = DestinationState.GIVING_UP
        return []

    def _free(self, reason: Reason) -> list[Effect]:
        if self._num_reserved_stages == 0:
            return self._end(reason)
        self._give_up_reason = reason
        self._state = DestinationState.FREEING
        return [FreeReservation(self.migration_id)]

    def _end(self, aborted: Reason | None) -> list[Effect]:
        self._state = DestinationState.OVER
        if aborted is None or self._is_peer_dead:
            return [self._ended(aborted)]
        return [self._answer_aborted(aborted), self._ended(aborted)]

    @property
    def _is_aborted(self) -> bool:
        return self._has_source_aborted or self._has_client_aborted

    def _ended(self, aborted: Reason | None) -> Ended:
        return Ended(
            migration_id=self.migration_id,
            request_id=self.request_id,
            peer=self.peer,
            is_outgoing=False,
            aborted=aborted,
            stages=self._num_reserved_stages,
        )

    # ------------------------------------------------------------------------------ answers

    def _answer_reserved(self) -> Send:
        return Send(
            self.peer,
            Reserved(self.migration_id, self.reservation, self._stage, self._receivers),
        )

    def _answer_copied(self) -> Send:
        return Send(self.peer, StageCopied(self.migration_id, self.reservation, self._stage))

    def _answer_committed(self, now_s: float) -> Send:
        self._repeat_s = now_s + self._config.query_interval_s
        return Send(self.peer, Committed(self.migration_id, self.reservation))

    def _answer_aborted(self, reason: Reason) -> Send:
        return Send(self.peer, Aborted(self.migration_id, self.reservation, reason))

    def _illegal(self, event: Event) -> ProtocolError:
        return ProtocolError(
            f"migration {self.migration_id}: the destination cannot be told {event!r} "
            f"while {self._state.value}"
        )
