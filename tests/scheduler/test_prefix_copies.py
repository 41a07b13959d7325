"""A request waits for the part of its prefix that only another instance has."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from msgspec import structs

from sterna.config import Soonest
from sterna.messages.actors import DispatchRequest
from sterna.messages.reasons import HeldCause
from sterna.policy.presets import ROUND_ROBIN, STERNA
from sterna.scheduler.global_scheduler import Dispatch, Effect, GlobalScheduler
from sterna.scheduler.prefix_copies import COPY_LIMIT_S, CopyPrefix
from sterna.types import FrontendId, InstanceId, RequestId
from tests.policy.builders import evenly_loaded, instance, report
from tests.scheduler.test_global_scheduler import FRONTEND, ask, places

COPYING = replace(
    STERNA,
    dispatch=Soonest(copy_token_cost=0.1, copy_start_cost=10.0),
    migrates=False,
    binds_late=False,
)
"""No rounds, so that deadlines are those of copies alone."""

PROMPT = 160
R = RequestId("r")


class Known:
    """What i0 and i1 have of the prompts, and whether it can be copied between them."""

    copies = True

    def __init__(self, **tokens: int) -> None:
        self.tokens: Mapping[InstanceId, int] = {InstanceId(k): v for k, v in tokens.items()}

    def cached_tokens(self, request: DispatchRequest) -> Mapping[InstanceId, int]:
        return self.tokens

    def can_copy(self, source: InstanceId, destination: InstanceId) -> bool:
        assert (source, destination) == ("i0", "i1")
        return self.copies

    def on_dispatched(
        self, request: DispatchRequest, instance_id: InstanceId, now_s: float
    ) -> None: ...

    def on_cancel(self, request_id: RequestId) -> None: ...

    def on_frontend_left(self, frontend_id: FrontendId) -> None: ...


def scheduler(*, explains: bool = False, **tokens: int) -> GlobalScheduler:
    """i0, which has most of the prompts, is so busy that they are sent to i1."""
    core = GlobalScheduler(COPYING, now_s=0.0, prefixes=Known(**tokens), explains=explains)
    core.on_load(report(evenly_loaded("i0", 9_600, 60), COPYING), 0.0)
    core.on_load(report(instance("i1"), COPYING), 0.0)
    return core


def asked(core: GlobalScheduler, now_s: float = 1.0) -> list[Effect]:
    return core.on_request(structs.replace(ask("r"), prompt_tokens=PROMPT), now_s)


def copying(**tokens: int) -> GlobalScheduler:
    core = scheduler(**(tokens or {"i0": 144}))
    effects = asked(core)
    assert [type(each) for each in effects] == [CopyPrefix]
    return core


def test_a_prefix_that_cannot_move_alone_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Known, "copies", False)
    (sent,) = asked(scheduler(i0=144))
    assert isinstance(sent, Dispatch)
    assert sent.instance_id == "i1"


def test_the_prefix_of_a_request_with_an_adapter_is_computed() -> None:
    """The adapter's files may be others on the other instance."""
    prompt = structs.replace(ask("r"), prompt_tokens=PROMPT, has_adapter=True)
    (sent,) = scheduler(i0=144).on_request(prompt, 1.0)
    assert isinstance(sent, Dispatch)
    assert sent.instance_id == "i1"


def test_a_request_is_sent_when_its_prefix_has_been_copied() -> None:
    core = scheduler(i0=144, i1=16)
    (order,) = asked(core)
    assert isinstance(order, CopyPrefix)
    assert (order.source, order.destination, order.first_token) == ("i0", "i1", 16)
    assert (order.request.request_id, core.num_held, core.waits(R)) == ("r", 0, True)
    assert core.held_cause(R) is HeldCause.COPY
    assert core.waiting() == {R: FRONTEND}
    assert places(core.on_prefix_done(R, 1.2)) == [("r", "i1")]
    assert (core.waits(R), core.waiting(), core.on_prefix_done(R, 1.3)) == (False, {}, [])


