"""Operators' view of the instances and of held requests."""

from collections.abc import Sequence

from sterna.messages.actors import (
    Absent,
    DispatchRequest,
    InstanceMember,
    LoadReport,
    Membership,
)
from sterna.policy.candidate_table import CandidateTable
from sterna.policy.presets import STERNA
from sterna.policy.virtual_usage import Candidate
from sterna.scheduler.description import describe_held, describe_instances
from sterna.types import HIGH, NORMAL, FrontendId, InstanceId, InstanceLoad, RequestId

I0, I1 = InstanceId("i0"), InstanceId("i1")


def report(instance_id: InstanceId, **changes: object) -> LoadReport:
    values: dict[str, object] = {
        "sequence": 1,
        "total_tokens": 1000,
        "used_tokens": 100,
        "free_tokens": 900.0,
        "normal_free_tokens": 900.0,
        "num_running": 2,
        "num_queuing": 1,
        **changes,
    }
    return LoadReport(InstanceLoad(instance_id=instance_id, **values))


def described(
    membership: Membership,
    *reports: LoadReport,
    sources: tuple[InstanceId, ...] = (),
    migrates: bool = True,
    candidates: Sequence[Candidate] = (),
):
    by_id = {each.load.instance_id: each for each in reports}
    table = CandidateTable(candidates)
    return describe_instances(membership, by_id, table, sources, migrates=migrates)


def test_an_instance_is_described_by_its_last_report() -> None:
    moving = report(I0, num_migrating_out=1, num_migrating_in=2)
    (row,) = described(Membership(1, (InstanceMember(I0, "a"),), (), None), moving)
    assert row["id"] == "i0"
    assert row["state"] == "running"
    assert (row["total_tokens"], row["used_tokens"]) == (1000, 100)
    assert (row["running"], row["queuing"], row["migrating"]) == (2, 1, 3)
    # Two run, and one in line counts: 900 / 3.
    assert row["freeness"] == 300.0
    assert row["note"] is None


def test_freeness_is_what_the_scheduler_decides_by() -> None:
    """Beside a request of high priority with the share of its headroom that instances can bear."""
    crowded = report(I0, free_tokens=-8_400.0)
    seen = Candidate(crowded.load, policy=STERNA, headroom_share=0.5)
    membership = Membership(1, (InstanceMember(I0, "a"),), (), None)
    (row,) = described(membership, crowded, candidates=(seen,))
    assert row["freeness"] == seen.freeness
    assert row["freeness"] > described(membership, crowded)[0]["freeness"]


def test_each_is_described_with_its_node() -> None:
    waits, starts = Absent(I1, "pending"), Absent(InstanceId("i2"), "starting", node="10.0.0.2")
    serves = InstanceMember(I0, "a", node="10.0.0.1")
    rows = described(Membership(1, (serves,), (), None, (waits, starts)), report(I0))
    assert [row["node"] for row in rows] == ["10.0.0.1", None, "10.0.0.2"]


def test_one_that_has_not_reported_starts() -> None:
    (row,) = described(Membership(1, (InstanceMember(I0, "a"),), (), None))
    assert (row["state"], row["freeness"]) == ("starting", None)


def test_instances_to_come_say_what_they_wait_for() -> None:
    membership = Membership(1, (), (), None, (Absent(I0, "pending", "no node has 1 GPUs free", 2),))
    (row,) = described(membership)
    assert (row["state"], row["note"], row["generation"]) == (
        "pending",
        "no node has 1 GPUs free",
        2,
    )


def test_a_drain_says_how_many_requests_it_waits_for_and_why() -> None:
    membership = Membership(1, (InstanceMember(I0, "a", True, "an operator drains it"),), (), None)

    def note(**changes: object) -> object:
        sources = (I0,) if changes.pop("is_source", False) else ()
        migrates = bool(changes.pop("migrates", True))
        leaving = report(I0, is_terminating=True, **changes)
        (row,) = described(membership, leaving, sources=sources, migrates=migrates)
        assert (row["state"], row["freeness"]) == ("terminating", None)
        return row["note"]

    assert note(move_tokens=64, is_source=True) == "an operator drains it; 3 requests left"
    assert note(num_migrating_out=1) == "an operator drains it; 3 requests left"
    assert note(move_tokens=64) == (
        "an operator drains it; 3 requests left, waiting for an instance with room"
    )
    assert note() == "an operator drains it; 3 requests left, none of which can move now"
    assert note(num_running=0, num_queuing=0) == "an operator drains it"
    assert note(move_tokens=64, migrates=False) == (
        "an operator drains it; 3 requests left, which the policy does not move"
    )


def test_one_that_will_be_emptied_waits_for_no_request_yet() -> None:
    member = InstanceMember(I0, "a", note="its node is drained; it stays")
    (row,) = described(Membership(1, (member,), (), None), report(I0))
    assert (row["state"], row["note"]) == ("running", "its node is drained; it stays")


def test_a_held_request_has_its_prompt_and_no_instance() -> None:
    held = DispatchRequest(FrontendId(0), RequestId("r"), 176, 5.0, HIGH, NORMAL, prompt_tokens=170)
    (row,) = describe_held([held])
    assert row == {
        "id": "r",
        "instance": None,
        "status": "held",
        "num_tokens": 170,
        "num_output_tokens": 0,
        "used_tokens": 0,
        "demand_tokens": 176,
        "priority": 1,
        "num_preemptions": 0,
        "arrival_s": 5.0,
        "immovable": "it waits at the scheduler",
    }
