"""`sterna drain`, `start` and `restart`: their orders, and their lines while they watch."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from sterna.cli.main import main
from sterna.cli.operate import fleet_commands
from sterna.cli.operate.admin_commands import ServerError
from sterna.cli.operate.fleet_commands import Row, Rows, changes, wait_for_end


def row(instance_id: str, state: str, note: str | None = None, generation: int = 1) -> Row:
    return {"id": instance_id, "state": state, "note": note, "generation": generation}


def cluster(state: str) -> Rows:
    """The instance that is drained, and another."""
    return [row("i0", state), row("i1", "running")]


RUNNING, TERMINATING, ENDED = cluster("running"), cluster("terminating"), [row("i1", "running")]


def num_awaited(*states: Rows) -> int:
    """The number of these polls that are made until the end of i0 is noticed."""
    num_polls = 0

    def polls() -> Iterator[Rows]:
        nonlocal num_polls
        for each in states:
            num_polls += 1
            yield each
        pytest.fail("the end was not noticed")

    wait_for_end("i0", polls())
    return num_polls


def test_a_drain_ends_with_its_instance() -> None:
    assert num_awaited(TERMINATING, TERMINATING, ENDED) == 3


def test_a_scheduler_that_has_not_heard_of_the_drain_yet_has_not_undone_it() -> None:
    """It is told by the supervisor, and asked by a front end: over two connections."""
    assert num_awaited(RUNNING, TERMINATING, ENDED) == 3


def test_a_scheduler_that_knows_nobody_yet_says_nothing_of_an_end() -> None:
    assert num_awaited([], TERMINATING, ENDED) == 3


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


# --------------------------------------------------------------------------- with a server


@dataclass
class Cluster:
    """A server that shows its instances as they are in one look after the other.

    Attributes:
        looks: what is still to be shown, None where it cannot be; a look beyond them is refused,
            and ends the command.
        ordered: the path and the body of each order.
        keys: with which it was asked for anything.
        answers: to other questions and to orders, by their paths.
    """

    looks: Sequence[Rows | None]
    ordered: list[tuple[str, Any]] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    answers: dict[str, Any] = field(
        default_factory=lambda: {"/admin/restart": {"generation": 4}, "/admin/nodes": []}
    )

    @contextmanager
    def listening(self) -> Iterator[str]:
        cluster = self

        class Answers(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path in cluster.answers:
                    self._answer(cluster.answers[self.path])
                    return
                assert self.path == "/admin/instances"
                if cluster.looks:
                    look, *cluster.looks = cluster.looks
                    self._answer(look, 503 if look is None else 200)
                else:
                    self._answer(None, 410)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                cluster.ordered.append((self.path, json.loads(body)))
                self._answer(cluster.answers.get(self.path, {}))

            def _answer(self, content: Any, status: int = 200) -> None:
                cluster.keys.add(self.headers["Authorization"])
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(content).encode())

            def log_message(self, *_: Any) -> None:
                pass

        with HTTPServer(("127.0.0.1", 0), Answers) as server:
            serving = threading.Thread(target=server.serve_forever, args=(0.01,))
            serving.start()
            try:
                yield f"http://127.0.0.1:{server.server_port}"
            finally:
                server.shutdown()
                serving.join()


@pytest.fixture(autouse=True)
def _polls_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_commands, "POLL_INTERVAL_S", 0.0)


def run(cluster: Cluster, *command: str) -> int:
    """The status of `sterna COMMAND` on that cluster."""
    with cluster.listening() as url:
        name, *rest = command
        return main([name, "--url", url, "--api-key", "operator", *rest])


def on_node(instance_id: str, state: str, note: str | None = None, node: str = "10.0.0.2") -> Row:
    return {**row(instance_id, state, note), "node": node}


ELSEWHERE = on_node("i0", "running", node="10.0.0.1")
WAITS = {**row("i3", "pending", "no node but drained ones has a GPU"), "node": None}
LEAVES = "its node is drained"


def test_a_drain_of_a_node_ends_when_no_instance_is_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also none that is loading; and the last one that takes requests may stay for long."""
    loads = on_node("i2", "starting")
    cluster = Cluster(
        [
            [ELSEWHERE, on_node("i1", "running"), loads],
            [],
            *[[ELSEWHERE, on_node("i1", "running", f"{LEAVES}; it stays"), loads]] * 10,
            [ELSEWHERE, on_node("i1", "terminating", LEAVES), loads, WAITS],
            *[[ELSEWHERE, loads, WAITS]] * 10,
            [ELSEWHERE, WAITS],
        ]
    )
    assert run(cluster, "drain", "--node", "10.0.0.2") == 0
    out, err = capsys.readouterr()
    assert out == (
        "10.0.0.2 is empty: no instance is placed there until "
        "`sterna drain --undo --node 10.0.0.2`\n"
    )
    assert err.splitlines()[-2:] == [
        f"i1 terminating: {LEAVES}",
        "i2 did not come up; the server's log says why",
    ]
    assert cluster.ordered == [("/admin/drain", {"node": "10.0.0.2", "undo": False})]
    assert cluster.looks == []


