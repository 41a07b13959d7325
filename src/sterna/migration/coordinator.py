"""All migrations of one instance: the paper's migration coordinator (Section 4.3). Pure.

The coordinator hands every message, outcome, death and deadline to the machine that it concerns,
creates a machine for an incoming migration, forgets machines that are over, and answers messages of
migrations that have no machine here. These answers are safe because a machine is forgotten only
when its answer is true:

- "Aborted" for an unknown reservation: a destination that adopted is remembered until the source
  has received Committed, or is dead;
- "Abort" for an unknown source: a source that may still commit is remembered until its verdict;
- "Released" for a Committed without a source: likewise.
"""

from collections.abc import Collection, Iterable

from sterna.config import MigrationConfig
from sterna.errors import ProtocolError
from sterna.migration.destination import DestinationMessage, DestinationState, MigrationDestination
from sterna.migration.messages import (
    Abort,
    Aborted,
    Commit,
    CommitQuery,
    Committed,
    CopyFailed,
    Effect,
    Event,
    ForwardedAbort,
    Inspected,
    Message,
    Mode,
    PeerDead,
    Reason,
    Received,
    Released,
    RequestEnded,
    ReservationId,
    Reserve,
    Reserved,
    Send,
    StageCopied,
    StageFailed,
    StageReceived,
    Tick,
)
from sterna.migration.source import MigrationSource
from sterna.types import InstanceId, MigrationId, RequestId, whose_prefix

MAX_INCOMING_PREFIXES = 8
"""Prefixes that an instance takes in at once. They are not among the migrations of requests, whose
number policies set."""

Machine = MigrationSource | MigrationDestination


