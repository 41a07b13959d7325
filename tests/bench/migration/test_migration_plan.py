"""Which cells are measured, and together with which."""

from bench.migration.plan import Group, Plan, cells, groups, in_order, turns
from bench.migration.samples import Cell

SMALL = Plan(transports=("tcp", "shm"), tokens=(256, 512), num_samples=7, num_recompute_samples=3)


def a_row(cell: Cell) -> dict[str, object]:
    return {
        "mode": cell.mode,
        "transport": cell.transport,
        "tokens": cell.tokens,
        "busy": cell.busy,
    }


def test_recompute_is_measured_once_for_all_transports() -> None:
    recompute = [cell for cell in cells(SMALL) if cell.mode == "recompute"]

    assert recompute == [
        Cell("recompute", None, tokens, busy) for busy in (False, True) for tokens in (256, 512)
    ]


def test_the_full_plan_has_every_length_mode_and_transport_idle_and_busy() -> None:
    found = list(cells(Plan()))

    assert len(found) == len(set(found)) == 6 * 2 * (2 * 3 + 1)


def test_live_and_stop_and_copy_are_measured_side_by_side() -> None:
    first = groups(SMALL, [])[0]

    assert first == Group(
        "tcp",
        False,
        tuple(
            (Cell("live", "tcp", tokens, False), Cell("stop_copy", "tcp", tokens, False))
            for tokens in (256, 512)
        ),
    )


def test_what_was_measured_is_not_measured_again() -> None:
    rows = [a_row(cell) for cell in cells(SMALL) if cell.tokens == 256 or cell.transport == "tcp"]

    left = [cell for group in groups(SMALL, rows) for each in group.cells for cell in each]

    assert left == [
        Cell("live", "shm", 512, False),
        Cell("stop_copy", "shm", 512, False),
        Cell("live", "shm", 512, True),
        Cell("stop_copy", "shm", 512, True),
        Cell("recompute", None, 512, False),
        Cell("recompute", None, 512, True),
    ]


def test_nothing_is_left_of_a_finished_run() -> None:
    assert groups(SMALL, [a_row(cell) for cell in cells(SMALL)]) == []


def test_rows_of_cells_outside_the_plan_are_left_out_and_the_others_ordered() -> None:
    planned = [a_row(cell) for cell in cells(SMALL)]

    assert in_order(SMALL, [a_row(Cell("live", "gloo", 256, False)), *reversed(planned)]) == planned


def test_without_copying_modes_no_transport_is_measured() -> None:
    found = groups(Plan(modes=("recompute",), tokens=(256,), batches=("idle",)), [])

    assert found == [Group("shm", False, ((Cell("recompute", None, 256, False),),))]


def test_each_kind_of_cell_has_a_number_of_samples_of_its_own() -> None:
    plan = Plan(num_samples=7, num_live_samples=9, num_recompute_samples=3)

    assert plan.count(Cell("recompute", None, 256, True)) == 3
    assert plan.count(Cell("live", "tcp", 256, False)) == 9
    assert plan.count(Cell("live", "tcp", 256, True)) == 9
    assert plan.count(Cell("stop_copy", "tcp", 256, True)) == 7


def test_modes_take_turns_and_the_first_one_changes() -> None:
    assert turns({"live": 3, "stop": 3}) == ["live", "stop", "stop", "live", "live", "stop"]


def test_a_mode_that_is_measured_less_often_is_spread_over_the_others() -> None:
    found = turns({"live": 5, "stop": 2})

    assert found == ["live", "stop", "live", "live", "live", "stop", "live"]