@pytest.mark.parametrize("begins", [True, False])
def test_a_drain_of_a_node_that_was_undone_is_told(
    capsys: pytest.CaptureFixture[str], begins: bool
) -> None:
    leaving = [[ELSEWHERE, on_node("i1", "terminating", LEAVES)]] if begins else []
    looks = [*leaving, *[[ELSEWHERE, on_node("i1", "running")]] * 10]
    assert run(Cluster(looks), "drain", "--node", "10.0.0.2") == 1
    assert "10.0.0.2 was told to have instances" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "undo", "said"),
    [
        (("--undo",), True, "10.0.0.2 takes instances again\n"),
        (
            ("--no-wait",),
            False,
            "10.0.0.2 is being drained; `sterna instances` shows how far it is\n",
        ),
    ],
)
def test_an_order_about_a_node_need_not_be_watched(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], undo: bool, said: str
) -> None:
    cluster = Cluster([])
    assert run(cluster, "drain", "--node", "10.0.0.2", *options) == 0
    assert capsys.readouterr().out == said
    assert cluster.ordered == [("/admin/drain", {"node": "10.0.0.2", "undo": undo})]


def test_start_says_which_instances_can_serve_when_so_many_are_up(
    capsys: pytest.CaptureFixture[str],
) -> None:
    i0 = row("i0", "running")
    cluster = Cluster(
        [
            [i0],
            [],
            [i0, row("i1", "starting")],
            [i0, row("i1", "running"), row("i2", "starting")],
            [i0, row("i1", "running"), row("i2", "running")],
        ]
    )
    assert run(cluster, "start", "2") == 0
    assert capsys.readouterr() == (
        "i1, i2 can serve\n",
        "i1 starting\ni1 running\ni2 starting\ni2 running\n",
    )
    assert cluster == Cluster([], [("/admin/start", {"instances": 2})], {"Bearer operator"})


def test_an_instance_that_comes_up_for_another_order_is_not_this_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    i0, i3 = row("i0", "running"), row("i3", "pending", "no GPU is free")
    cluster = Cluster(
        [
            [i0, row("i2", "starting")],
            [i0, row("i2", "running"), i3],
            [i0, row("i2", "running"), row("i3", "running")],
        ]
    )
    assert run(cluster, "start") == 0
    assert capsys.readouterr().out == "i2, i3 can serve\n"
    assert cluster.looks == []


def test_an_instance_of_the_pool_that_was_starting_may_serve_in_its_place(
    capsys: pytest.CaptureFixture[str],
) -> None:
    i0 = row("i0", "running")
    settled = [i0, row("i1", "running"), row("i2", "warm")]
    cluster = Cluster([[i0, row("i1", "starting")], *[settled] * 100])
    assert run(cluster, "start") == 0
    assert capsys.readouterr().out == "i1 can serve\n"


