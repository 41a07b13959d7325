"""What `sterna drain`, `start` and `restart` say while they watch."""

import pytest

from sterna.cli.operate.admin_commands import ServerError
from sterna.cli.operate.fleet_commands import Row, Rows, changes, wait_for_end


def row(instance_id: str, state: str, note: str | None = None) -> Row:
    return {"id": instance_id, "state": state, "note": note}


def cluster(state: str) -> Rows:
    """The instance that is drained, and another."""
    return [row("i0", state), row("i1", "running")]


RUNNING, TERMINATING, ENDED = cluster("running"), cluster("terminating"), [row("i1", "running")]


def test_a_drain_ends_with_its_instance() -> None:
    wait_for_end("i0", iter([TERMINATING, TERMINATING, ENDED]))


def test_a_scheduler_that_has_not_heard_of_the_drain_yet_has_not_undone_it() -> None:
    """It is told by the supervisor, and asked by a front end: over two connections."""
    wait_for_end("i0", iter([RUNNING, TERMINATING, ENDED]))


def test_a_scheduler_that_knows_nobody_yet_says_nothing_of_an_end() -> None:
    polls = iter([[], TERMINATING, ENDED])
    wait_for_end("i0", polls)
    assert list(polls) == []


@pytest.mark.parametrize("polls", [[TERMINATING, RUNNING], [RUNNING] * 10])
def test_a_drain_that_was_undone_is_told(polls: list[Rows]) -> None:
    with pytest.raises(ServerError, match="i0 was told to serve on"):
        wait_for_end("i0", iter(polls))


def test_what_changes_is_said_once() -> None:
    shown: dict[str, str] = {}
    waits = row("i1", "pending", "no node has 1 GPUs free")
    polls = [[waits], [waits], [row("i1", "starting")], [row("i1", "running")], [row("i2", "x")]]
    said = [changes(shown, rows, lambda row: row["id"] == "i1") for rows in polls]
    assert said == [
        ["i1 pending: no node has 1 GPUs free"],
        [],
        ["i1 starting"],
        ["i1 running"],
        [],
    ]


def test_an_instance_that_does_not_come_up_is_told() -> None:
    """Each attempt has a name of its own: who only saw these change would wait for ever."""
    shown: dict[str, str] = {}
    polls = [[*RUNNING, row("i2", "starting")], [], RUNNING, [*RUNNING, row("i3", "starting")]]
    said = [changes(shown, rows, lambda row: row["id"] not in ("i0", "i1")) for rows in polls]
    failed = "i2 did not come up; the server's log says why"
    assert said == [["i2 starting"], [], [failed], ["i3 starting"]]
