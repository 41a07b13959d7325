"""Frames: what the dashboard shows of a cluster, and how large that is."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sterna.dashboard.cluster_frames import (
    MAX_DECISIONS,
    MAX_NAMES,
    NUM_KEPT_FRAMES,
    Frames,
    ShownDecision,
    ShownInstance,
    ShownRequest,
    interval_s,
    percentiles,
)

RANKS = {"normal": 0, "high": 1, "batch": -1}


def request(name: str, tokens: int = 100, kind: str = "normal", *, queues: bool = False):
    return ShownRequest(name, kind, tokens, queues)


def instance(name: str, *requests: ShownRequest) -> ShownInstance:
    used_tokens = sum(each.used_tokens for each in requests)
    num_queuing = sum(each.is_queuing for each in requests)
    return ShownInstance(
        *(name, "running", 10_000, used_tokens, 12.34),
        *(len(requests) - num_queuing, num_queuing, None, requests),
    )


def listed(frame) -> list[list[list[int]]]:
    return [each["requests"] for each in frame["instances"]]


def frames() -> Frames:
    return Frames("tern-7b", RANKS)


def test_a_frame_has_the_whole_state_of_a_small_cluster() -> None:
    made = frames()
    assert made.header() == {
        "title": "tern-7b",
        "classes": [["normal", 0], ["high", 1], ["batch", -1]],
        "names": [],
    }
    frame = made.frame(
        12.345,
        [instance("i0", request("a", 300), request("b", 0, "high", queues=True)), instance("i1")],
        num_held=2,
        ttfts_s=[0.5, 0.1, 0.2],
        decisions=[ShownDecision(12.3, "a", "dispatched", "to i0")],
    )
    assert frame == {
        "t": 12.35,
        "instances": [
            {
                **{"id": "i0", "state": "running", "total": 10_000, "used": 300, "freeness": 12.3},
                **{"running": 1, "queuing": 1, "note": None},
                "requests": [[1, 300], [2, 0, 3]],
                "more": [0, 0],
            },
            {
                **{"id": "i1", "state": "running", "total": 10_000, "used": 0, "freeness": 12.3},
                **{"running": 0, "queuing": 0, "note": None, "requests": [], "more": [0, 0]},
            },
        ],
        "names": [[1, "a"], [2, "b"]],
        "held": 2,
        "ttft": [0.2, 0.5],
        "tpot": None,
        "decisions": [[12.3, "a", "dispatched", "to i0"]],
        "error": None,
    }


def test_a_request_keeps_its_number_when_it_moves_and_is_named_once() -> None:
    made = frames()
    made.frame(0.0, [instance("i0", request("a")), instance("i1")])
    frame = made.frame(1.0, [instance("i0"), instance("i1", request("a", 200))])
    assert listed(frame) == [[], [[1, 200]]]
    assert frame["names"] == []
    assert made.header()["names"] == [[1, "a"]]


def test_a_request_that_is_nowhere_for_a_moment_keeps_its_number_and_later_loses_it() -> None:
    made = frames()
    made.frame(0.0, [instance("i0", request("a"))])
    for _ in range(NUM_KEPT_FRAMES - 1):
        made.frame(1.0, [instance("i0")])
    assert listed(made.frame(2.0, [instance("i0", request("a"))])) == [[[1, 100]]]
    for _ in range(NUM_KEPT_FRAMES):
        made.frame(3.0, [instance("i0")])
    frame = made.frame(4.0, [instance("i0", request("a"))])
    assert (listed(frame), frame["names"]) == ([[[2, 100]]], [[2, "a"]])


def test_a_frame_has_the_decisions_that_no_frame_has_had() -> None:
    made = frames()
    first, second = (ShownDecision(t, "a", "moved", "moved i0 to i1") for t in (1.0, 2.0))
    assert len(made.frame(1.0, [], decisions=[first])["decisions"]) == 1
    # The answer with the first one may not come in time.
    assert made.frame(2.0, [], decisions=[])["decisions"] == []
    frame = made.frame(3.0, [], decisions=[first, second])
    assert frame["decisions"] == [[2.0, "a", "moved", "moved i0 to i1"]]


def test_dispatches_give_way_to_other_decisions() -> None:
    moved = ShownDecision(0.5, "m", "moved", "moved")
    many = [ShownDecision(float(n), f"r{n}", "dispatched", "to i0") for n in range(100)]
    shown = frames().frame(1.0, [], decisions=[moved, *many])["decisions"]
    assert len(shown) == MAX_DECISIONS
    assert shown[0][1] == "m"
    assert [each[1] for each in shown[1:]] == [f"r{n}" for n in range(100 - len(shown) + 1, 100)]


def test_the_largest_requests_are_listed_in_their_order_and_the_others_counted() -> None:
    sizes = [*range(600, 0, -1)]
    requests = [request(f"r{size}", size) for size in sorted(sizes, key=lambda size: size % 7)]
    (shown,) = frames().frame(0.0, [instance("i0", *requests)])["instances"]
    listed_sizes = [tokens for _, tokens in shown["requests"]]
    assert len(listed_sizes) == 560
    assert listed_sizes == [each.used_tokens for each in requests if each.used_tokens > 40]
    assert shown["more"] == [40, sum(range(1, 41))]


def test_names_come_a_few_at_a_time() -> None:
    made = frames()
    crowd = instance("i0", *(request(f"r{number}") for number in range(MAX_NAMES + 1)))
    assert len(made.frame(0.0, [crowd])["names"]) == MAX_NAMES
    assert len(made.header()["names"]) == MAX_NAMES
    assert made.frame(1.0, [crowd])["names"] == [[MAX_NAMES + 1, f"r{MAX_NAMES}"]]


@given(
    per_instance=st.integers(0, 300),
    name_length=st.integers(1, 200),
    has_queue=st.booleans(),
    error=st.none() | st.just("the scheduler does not answer"),
)
def test_sixteen_instances_send_less_than_20_kB_a_second(
    per_instance: int, name_length: int, has_queue: bool, error: str | None
) -> None:
    made = frames()
    decisions = [
        ShownDecision(1e9 + n, "r" * name_length, "moved", "x" * name_length) for n in range(50)
    ]

    def cluster(second: int) -> Sequence[ShownInstance]:
        return [
            instance(
                f"i{row}",
                *(
                    request(
                        f"{second}-{row}-{n}".ljust(name_length, "x"),
                        100_000 + n,
                        "batch",
                        queues=has_queue,
                    )
                    for n in range(per_instance)
                ),
            )
            for row in range(16)
        ]

    sizes = []
    for second in range(3):
        frame = made.frame(
            1.7e9 + second,
            cluster(second),
            ttfts_s=[0.123456],
            tpots_s=[0.0123456],
            decisions=decisions,
            error=error,
        )
        sizes.append(len(json.dumps(frame, separators=(",", ":"))))
    assert max(sizes) / interval_s(16) < 20_000


@pytest.mark.parametrize(
    ("num_instances", "seconds"), [(1, 1.0), (16, 1.0), (64, 4.0), (1_000, 8.0)]
)
def test_larger_clusters_have_frames_less_often(num_instances: int, seconds: float) -> None:
    assert interval_s(num_instances) == seconds


def test_percentiles_are_values_that_were_measured() -> None:
    assert percentiles([]) is None
    assert percentiles([0.3]) == [0.3, 0.3]
    assert percentiles([number / 100 for number in range(101)]) == [0.5, 0.99]


def test_long_names_keep_their_beginning_and_end() -> None:
    frame = frames().frame(0.0, [instance("i0", request("chatcmpl-0123456789-abcdefghij-klm"))])
    assert frame["names"] == [[1, "chatcmpl-012345…ghij-klm"]]
