"""What the actors say to each other, besides the KV bytes. Pure.

Every message is one ZeroMQ multipart message: the struct in msgpack, then, where the struct
says so, payload frames in the engine's own encoding, which only engine and front end read.
All messages are one-way; an answer is a message of its own. Delivery is in order between two
actors while both live; nothing is promised across actors, so that tokens of a migrated request
can overtake each other: every span says which token it begins with.
"""

import msgspec

from sterna.messages.streams import StreamMessage
from sterna.migration.messages import Message, Mode
from sterna.types import FrontendId, InstanceId, InstanceLoad, Priority, RequestId

MAX_FRAME_BYTES = 512 << 20
"""Of a message's struct, and of each of its payload frames: far above the largest request that a
front end lets in, with its images as tensors. A request or an answer that has more fails."""

# --------------------------------------------------------------- front end <-> global scheduler


class DispatchRequest(msgspec.Struct, frozen=True, tag=True):
    """Front end -> scheduler: name an instance for this request.

    Attributes:
        demand_tokens: memory needed to admit it, in tokens of whole blocks.
        arrival_s: when it reached the front end, in seconds of the wall clock.
    """

    frontend_id: FrontendId
    request_id: RequestId
    demand_tokens: int
    arrival_s: float
    scheduling_priority: Priority
    execution_priority: Priority


class Dispatched(msgspec.Struct, frozen=True, tag=True):
    """Scheduler -> front end: send the request to this instance."""

    request_id: RequestId
    instance_id: InstanceId
    dispatch_number: int


class CancelDispatch(msgspec.Struct, frozen=True, tag=True):
    """Front end -> scheduler: the request needs no instance any more."""

    request_id: RequestId


# ------------------------------------------------------------------- front end <-> instance


class AddRequest(msgspec.Struct, frozen=True, tag=True):
    """Front end -> instance: serve this request. Payload: the engine's request.

    Attributes:
        dispatch_number: from Dispatched; 0 when the scheduler was bypassed.
        output_token_ids: the outputs that the client has already, when an instance died with the
            request: it goes on behind them.
    """

    frontend_id: FrontendId
    request_id: RequestId
    dispatch_number: int
    output_token_ids: tuple[int, ...] = ()


class AbortRequests(msgspec.Struct, frozen=True, tag=True):
    """Front end or instance -> instance: the clients of these requests have gone.

    An instance that gave a request away forwards this to where it went.
    """

    request_ids: tuple[RequestId, ...]


class CallUtility(msgspec.Struct, frozen=True, tag=True):
    """Front end -> instance: call a method of the engine. Payload: its arguments."""

    frontend_id: FrontendId
    call_id: int
    method: str


class TokenSpan(msgspec.Struct, frozen=True, array_like=True):
    """Which tokens of a request one output holds.

    Attributes:
        first_index: index of its first token in the request's output, from 0.
        num_tokens: how many; 0 for an output that only ends the request.
    """

    request_id: RequestId
    first_index: int
    num_tokens: int
    is_finished: bool


class TokenBatch(msgspec.Struct, frozen=True, tag=True):
    """Instance -> front end: what one step produced. Payload: the engine's outputs, one for
    each span, in the same order."""

    instance_id: InstanceId
    spans: tuple[TokenSpan, ...]


class Farewell(msgspec.Struct, frozen=True, tag=True):
    """Front end -> instance that is being emptied: nothing of mine is with you, and nothing more
    will come. What the front end had sent before has arrived before.

    Attributes:
        emptied_since: see `InstanceMember`; the farewell is void for another termination.
        num_heard: how many messages about its requests (`RequestNews`) the front end has had from
            the instance, ever; the farewell is void while others are on their way.
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
        first_indices: for each, the first token that it will produce here. It tells what came
            before the move from what comes after it, whichever way news takes.
        version: of the membership that the instance knows. Who knows an older one, without the
            instance, has not heard of its start; who knows this or a later one, of its death.
    """

    instance_id: InstanceId
    request_ids: tuple[RequestId, ...]
    first_indices: tuple[int, ...]
    version: int


