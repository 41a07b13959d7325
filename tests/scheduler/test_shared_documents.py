"""Requests that share a large prompt with running ones need memory for the rest alone."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from msgspec import structs

from sterna.messages.actors import DispatchRequest
from sterna.policy.presets import STERNA
from sterna.scheduler.global_scheduler import GlobalScheduler
from sterna.scheduler.running_prompts import MAX_PROMPTS
from sterna.types import InstanceId, InstanceView, RequestId, packed
from tests.policy.builders import instance, queuing, report, running
from tests.scheduler.test_global_scheduler import ask, places
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


def with_questions(
    num_questions: int, *, more: Sequence[int] = (), instance_id: str = "i0"
) -> InstanceView:
    """An instance on which as many questions about one document run, and requests of these
    tokens."""
    usages_tokens = [QUESTION, *[QUESTION - DOCUMENT] * (num_questions - 1)][:num_questions]
    views = [running(f"{instance_id}-{n}", each) for n, each in enumerate([*usages_tokens, *more])]
    return instance(instance_id, running=views, total_tokens=TOTAL)


def test_questions_about_one_document_run_together() -> None:
    """By hand: the first one uses 26,240 tokens, so that 13,760 are free; each further one needs
    640, and 21 of them fit, whether reports show them or they are on their way."""
    cluster = Cluster()
    assert cluster.ask("r0", cached={}) == [("r0", "i0")]
    assert cluster.report(with_questions(1)) == []
    for number in range(1, 22):
        assert cluster.ask(f"r{number}") == [(f"r{number}", "i0")]
        if number == 8:
            cluster.report(with_questions(9))
        elif number == 16:
            cluster.report(with_questions(17))
    assert cluster.ask("r22") == []
    assert cluster.report(with_questions(22)) == []
    assert cluster.core.smallest_held_tokens == QUESTION - DOCUMENT
    assert cluster.report(with_questions(21)) == [("r22", "i0")]


def test_those_whose_own_parts_are_still_to_be_computed_are_few() -> None:
    """By hand: a quarter of what they share, ten questions."""
    cluster = Cluster()
    cluster.ask("r0", cached={})
    cluster.report(with_questions(1))
    sent = [cluster.ask(f"r{number}") for number in range(1, 13)]
    assert [len(each) for each in sent] == [1] * 11 + [0]
    assert cluster.report(with_questions(12)) == [("r12", "i0")]


def test_while_the_document_is_computed_its_questions_wait() -> None:
    """An engine would compute it once for each of them."""
    cluster = Cluster()
    cluster.ask("r0", cached={})
    begun = running("r0", 2_048, num_tokens=QUESTION, demand_tokens=QUESTION)
    view = instance("i0", running=[begun], total_tokens=TOTAL)
    load = structs.replace(
        report(view, ALONE, sequence=2, last_dispatch=1_000), uncomputed_tokens=QUESTION - 2_048
    )
    cluster.sequence = 2
    assert places(cluster.core.on_load(load, 1.0)) == []
    assert cluster.ask("r1") == []
    assert cluster.report(with_questions(1)) == [("r1", "i0")]


def test_of_a_document_in_no_use_all_blocks_need_memory() -> None:
    """The question that was there has ended, and others have come since: what is cached is free,
    and will be taken by those."""
    cluster = Cluster()
    cluster.ask("r0", cached={})
    cluster.report(instance("i0", total_tokens=TOTAL))
    for number in range(2):
        cluster.ask(f"other {number}", number + 2, cached={}, num_tokens=7_200)
    assert cluster.report(with_questions(0, more=[7_200, 7_200])) == []
    assert cluster.ask("r1") == []


def test_another_document_is_not_shared() -> None:
    cluster = Cluster()
    cluster.ask("r0", cached={})
    cluster.report(with_questions(1))
    assert cluster.ask("r1", 2) == []
    assert cluster.ask("r2", 1) == [("r2", "i0")]


def test_the_turn_before_of_the_same_session_has_ended() -> None:
    cluster = Cluster()
    first, second = (
        structs.replace(question(name, 1), session="s") for name in ("first", "second")
    )
    assert places(cluster.core.on_request(first, 0.0)) == [("first", "i0")]
    cluster.report(with_questions(0, more=[QUESTION]))
    cluster.cached["second"] = {"i0": DOCUMENT}
    assert cluster.core.on_request(second, 1.0) == []
    assert cluster.ask("other") == [("other", "i0")]


def test_no_more_is_shared_than_is_cached() -> None:
    """By hand: 13,760 tokens are free."""
    cluster = Cluster()
    cluster.ask("r0", cached={})
    cluster.report(with_questions(1))
    needed_tokens = QUESTION - 13_760
    assert cluster.ask("r1", cached={"i0": needed_tokens - 16}) == []
    assert cluster.ask("r2", cached={"i0": needed_tokens}) == [("r2", "i0")]


def test_of_a_prompt_that_is_not_large_all_counts() -> None:
    """By hand: a tenth of the memory is 4,000 tokens."""
    cluster = Cluster()
    cluster.ask("r0", cached={}, num_tokens=4_000)
    cluster.report(with_questions(0, more=[4_000, 35_000]))
    assert cluster.ask("r1", cached={"i0": 3_840}, num_tokens=4_000) == []
    cluster = Cluster()
    cluster.ask("r0", cached={}, num_tokens=4_016)
    cluster.report(with_questions(0, more=[4_016, 35_000]))
    assert cluster.ask("r1", cached={"i0": 3_840}, num_tokens=4_016) == [("r1", "i0")]


def test_one_that_waits_for_its_prefix_goes_there_when_it_is_in_use() -> None:
    """The document is still being computed on i0 when its second question comes; i1 is empty."""
    cluster = Cluster("i0", "i1")
    assert cluster.ask("r0", cached={}) == [("r0", "i0")]
    assert cluster.ask("r1") == []
    assert cluster.report(with_questions(1)) == [("r1", "i0")]


def test_a_document_that_was_sent_later_is_found_within_a_quarter_of_a_second() -> None:
    """Its other question came while the memory was full, and nothing of it was known."""
    cluster = Cluster()
    cluster.report(with_questions(0, more=[TOTAL]))
    assert cluster.ask("r0", cached={}) == []
    assert cluster.ask("r1", cached={}) == []
    assert cluster.report(instance("i0", total_tokens=TOTAL)) == [("r0", "i0")]
    cluster.cached["r1"] = {"i0": DOCUMENT}
    assert cluster.report(with_questions(1), 1.1) == []
    assert cluster.core.smallest_held_tokens == QUESTION
    assert places(cluster.core.on_tick(1.3)) == [("r1", "i0")]


def test_what_was_sent_is_forgotten_with_the_instance() -> None:
    cluster = Cluster("i0", "i1")
    cluster.ask("r0", cached={})
    cluster.report(with_questions(1))
    cluster.core.on_instance_left(InstanceId("i0"), 1.0)
    assert cluster.ask("r1", cached={}) == [("r1", "i1")]
    assert cluster.core.smallest_held_tokens is None


def test_the_last_documents_are_known_and_one_question_stands_for_all() -> None:
    cluster = Cluster()
    for number in range(2 * MAX_PROMPTS):
        cluster.ask(f"a{number}", 1, cached={}, num_tokens=4_800)
        cluster.report(instance("i0", total_tokens=TOTAL))
    for number in range(MAX_PROMPTS - 1):
        cluster.ask(f"b{number}", 2 + number, cached={}, num_tokens=4_800)
        cluster.report(instance("i0", total_tokens=TOTAL))
    full = with_questions(0, more=[4_800] * MAX_PROMPTS)
    cluster.report(full)
    assert cluster.ask("r1", cached={"i0": 4_784}, num_tokens=4_800) == [("r1", "i0")]
    cluster.core.on_cancel(RequestId("r1"), 1.0)
    cluster.report(full)
    assert cluster.core.on_request(ask("small", 2_000), 1.0) == []


def test_a_waiting_line_at_the_instance_takes_its_memory_first() -> None:
    cluster = Cluster()
    cluster.ask("r0", cached={})
    view = replace(with_questions(1), queuing=(queuing("other", 13_700),))
    assert cluster.report(view) == []
    assert cluster.ask("r1") == []
