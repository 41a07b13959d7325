"""Descriptions of instances and of held requests for operators. Pure."""

import math
from collections.abc import Collection, Iterable, Mapping

from sterna.messages.actors import (
    Absent,
    DispatchRequest,
    InstanceMember,
    LoadReport,
    Membership,
)
from sterna.policy.candidate_table import CandidateTable
from sterna.policy.virtual_usage import Candidate, freeness_of
from sterna.types import InstanceId

Description = dict[str, object]

UNKNOWN: Description = {
    "total_tokens": 0,
    "used_tokens": 0,
    "freeness": None,
    "running": 0,
    "queuing": 0,
    "migrating": 0,
    "head_demand_tokens": 0,
    "preemptions": 0,
    "migrations_committed": 0,
    "migrations_aborted": 0,
}
"""The load of an instance that has sent no report."""


def describe_instances(
    membership: Membership,
    reports: Mapping[InstanceId, LoadReport],
    candidates: CandidateTable,
    sources: Collection[InstanceId],
    *,
    migrates: bool = True,
) -> list[Description]:
    """One entry for each instance, those that do not serve yet last. The names of the fields are
    stable (docs/operations/run.md).

    Args:
        candidates: the instances as decisions see them.
        sources: instances that have a destination to move requests to.
        migrates: whether the policy moves requests at all.
    """
    return [
        *(
            _describe(
                each,
                reports.get(each.instance_id),
                candidates.find(each.instance_id),
                sources,
                migrates=migrates,
            )
            for each in membership.instances
        ),
        *(_describe_absent(each) for each in membership.absent),
    ]


def describe_held(requests: Iterable[DispatchRequest]) -> list[Description]:
    """One entry for each request that waits at the scheduler, with the fields of those that
    instances describe. What one that was lost with its instance had generated counts as prompt."""
    return [
        {
            "id": each.request_id,
            "instance": None,
            "status": "held",
            "num_tokens": each.prompt_tokens,
            "num_output_tokens": 0,
            "used_tokens": 0,
            "demand_tokens": each.demand_tokens,
            "priority": int(each.scheduling_priority),
            "num_preemptions": 0,
            "arrival_s": each.arrival_s,
            "immovable": "it waits at the scheduler",
        }
        for each in requests
    ]


def _describe(
    instance: InstanceMember,
    report: LoadReport | None,
    candidate: Candidate | None,
    sources: Collection[InstanceId],
    *,
    migrates: bool,
) -> Description:
    state = "terminating" if instance.is_terminating else "running"
    if report is None:
        state = "starting"
    return {
        "id": instance.instance_id,
        "node": instance.node,
        "state": state,
        **(UNKNOWN if report is None else _load(report, candidate)),
        "generation": instance.generation,
        "note": _note(instance, report, sources, migrates=migrates),
    }


def _describe_absent(absent: Absent) -> Description:
    return {
        "id": absent.instance_id,
        "node": absent.node,
        "state": absent.state,
        **UNKNOWN,
        "generation": absent.generation,
        "note": absent.note,
    }


def _load(report: LoadReport, candidate: Candidate | None) -> Description:
    load = report.load
    freeness = freeness_of(load) if candidate is None else candidate.freeness
    return {
        "total_tokens": load.total_tokens,
        "used_tokens": load.used_tokens,
        # JSON has no infinity, and a terminating instance has minus infinity.
        "freeness": freeness if math.isfinite(freeness) else None,
        "running": load.num_running,
        "queuing": load.num_queuing,
        "migrating": load.num_migrating_out + load.num_migrating_in,
        "head_demand_tokens": load.head_demand_tokens,
        "preemptions": load.num_preemptions,
        "migrations_committed": report.num_committed,
        "migrations_aborted": report.num_aborted,
    }


def _note(
    instance: InstanceMember,
    report: LoadReport | None,
    sources: Collection[InstanceId],
    *,
    migrates: bool,
) -> str | None:
    """The reason why it is or will be emptied, and what that waits for."""
    if instance.note is None or report is None or not instance.is_terminating:
        return instance.note
    load = report.load
    num_left = load.num_running + load.num_queuing
    if num_left == 0:
        return instance.note
    left = f"{instance.note}; {num_left} request{'s' if num_left > 1 else ''} left"
    if not migrates:
        return f"{left}, which the policy does not move"
    if instance.instance_id in sources or load.num_migrating_out > 0:
        return left
    if load.move_tokens is None:
        return f"{left}, none of which can move now"
    return f"{left}, waiting for an instance with room"
