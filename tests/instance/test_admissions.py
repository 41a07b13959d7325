"""Which dispatches a load report may say have arrived."""

from hypothesis import given
from hypothesis import strategies as st

from sterna.instance.admissions import Admissions
from sterna.types import RequestId
from tests.policy.builders import instance, queuing, running


def arrived(**numbers: int) -> Admissions:
    admissions = Admissions()
    for name, number in numbers.items():
        admissions.add(RequestId(name), number)
    return admissions


def test_a_dispatch_is_reported_once_the_engine_shows_its_request() -> None:
    admissions = arrived(a=1, b=2)
    assert admissions.seen(instance()) == []
    assert admissions.seen(instance(running=[running("a", 16)])) == [1]
    assert admissions.seen(instance(running=[running("a", 16)], queuing=[queuing("b", 16)])) == [2]


def test_a_number_stands_for_lower_ones_and_waits_for_them() -> None:
    """The later one of two front ends may have the faster way, and a step begins in between."""
    admissions = arrived(late=11, early=10)
    assert admissions.seen(instance(running=[running("late", 16)])) == []
    both = [running("late", 16), running("early", 16)]
    assert admissions.seen(instance(running=both)) == [11]


@given(st.permutations(range(1, 7)), st.data())
def test_no_number_is_reported_before_all_lower_ones_are_shown(
    order: list[int], data: st.DataObject
) -> None:
    admissions = Admissions()
    for number in order:
        admissions.add(RequestId(f"r{number}"), number)
    pending = set(order)
    reported = 0
    for number in data.draw(st.permutations(order)):
        pending.remove(number)
        name = f"r{number}"
        if data.draw(st.booleans()):
            numbers = admissions.seen(instance(running=[running(name, 16)]))
        else:
            numbers = admissions.ended(RequestId(name))
        reported = max([reported, *numbers])
        assert all(reported < each for each in pending)
    assert reported == 6
