"""`sterna instances`, `requests` and `migrate`: their questions, and their answers in words."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from sterna.cli.main import main
from tests.cli.operate.test_fleet_commands import Cluster, run

INSTANCES: list[dict[str, Any]] = [
    {
        **{"id": "i0", "node": "10.0.0.1", "state": "running"},
        **{"used_tokens": 96, "total_tokens": 2048},
        **{"freeness": 12.6, "running": 2, "queuing": 1, "migrating": 0, "note": None},
    },
    {"id": "i1", "state": "pending", "note": "no free GPU"},
]
REQUESTS: list[dict[str, Any]] = [
    {
        **{"id": "cmpl-tern", "instance": "i0", "status": "running", "class": "normal"},
        **{"num_tokens": 40, "num_output_tokens": 8, "immovable": None},
    },
    {"id": "cmpl-auk", "instance": None, "status": "held", "class": "high"},
]
INSTANCE_LINES = [
    "id  node      state    used_tokens  total_tokens  freeness  running  queuing  migrating  note",
    "i0  10.0.0.1  running  96           2048          13        2        1        0          -",
    "i1  -         pending  -            -             -         -        -        -          "
    "no free GPU",
]
REQUEST_LINES = [
    "id         instance  status   class   num_tokens  num_output_tokens  immovable",
    "cmpl-tern  i0        running  normal  40          8                  -",
    "cmpl-auk   -         held     high    -           -                  -",
]
MOVED = {"request": "tern", "from": "i0", "to": "i1", "stages": 2, "suspended_ms": 3.46}
IN_WORDS = "moved tern from i0 to i1 in 2 stages, paused for 3.5 ms\n"


@pytest.mark.parametrize(
    ("command", "rows", "lines"),
    [("instances", INSTANCES, INSTANCE_LINES), ("requests", REQUESTS, REQUEST_LINES)],
    ids=["instances", "requests"],
)
def test_instances_and_requests_are_a_table_or_json(
    capsys: pytest.CaptureFixture[str], command: str, rows: list[dict[str, Any]], lines: list[str]
) -> None:
    cluster = Cluster([], answers={f"/admin/{command}": rows, "/admin/nodes": []})
    assert run(cluster, command) == 0
    assert capsys.readouterr().out.splitlines() == lines
    assert run(cluster, command, "--json") == 0
    assert json.loads(capsys.readouterr().out) == rows
    assert (cluster.ordered, cluster.keys) == ([], {"Bearer operator"})


def test_a_server_on_this_machine_is_asked_without_a_proxy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Docker gives every container those of its client; they would ask themselves."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    assert run(Cluster([INSTANCES]), "instances") == 0
    assert "i0  10.0.0.1" in capsys.readouterr().out


def test_instances_have_notes_only_where_there_are_some(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(Cluster([INSTANCES[:1]]), "instances") == 0
    assert "note" not in capsys.readouterr().out


def test_drained_nodes_stand_below_the_instances(capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [
        {"node": "10.0.0.1", "drained": False, "instances": ["i0"]},
        {"node": "10.0.0.2", "drained": True, "instances": []},
    ]
    assert run(Cluster([INSTANCES], answers={"/admin/nodes": nodes}), "instances") == 0
    assert capsys.readouterr().out.splitlines()[len(INSTANCE_LINES) :] == [
        "10.0.0.2 is drained: no instance is placed there until "
        "`sterna drain --undo --node 10.0.0.2`"
    ]


@pytest.mark.parametrize(
    ("options", "mode"),
    [((), "live"), (("--mode", "stop_copy"), "stop_copy"), (("--mode", "recompute"), "recompute")],
    ids=["default", "stop_copy", "recompute"],
)
def test_a_request_moves_in_the_mode_that_is_given(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], mode: str
) -> None:
    cluster = Cluster([], answers={"/admin/migrate": MOVED})
    assert run(cluster, "migrate", "tern", "--to", "i1", *options) == 0
    assert capsys.readouterr().out == IN_WORDS
    assert cluster.ordered == [("/admin/migrate", {"request": "tern", "to": "i1", "mode": mode})]


def test_each_moved_choice_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = [MOVED, {**MOVED, "from": "i2", "stages": 1}]
    cluster = Cluster([], answers={"/admin/migrate": outcomes})
    assert run(cluster, "migrate", "tern", "--to", "i1") == 0
    assert capsys.readouterr().out == IN_WORDS + IN_WORDS.replace("i0", "i2").replace(
        "2 stages", "1 stage"
    )
    assert run(cluster, "migrate", "tern", "--to", "i1", "--json") == 0
    assert json.loads(capsys.readouterr().out) == outcomes


def test_a_misspelt_option_is_refused_with_the_usage_of_its_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["instances", "--josn"])
    usage, *_, error = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage: sterna instances ")
    assert error == "sterna instances: error: unrecognized arguments: --josn"


NOT_THERE = (
    "start one with `sterna serve`, or name it with --url, as in --url http://127.0.0.1:8000"
)


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("sterna: error: ")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "localhost:8000", ""])
def test_an_address_without_http_is_refused_by_what_it_lacks(
    capsys: pytest.CaptureFixture[str], url: str
) -> None:
    assert main(["instances", "--url", url]) == 1
    assert error_line(capsys) == (
        f"no Sterna server answers at {url} (it begins with neither http:// nor https://); "
        f"{NOT_THERE}"
    )


def refused(status: int, body: dict[str, Any]) -> tuple[str, int]:
    """The address, with the path of OpenAI's clients, and the exit status of `sterna instances`
    beside a server that answers everything so."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        url = f"http://127.0.0.1:{server.server_port}/v1"
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        exit_status = main(["instances", "--url", url])
        thread.join()
    return url, exit_status


def test_a_server_without_these_routes_is_none_of_sterna(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Such as plain vLLM, or the address with the path that OpenAI's clients need."""
    url, exit_status = refused(404, {"detail": "Not Found"})
    assert exit_status == 1
    assert error_line(capsys) == f"no Sterna server answers at {url} (404 Not Found); {NOT_THERE}"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"error": {"message": "these routes need a key"}}, "these routes need a key"),
        ({"error": "Unauthorized"}, "the server answered 401 Unauthorized"),
    ],
    ids=["its own words", "vLLM's"],
)
def test_a_missing_key_is_asked_for_by_its_option(
    capsys: pytest.CaptureFixture[str], body: dict[str, Any], reason: str
) -> None:
    assert refused(401, body)[1] == 1
    assert error_line(capsys) == f"{reason}; give it with --api-key, or as STERNA_API_KEY"
