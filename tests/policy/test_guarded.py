"""A policy class in a server: what it decides, and what is decided where it fails."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from sterna.config import ScalingConfig
from sterna.policy.guarded import GuardedPolicy, guarded
from sterna.policy.own import Policy
from sterna.policy.presets import LLUMNIX
from sterna.policy.virtual_usage import NewRequest
from sterna.types import Immovable, InstanceId, RequestId
from tests.policy.builders import candidate, instance, running

SCALING = ScalingConfig(min_instances=1, max_instances=4)


class Own(Policy):
    """Decides by functions that a test sets; counts the objects made."""

    base = "llumnix"
    decide: Callable[..., Any]

    def dispatch(self, request: Any, instances: Any) -> Any:
        return type(self).decide(instances)

    def pair(self, instances: Any) -> Any:
        return type(self).decide(instances)

    def victims(self, instance: Any) -> Any:
        return type(self).decide(instance)

    def num_instances(self, instances: Any, num_starting: int, scaling: Any) -> Any:
        return type(self).decide(instances)


@pytest.fixture
def reports() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def policy(reports: list[tuple[str, str]]) -> GuardedPolicy:
    own = (
        guarded(Own().as_config(), lambda method, error: reports.append((method, str(error))))
        .with_fresh_state()
        .own
    )
    assert isinstance(own, GuardedPolicy)
    return own


VIEW = instance("i0", running=[running("a", 320), running("b", 160, immovable=Immovable.MIGRATING)])
FREE = instance("i1")
BOTH = (candidate(VIEW), candidate(FREE))
REQUEST = NewRequest(RequestId("r"), 64)


def test_what_can_be_carried_out_is_decided_by_the_class(
    policy: GuardedPolicy, reports: list[tuple[str, str]]
) -> None:
    Own.decide = lambda instances: InstanceId("i0")
    assert policy.dispatch(REQUEST, BOTH) == "i0"
    Own.decide = lambda instances: {InstanceId("i0"): InstanceId("i1")}
    assert policy.pair(BOTH) == {"i0": "i1"}
    Own.decide = lambda view: [view.running[0]]
    assert [each.request_id for each in policy.victims(VIEW)] == ["a"]
    Own.decide = lambda instances: 3
    assert policy.num_instances(BOTH, 0, SCALING) == 3
    assert reports == []


def fail(_: Any) -> Any:
    raise RuntimeError("no coffee")


def fail_later(_: Any) -> Any:
    yield "i0", "i1"
    raise TypeError("no tea")


@pytest.mark.parametrize(
    ("method", "given", "decide", "reason"),
    [
        ("dispatch", (REQUEST, BOTH), fail, "no coffee"),
        ("dispatch", (REQUEST, BOTH), lambda _: "i9", "'i9' is not the instance_id"),
        ("dispatch", (REQUEST, BOTH), lambda _: None, "None is not the instance_id"),
        ("pair", (BOTH,), fail, "no coffee"),
        ("pair", (BOTH,), lambda _: {"i0": "i9"}, "'i9' is not the instance_id"),
        ("pair", (BOTH,), lambda _: {"i0": "i0"}, "'i0' cannot be its own destination"),
        ("pair", (BOTH,), lambda _: {"i0": ["i1"]}, "['i1'] is not the instance_id"),
        ("pair", (BOTH,), fail_later, "no tea"),
        ("pair", (BOTH,), lambda _: iter([None]), "a mapping of sources to destinations, not"),
        ("pair", (BOTH,), lambda _: None, "a mapping of sources to destinations, not None"),
        ("victims", (VIEW,), fail, "no coffee"),
        (
            "victims",
            (VIEW,),
            lambda view: view.running,
            f"request b cannot move: {Immovable.MIGRATING.value}",
        ),
        ("victims", (VIEW,), lambda _: [running("z", 16)], "request z is not on the instance"),
        ("victims", (VIEW,), lambda _: ["a"], "must return requests of the instance, not 'a'"),
        ("victims", (VIEW,), lambda _: None, "must return a sequence of requests of the instance"),
        (
            "victims",
            (VIEW,),
            lambda view: view.running[0],
            "a sequence of requests of the instance",
        ),
        ("num_instances", (BOTH, 0, SCALING), fail, "no coffee"),
        ("num_instances", (BOTH, 0, SCALING), lambda _: 2.5, "must be an integer, not 2.5"),
    ],
)
def test_where_the_class_fails_its_base_decides_and_the_reason_is_told(
    policy: GuardedPolicy,
    reports: list[tuple[str, str]],
    method: str,
    given: Any,
    decide: Any,
    reason: str,
) -> None:
    Own.decide = decide
    base = Policy()
    base.config = replace(LLUMNIX, name="Own")
    assert getattr(policy, method)(*given) == getattr(base, method)(*given)
    ((told, why),) = reports
    assert told == method
    assert reason in why


def test_a_preset_needs_no_guard() -> None:
    assert guarded(LLUMNIX, lambda method, error: None) is LLUMNIX
