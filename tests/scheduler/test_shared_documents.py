"""Requests that share a large prompt with running ones need memory for the rest alone."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from sterna.messages.actors import DispatchRequest
from sterna.policy.presets import STERNA
from sterna.scheduler.global_scheduler import GlobalScheduler
from sterna.scheduler.running_prompts import RunningPrompts
from sterna.types import (
    MAX_LARGE_PROMPTS,
    InstanceId,
    InstanceView,
    Priority,
    RequestView,
    packed,
    unpacked,
)
from tests.policy.builders import instance, queuing, report, running
from tests.scheduler.test_global_scheduler import places
from tests.scheduler.test_waits_for_prefixes import Known, prompt

TOTAL = 40_000
DOCUMENT = 25_600
QUESTION = DOCUMENT + 640
"""In tokens: 1,600 blocks of a document, and 40 of a question."""

ALONE = replace(STERNA, migrates=False, growth_steps=0.0)


class Cluster:
    """A scheduler, and instances that report what the test says. Each is empty at first."""

    def __init__(self, *names: str) -> None:
        self.cached: dict[str, Mapping[str, int]] = {}
        known = Known()
        known.tokens = self.cached
        self.core = GlobalScheduler(ALONE, now_s=0.0, prefixes=known)
        self.sequence = 1
        for name in names or ("i0",):
            self.core.on_load(report(instance(name, total_tokens=TOTAL), ALONE), 0.0)

    def report(self, view: InstanceView, now_s: float = 1.0) -> list[tuple[str, str]]:
        self.sequence += 1
        load = report(view, ALONE, sequence=self.sequence, last_dispatch=1_000 * self.sequence)
        return places(self.core.on_load(load, now_s))

    def ask(
        self,
        name: str,
        document: int = 1,
        *,
        cached: Mapping[str, int] | None = None,
        num_tokens: int = QUESTION,
        now_s: float = 1.0,
    ) -> list[tuple[str, str]]:
        self.cached[name] = {"i0": DOCUMENT} if cached is None else cached
        return places(self.core.on_request(question(name, document, num_tokens), now_s))


def question(name: str, document: int, num_tokens: int = QUESTION) -> DispatchRequest:
    """A prompt of a document and of blocks that no other prompt has."""
    num_shared = min(num_tokens, DOCUMENT) // 16
    hashes = [1_000_000 * document + place for place in range(num_shared)]
    own = hash(name) % 2**40 << 20
    hashes += [own + place for place in range(num_tokens // 16 - num_shared)]
    return structs.replace(prompt(name, num_tokens), block_hashes=packed(hashes))


def with_requests(
    *names: str, more: Sequence[int] = (), instance_id: str = "i0", num_tokens: int = QUESTION
) -> InstanceView:
    """An instance on which these questions about one document decode, and before them requests of
    these tokens, whose prompts are small."""
    others = [
        running(f"{instance_id}-{n}", each, num_output_tokens=each) for n, each in enumerate(more)
    ]
    questions = [
        asked(name, num_tokens, shared_tokens=DOCUMENT if place else 0)
        for place, name in enumerate(names)
    ]
    return instance(instance_id, running=[*others, *questions], total_tokens=TOTAL)


def asked(name: str, num_tokens: int = QUESTION, *, shared_tokens: int = 0) -> RequestView:
    """A question that decodes, and the part of its memory that no request before it has."""
    return running(name, num_tokens - shared_tokens, num_tokens=num_tokens)


def test_questions_about_one_document_run_together() -> None:
    """By hand: the first one uses 26,240 tokens, so that 13,760 are free; each further one needs
    640, and 21 of them fit, whether reports show them or they are on their way."""
    cluster = Cluster()
    assert cluster.ask("r0", cached={}) == [("r0", "i0")]
    names = [f"r{number}" for number in range(22)]
    assert cluster.report(with_requests("r0")) == []
    for number, name in enumerate(names[1:], 1):
        assert cluster.ask(name) == [(name, "i0")]
        if number in (8, 16):
            cluster.report(with_requests(*names[: number + 1]))
    assert cluster.ask("r22") == []
    assert cluster.report(with_requests(*names)) == []
    assert cluster.core.smallest_held_tokens == QUESTION - DOCUMENT
    assert cluster.report(with_requests(*names[:-1])) == [("r22", "i0")]


def test_while_the_document_is_computed_its_questions_wait() -> None:
    """An engine would compute it once for each of them."""
    cluster = Cluster()
    cluster.ask("r0", cached={})
    begun = running("r0", 2_048, num_tokens=QUESTION, demand_tokens=QUESTION)
    assert cluster.report(instance("i0", running=[begun], total_tokens=TOTAL)) == []
    assert cluster.ask("r1") == []
    assert cluster.report(with_requests("r0")) == []
    assert places(cluster.core.on_tick(1.3)) == [("r1", "i0")]


def test_another_prompt_that_is_computed_changes_nothing() -> None:
    cluster = Cluster()
    cluster.ask("r0", cached={})
    other = running("other", 0, num_tokens=12_800, demand_tokens=12_800)
    view = instance("i0", running=[asked("r0"), other], total_tokens=TOTAL)
    load = structs.replace(
        report(view, ALONE, sequence=2, last_dispatch=1_000), uncomputed_tokens=12_800
    )
    cluster.sequence = 2
    assert places(cluster.core.on_load(load, 1.0)) == []
    assert cluster.ask("r1") == [("r1", "i0")]


def test_of_a_document_in_no_use_all_blocks_need_memory() -> None:
    """The question has ended, and requests that were there before it have grown: what is cached is
    free, and will be taken by those."""
    cluster = Cluster()
    for number in range(2):
        cluster.ask(f"other {number}", number + 2, cached={}, num_tokens=3_200)
    cluster.ask("r0", cached={})
    cluster.report(with_requests("r0", more=[3_200, 3_200]))
    assert cluster.report(with_requests(more=[10_000, 10_000])) == []
    assert cluster.ask("r1") == []


def test_a_question_that_has_moved_shares_where_it_is_now() -> None:
    cluster = Cluster("i0", "i1")
    cluster.ask("r0", cached={})
    cluster.report(with_requests(more=[39_000]))
    cluster.report(with_requests("r0", instance_id="i1"))
    assert cluster.ask("r1", cached={"i0": DOCUMENT}) == []
    assert cluster.ask("r2", cached={"i0": DOCUMENT, "i1": DOCUMENT}) == [("r2", "i1")]


def test_another_document_is_not_shared() -> None:
    cluster = Cluster()
    cluster.ask("r0", cached={})
    cluster.report(with_requests("r0"))
    assert cluster.ask("r1", 2) == []
    assert cluster.ask("r2", 1) == [("r2", "i0")]


def test_a_part_of_the_document_that_runs_too_changes_nothing() -> None:
    cluster = Cluster()
    cluster.ask("r0", cached={})
    cluster.report(with_requests("r0"))
    assert cluster.ask("part", num_tokens=8_000) == [("part", "i0")]
    cluster.report(with_requests("r0", "part"))
    assert cluster.ask("r1") == [("r1", "i0")]


def test_questions_of_one_session_run_together() -> None:
    """And of the turn before, which has ended, nothing is shared."""
    cluster = Cluster()
    first, second, third = (
        structs.replace(question(name, 1), session="s") for name in ("first", "second", "third")
    )
    cluster.core.on_request(first, 0.0)
    cluster.report(with_requests("first"))
    cluster.cached |= {name: {"i0": DOCUMENT} for name in ("second", "third")}
    assert places(cluster.core.on_request(second, 1.0)) == [("second", "i0")]
    cluster.report(with_requests(more=[QUESTION]))
    assert cluster.core.on_request(third, 1.0) == []


def test_no_more_is_shared_than_is_cached() -> None:
    """By hand: 10,000 tokens are free."""
    cluster = Cluster()
    cluster.ask("r0", cached={})
    cluster.report(with_requests("r0", more=[3_760]))
    needed_tokens = QUESTION - 10_000
    assert cluster.ask("r1", cached={"i0": needed_tokens - 16}) == []
    assert cluster.ask("r2", cached={"i0": needed_tokens}) == [("r2", "i0")]


def test_nothing_is_shared_where_engines_keep_a_part_of_the_prompt_alone() -> None:
    """As with sliding windows alone, where demands are smaller than prompts."""
    cluster = Cluster()
    for name in ("r0", "r1"):
        cluster.cached[name] = {"i0": DOCUMENT} if name == "r1" else {}
    window = [structs.replace(question(name, 1), demand_tokens=6_160) for name in ("r0", "r1")]
    assert places(cluster.core.on_request(window[0], 1.0)) == [("r0", "i0")]
    cluster.report(with_requests("r0", more=[TOTAL - QUESTION - 6_144]))
    assert cluster.core.on_request(window[1], 1.0) == []


def test_of_a_prompt_that_is_not_large_all_counts() -> None:
    """By hand: a tenth of the memory is 4,000 tokens."""
    cluster = Cluster()
    cluster.ask("r0", cached={}, num_tokens=4_000)
    cluster.report(with_requests("r0", more=[35_000], num_tokens=4_000))
    assert cluster.ask("r1", cached={"i0": 3_840}, num_tokens=4_000) == []
    cluster = Cluster()
    cluster.ask("r0", cached={}, num_tokens=4_016)
    cluster.report(with_requests("r0", more=[35_000], num_tokens=4_016))
    assert cluster.ask("r1", cached={"i0": 3_840}, num_tokens=4_016) == [("r1", "i0")]


def test_one_that_waits_for_its_prefix_goes_there_when_it_is_in_use() -> None:
    """The document is still being computed on i0 when its second question comes; i1 is empty."""
    cluster = Cluster("i0", "i1")
    assert cluster.ask("r0", cached={}) == [("r0", "i0")]
    assert cluster.ask("r1") == []
    assert cluster.report(with_requests("r0")) == []
    assert places(cluster.core.on_tick(1.3)) == [("r1", "i0")]


def test_memory_is_kept_free_where_least_is_missing() -> None:
    """A question of high priority needs 640 tokens beside its document on i0, and would need 26,240
    on i1, where more is free. Normal ones about the document do not go before it."""
    cluster = Cluster("i0", "i1")
    cluster.ask("r0", cached={})
    full = with_requests("r0", more=[TOTAL - QUESTION - 480])
    cluster.report(with_requests(more=[TOTAL - 10_000], instance_id="i1"))
    assert cluster.report(full) == []
    urgent = structs.replace(question("urgent", 1), scheduling_priority=Priority(1))
    cluster.cached["urgent"] = {"i0": DOCUMENT}
    assert cluster.core.on_request(urgent, 1.0) == []
    assert cluster.ask("normal", num_tokens=DOCUMENT + 320) == []
    view = with_requests("r0", more=[TOTAL - QUESTION - 640])
    assert cluster.report(view) == [("urgent", "i0")]


def test_reports_of_instances_without_the_document_cost_no_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster("i0", "i1")
    cluster.ask("r0", cached={})
    cluster.report(with_requests(more=[TOTAL - 10_000], instance_id="i1"))
    cluster.report(with_requests("r0", more=[TOTAL - QUESTION]))
    for number in range(1, 4):
        assert cluster.ask(f"r{number}") == []
    looks: list[object] = []
    monkeypatch.setattr(RunningPrompts, "shared", lambda *arguments: looks.append(arguments))
    cluster.report(with_requests(more=[TOTAL - 9_000], instance_id="i1"))
    assert looks == []


def test_only_prompts_that_may_be_alike_are_compared() -> None:
    """Not those of which less than half is cached, and not those of another document."""
    cluster = Cluster()
    cluster.report(with_requests("r0"))
    candidates, prompts = cluster.core.candidates, RunningPrompts()
    prompts.on_sent(question("r0", 1), candidates)
    i0 = InstanceId("i0")
    assert prompts.shared(question("r1", 1), {i0: QUESTION // 2}, candidates) == {}
    assert prompts.shared(question("r2", 2), {i0: DOCUMENT}, candidates) == {}
    assert prompts.num_compared == 0
    assert prompts.shared(question("r3", 1), {i0: DOCUMENT}, candidates) == {i0: DOCUMENT}
    assert prompts.num_compared == 1


def test_looks_that_compare_much_are_rarer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sterna.scheduler.global_scheduler.COMPARISON_PAUSE_S", 1.0)
    cluster = Cluster()
    cluster.ask("r0", cached={})
    cluster.report(with_requests("r0", more=[TOTAL - QUESTION]))
    for number in range(1, 4):
        assert cluster.ask(f"r{number}") == []
    cluster.core.on_tick(1.3)
    looks: list[object] = []
    shared = RunningPrompts.shared

    def note(*arguments: Any) -> dict[InstanceId, int]:
        looks.append(arguments)
        return shared(*arguments)

    monkeypatch.setattr(RunningPrompts, "shared", note)
    cluster.core.on_tick(4.2)
    assert looks == []
    cluster.core.on_tick(4.4)
    assert len(looks) == 3


def test_a_document_that_was_sent_later_is_found_within_a_quarter_of_a_second() -> None:
    """Its other question came while the memory was full, and nothing of it was known."""
    cluster = Cluster()
    cluster.report(with_requests(more=[TOTAL]))
    assert cluster.ask("r0", cached={}) == []
    assert cluster.ask("r1", cached={}) == []
    assert cluster.report(instance("i0", total_tokens=TOTAL)) == [("r0", "i0")]
    cluster.cached["r1"] = {"i0": DOCUMENT}
    assert cluster.report(with_requests("r0"), 1.1) == []
    assert cluster.core.smallest_held_tokens == QUESTION
    assert places(cluster.core.on_tick(1.3)) == [("r1", "i0")]


def test_with_the_instance_what_runs_there_is_gone() -> None:
    cluster = Cluster("i0", "i1")
    cluster.ask("r0", cached={})
    cluster.report(with_requests("r0"))
    cluster.core.on_instance_left(InstanceId("i0"), 1.0)
    assert cluster.ask("r1", cached={}) == [("r1", "i1")]
    assert cluster.core.smallest_held_tokens is None


def test_prompts_that_run_are_known_and_those_that_have_ended_are_forgotten() -> None:
    cluster = Cluster()
    cluster.ask("r0", cached={}, num_tokens=4_800)
    for number in range(4 * MAX_LARGE_PROMPTS):
        cluster.report(with_requests("r0", num_tokens=4_800))
        cluster.ask(f"other {number}", 2 + number, cached={}, num_tokens=4_800)
    cluster.report(with_requests("r0", more=[TOTAL - 4_816], num_tokens=4_800))
    assert cluster.ask("r1", cached={"i0": 4_784}, num_tokens=4_800) == [("r1", "i0")]
    cluster.report(with_requests("other 0", more=[TOTAL - 4_816], num_tokens=4_800))
    assert cluster.ask("r2", 2, cached={"i0": 4_784}, num_tokens=4_800) == []


def test_of_a_stream_that_goes_on_its_outputs_are_not_shared() -> None:
    """By hand: 1,500 of 1,640 blocks are alike, 24,000 tokens; of 28,240 others 14,240 fit into
    16,000 less what the blocks take."""
    cluster = Cluster()
    cluster.ask("r0", cached={}, num_tokens=24_000)
    lost = structs.replace(
        question("lost", 1),
        prompt_tokens=QUESTION + 2_000,
        demand_tokens=QUESTION + 2_000,
        has_begun=True,
    )
    hashes = [*unpacked(question("r0", 1, 24_000).block_hashes), *range(5, 145)]
    lost = structs.replace(lost, block_hashes=packed(hashes))
    cluster.cached["lost"] = {"i0": 26_240}
    own_tokens = QUESTION + 2_000 - 24_000
    cluster.report(with_requests("r0", more=[16_000 - own_tokens + 16], num_tokens=24_000))
    assert cluster.core.on_request(lost, 1.0) == []
    view = with_requests("r0", more=[16_000 - own_tokens], num_tokens=24_000)
    assert cluster.report(view) == [("lost", "i0")]


def test_a_waiting_line_at_the_instance_takes_its_memory_first() -> None:
    cluster = Cluster()
    cluster.ask("r0", cached={})
    view = replace(with_requests("r0"), queuing=(queuing("other", 13_700),))
    assert cluster.report(view) == []
    assert cluster.ask("r1") == []


def test_a_report_names_the_newest_large_prompts() -> None:
    names = [f"r{number}" for number in range(MAX_LARGE_PROMPTS + 2)]
    begun = running("begun", 0, num_tokens=QUESTION, demand_tokens=QUESTION)
    small = running("small", 24_000, num_output_tokens=20_000)
    view = with_requests(*names)
    view = replace(view, running=(*view.running, small, begun))
    assert report(view, ALONE).large_prompts == tuple(reversed(names[2:]))
    assert report(view, replace(ALONE, binds_late=False)).large_prompts == ()
