"""Prompts on their way, found by their beginnings."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sterna.scheduler.coming_prompts import ComingPrompts
from sterna.types import InstanceId

I1, I2 = InstanceId("i1"), InstanceId("i2")


def hashes(text: str) -> list[int]:
    """One for each letter; as those of blocks, each also says what is before."""
    return [hash(text[: place + 1]) for place in range(len(text))]


def test_of_several_prompts_that_go_to_an_instance_the_one_that_shares_most_counts() -> None:
    prompts = ComingPrompts()
    prompts.add(hashes("system, a tern"), I1)
    prompts.add(hashes("system, a gull"), I1)
    prompts.add(hashes("system, b"), I2)
    assert prompts.longest(hashes("system, a tern and")) == {I1: 14, I2: 8}
    assert prompts.longest(hashes("system, a gu")) == {I1: 12, I2: 8}
    assert prompts.longest(hashes("sys")) == {I1: 3, I2: 3}
    assert prompts.longest(hashes("another")) == {}


def test_a_prompt_counts_until_it_is_removed_as_often_as_it_was_added() -> None:
    prompts = ComingPrompts()
    for text in ("abc", "abcd", "abc"):
        prompts.add(hashes(text), I1)
    prompts.remove(hashes("abc"), I1)
    prompts.remove(hashes("abcd"), I1)
    assert prompts.longest(hashes("abcd")) == {I1: 3}
    prompts.remove(hashes("abc"), I1)
    assert prompts.longest(hashes("abcd")) == {}
    assert not prompts._first, "nothing is kept"


PROMPTS = st.text("ab", max_size=6)
INSTANCES = st.sampled_from([I1, I2, InstanceId("i3")])


class PromptsMachine(RuleBasedStateMachine):
    """Prompts that branch anywhere, against a comparison with each."""

    @initialize()
    def begin(self) -> None:
        self.prompts = ComingPrompts()
        self.coming: Counter[tuple[str, InstanceId]] = Counter()

    @rule(text=PROMPTS, instance_id=INSTANCES)
    def add(self, text: str, instance_id: InstanceId) -> None:
        self.prompts.add(hashes(text), instance_id)
        self.coming[text, instance_id] += 1

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.coming:
            text, instance_id = data.draw(st.sampled_from(sorted(self.coming)))
            self.prompts.remove(hashes(text), instance_id)
            self.coming -= Counter([(text, instance_id)])

    @rule(text=PROMPTS)
    def search(self, text: str) -> None:
        expected: dict[InstanceId, int] = {}
        for other, instance_id in self.coming:
            num_shared = shared(text, other)
            if num_shared > expected.get(instance_id, 0):
                expected[instance_id] = num_shared
        assert self.prompts.longest(hashes(text)) == expected

    @invariant()
    def nothing_is_kept_of_what_is_gone(self) -> None:
        if not any(text for text, _ in self.coming):
            assert not self.prompts._first


def shared(text: str, other: str) -> int:
    pairs = enumerate(zip(text, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(text), len(other)))


TestPrompts = PromptsMachine.TestCase
TestPrompts.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
