"""Messages between the actors, except for KV bytes. Pure.

Every message is one ZeroMQ multipart message: the struct in msgpack, then, where its docstring
says so, payload frames in the engine's own encoding, which only engine and front end read.
All messages are one-way; an answer is a message of its own. Delivery is in order between two
actors while both live. There is no order across actors, so that tokens of a migrated request
can overtake each other: every span has the index of its first token.
"""

import msgspec

from sterna.messages.reasons import DispatchReason, HeldCause, MoveReason
from sterna.messages.streams import StreamMessage
from sterna.migration.messages import Message, Mode
from sterna.types import (
    CacheLayout,
    FrontendId,
    InstanceId,
    InstanceLoad,
    Priority,
    RequestId,
)

MAX_FRAME_BYTES = 512 << 20
"""Limit of a message's struct, and of each of its payload frames: far above the largest request
that a front end admits, with its images as tensors. A larger request or answer fails."""

# --------------------------------------------------------------- front end <-> global scheduler


class DispatchRequest(msgspec.Struct, frozen=True, tag=True):
    """Front end -> scheduler: name an instance for this request.

    Attributes:
        demand_tokens: memory needed to admit it, in tokens of whole blocks.
        arrival_s: when it reached the front end, in seconds of the wall clock.
        session: what its client calls its session; "" without one.
        prompt_tokens: length of its prompt, and of what it had generated when it was lost with its
            instance.
        block_hashes: of the full blocks of its prompt, 8 bytes each in native order; empty unless
            instances report their prefix caches.
        has_adapter: whether it has a LoRA adapter: its prefix is not copied, since the other
            instance may have other files under the adapter's path.
        has_begun: whether its client has tokens of it: it goes before those of its class.
        waited_s: for how long it has waited already, at a scheduler that died.
    """

    frontend_id: FrontendId
    request_id: RequestId
    demand_tokens: int
    arrival_s: float
    scheduling_priority: Priority
    execution_priority: Priority
    session: str = ""
    prompt_tokens: int = 0
    block_hashes: bytes = b""
    has_adapter: bool = False
    has_begun: bool = False
    waited_s: float = 0.0


class Dispatched(msgspec.Struct, frozen=True, tag=True):
    """Scheduler -> front end: send the request to this instance."""

    request_id: RequestId
    instance_id: InstanceId
    dispatch_number: int
    reason: DispatchReason | None = None


class Held(msgspec.Struct, frozen=True, tag=True):
    """Scheduler -> front end, a few times a second: your requests that wait here for memory on an
    instance do so still (late binding).

    Attributes:
        request_ids: those of which it had not said so before.
        room_tokens: the most memory that an instance has for one of them.
        causes: what each of these waits for.
    """

    request_ids: tuple[RequestId, ...] = ()
    room_tokens: float = 0.0
    causes: tuple[HeldCause, ...] = ()


HELD_INTERVAL_S = 0.2
"""Time between two such messages, well below that after which a front end that hears nothing takes
its requests back (`FrontendConfig.scheduler_timeout_s`)."""


class CancelDispatch(msgspec.Struct, frozen=True, tag=True):
    """Front end -> scheduler: the request no longer needs an instance. One that was sent to an
    instance has ended there, or is told to."""

    request_id: RequestId


# ------------------------------------------------------------------- front end <-> instance


class AddRequest(msgspec.Struct, frozen=True, tag=True):
    """Front end -> instance: serve this request. Payload: the engine's request.

    Attributes:
        dispatch_number: from Dispatched; 0 when the scheduler was bypassed.
        output_token_ids: the output tokens that the client has already, after an instance died with
            the request: it goes on behind them.
    """

    frontend_id: FrontendId
    request_id: RequestId
    dispatch_number: int
    output_token_ids: tuple[int, ...] = ()


class AbortRequests(msgspec.Struct, frozen=True, tag=True):
    """Front end or instance -> instance: the clients of these requests have gone.

    An instance that a request has left forwards this to the request's destination.
    """

    request_ids: tuple[RequestId, ...]


class CallUtility(msgspec.Struct, frozen=True, tag=True):
    """Front end -> instance: call a method of the engine. Payload: its arguments.

    Attributes:
        place: position of the instance among those that get the call, from 0.
    """

    frontend_id: FrontendId
    call_id: int
    method: str
    place: int = 0


