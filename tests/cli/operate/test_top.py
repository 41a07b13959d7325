"""`sterna top`: its tables, its screen with keys, and the snapshot that it prints."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from rich.text import Text
from textual.pilot import Pilot
from textual.widgets import DataTable, Label, Static

from sterna.cli.main import main
from sterna.cli.operate import top_app, top_command
from sterna.cli.operate.admin_commands import ServerError
from sterna.cli.operate.top_app import TopApp
from sterna.cli.operate.top_view import Snapshot, headline, plain
from sterna.errors import SternaError

INSTANCE = {
    **{"id": "i0", "state": "running", "total_tokens": 8_000, "used_tokens": 6_000},
    **{"running": 3, "queuing": 1, "migrating": 1, "freeness": 12.4, "note": None},
}
EMPTY = {
    **INSTANCE,
    **{"id": "i1", "state": "starting", "total_tokens": 0, "used_tokens": 0, "freeness": None},
}
REQUEST = {
    **{"id": "cmpl-tern", "instance": "i0", "status": "running", "class": "normal"},
    **{"num_tokens": 1_200, "num_output_tokens": 200, "used_tokens": 1_216, "immovable": None},
}
HELD = {**REQUEST, "instance": None, "status": "held", "immovable": "it waits at the scheduler"}
LONGER = {**REQUEST, "id": "cmpl-gull", "num_tokens": 2_400}
PREEMPTED = {"time_s": 1.7e9, "request": "cmpl-tern", "event": "preempted", "instance": "i0"}
RECENT = {"decisions": [PREEMPTED], "ttft_s": [0.1, 0.3], "tpot_s": [], "waiting": 2}
SNAPSHOT = Snapshot([INSTANCE, EMPTY], [REQUEST, LONGER], RECENT)


class ScriptedCluster:
    """Answers as told, and remembers the orders."""

    def __init__(self) -> None:
        self.answer: Snapshot | SternaError = SNAPSHOT
        self.orders: list[tuple[object, ...]] = []

    def snapshot(self) -> Snapshot:
        if isinstance(self.answer, SternaError):
            raise self.answer
        return self.answer

    def migrate(self, request_id: str, destination: str) -> str:
        self.orders.append(("migrate", request_id, destination))
        return "moved"

    def drain(self, instance_id: str, *, is_undo: bool) -> str:
        self.orders.append(("drain", instance_id, is_undo))
        if is_undo:
            raise SternaError("it is empty already")
        return "drained"


def test_the_headline_counts_the_cluster() -> None:
    assert headline(SNAPSHOT) == (
        "2 instances | 6 running | 2 queuing | 2 held | memory 75 % | TTFT 100 ms, P99 300 ms | "
        "TPOT -"
    )


def test_a_printed_snapshot_has_all_tables_and_says_what_it_leaves_out() -> None:
    printed = plain(SNAPSHOT, 1)
    assert "i0  running  ███████████████░░░░░  75 %  6,000  3" in printed
    assert "cmpl-gull  i0        running  normal  2,400" in printed, "the largest first"
    assert printed.count("(1 more)") == 2
    assert printed.endswith("cmpl-tern  preempted on i0")


def test_a_printed_snapshot_has_as_many_rows_as_the_option_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(top_command.Server, "snapshot", lambda _: SNAPSHOT)
    assert main(["top", "--once", "--rows", "1"]) == 0
    assert capsys.readouterr().out == plain(SNAPSHOT, 1) + "\n"


def test_the_screen_is_refreshed_as_often_as_the_option_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    intervals_s: list[float] = []

    class Screen:
        def __init__(self, _: top_command.Server, interval_s: float) -> None:
            intervals_s.append(interval_s)

        def run(self) -> None:
            """It ends at once."""

    terminal = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr(top_command, "sys", SimpleNamespace(stdin=terminal, stdout=terminal))
    monkeypatch.setattr(top_command.Server, "snapshot", lambda _: SNAPSHOT)
    monkeypatch.setattr(top_app, "TopApp", Screen)
    assert main(["top", "--interval", "2.5"]) == 0
    assert intervals_s == [2.5]


def texts(app: TopApp, name: str) -> list[list[str]]:
    table: DataTable[Text] = app.screen_stack[0].query_one(f"#{name}", DataTable)
    return [[cell.plain for cell in table.get_row_at(row)] for row in range(table.row_count)]


def shown(app: TopApp, name: str) -> str:
    return str(app.screen_stack[0].query_one(f"#{name}", Static).render())


def asked(app: TopApp) -> str:
    """The question of the dialog on the screen."""
    return "".join(str(each.render()) for each in app.screen.query(Label))


async def step_by_step(app: TopApp, pilot: Pilot[None], *steps: str) -> None:
    """Press keys once the screen shows the cluster; questions are waited for."""
    while not shown(app, "headline").startswith(("2 instances", "no server")):
        await pilot.pause(0.01)
    for step in steps:
        if " " in step:
            while asked(app) != step:
                await pilot.pause(0.01)
        else:
            await pilot.press(step)


def driven(cluster: ScriptedCluster, *steps: str, until: str = "") -> dict[str, Any]:
    """Press keys once the screen shows the cluster; returns what it shows in the end.

    Args:
        steps: keys, and questions, for which the steps behind them wait.
    """

    async def run() -> dict[str, Any]:
        app = TopApp(cluster, 0.2)
        async with app.run_test(size=(120, 40)) as pilot, asyncio.timeout(60.0):
            await step_by_step(app, pilot, *steps)
            while until not in shown(app, "outcome"):
                await pilot.pause(0.01)
            return {
                "headline": shown(app, "headline"),
                "outcome": shown(app, "outcome"),
                "requests": texts(app, "requests"),
                "instances": texts(app, "instances"),
                "decisions": texts(app, "decisions"),
                "is_lost": app.screen_stack[0].query_one("#headline").has_class("lost"),
            }

    return asyncio.run(run())


def test_the_screen_shows_what_the_server_answers() -> None:
    found = driven(ScriptedCluster())
    assert [row[0] for row in found["instances"]] == ["i0", "i1"]
    assert [row[0] for row in found["requests"]] == ["cmpl-gull", "cmpl-tern"]
    assert [row[2] for row in found["decisions"]] == ["preempted on i0"]
    assert not found["is_lost"]


def test_a_server_that_does_not_answer_is_a_line_on_the_screen() -> None:
    cluster = ScriptedCluster()
    cluster.answer = SternaError("no server answers")
    found = driven(cluster)
    assert (found["headline"], found["is_lost"]) == ("no server answers", True)


WHERE = "Move cmpl-tern from i0 to"
SURE = "Move cmpl-tern from i0 to i1?"


def test_the_chosen_request_moves_after_a_confirmation() -> None:
    cluster = ScriptedCluster()
    driven(cluster, "down", "m", WHERE, "enter", SURE, "down", "enter", until="moved")
    assert cluster.orders == [("migrate", "cmpl-tern", "i1")]


@pytest.mark.parametrize(
    "steps",
    [
        (WHERE, "escape"),
        (WHERE, "q"),
        (WHERE, "enter", SURE, "enter"),
        (WHERE, "enter", SURE, "escape"),
    ],
)
def test_nothing_moves_without_a_confirmation(steps: tuple[str, ...]) -> None:
    cluster = ScriptedCluster()
    # The last key shows that the others have been handled.
    driven(cluster, "down", "m", *steps, "p", until="paused")
    assert cluster.orders == []


@pytest.mark.parametrize("steps", [(), ("down", "m", WHERE)], ids=["tables", "a question"])
def test_control_c_ends_the_screen(steps: tuple[str, ...]) -> None:
    """By itself Textual would say that another key does."""

    async def run() -> bool:
        app = TopApp(ScriptedCluster(), 0.2)
        async with app.run_test(size=(120, 40)) as pilot, asyncio.timeout(60.0):
            await step_by_step(app, pilot, *steps, "ctrl+c")
            return not app.is_running

    assert asyncio.run(run())


def test_an_instance_is_drained_after_a_confirmation() -> None:
    cluster = ScriptedCluster()
    sure = "Move all requests away from i0, and end it?"
    driven(cluster, "d", sure, "down", "enter", until="drained")
    assert cluster.orders == [("drain", "i0", False)]


def test_a_refusal_is_shown() -> None:
    cluster = ScriptedCluster()
    found = driven(cluster, "u", "Have i0 serve on?", "down", "enter", until="empty")
    assert cluster.orders == [("drain", "i0", True)]
    assert found["outcome"] == "it is empty already"


def test_with_no_other_instance_nothing_can_move() -> None:
    cluster = ScriptedCluster()
    cluster.answer = Snapshot([INSTANCE, INSTANCE], [REQUEST], RECENT)
    found = driven(cluster, "m", until="no other")
    assert found["outcome"] == "there is no other instance"


def test_a_request_that_waits_at_the_scheduler_cannot_move() -> None:
    cluster = ScriptedCluster()
    cluster.answer = Snapshot([INSTANCE, EMPTY], [HELD], RECENT)
    found = driven(cluster, "m", until="waits")
    assert found["outcome"] == "the request waits at the scheduler"
    assert found["requests"][0][:3] == ["cmpl-tern", "-", "held"]
    assert cluster.orders == []


def test_names_that_look_like_markup_are_shown_as_they_are() -> None:
    cluster = ScriptedCluster()
    name = "cmpl-[/x]-[bold]"
    cluster.answer = Snapshot([INSTANCE, EMPTY], [{**REQUEST, "id": name}], RECENT)
    question = f"Move {name} from i0 to"
    found = driven(
        cluster, "m", question, "enter", f"{question} i1?", "down", "enter", until="moved"
    )
    assert [row[0] for row in found["requests"]] == [name]
    assert cluster.orders == [("migrate", name, "i1")]


def test_what_is_not_answered_is_said_beside_the_rest() -> None:
    cluster = ScriptedCluster()
    cluster.answer = Snapshot([INSTANCE, EMPTY], [], RECENT, ["there is no scheduler"])
    found = driven(cluster)
    assert found["headline"].endswith("| there is no scheduler")
    assert found["is_lost"]


class _Answers(BaseHTTPRequestHandler):
    """A server without a scheduler."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        answers = {"/admin/requests": [REQUEST], "/admin/recent": RECENT}
        found = answers.get(path, {"error": {"message": "there is no scheduler"}})
        body = json.dumps(found).encode()
        self.send_response(200 if path in answers else 503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Nothing is logged."""


def test_a_part_that_is_not_answered_is_empty() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        found = top_command.Server(f"http://127.0.0.1:{server.server_port}", None).snapshot()
        server.shutdown()
        thread.join()
    assert found == Snapshot([], [REQUEST], RECENT, ("there is no scheduler",))


def test_a_server_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ServerError, match="no Sterna server answers"):
        top_command.Server("http://127.0.0.1:1", None).snapshot()