class HandedBack(msgspec.Struct, frozen=True, tag=True):
    """Instance -> front end: these requests cannot stay here, nor be migrated; they run here no
    more, and are to go on elsewhere behind the tokens that their clients have."""

    instance_id: InstanceId
    request_ids: tuple[RequestId, ...]


RequestNews = TokenBatch | RequestsMoved | HandedBack
"""What an instance tells a front end unasked. Both count it (`Farewell`)."""


class OwnerQuery(msgspec.Struct, frozen=True, tag=True):
    """Front end -> instance, after another instance died: do you have any of these requests?"""

    frontend_id: FrontendId
    query_id: int
    request_ids: tuple[RequestId, ...]


class OwnerReply(msgspec.Struct, frozen=True, tag=True):
    """Instance -> front end: which of the queried requests are here.

    Attributes:
        arriving: those that may come to be here, or to stay, by a migration that has not ended.
    """

    instance_id: InstanceId
    query_id: int
    request_ids: tuple[RequestId, ...]
    arriving: tuple[RequestId, ...] = ()


# --------------------------------------------------------------- instance <-> global scheduler


class LoadReport(msgspec.Struct, frozen=True, tag=True):
    """Instance -> scheduler (Section 4.3).

    Attributes:
        num_committed: migrations from this instance, since it started, after which the
            destination had the request.
        num_aborted: those after which it kept the request.
    """

    load: InstanceLoad
    num_committed: int = 0
    num_aborted: int = 0


class SetDestination(msgspec.Struct, frozen=True, tag=True):
    """Scheduler -> instance: migrate to this instance until told otherwise; None: stop."""

    destination: InstanceId | None


class AddInstances(msgspec.Struct, frozen=True, tag=True):
    """Scheduler -> supervisor: so many more instances are needed (auto-scaling)."""

    num_instances: int


class TerminateInstance(msgspec.Struct, frozen=True, tag=True):
    """Scheduler -> supervisor: this instance is not needed any more (auto-scaling)."""

    instance_id: InstanceId


class Emptied(msgspec.Struct, frozen=True, tag=True):
    """Instance -> supervisor: nothing is here, and nothing more will come.

    Attributes:
        emptied_since: of the instance (`InstanceMember`); what is said of another emptying is void.
    """

    instance_id: InstanceId
    emptied_since: int


HEARTBEAT_INTERVAL_S = 0.25
"""Of every member that is watched."""

SCHEDULER_NAME = "scheduler"
"""Of the global scheduler, as a member that is watched; instances have their ids."""


def frontend_name(frontend_id: FrontendId) -> str:
    """Return a front end's name, as a member that is watched and as an actor."""
    return f"front end {frontend_id}"


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Instance, scheduler or front end -> supervisor, a few times a second: how it gets on.

    Attributes:
        member: an instance's id, or one of the names above.
        num_ended: steps, and other work on what is stepped, that have ended since the start.
        is_busy: whether the engine has something in hand that should end soon. Who has no engine
            has nothing in hand.
        asked_s: when it was sent, by the instance's own clock: its lease is to count from then.
            None: it has none (`lease`).
    """

    member: str
    num_ended: int
    is_busy: bool
    asked_s: float | None = None


class HeartbeatAnswer(msgspec.Struct, frozen=True, tag=True):
    """Supervisor -> instance: send your heartbeats here.

    Attributes:
        supervisor: its mailbox.
        asked_s: of the heartbeat that this answers; None: of none.
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


STATS_INTERVAL_S = 1.0
"""Time between two reports for the front ends."""


class ClusterStats(msgspec.Struct, frozen=True, tag=True):
    """Scheduler -> front ends, once a second: all instances that have reported."""

    instances: tuple[InstanceStats, ...]