class TokenSpan(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of a request that one output holds.

    Attributes:
        first_index: index of the first token in the request's output, from 0.
        num_tokens: number of tokens; 0 for an output that only ends the request.
        has_events: the output says when the engine queued, scheduled or preempted the request.
    """

    request_id: RequestId
    first_index: int
    num_tokens: int
    is_finished: bool
    has_events: bool = False


class TokenBatch(msgspec.Struct, frozen=True, tag=True):
    """Instance -> front end: the outputs of one step. Payload: one of the engine's outputs for
    each span, in the same order."""

    instance_id: InstanceId
    spans: tuple[TokenSpan, ...]


class FinalAck(msgspec.Struct, frozen=True, tag=True):
    """Front end -> terminating instance: no request of this front end is there, or will come.
    Earlier messages of the front end have arrived before.

    Attributes:
        emptied_since: that of `InstanceMember`; the FinalAck is void for another termination.
        num_heard: number of messages about its requests (`RequestNews`) that the front end has ever
            got from the instance; the FinalAck is void while others are on their way.
    """

    frontend_id: FrontendId
    emptied_since: int
    num_heard: int = 0


class UtilityResult(msgspec.Struct, frozen=True, tag=True):
    """Instance -> front end: outcome of CallUtility. Payload: the engine's outputs with it."""

    instance_id: InstanceId
    call_id: int


class RequestsMoved(msgspec.Struct, frozen=True, tag=True):
    """Instance -> front end: these requests run here from now on.

    Attributes:
        first_indices: for each, the index of the first token that it will produce here. It
            separates tokens before the move from those after it, in whatever order they arrive.
        version: that of the membership which the instance knows. If a front end knows an older one
            that lacks the instance, the instance is new to it; if it knows this or a later one, the
            instance is dead.
    """

    instance_id: InstanceId
    request_ids: tuple[RequestId, ...]
    first_indices: tuple[int, ...]
    version: int


class HandedBack(msgspec.Struct, frozen=True, tag=True):
    """Instance -> front end: these requests have ended here, and are to go on elsewhere after the
    tokens that their clients have. They can neither stay nor migrate, or the front end's mailbox
    has refused the news of their end."""

    instance_id: InstanceId
    request_ids: tuple[RequestId, ...]


class MoveEnded(msgspec.Struct, frozen=True, tag=True):
    """Instance -> front end: a migration of this request from here has ended. For the request's
    history alone: it may be lost, and has no effect.

    Attributes:
        outcome: `COMMITTED`, or the reason why the request stayed, in lower case.
        suspended_s: time for which the request was in no batch.
        reason: of the scheduler, when it set this destination last; None for an operator's order.
    """

    instance_id: InstanceId
    request_id: RequestId
    destination: InstanceId
    outcome: str
    stages: int
    suspended_s: float
    reason: MoveReason | None = None


RequestNews = TokenBatch | RequestsMoved | HandedBack
"""Messages of an instance to a front end that are no answers. Both count them (`FinalAck`)."""


class OwnerQuery(msgspec.Struct, frozen=True, tag=True):
    """Front end -> instance, after another instance died: do you have any of these requests?"""

    frontend_id: FrontendId
    query_id: int
    request_ids: tuple[RequestId, ...]


class OwnerReply(msgspec.Struct, frozen=True, tag=True):
    """Instance -> front end: those of the queried requests that are here.

    Attributes:
        arriving: those that may arrive here, or stay, by a migration that has not ended.
        version: that of the membership which the instance knows: it has passed requests on only to
            instances of this membership or an earlier one.
    """

    instance_id: InstanceId
    query_id: int
    request_ids: tuple[RequestId, ...]
    arriving: tuple[RequestId, ...] = ()
    version: int = 0


# --------------------------------------------------------------- instance <-> global scheduler


COMMITTED = "committed"
"""Outcome of a migration after which the destination has the request."""

BY_OPERATOR = "operator"
UNKNOWN_CAUSE = "unknown"
"""Causes of migrations, besides those of the scheduler (`MoveCause`): the order of an operator, and
that of a scheduler which gave no reason."""


class MigrationEnd(msgspec.Struct, frozen=True, array_like=True):
    """The end of a migration of a request, for the front ends' metrics.

    Attributes:
        outcome: `COMMITTED`, or the reason why the request stayed, in lower case.
        stages: number of stages that were reserved.
        suspended_s: time for which the request was in no batch.
        cause: that of `MoveReason`, `BY_OPERATOR`, or `UNKNOWN_CAUSE`.
    """

    outcome: str
    stages: int
    suspended_s: float
    cause: str = UNKNOWN_CAUSE

    @property
    def is_committed(self) -> bool:
        """Whether the destination has the request."""
        return self.outcome == COMMITTED


class LoadReport(msgspec.Struct, frozen=True, tag=True):
    """Instance -> scheduler (Section 4.3).

    Attributes:
        num_committed: migrations from this instance since its start after which the destination had
            the request.
        num_aborted: those after which this instance kept the request.
        listed_in: version of the newest membership of which the instance knows that it is in it; 0:
            of none.
        num_prefix_tokens, num_prefix_hits, external_counts, draft_counts: see `InstanceView`.
        num_sent_bytes: of KV caches that this instance has sent to others since its start.
        migrations: those from this instance that have ended since its last report.
        usage_by_priority: memory of the running requests of each execution priority, as (priority,
            tokens); blocks that requests share count once for each of them.
    """

    load: InstanceLoad
    num_committed: int = 0
    num_aborted: int = 0
    listed_in: int = 0
    num_prefix_tokens: int = 0
    num_prefix_hits: int = 0
    migrations: tuple[MigrationEnd, ...] = ()
    num_sent_bytes: int = 0
    usage_by_priority: tuple[tuple[Priority, int], ...] = ()
    external_counts: tuple[int, int] = (0, 0)
    draft_counts: tuple[int, ...] = ()


class CacheReport(msgspec.Struct, frozen=True, tag=True):
    """Instance -> scheduler: what its prefix cache has got and lost since the last such report.

    Attributes:
        added: keys of blocks that can be found now (`cache_key`), 8 bytes each in native order.
        removed: keys of those that no longer can.
        layout: of the first report to a scheduler, and of one that follows a report that was not
            sent: `added` is all that the cache has. None in others.
        listed_in: as in `LoadReport`.
    """

    instance_id: InstanceId
    added: bytes
    removed: bytes = b""
    layout: CacheLayout | None = None
    listed_in: int = 0


class SetDestination(msgspec.Struct, frozen=True, tag=True):
    """Scheduler -> instance: migrate to this instance until the next order; None ends that."""

    destination: InstanceId | None
    reason: MoveReason | None = None


class CopyPrefix(msgspec.Struct, frozen=True, tag=True):
    """Scheduler -> instance: copy this prompt's prefix to the prefix cache of the destination,
    where the request is to be sent. Answered by PrefixDone.

    Attributes:
        block_hashes: see `DispatchRequest`.
        first_token: tokens before it are there already.
    """

    request_id: RequestId
    destination: InstanceId
    block_hashes: bytes
    first_token: int


class PrefixDone(msgspec.Struct, frozen=True, tag=True):
    """Instance -> scheduler: the request need not wait for its prefix.

    Attributes:
        is_copied: it was copied; False: it will not be.
    """

    request_id: RequestId
    is_copied: bool = True


class AddInstances(msgspec.Struct, frozen=True, tag=True):
    """Scheduler -> supervisor: this number of further instances is needed (auto-scaling)."""

    num_instances: int


class TerminateInstance(msgspec.Struct, frozen=True, tag=True):
    """Scheduler -> supervisor: this instance is no longer needed (auto-scaling)."""

    instance_id: InstanceId


class Emptied(msgspec.Struct, frozen=True, tag=True):
    """Instance -> supervisor: no request is here, and none will come.

    Attributes:
        emptied_since: that of `InstanceMember`; the message is void for another termination.
    """

    instance_id: InstanceId
    emptied_since: int


HEARTBEAT_INTERVAL_S = 0.25
"""Time between two heartbeats of a member."""

SCHEDULER_NAME = "scheduler"
"""The global scheduler's name as a watched member; an instance's name is its id."""


def frontend_name(frontend_id: FrontendId) -> str:
    """Return a front end's name as a watched member and as an actor."""
    return f"front end {frontend_id}"


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Instance, scheduler or front end -> supervisor, a few times a second: a sign of life.

    Attributes:
        member: an instance's id, or one of the names above.
        num_ended: steps, and commands between two steps, that have ended since the start.
        is_busy: whether the engine works on something that should end soon; False without an
            engine.
        asked_s: when it was sent, on the instance's own clock: its lease counts from then. None
            without a lease (`lease`).
        weight_updates: that of `EngineActivity`.
    """

    member: str
    num_ended: int
    is_busy: bool
    asked_s: float | None = None
    weight_updates: str = ""


class HeartbeatAnswer(msgspec.Struct, frozen=True, tag=True):
    """Supervisor -> instance: the answer to a heartbeat; one that answers none asks for the
    heartbeats of this instance.

    Attributes:
        supervisor: its mailbox.
        asked_s: that of the heartbeat which this answers; None if it answers none.
    """

    supervisor: str
    asked_s: float | None = None


class InstanceStats(msgspec.Struct, frozen=True, array_like=True):
    """One instance's load, for the front ends' metrics; see `InstanceLoad` and `LoadReport`."""

    instance_id: InstanceId
    num_running: int
    num_queuing: int
    used_tokens: int
    total_tokens: int
    freeness_steps: float
    num_migrating_out: int
    num_migrating_in: int
    num_committed: int = 0
    num_aborted: int = 0
    num_preemptions: int = 0
    num_prefix_tokens: int = 0
    num_prefix_hits: int = 0
    head_demand_tokens: int = 0
    num_sent_bytes: int = 0
    num_by_priority: tuple[tuple[Priority, int], ...] = ()
    usage_by_priority: tuple[tuple[Priority, int], ...] = ()
    external_counts: tuple[int, int] = (0, 0)
    draft_counts: tuple[int, ...] = ()


STATS_INTERVAL_S = 1.0
"""Time between two reports for the front ends."""


class ClusterStats(msgspec.Struct, frozen=True, tag=True):
    """Scheduler -> front ends, once a second: all instances that have reported.

    Attributes:
        num_held: requests that wait at the scheduler for an instance.
        head_demand_tokens: demand of the first in line there; 0 for none.
        migrations: those that the scheduler has heard of since the last message.
        num_scaled_up, num_scaled_down: instances that auto-scaling has asked the supervisor for,
            and those that it has asked it to end, since the last message.
    """

    instances: tuple[InstanceStats, ...]
    num_held: int = 0
    head_demand_tokens: int = 0
    migrations: tuple[MigrationEnd, ...] = ()
    num_scaled_up: int = 0
    num_scaled_down: int = 0

    @property
    def num_waiting(self) -> int:
        """Requests that wait for memory, at the scheduler or on an instance."""
        return self.num_held + sum(each.num_queuing for each in self.instances)


# --------------------------------------------------------------------- instance <-> instance


class MigrationMessage(msgspec.Struct, frozen=True, tag=True):
    """Llumlet -> llumlet: a message of the migration protocol."""

    sender: InstanceId
    message: Message


# ------------------------------------------------------------------------------- operators


class MigrateRequest(msgspec.Struct, frozen=True, tag=True):
    """Front end -> instance: an operator orders to move this request. Answer: AdminReply."""

    reply_to: str
    query_id: int
    request_id: RequestId
    destination: InstanceId
    mode: Mode = Mode.LIVE


class ListRequests(msgspec.Struct, frozen=True, tag=True):
    """Front end -> instance or scheduler: describe your requests. Answer: AdminReply."""

    reply_to: str
    query_id: int


class ListInstances(msgspec.Struct, frozen=True, tag=True):
    """Front end -> scheduler: describe the instances. Answer: AdminReply."""

    reply_to: str
    query_id: int


class DescribeHistory(msgspec.Struct, frozen=True, tag=True):
    """Front end -> front end: describe the histories of the requests that this name stands for.
    Answer: AdminReply."""

    reply_to: str
    query_id: int
    name: str


class ListRecent(msgspec.Struct, frozen=True, tag=True):
    """Front end -> front end: describe what has happened to your requests in the last seconds.
    Answer: AdminReply."""

    reply_to: str
    query_id: int
    last_s: float


class AbortNamed(msgspec.Struct, frozen=True, tag=True):
    """Front end -> front end: abort the requests that vLLM's server calls so.

    Attributes:
        names: ids without what vLLM's client adds to them; None: all requests.
    """

    names: tuple[str, ...] | None


class DrainInstance(msgspec.Struct, frozen=True, tag=True):
    """Front end -> supervisor: empty this instance, then end it; or let it serve again. Answer:
    AdminReply."""

    reply_to: str
    query_id: int
    instance_id: InstanceId
    is_undo: bool = False


class DrainNode(msgspec.Struct, frozen=True, tag=True):
    """Front end -> supervisor: empty the instances of this node, and place none there; or let it
    have some again. Answer: AdminReply.

    Attributes:
        node: its address.
    """

    reply_to: str
    query_id: int
    node: str
    is_undo: bool = False


class StartInstances(msgspec.Struct, frozen=True, tag=True):
    """Front end -> supervisor: start this number of further instances. Answer: AdminReply."""

    reply_to: str
    query_id: int
    num_instances: int


class RestartInstances(msgspec.Struct, frozen=True, tag=True):
    """Front end -> supervisor: replace every instance, one at a time. Answer: AdminReply.

    Attributes:
        has_surge: whether a successor starts before an instance is emptied.
        options: further options of vLLM, which overrule those that the engines have.
    """

    reply_to: str
    query_id: int
    has_surge: bool = True
    options: tuple[str, ...] = ()


class AdminReply(msgspec.Struct, frozen=True, tag=True):
    """Answer to an operator's query or order.

    Attributes:
        body: JSON of the answer, or of the reason when `error` is set.
        error: None, or a message for the operator.
    """

    query_id: int
    body: bytes
    error: str | None = None


# -------------------------------------------------------------------------------- membership


class InstanceMember(msgspec.Struct, frozen=True, array_like=True):
    """An instance in a membership; `address` is its mailbox.

    Attributes:
        is_terminating: it gets no new requests, and is being emptied.
        note: the reason why it is or will be emptied, for operators.
        generation: that of its engine options.
        kv_format: a digest of that of `EngineFacts`, and the label of the updates of its weights.
        emptied_since: version of the first membership of this termination, which identifies it; 0
            while the instance is not being emptied.
        node: the address of its node.
    """

    instance_id: InstanceId
    address: str
    is_terminating: bool = False
    note: str | None = None
    generation: int = 0
    kv_format: str = ""
    emptied_since: int = 0
    node: str | None = None


class Absent(msgspec.Struct, frozen=True, array_like=True):
    """An instance that has no mailbox yet, or one that must not be used yet.

    Attributes:
        state: "starting", "pending" (no place to start on) or "warm" (up, waiting to be needed).
        note: the reason why it is pending; None for the others.
        is_for_pool: whether it starts for the warm pool, and is not needed to serve.
        node: the address of its node; None while it has no place.
    """

    instance_id: InstanceId
    state: str
    note: str | None = None
    generation: int = 0
    is_for_pool: bool = False
    node: str | None = None


class FrontendMember(msgspec.Struct, frozen=True, array_like=True):
    """One front end; `address` is its mailbox."""

    frontend_id: FrontendId
    address: str


class Membership(msgspec.Struct, frozen=True, tag=True):
    """Supervisor -> all: the members of the cluster. The highest version is valid.

    An instance that was in an older version and is not in this one is confirmed dead: it will
    never act again.

    Attributes:
        absent: instances that do not serve yet.
        supervisor: its mailbox.
        state: the state for a successor of the supervisor, which alone reads it.
        num_wanted: the number of instances that should take requests.
        drained_nodes: addresses of the nodes on which no instance is placed.
    """

    version: int
    instances: tuple[InstanceMember, ...]
    frontends: tuple[FrontendMember, ...]
    scheduler: str | None
    absent: tuple[Absent, ...] = ()
    supervisor: str | None = None
    state: bytes = b""
    num_wanted: int = 0
    drained_nodes: tuple[str, ...] = ()


WireMessage = (
    DispatchRequest
    | Dispatched
    | Held
    | CancelDispatch
    | AddRequest
    | AbortRequests
    | CallUtility
    | TokenBatch
    | FinalAck
    | UtilityResult
    | RequestsMoved
    | MoveEnded
    | HandedBack
    | OwnerQuery
    | OwnerReply
    | LoadReport
    | CacheReport
    | SetDestination
    | CopyPrefix
    | PrefixDone
    | AddInstances
    | TerminateInstance
    | Emptied
    | Heartbeat
    | HeartbeatAnswer
    | ClusterStats
    | MigrationMessage
    | MigrateRequest
    | ListRequests
    | ListInstances
    | DescribeHistory
    | ListRecent
    | AbortNamed
    | DrainInstance
    | DrainNode
    | StartInstances
    | RestartInstances
    | AdminReply
    | Membership
    | StreamMessage
)

PERIODIC_MESSAGES = (
    LoadReport,
    CacheReport,
    SetDestination,
    Heartbeat,
    HeartbeatAnswer,
    ClusterStats,
)
"""Those that another one of these follows within a second or so, but for two that are told once and
can wait: that an instance has no destination any longer, and the first answer to a heartbeat."""