def test_a_warm_instance_that_comes_to_serve_is_one_that_was_started(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cluster = Cluster([cluster_with_warm("warm"), cluster_with_warm("running")])
    assert run(cluster, "start") == 0
    assert capsys.readouterr() == ("i1 can serve\n", "i1 running\n")
    assert cluster.ordered == [("/admin/start", {"instances": 1})]


def cluster_with_warm(state: str) -> Rows:
    return [row("i0", "running"), row("i1", state)]


OLD = [row("i0", "running"), row("i1", "running", generation=3)]
"""Before a restart, by which all become generation 4."""


@pytest.mark.parametrize(
    ("looks", "said"),
    [
        pytest.param(
            [
                OLD,
                [*OLD, row("i2", "starting", generation=4)],
                [row("i0", "terminating"), OLD[1], row("i2", "running", generation=4)],
                [OLD[1], row("i2", "running", generation=4)],
                [row("i2", "running", generation=4), row("i3", "starting", generation=4)],
                [row("i2", "running", generation=4), row("i3", "warm", generation=4)],
            ],
            "i2 starting\ni0 terminating\ni3 starting\ni3 warm\n",
            id="one after the other",
        ),
        pytest.param(
            [OLD, [], [row("i2", "running", generation=4), row("i3", "running", generation=4)]],
            "",
            id="a scheduler that knows nobody yet",
        ),
        pytest.param(
            [
                [OLD[0], row("i1", "terminating", generation=3)],
                [],
                [row("i0", "terminating"), row("i2", "running", generation=4)],
                [row("i2", "running", generation=4), row("i3", "running", generation=4)],
            ],
            "i1 terminating\ni0 terminating\n",
            id="a scheduler that knows nobody any more",
        ),
    ],
)
def test_a_restart_ends_when_every_instance_is_new(
    capsys: pytest.CaptureFixture[str], looks: list[Rows], said: str
) -> None:
    """Its first look may come before the supervisor has done anything."""
    cluster = Cluster(looks)
    assert run(cluster, "restart", "--rolling", "--", "--max-num-seqs", "64") == 0
    out = "restarted: i2, i3 serve\ngive them to the next `sterna serve` too: --max-num-seqs 64\n"
    assert capsys.readouterr() == (out, said)
    options = ["--max-num-seqs", "64"]
    assert cluster.ordered == [("/admin/restart", {"options": options, "surge": True})]
    assert cluster.looks == []


def test_options_of_vllm_go_behind_dashes_as_the_usage_of_a_restart_shows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cluster = Cluster([])
    with pytest.raises(SystemExit):
        run(cluster, "restart", "--rolling", "--max-num-seqs", "64")
    *usage, error = capsys.readouterr().err.splitlines()
    assert error == "sterna restart: error: unrecognized arguments: --max-num-seqs"
    assert usage[0].startswith("usage: sterna restart [-h] --rolling ")
    assert usage[-1].endswith("[-- OPTION ...]")
    assert cluster.ordered == []


@pytest.mark.parametrize(
    "command",
    [("drain", "i0"), ("drain", "--node", "10.0.0.2"), ("start",), ("restart", "--rolling")],
)
def test_control_c_ends_the_command_and_says_that_the_work_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fleet_commands, "time", SimpleNamespace(sleep=interrupted))
    on_its_node = {**row("i0", "running"), "node": "10.0.0.2"}
    assert run(Cluster([[on_its_node], [on_its_node]]), *command) == 130
    assert capsys.readouterr().err.splitlines()[-1] == (
        "what was ordered goes on; `sterna instances` shows how far it is"
    )


@pytest.mark.parametrize(
    "begun",
    [
        [*OLD, row("i2", "starting", generation=4)],
        [row("i0", "terminating"), OLD[1]],
    ],
    ids=["a new one does not come up", "an old one serves on"],
)
def test_a_restart_that_was_given_up_is_told(
    capsys: pytest.CaptureFixture[str], begun: Rows
) -> None:
    cluster = Cluster([OLD, begun, [], OLD])
    assert run(cluster, "restart", "--rolling", "--no-surge") == 1
    assert "sterna: error: the restart was given up" in capsys.readouterr().err
    assert cluster.ordered == [("/admin/restart", {"options": [], "surge": False})]
    assert cluster.looks == []


def test_a_restart_is_not_given_up_while_an_old_instance_comes_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    terminating = [row("i0", "terminating"), OLD[1]]
    new = [row("i2", "running", generation=4)]
    assert run(Cluster([terminating, terminating, new]), "restart", "--rolling") == 0
    assert capsys.readouterr().out == "restarted: i2 serve\n"


