"""Nodes are cut off in the simulated clusters, for shorter and for longer than a lease: what holds
then is looked at in all seeds, and here, that it happens at all."""

from collections import Counter
from dataclasses import replace
from functools import cache

from fault_simulation.adversary.faults import LINKS_ONLY
from fault_simulation.adversary.link_faults import CUTS
from fault_simulation.run import Result, nodes_of, run_seed
from tests.fault_simulation.replay import said

NUM_SEEDS = 12


@cache
def results(*how_long: str, interval_s: float = 0.06) -> list[Result]:
    """Of some clusters on several nodes, where nothing but links is cut."""
    plan = replace(LINKS_ONLY, cuts=how_long or tuple(CUTS), interval_s=interval_s)
    seeds = [each for each in range(200) if nodes_of(each)[0] > 1]
    return [run_seed(each, plan) for each in seeds[:NUM_SEEDS]]


def cuts(result: Result) -> set[str]:
    return {each for each in CUTS if result.counts.get(f"link cut: {each}")}


def test_links_are_cut_for_shorter_and_longer_than_a_lease() -> None:
    counts = sum((Counter(each.counts) for each in results()), Counter[str]())
    for each in CUTS:
        assert counts[f"link cut: {each}"] > 0
    assert counts["instance ended by its lease"] > 0
    assert counts["instance given up by its lease"] > 0
    assert counts["supervisor killed while a link is cut"] > 0
    assert counts["node lost"] > 0


def test_no_promise_is_broken_by_links_that_are_cut() -> None:
    for each in results():
        assert each.violation is None, said(each, "--links-only")


def test_who_is_cut_off_for_much_longer_than_a_lease_ends_by_itself() -> None:
    cut = [each for each in results() if "much longer than a lease" in cuts(each)]
    assert cut
    for each in cut:
        assert each.counts["instance ended by its lease"] > 0


def test_a_cut_that_is_much_shorter_than_a_lease_ends_nobody() -> None:
    """Unless there is no supervisor, Ray gives the node up, or another cut follows at once."""
    others = ("node lost", "supervisor killed while a link is cut")
    cut = [
        each
        for interval_s in (2.5, 3.0, 5.0)
        for each in results("much shorter than a lease", interval_s=interval_s)
        if each.counts.get("link cut: much shorter than a lease") == 1
        and not any(each.counts.get(other) for other in others)
    ]
    assert cut
    for each in cut:
        assert each.counts.get("instance ended by its lease", 0) == 0
        assert each.counts.get("instance given up by its lease", 0) == 0


def test_some_clusters_are_on_one_node_and_some_on_more() -> None:
    nums = Counter(nodes_of(each)[0] for each in range(1000))
    assert nums[1] > 600
    assert nums[2] > 100
    assert nums[3] > 100