# --------------------------------------------------------------------- instance <-> instance


class MigrationMessage(msgspec.Struct, frozen=True, tag=True):
    """Llumlet -> llumlet: a message of the migration protocol."""

    sender: InstanceId
    message: Message


# ------------------------------------------------------------------------------- operators


class MigrateRequest(msgspec.Struct, frozen=True, tag=True):
    """Front end -> instance: an operator wants this request moved. Answer: AdminReply."""

    reply_to: str
    query_id: int
    request_id: RequestId
    destination: InstanceId
    mode: Mode = Mode.LIVE


class ListRequests(msgspec.Struct, frozen=True, tag=True):
    """Front end -> instance: describe your requests. Answer: AdminReply."""

    reply_to: str
    query_id: int


class ListInstances(msgspec.Struct, frozen=True, tag=True):
    """Front end -> scheduler: describe the instances. Answer: AdminReply."""

    reply_to: str
    query_id: int


class DrainInstance(msgspec.Struct, frozen=True, tag=True):
    """Front end -> supervisor: empty this instance, then end it; or let it serve on. Answer:
    AdminReply."""

    reply_to: str
    query_id: int
    instance_id: InstanceId
    is_undo: bool = False


class StartInstances(msgspec.Struct, frozen=True, tag=True):
    """Front end -> supervisor: an operator wants so many more instances. Answer: AdminReply."""

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
    """Answer to an operator's question.

    Attributes:
        body: JSON of the answer; of the reason when `error` is set.
        error: None, or what went wrong, in words for the operator.
    """

    query_id: int
    body: bytes
    error: str | None = None


# -------------------------------------------------------------------------------- membership


class InstanceMember(msgspec.Struct, frozen=True, array_like=True):
    """One member of the cluster; `address` is its mailbox.

    Attributes:
        is_terminating: it gets no new requests, and is being emptied.
        note: why it is being emptied, in words.
        generation: which of the cluster's sets of engine options it runs with.
        kv_format: see `EngineFacts`.
        emptied_since: the version of the membership that first said that it is being emptied;
            another one each time that it begins. 0 while it is not.
    """

    instance_id: InstanceId
    address: str
    is_terminating: bool = False
    note: str | None = None
    generation: int = 0
    kv_format: str = ""
    emptied_since: int = 0


class Absent(msgspec.Struct, frozen=True, array_like=True):
    """An instance that has no mailbox yet, or none that anybody should use.

    Attributes:
        state: "starting", "pending" (no place to start on) or "warm" (up, waiting to be needed).
        note: why it is pending, in words; None for the others.
    """

    instance_id: InstanceId
    state: str
    note: str | None = None
    generation: int = 0


class FrontendMember(msgspec.Struct, frozen=True, array_like=True):
    """One front end; `address` is its mailbox."""

    frontend_id: FrontendId
    address: str


class Membership(msgspec.Struct, frozen=True, tag=True):
    """Supervisor -> all: who is there. The one with the highest version holds.

    An instance that was in an older version and is not in this one is confirmed dead: it will
    never act again.

    Attributes:
        absent: instances to come.
        supervisor: its mailbox.
        state: all that a successor of the supervisor needs, which only that reads.
    """

    version: int
    instances: tuple[InstanceMember, ...]
    frontends: tuple[FrontendMember, ...]
    scheduler: str | None
    absent: tuple[Absent, ...] = ()
    supervisor: str | None = None
    state: bytes = b""


WireMessage = (
    DispatchRequest
    | Dispatched
    | CancelDispatch
    | AddRequest
    | AbortRequests
    | CallUtility
    | TokenBatch
    | Farewell
    | UtilityResult
    | RequestsMoved
    | HandedBack
    | OwnerQuery
    | OwnerReply
    | LoadReport
    | SetDestination
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
    | DrainInstance
    | StartInstances
    | RestartInstances
    | AdminReply
    | Membership
    | StreamMessage
)
