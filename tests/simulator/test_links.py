"""Copies share the bandwidth of the links that they go through; computed by hand."""

import pytest

from sterna.simulator.links import Copy, Links
from sterna.types import InstanceId, MigrationId

A, B, C, D = (InstanceId(name) for name in "ABCD")


def begin(
    links: Links, name: str, source: InstanceId, destination: InstanceId, work_s: float, at_s: float
) -> dict[str, float]:
    """The ends that the copy's beginning changed, by migration."""
    return ends(links.begin(MigrationId(name), source, destination, 0, work_s, at_s))


def end(links: Links, name: str, at_s: float) -> dict[str, float]:
    return ends(links.end(MigrationId(name), at_s))


def ends(copies: list[Copy]) -> dict[str, float]:
    return {copy.migration_id: pytest.approx(copy.end_s) for copy in copies}


def test_a_lone_copy_takes_its_time() -> None:
    assert begin(Links(), "m", A, B, 2.0, 1.0) == {"m": 3.0}


@pytest.mark.parametrize(
    ("source", "destination"), [(A, C), (C, B), (A, B)], ids=["out", "in", "both"]
)
def test_two_copies_share_a_link_evenly(source: InstanceId, destination: InstanceId) -> None:
    """m goes alone from 0 to 1 and has 1 s of work left; both go at half their speed from then
    on. At 3 m is done; n, which has done 1 of 3, needs 2 more seconds alone."""
    links = Links()
    assert begin(links, "m", A, B, 2.0, 0.0) == {"m": 2.0}
    assert begin(links, "n", source, destination, 3.0, 1.0) == {"m": 3.0, "n": 7.0}
    assert end(links, "m", 3.0) == {"n": 5.0}
    assert end(links, "n", 5.0) == {}


def test_copies_on_different_links_do_not_know_of_each_other() -> None:
    """Also one that comes to an instance and one that leaves it: links have two directions."""
    links = Links()
    begin(links, "m", A, B, 2.0, 0.0)
    assert begin(links, "n", C, D, 2.0, 1.0) == {"n": 3.0}
    assert begin(links, "back", B, A, 2.0, 1.0) == {"back": 3.0}
    assert begin(links, "on", B, C, 2.0, 1.0) == {"back": 5.0, "on": 5.0}


def test_a_copy_goes_as_fast_as_the_slower_one_of_its_links() -> None:
    """Three leave A and two come to B: the one that does both goes at a third of its speed, like
    the two others from A; the other one to B at half."""
    links = Links()
    begin(links, "to C", A, C, 1.0, 0.0)
    begin(links, "to D", A, D, 1.0, 0.0)
    assert begin(links, "from C", C, B, 1.0, 0.0) == {"from C": 1.0}
    assert begin(links, "both", A, B, 1.0, 0.0) == {
        "to C": 3.0,
        "to D": 3.0,
        "both": 3.0,
        "from C": 2.0,
    }
    # At 1 "from C" has done half and is given up; A's link is as crowded as before.
    assert end(links, "from C", 1.0) == {}
    # At 2 each of the others has done two thirds; two are left, at half their speed.
    assert end(links, "to C", 2.0) == {"to D": 2 + 2 / 3, "both": 2 + 2 / 3}


def test_a_copy_that_was_given_up_is_forgotten() -> None:
    links = Links()
    begin(links, "m", A, B, 2.0, 0.0)
    assert links.copy_of(MigrationId("m")) is not None
    assert end(links, "m", 0.5) == {}
    assert links.copy_of(MigrationId("m")) is None
    assert end(links, "m", 0.6) == {}
    assert begin(links, "m", A, B, 2.0, 1.0) == {"m": 3.0}


def test_no_copy_ends_in_the_past() -> None:
    """b and c, which are alike, end at one moment, after which c has next to nothing left; an end
    that is rounded to before that moment would turn time back."""
    links = Links()
    begin(links, "a", A, B, 0.65, 0.4)
    begin(links, "b", A, C, 7 * 0.05, 0.55)
    begin(links, "c", A, C, 7 * 0.05, 0.55)
    both = [links.copy_of(MigrationId(name)) for name in "bc"]
    now_s = min(each.end_s for each in both if each is not None)
    moved = links.end(MigrationId("b"), now_s)
    assert [each.migration_id for each in moved] == ["a", "c"]
    assert all(each.end_s >= now_s for each in moved)
