"""Downtimes and steps from the arrivals of tokens."""

import pytest

from bench.migration.samples import PHASES, Arrival, Cell, Moments, Sample, row, sample


def arrivals(*times_ms: float, instance: str = "i0", first_index: int = 0) -> list[Arrival]:
    """One token at each of these times."""
    return [
        Arrival(time_ms / 1e3, instance, first_index + i, 1) for i, time_ms in enumerate(times_ms)
    ]


MOVED = [
    *arrivals(0, 10, 20, 30, 43),
    *arrivals(58, 68, 78, instance="i1", first_index=5),
]
"""Steps of 10 ms on both instances, one of 13 ms while copying, a hand-over of 15 ms."""


def moments(*, received_s: float | None = 0.047) -> dict[str, Moments]:
    """Tokens are sent 1 ms before they arrive; the first one on the destination, 3 ms."""
    sent_s = {"i0": {4: 0.042}, "i1": {5: 0.055}}
    outputs_s = {
        name: {("r", index): time_s for index, time_s in those.items()}
        for name, those in sent_s.items()
    }
    return {
        "i0": Moments(drained_s=0.0425, outputs_s=outputs_s["i0"]),
        "i1": Moments(
            commit_s=0.044, received_s=received_s, adopted_s=0.0475, outputs_s=outputs_s["i1"]
        ),
    }


def measure(
    moved: list[Arrival],
    *neighbours: list[Arrival],
    begun_ms: float = 0,
    ordered_ms: float = 31,
    those: dict[str, Moments] | None = None,
) -> Sample:
    return sample(
        "r",
        moved,
        neighbours,
        moments() if those is None else those,
        begun_s=begun_ms / 1e3,
        ordered_s=ordered_ms / 1e3,
        stages=2,
        suspended_ms=4.0,
    )


def rounded(values: tuple[float, ...]) -> list[float]:
    return [round(value, 3) for value in values]


def test_downtime_is_the_gap_at_the_hand_over_less_a_decode_step() -> None:
    assert measure(MOVED).downtime_ms == pytest.approx(5.0)


def test_the_phases_are_the_parts_of_the_downtime() -> None:
    found = measure(MOVED)

    phases = dict(zip(PHASES, rounded(found.phases_ms), strict=True))
    assert phases == {
        "drain": 0.5,
        "copy": 4.5,
        "adoption": 0.5,
        "first step": -2.5,
        "delivery": 2.0,
    }
    assert sum(found.phases_ms) == pytest.approx(found.downtime_ms)


@pytest.mark.parametrize("received_s", [None, 0.043])
def test_without_blocks_on_the_way_the_copy_ends_with_the_commit(received_s: float | None) -> None:
    found = measure(MOVED, those=moments(received_s=received_s))

    assert rounded(found.phases_ms)[1:3] == [1.5, 3.5]


def test_a_migration_without_its_points_has_no_phases() -> None:
    lost = moments()
    lost["i1"].adopted_s = None

    with pytest.raises(ValueError, match="without a drain, a commit or an adoption"):
        measure(MOVED, those=lost)


def test_a_step_during_the_migration_is_not_among_the_normal_ones() -> None:
    found = measure(MOVED)

    assert rounded(found.steps_ms) == [10, 10, 10, 10, 10]
    assert rounded(found.migrating_steps_ms) == [13]


def test_a_neighbours_steps_stand_for_the_source_while_the_request_migrates() -> None:
    found = measure(MOVED, arrivals(0, 11, 22, 33, 47, 58, 69))

    assert rounded(found.steps_ms) == [10, 10, 10, 10, 10, 11, 11]
    assert rounded(found.migrating_steps_ms) == [11, 14, 11]


def test_the_migration_lasts_from_the_order_to_the_first_token_on_the_destination() -> None:
    assert measure(MOVED).migration_ms == pytest.approx(27.0)


def test_what_came_before_the_sample_began_is_left_out() -> None:
    earlier = [Arrival(-0.5, "i1", -1, 1)]

    assert measure([*earlier, *MOVED]) == measure(MOVED)


def test_a_token_that_was_overtaken_counts_when_its_client_can_have_the_next() -> None:
    # The source's last token comes 4 ms after the destination's first one, which waits for it.
    late = [*arrivals(0, 10, 20, 30), *arrivals(58, 68, 78, instance="i1", first_index=5)]
    late.append(Arrival(0.062, "i0", 4, 1))

    assert measure(late).downtime_ms == pytest.approx(-10.0)


def test_a_request_that_did_not_move_has_no_downtime() -> None:
    with pytest.raises(ValueError, match="one instance"):
        measure(arrivals(0, 10, 20, 30))


def test_without_a_normal_step_there_is_nothing_to_compare_with() -> None:
    with pytest.raises(ValueError, match="no decode step"):
        measure([*arrivals(0), *arrivals(15, instance="i1", first_index=1)])


def test_a_row_summarises_its_samples() -> None:
    samples = [
        Sample(downtime, (1.0, downtime - 4, 1.0, 1.006, 1.0), 3.0, 40.0, stages, (30.0, 32.0), ())
        for downtime, stages in ((4.0, 2), (6.0, 3), (5.0, 2))
    ]

    assert row(Cell("live", "tcp", 256, True), samples, 0.034) == {
        "mode": "live",
        "transport": "tcp",
        "tokens": 256,
        "busy": True,
        "n": 3,
        "downtime_ms": {"median": 5.0, "p99": 5.98},
        "phases_ms": {
            "drain": [1.0, 1.0, 1.0],
            "copy": [0.0, 2.0, 1.0],
            "adoption": [1.0, 1.0, 1.0],
            "first step": [1.01, 1.01, 1.01],
            "delivery": [1.0, 1.0, 1.0],
        },
        "decode_step_ms": {"median": 31.0, "p99": 32.0},
        "decode_step_migrating_ms": None,
        "suspended_ms": {"median": 3.0, "p99": 3.0},
        "migration_ms": {"median": 40.0, "p99": 40.0},
        "stages": 3,
        "foreign_cores": 0.03,
    }
