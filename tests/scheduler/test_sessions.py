"""Copies of sessions' prefixes ahead of their next turns."""

from collections.abc import Mapping
from dataclasses import replace

from msgspec import structs

from sterna.config import PolicyConfig
from sterna.messages.actors import DispatchRequest
from sterna.policy.presets import STERNA
from sterna.scheduler.global_scheduler import GlobalScheduler
from sterna.scheduler.prefix_copies import CopyPrefix
from sterna.scheduler.sessions import IDLE_AFTER_S, MAX_SESSIONS, Sessions
from sterna.types import FrontendId, InstanceId, InstanceView, RequestId
from tests.policy.builders import instance, queuing, report
from tests.scheduler.test_global_scheduler import ask

I0, I1, I2 = (InstanceId(f"i{k}") for k in range(3))
PROMPT_TOKENS = 40_000
COPYING = replace(STERNA, num_session_copies=2)
IDLE_S = IDLE_AFTER_S + 1.0


class Caches:
    """Prefix caches whose contents a test sets, as `PrefixKnowledge`."""

    def __init__(self) -> None:
        self.cached: dict[str, dict[InstanceId, int]] = {}
        self.can = True

    def cached_tokens(self, request: DispatchRequest) -> Mapping[InstanceId, int]:
        return self.cached.get(request.session, {})

    def can_copy(self, source: InstanceId, destination: InstanceId) -> bool:
        return self.can

    def on_dispatched(
        self, request: DispatchRequest, instance_id: InstanceId, now_s: float
    ) -> None:
        self.cached.setdefault(request.session, {})[instance_id] = request.prompt_tokens - 1

    def on_cancel(self, request_id: RequestId) -> None:
        pass

    def on_frontend_left(self, frontend_id: FrontendId) -> None:
        pass


def turn(name: str, session: str, prompt_tokens: int = PROMPT_TOKENS) -> DispatchRequest:
    return structs.replace(ask(name, 160), session=session, prompt_tokens=prompt_tokens)


def hot(instance_id: str) -> InstanceView:
    """An instance with a long prompt to compute, and memory."""
    waiting = structs.replace(queuing("long", 160), num_tokens=30_000, uncomputed_tokens=30_000)
    return instance(instance_id, queuing=[waiting])


def cluster(
    caches: Caches,
    *views: InstanceView,
    after_s: float = IDLE_S,
    policy: PolicyConfig = COPYING,
) -> GlobalScheduler:
    """A scheduler that has sent a turn of each of two sessions to i0, and then gets these views."""
    core = GlobalScheduler(policy, now_s=0.0, prefixes=caches)
    core.on_load(report(instance("i0"), policy), 0.0)
    core.on_request(turn("r0", "a"), 0.0)
    core.on_request(turn("r1", "b"), 0.0)
    for number, view in enumerate(views):
        load = report(view, policy, sequence=2 + number, last_dispatch=2)
        core.on_load(load, after_s - 0.1)
    return core


def copies(core: GlobalScheduler, now_s: float = IDLE_S) -> list[tuple[str, str, str, int]]:
    return [
        (each.request.session, each.source, each.destination, each.first_token)
        for each in core.on_tick(now_s)
        if isinstance(each, CopyPrefix)
    ]


def test_from_where_turns_would_wait_prefixes_are_copied_to_where_they_would_not() -> None:
    """That of the newest turn, then that of the one before, each of them once."""
    core = cluster(Caches(), hot("i0"), instance("i1"))
    assert copies(core) == [("b", "i0", "i1", 0)]
    assert copies(core, IDLE_S + 1) == [("a", "i0", "i1", 0)]
    assert copies(core, IDLE_S + 2) == []


def test_turns_with_an_adapter_are_not_copied_ahead() -> None:
    """The adapter's files may be others on the other instance."""
    core = cluster(Caches())
    core.on_request(structs.replace(turn("r2", "c"), has_adapter=True), 0.0)
    for number, view in enumerate((hot("i0"), instance("i1"))):
        core.on_load(report(view, COPYING, sequence=2 + number, last_dispatch=3), IDLE_S - 0.1)
    assert {copies(core, IDLE_S + n)[0][0] for n in range(2)} == {"a", "b"}
    assert copies(core, IDLE_S + 2) == []


def test_a_copy_begins_behind_what_is_there() -> None:
    caches = Caches()
    core = cluster(caches, hot("i0"), instance("i1"))
    caches.cached["b"][I1] = 16_000
    assert copies(core) == [("b", "i0", "i1", 16_000)]


def test_no_front_end_waits_for_such_a_copy() -> None:
    core = cluster(Caches(), hot("i0"), instance("i1"))
    (copy,) = [each for each in core.on_tick(IDLE_S) if isinstance(each, CopyPrefix)]
    assert copy.request.request_id == "next turn of r1"
    assert not core.waits(copy.request.request_id)
    assert core.on_prefix_done(copy.request.request_id, IDLE_S, is_copied=True) == []


def test_nothing_is_copied_that_is_as_soon_computed() -> None:
    caches = Caches()
    core = cluster(caches, hot("i0"), instance("i1"))
    for each in caches.cached.values():
        each[I1] = PROMPT_TOKENS - 200
    assert copies(core) == []


def test_nothing_is_copied_where_turns_would_not_wait_or_wait_everywhere() -> None:
    assert copies(cluster(Caches(), instance("i0"), instance("i1"))) == []
    assert copies(cluster(Caches(), hot("i0"), hot("i1"))) == []
    emptied = instance("i1", is_terminating=True)
    assert copies(cluster(Caches(), hot("i0"), emptied)) == []


def test_a_turn_that_has_just_been_sent_is_not_copied_yet() -> None:
    core = cluster(Caches(), hot("i0"), instance("i1"), after_s=IDLE_AFTER_S - 0.5)
    assert copies(core, IDLE_AFTER_S - 0.1) == []


def test_caches_that_cannot_be_copied_between_are_left_alone() -> None:
    caches = Caches()
    caches.can = False
    assert copies(cluster(caches, hot("i0"), instance("i1"))) == []


def test_by_default_nothing_is_copied_ahead() -> None:
    core = cluster(Caches(), hot("i0"), instance("i1"), policy=STERNA)
    assert [copies(core, IDLE_S + n) for n in range(3)] == [[]] * 3


def test_the_newest_sessions_are_remembered_and_each_turn_is_taken_once() -> None:
    sessions = Sessions()
    for number in range(MAX_SESSIONS + 1):
        sessions.on_dispatched(turn(f"r{number}", f"s{number}"), I0, 0.0)
    sessions.on_dispatched(turn("other", ""), I0, 0.0)
    sessions.on_dispatched(turn("again", "s5"), I1, 0.0)
    names = [each.session for each in sessions.take(I0, IDLE_S)]
    assert names == [f"s{number}" for number in range(MAX_SESSIONS, 0, -1) if number != 5]
    assert list(sessions.take(I0, IDLE_S)) == []
    sessions.on_dispatched(turn("next", "s7"), I0, IDLE_S)
    assert [each.request_id for each in sessions.take(I0, 2 * IDLE_S)] == ["next"]


def test_the_sessions_of_an_instance_that_has_left_are_forgotten_and_no_others() -> None:
    sessions = Sessions()
    for name, instance_id in (("a", I0), ("b", I1)):
        sessions.on_dispatched(turn(name, name), instance_id, 0.0)
    sessions.on_instance_left(I1)
    taken = {each: [turn.session for turn in sessions.take(each, IDLE_S)] for each in (I0, I1)}
    assert taken == {I0: ["a"], I1: []}