def test_a_restart_that_goes_on_without_surge_ends_when_every_instance_is_new(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The first one of its generation found no place."""
    pending = [*OLD, row("i2", "pending", "no node has 1 GPUs free", generation=4)]
    new = [row("i2", "running", generation=4), row("i3", "running", generation=4)]
    emptied = [row("i0", "terminating"), OLD[1], row("i2", "starting", generation=4)]
    cluster = Cluster([pending, emptied, new])
    assert run(cluster, "restart", "--rolling", "--no-surge") == 0
    assert capsys.readouterr().out == "restarted: i2, i3 serve\n"


def test_a_restart_ends_although_more_are_wanted_than_have_a_place(
    capsys: pytest.CaptureFixture[str],
) -> None:
    waits = row("i4", "pending", "no node has 1 GPUs free", generation=4)
    begun = [*OLD, {**waits, "generation": 3}]
    # One that follows another may wait for the place which that one leaves.
    last = [row("i2", "running", generation=4), row("i3", "pending", generation=4), waits]
    new = [row("i2", "running", generation=4), row("i3", "running", generation=4), waits]
    cluster = Cluster([begun, last, new])
    assert run(cluster, "restart", "--rolling", "--no-surge") == 0
    assert capsys.readouterr().out == "restarted: i2, i3 serve\n"
    assert cluster.looks == []


def test_a_restart_that_is_given_up_is_told_although_more_are_wanted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    waits = row("i3", "pending", "no node has 1 GPUs free")
    assert run(Cluster([[OLD[0], waits]] * 100), "restart", "--rolling", "--no-surge") == 1
    assert "the restart was given up" in capsys.readouterr().err


def test_a_restart_that_never_begins_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """It was given up before anything of it could be seen."""
    assert run(Cluster([OLD] * 100), "restart", "--rolling") == 1
    assert "the restart was given up" in capsys.readouterr().err


def test_a_start_that_is_withdrawn_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster([OLD, [*OLD, row("i2", "pending", "no GPU is free")], *[OLD] * 100])
    assert run(cluster, "start") == 1
    said = capsys.readouterr().err
    assert "i2 did not come up" in said
    assert "0 of 1 instances have started, and no other one starts" in said


@pytest.mark.parametrize("num_failed", [59, 60])
def test_commands_watch_on_while_a_part_of_the_server_is_replaced(
    capsys: pytest.CaptureFixture[str], num_failed: int
) -> None:
    new = [row("i2", "running", generation=4)]
    cluster = Cluster([[row("i0", "terminating")], *[None] * num_failed, new])
    is_too_long = num_failed == 60
    assert run(cluster, "restart", "--rolling") == is_too_long
    out, said = capsys.readouterr()
    assert out == ("" if is_too_long else "restarted: i2 serve\n")
    assert ("What was ordered goes on" in said) == is_too_long


@pytest.mark.parametrize(
    ("command", "num_looks", "said"),
    [
        (("start", "3"), 1, "starting; `sterna instances` shows how far it is"),
        (("restart", "--rolling"), 0, "restarting; `sterna instances` shows how far it is"),
        (("drain", "i0"), 0, "i0 is being drained; `sterna instances` shows how far it is"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_who_does_not_wait_is_told_where_to_look(
    capsys: pytest.CaptureFixture[str], command: tuple[str, ...], num_looks: int, said: str
) -> None:
    cluster = Cluster([OLD] * num_looks)
    assert run(cluster, *command, "--no-wait") == 0
    assert capsys.readouterr() == (said + "\n", "")
    assert len(cluster.ordered) == 1


def test_a_drain_watches_its_instance_alone(capsys: pytest.CaptureFixture[str]) -> None:
    i1 = row("i1", "terminating")
    cluster = Cluster([[row("i0", "running"), i1], [row("i0", "terminating"), i1], [], [i1]])
    assert run(cluster, "drain", "i0") == 0
    assert capsys.readouterr() == ("i0 has ended\n", "i0 running\ni0 terminating\n")
    assert cluster == Cluster(
        [], [("/admin/drain", {"instance": "i0", "undo": False})], {"Bearer operator"}
    )


def test_a_drain_is_undone_without_a_look(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster([])
    assert run(cluster, "drain", "i0", "--undo") == 0
    assert capsys.readouterr() == ("i0 serves on\n", "")
    assert cluster.ordered == [("/admin/drain", {"instance": "i0", "undo": True})]
