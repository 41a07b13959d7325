"""Llumlets of an instance A, brought to where a test begins."""

from collections.abc import Iterable

from sterna.config import LlumletConfig, MigrationConfig, PolicyConfig
from sterna.instance.llumlet import Llumlet, LlumletEffect, Report
from sterna.migration.messages import (
    Adopted,
    BlocksReserved,
    Commit,
    Committed,
    Drained,
    Inspect,
    Inspected,
    RequestPosition,
    ReservationId,
    Reserve,
    Reserved,
    Send,
)
from sterna.types import (
    NORMAL,
    Immovable,
    InstanceId,
    InstanceView,
    MigrationId,
    Priority,
    RequestId,
    RequestStatus,
    RequestView,
)

A, B, C = InstanceId("A"), InstanceId("B"), InstanceId("C")
N = ReservationId(1)


def config(
    num_concurrent_migrations: int = 1,
    *,
    report_interval_s: float = 0.05,
    heartbeat_interval_s: float = 1.0,
    retry_backoff_s: float = 1.0,
) -> LlumletConfig:
    return LlumletConfig(
        policy=PolicyConfig(name="test", num_concurrent_migrations=num_concurrent_migrations),
        migration=MigrationConfig(),
        report_interval_s=report_interval_s,
        heartbeat_interval_s=heartbeat_interval_s,
        retry_backoff_s=retry_backoff_s,
    )


def running(
    name: str,
    num_tokens: int = 64,
    priority: Priority = NORMAL,
    immovable: Immovable | None = None,
) -> RequestView:
    return RequestView(
        request_id=RequestId(name),
        status=RequestStatus.RUNNING,
        num_tokens=num_tokens,
        physical_usage_tokens=num_tokens,
        execution_priority=priority,
        immovable=immovable,
    )


def queuing(name: str, num_tokens: int = 64) -> RequestView:
    return RequestView(
        request_id=RequestId(name),
        status=RequestStatus.QUEUING,
        num_tokens=num_tokens,
        demand_tokens=num_tokens,
    )


def view(*requests: RequestView) -> InstanceView:
    return InstanceView(
        instance_id=A,
        total_tokens=4096,
        block_size=16,
        running=tuple(r for r in requests if r.status is RequestStatus.RUNNING),
        queuing=tuple(r for r in requests if r.status is RequestStatus.QUEUING),
    )


def paired(*requests: RequestView, num_concurrent_migrations: int = 1) -> Llumlet:
    """Instance A with these requests, told at 0 s to migrate to B."""
    llumlet = Llumlet(A, config(num_concurrent_migrations))
    llumlet.on_view(view(*requests), 0.0)
    llumlet.on_destination(B, 0.0)
    return llumlet


def inspects(effects: Iterable[LlumletEffect]) -> list[str]:
    """The requests with which migrations began."""
    return [effect.request_id for effect in effects if isinstance(effect, Inspect)]


def reports(effects: Iterable[LlumletEffect]) -> list[Report]:
    return [effect for effect in effects if isinstance(effect, Report)]


def without_reports(effects: Iterable[LlumletEffect]) -> list[LlumletEffect]:
    return [effect for effect in effects if not isinstance(effect, Report)]


PROGRESS = Inspected(RequestPosition(False, 1, 2, 0), b"request")


def until_reserve(llumlet: Llumlet, migration_id: str, now_s: float = 0.0) -> None:
    llumlet.on_outcome(MigrationId(migration_id), PROGRESS, now_s)


def until_commit(llumlet: Llumlet, migration_id: str, now_s: float = 0.0) -> None:
    """A short request: its first stage is the last."""
    until_reserve(llumlet, migration_id, now_s)
    reserved = Reserved(MigrationId(migration_id), N, 0, ())
    llumlet.on_message(B, reserved, now_s)
    llumlet.on_outcome(MigrationId(migration_id), Drained(2, b"state"), now_s)


def committed(llumlet: Llumlet, migration_id: str, now_s: float = 0.0) -> list[LlumletEffect]:
    until_commit(llumlet, migration_id, now_s)
    return llumlet.on_message(B, Committed(MigrationId(migration_id), N), now_s)


def coming(llumlet: Llumlet, request_id: str, source: InstanceId = C) -> ReservationId:
    """Let a request come until its only stage is reserved; returns the reservation's number."""
    migration_id = MigrationId(f"{source}-1")
    reserve = Reserve(migration_id, RequestId(request_id), 0, 0, 0, True, None, b"request")
    llumlet.on_message(source, reserve, 0.0)
    effects = llumlet.on_outcome(migration_id, BlocksReserved(0, ()), 0.0)
    (answer,) = (effect.message for effect in effects if isinstance(effect, Send))
    return answer.reservation


def come(llumlet: Llumlet, request_id: str, source: InstanceId = C) -> list[LlumletEffect]:
    number = coming(llumlet, request_id, source)
    migration_id = MigrationId(f"{source}-1")
    commit = Commit(migration_id, number, RequestId(request_id), 0, 0, b"state")
    llumlet.on_message(source, commit, 0.0)
    return llumlet.on_outcome(migration_id, Adopted(), 0.0)
