"""Classes of requests: what clients may ask for, and what it means for the policy."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sterna.errors import ConfigurationError
from sterna.priority_classes import DEFAULT_CLASSES, PriorityClass, PriorityClasses
from sterna.types import NORMAL, Priority


def priority_class(
    name: str, rank: int, execution_rank: int | None = None, target_load: int | None = None
) -> PriorityClass:
    execution = rank if execution_rank is None else execution_rank
    return PriorityClass(name, Priority(rank), Priority(execution), target_load)


def table(*names_and_ranks: tuple[str, int]) -> PriorityClasses:
    return PriorityClasses(tuple(priority_class(name, rank) for name, rank in names_and_ranks))


FOUR = table(("normal", 0), ("gold", 10), ("batch", -5), ("silver", 3))
FIVE = table(("idle", -9), *((each.name, each.scheduling_priority) for each in FOUR.classes))


@pytest.mark.parametrize(
    ("tier", "name", "answered"),
    [
        ("auto", "normal", "default"),
        ("default", "normal", "default"),
        ("normal", "normal", "default"),
        ("priority", "high", "priority"),
        ("high", "high", "priority"),
        ("flex", "normal", "default"),
    ],
)
def test_openais_tiers_are_the_papers_two_classes(tier: str, name: str, answered: str) -> None:
    found = DEFAULT_CLASSES.of_tier(tier)
    assert found is not None
    assert (found.name, DEFAULT_CLASSES.tier_of(found)) == (name, answered)


@pytest.mark.parametrize(
    ("tier", "name", "answered"),
    [
        ("priority", "silver", "priority"),
        ("gold", "gold", "gold"),
        ("flex", "batch", "flex"),
        ("batch", "batch", "flex"),
        ("idle", "idle", "idle"),
    ],
)
def test_a_tier_is_the_class_next_to_normal_where_none_has_its_name(
    tier: str, name: str, answered: str
) -> None:
    found = FIVE.of_tier(tier)
    assert found is not None
    assert (found.name, FIVE.tier_of(found)) == (name, answered)


def test_a_class_that_is_called_as_a_tier_is_that_tier() -> None:
    classes = table(("normal", 0), ("some", -1), ("flex", -2), ("more", 1), ("priority", 2))
    assert [classes.of_tier(tier).scheduling_priority for tier in ("flex", "priority")] == [-2, 2]
    assert [classes.tier_of(each) for each in classes.classes] == [
        "default", "some", "flex", "more", "priority",
    ]  # fmt: skip


def test_there_is_no_tier_of_another_name() -> None:
    assert DEFAULT_CLASSES.of_tier("scale") is None
    assert DEFAULT_CLASSES.tiers == ("default", "auto", "priority", "flex", "normal", "high")


@pytest.mark.parametrize(
    ("vllm_priority", "name"),
    [(0, "normal"), (-3, "silver"), (-10, "gold"), (5, "batch"), (-7, "gold"), (-6, "silver"),
     (-(2**63), "gold"), (2**63 - 1, "batch"), (2, "normal"), (3, "batch")],
)  # fmt: skip
def test_vllms_integer_is_the_class_of_the_nearest_rank(vllm_priority: int, name: str) -> None:
    """vLLM: "lower means earlier handling"."""
    assert FOUR.of_vllm_priority(vllm_priority).name == name


@pytest.mark.parametrize(("vllm_priority", "name"), [(-1, "normal"), (2, "batch"), (-2, "gold")])
def test_between_two_ranks_the_less_urgent_one_counts(vllm_priority: int, name: str) -> None:
    classes = table(("gold", 2), ("normal", 0), ("batch", -4))
    assert classes.of_vllm_priority(vllm_priority).name == name


RANKS = st.sets(st.integers(-50, 50), max_size=6)


@given(RANKS, st.integers(-100, 100), st.integers(-100, 100))
def test_a_lower_integer_is_never_a_less_urgent_class(
    ranks: set[int], one: int, other: int
) -> None:
    classes = table(("normal", 0), *((f"c{rank}", rank) for rank in ranks - {0}))
    lower, higher = sorted((one, other))
    assert (
        classes.of_vllm_priority(lower).scheduling_priority
        >= classes.of_vllm_priority(higher).scheduling_priority
    )
    for each in classes.classes:
        assert classes.of_vllm_priority(-each.scheduling_priority) is each
        assert classes.of_tier(classes.tier_of(each)) is each


@given(RANKS, st.data())
def test_a_request_gets_what_it_asks_for_or_its_limit(ranks: set[int], data: st.DataObject) -> None:
    classes = table(("normal", 0), *((f"c{rank}", rank) for rank in ranks - {0}))
    asked = data.draw(st.sampled_from(classes.classes))
    highest = data.draw(st.sampled_from(classes.classes))
    got = classes.admitted(asked, highest)
    assert got.scheduling_priority == min(asked.scheduling_priority, highest.scheduling_priority)
    assert classes.admitted(asked, None) is asked


def test_where_priorities_are_off_every_request_is_normal() -> None:
    classes = PriorityClasses(FOUR.classes, are_honoured=False)
    gold = classes.named("gold")
    assert gold is not None
    assert classes.admitted(gold, None) is classes.normal


def test_both_of_the_papers_priorities_can_be_set_apart() -> None:
    """Section 4.4.1: "Requests with higher scheduling priorities will get scheduled earlier to
    reduce their queuing delays. Those with higher execution priorities will be given lower
    instance load [...] our design also generalizes to more priorities." """
    classes = PriorityClasses(
        (
            priority_class("normal", 0),
            priority_class("quick", 1, execution_rank=0),
            priority_class("alone", 2, execution_rank=1, target_load=900),
            priority_class("gold", 3, execution_rank=2),
        )
    )
    quick = classes.of_vllm_priority(-1)
    assert (quick.scheduling_priority, quick.execution_priority) == (1, NORMAL)
    assert classes.target_load_tokens(1600) == {1: 900, 2: 1600}
    assert classes.take_policys_target_load
    assert not PriorityClasses(classes.classes[:3]).take_policys_target_load


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ([("high", 1)], "the priority class of rank 0 must be there and be called normal"),
        ([("usual", 0)], "the priority class of rank 0 must be there and be called normal"),
        ([("normal", 0), ("a", 2), ("b", 2)], "a and b have the same rank, 2"),
        ([("normal", 0), ("a", 2), ("a", 3)], "there are two priority classes a"),
        ([("normal", 0), ("normal", 1)], "there are two priority classes normal"),
        ([("normal", 0, 1)], "with execution rank 0"),
        ([("normal", 0), ("auto", 1)], "no priority class can be called auto"),
        ([("normal", 0), ("", 1)], "a priority class needs a name"),
        ([("normal", 0), ("a", 1, None, 0)], "a: target_load must be positive, not 0"),
        ([("normal", 0), ("a", -1, None, 9)], "a: only classes with an execution rank above"),
        (
            [("normal", 0), ("a", 1, 1, 9), ("b", 2, 1, 8)],
            "a and b have the same execution rank, 1, and must have the same target_load",
        ),
    ],
)
def test_classes_that_contradict_each_other_are_refused(
    classes: list[tuple[str, int]], message: str
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        PriorityClasses(tuple(priority_class(*each) for each in classes))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_table_reaches_other_processes_whole() -> None:
    arrived = pickle.loads(pickle.dumps(FOUR))
    assert arrived == FOUR
    assert arrived.tier_of(FOUR.classes[1]) == "gold"