@pytest.mark.parametrize("is_copied", [True, False])
def test_the_reason_says_whether_it_was_copied_and_how_long_that_took(is_copied: bool) -> None:
    core = scheduler(explains=True, i0=144)
    asked(core, 1.0)
    (sent,) = core.on_prefix_done(R, 1.25, is_copied=is_copied)
    assert isinstance(sent, Dispatch)
    assert sent.reason is not None
    assert sent.reason.held_s == 0.25
    assert sent.reason.prefix_from == ("i0" if is_copied else None)


def test_meanwhile_it_counts_on_its_instance_and_then_once() -> None:
    core = copying()

    def num_requests() -> int:
        return {each.instance_id: each.num_requests for each in core.candidates}["i1"]

    assert num_requests() == 1
    assert [each.request_id for each in core.undispatched] == [R]
    # Another request was dispatched meanwhile, and is there.
    core.on_load(report(instance("i1"), COPYING, sequence=2, last_dispatch=7), 1.1)
    assert num_requests() == 1
    (dispatch,) = core.on_prefix_done(R, 1.2)
    assert isinstance(dispatch, Dispatch)
    assert (num_requests(), core.undispatched) == (1, [])
    number = dispatch.dispatch_number
    core.on_load(report(instance("i1"), COPYING, sequence=3, last_dispatch=number), 1.3)
    assert num_requests() == 0


@pytest.mark.parametrize("tokens", [{}, {"i1": 144}, {"i0": 16, "i1": 16}, {"i0": 11}])
def test_what_is_nowhere_else_or_little_is_not_copied(tokens: dict[str, int]) -> None:
    assert places(asked(scheduler(**tokens))) == [("r", "i1")]


def test_a_rule_without_costs_copies_nothing() -> None:
    core = GlobalScheduler(ROUND_ROBIN, now_s=0.0, prefixes=Known(i0=144))
    core.on_load(report(instance("i1"), ROUND_ROBIN), 0.0)
    assert places(asked(core)) == [("r", "i1")]


def test_it_is_sent_without_its_prefix_after_a_while() -> None:
    core = copying()
    assert core.next_deadline_s == 1.0 + COPY_LIMIT_S
    assert core.on_tick(0.9 + COPY_LIMIT_S) == []
    assert places(core.on_tick(1.0 + COPY_LIMIT_S)) == [("r", "i1")]
    assert core.next_deadline_s is None


def test_it_is_sent_without_its_prefix_when_that_is_lost() -> None:
    core = copying()
    assert places(core.on_instance_left(InstanceId("i0"), 1.1)) == [("r", "i1")]


def test_it_waits_on_when_a_third_instance_is_lost() -> None:
    core = copying()
    core.on_load(report(evenly_loaded("i2", 9_600, 60), COPYING), 1.0)
    assert core.on_instance_left(InstanceId("i2"), 1.1) == []
    assert places(core.on_prefix_done(R, 1.2)) == [("r", "i1")]


def test_it_looks_for_another_instance_when_its_own_is_lost() -> None:
    core = copying()
    assert places(core.on_instance_left(InstanceId("i1"), 1.1)) == [("r", "i0")]
    assert core.on_prefix_done(R, 1.2) == []


def test_a_client_or_front_end_that_goes_ends_the_wait() -> None:
    core = copying()
    assert core.on_cancel(R, 1.1) == []
    assert (core.on_prefix_done(R, 1.2), core.next_deadline_s) == ([], None)
    core = copying()
    assert core.on_frontend_left(FrontendId(FRONTEND), 1.1) == []
    assert (core.on_prefix_done(R, 1.2), core.next_deadline_s) == ([], None)
    assert all(each.in_flight == () for each in core.candidates)


def test_asking_again_changes_nothing() -> None:
    core = copying()
    assert asked(core, now_s=1.1) == []
    assert places(core.on_prefix_done(R, 1.2)) == [("r", "i1")]