class MigrationCoordinator:
    """The machines of the migrations from and to one instance."""

    def __init__(self, instance_id: InstanceId, config: MigrationConfig, max_incoming: int) -> None:
        self._instance_id = instance_id
        self._config = config
        self._max_incoming = max_incoming
        self._sources: dict[MigrationId, MigrationSource] = {}
        self._destinations: dict[MigrationId, MigrationDestination] = {}
        # Counted as migrations begin and end: they are read at every event.
        self._num_outgoing = 0
        self._num_incoming = 0
        self._num_incoming_prefixes = 0
        self._num_started = 0
        self._num_reservations = 0

    # ------------------------------------------------------------------------------ queries

    @property
    def num_outgoing(self) -> int:
        """Migrations of requests from here that have not ended."""
        return self._num_outgoing

    @property
    def num_incoming(self) -> int:
        """Migrations of requests to here that have not ended."""
        return self._num_incoming

    @property
    def sources(self) -> Collection[MigrationSource]:
        """The machines of migrations from here, also of those that have ended here only."""
        return self._sources.values()

    @property
    def has_machines(self) -> bool:
        """Whether a migration is in flight, or has ended while the peer may not know how."""
        return bool(self._sources or self._destinations)

    @property
    def next_deadline_s(self) -> float | None:
        """When `on_tick` is due, or None."""
        next_s = None
        for machine in self._machines():
            deadline_s = machine.next_deadline_s
            if deadline_s is not None and (next_s is None or deadline_s < next_s):
                next_s = deadline_s
        return next_s

    def source_of(self, request_id: RequestId) -> MigrationSource | None:
        """The migration by which the request is leaving."""
        for source in self._sources.values():
            if source.request_id == request_id and not source.is_settled:
                return source
        return None

    def destination_of(self, request_id: RequestId) -> MigrationDestination | None:
        """The migration by which the request is arriving and has not arrived yet."""
        for destination in self._destinations.values():
            if destination.request_id == request_id and not destination.is_settled:
                return destination
        return None

    def requests(self) -> frozenset[RequestId]:
        """Requests of which no migration from here may begin.

        A request that arrived stays until its source knows of its arrival. If it moved on at once
        and this instance then died, the source would take the request back while it runs
        elsewhere.
        """
        leaving = {s.request_id for s in self._sources.values() if not s.is_settled}
        return frozenset(leaving | {d.request_id for d in self._destinations.values()})

    def committing_requests(self) -> frozenset[RequestId]:
        """Drained requests that wait here for a verdict: they may run on the peer already, and may
        have died with it."""
        return frozenset(
            source.request_id for source in self._sources.values() if source.is_holding_request
        )

    def arriving_requests(self) -> frozenset[RequestId]:
        """Requests that the engine does not have yet, but may get.

        A request that is not among them cannot arrive from a peer that is dead: a migration that
        begins later needs the peer's answers.
        """
        gone = (DestinationState.GIVING_UP, DestinationState.FREEING)
        return frozenset(
            destination.request_id
            for destination in self._destinations.values()
            if not (destination.is_settled or destination.state in gone)
        )

    # ------------------------------------------------------------------------------- events

    def start(
        self, request_id: RequestId, destination: InstanceId, mode: Mode, now_s: float
    ) -> tuple[MigrationId, list[Effect]]:
        """Begin to migrate a request of this instance."""
        # Unique without randomness, since instance ids are never used again.
        self._num_started += 1
        migration_id = MigrationId(f"{self._instance_id}-{self._num_started}")
        source = self._new_source(migration_id, request_id, destination, mode)
        self._sources[migration_id] = source
        self._count(source, 1)
        return migration_id, source.start(now_s)

    def on_message(
        self, sender: InstanceId, message: Message, now_s: float, *, is_terminating: bool = False
    ) -> list[Effect]:
        """Handle a peer's message.

        Raises:
            ProtocolError: it cannot have been sent by a correct peer.
        """
        machine = self._machine_for(message)
        if machine is None:
            return self._answer_unknown(sender, message, now_s, is_terminating)
        if machine.peer != sender:
            raise ProtocolError(f"{message!r} of {machine.peer}'s migration came from {sender}")
        return self.notify(machine, Received(message), now_s)

    def on_outcome(self, migration_id: MigrationId, event: Event, now_s: float) -> list[Effect]:
        """Handle the outcome of an effect, or an event of a transfer.

        Raises:
            ProtocolError: a machine that waits for this outcome cannot have been forgotten.
        """
        machine = self._sources.get(migration_id) or self._destinations.get(migration_id)
        if machine is not None:
            return self.notify(machine, event, now_s)
        match event:
            case Inspected() | CopyFailed() | StageReceived() | StageFailed() | RequestEnded():
                return []  # Late: the migration is over.
            case _:
                raise ProtocolError(f"no machine waits for {event!r} of migration {migration_id}")

    def on_peer_dead(self, instance_id: InstanceId, now_s: float) -> list[Effect]:
        """The supervisor confirmed the death of an instance."""
        machines = [machine for machine in self._machines() if machine.peer == instance_id]
        return self._notify_all(machines, PeerDead(), now_s)

    def on_tick(self, now_s: float) -> list[Effect]:
        """Time has passed."""
        return self._notify_all(self._machines(), Tick(), now_s)

    def notify(self, machine: Machine, event: Event, now_s: float) -> list[Effect]:
        """Hand an event to a machine, and forget the machine if that ends it."""
        was_settled = machine.is_settled
        effects = machine.on_event(event, now_s)
        if machine.is_settled and not was_settled:
            self._count(machine, -1)
        if machine.is_over:
            machines = self._sources if isinstance(machine, MigrationSource) else self._destinations
            del machines[machine.migration_id]
        return effects

    # ---------------------------------------------------------------------------- internals

    def _count(self, machine: Machine, change: int) -> None:
        is_request = whose_prefix(machine.request_id) is None
        if isinstance(machine, MigrationSource):
            self._num_outgoing += change * is_request
        elif is_request:
            self._num_incoming += change
        else:
            self._num_incoming_prefixes += change

    def _machines(self) -> tuple[Machine, ...]:
        return *self._sources.values(), *self._destinations.values()

    def _machine_for(self, message: Message) -> Machine | None:
        if isinstance(message, DestinationMessage):
            return self._destinations.get(message.migration_id)
        return self._sources.get(message.migration_id)

    def _notify_all(self, machines: Iterable[Machine], event: Event, now_s: float) -> list[Effect]:
        return [effect for machine in machines for effect in self.notify(machine, event, now_s)]

    def _answer_unknown(
        self, sender: InstanceId, message: Message, now_s: float, is_terminating: bool
    ) -> list[Effect]:
        migration_id = message.migration_id
        match message:
            case Reserve(stage=0, reservation=None):
                return self._open(sender, message, now_s, is_terminating)
            case Reserve() | Commit() | CommitQuery() | ForwardedAbort():
                unknown = Reason.UNKNOWN_MIGRATION
                return [Send(sender, Aborted(migration_id, message.reservation, unknown))]
            case Reserved() | StageCopied():
                # A reservation that a late copy of a Reserve opened.
                return [Send(sender, Abort(migration_id, Reason.UNKNOWN_MIGRATION))]
            case Committed():
                return [Send(sender, Released(migration_id))]
            case Aborted() | Abort() | Released():
                return []  # Both sides agree that it is over.

    def _open(
        self, sender: InstanceId, reserve: Reserve, now_s: float, is_terminating: bool
    ) -> list[Effect]:
        refusal = self._refusal(reserve.request_id, is_terminating)
        if refusal is not None:
            return [Send(sender, Aborted(reserve.migration_id, None, refusal))]
        self._num_reservations += 1
        destination = self._new_destination(
            reserve.migration_id, reserve.request_id, sender, ReservationId(self._num_reservations)
        )
        self._destinations[reserve.migration_id] = destination
        self._count(destination, 1)
        return self.notify(destination, Received(reserve), now_s)

    def _refusal(self, request_id: RequestId, is_terminating: bool) -> Reason | None:
        if is_terminating:
            return Reason.TERMINATING
        # For example a request that comes back while its departure has no verdict yet.
        if self.source_of(request_id) or self.destination_of(request_id):
            return Reason.DUPLICATE_REQUEST
        if whose_prefix(request_id) is not None:
            is_busy = self._num_incoming_prefixes >= MAX_INCOMING_PREFIXES
        else:
            is_busy = self.num_incoming >= self._max_incoming
        if is_busy:
            return Reason.BUSY
        return None

    def _new_source(
        self,
        migration_id: MigrationId,
        request_id: RequestId,
        destination: InstanceId,
        mode: Mode,
    ) -> MigrationSource:
        return MigrationSource(migration_id, request_id, destination, mode, self._config)

    def _new_destination(
        self,
        migration_id: MigrationId,
        request_id: RequestId,
        source: InstanceId,
        reservation: ReservationId,
    ) -> MigrationDestination:
        return MigrationDestination(migration_id, request_id, source, reservation, self._config)
