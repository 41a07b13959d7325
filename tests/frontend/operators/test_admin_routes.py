"""The operators' API: answers, names, errors and keys."""

from collections.abc import AsyncIterator, Callable, Sequence
from hashlib import sha256
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from sterna.errors import (
    ConfigurationError,
    ImmovableError,
    UnansweredError,
    UnknownInstanceError,
    UnknownRequestError,
)
from sterna.frontend.operators.admin_routes import add_admin_routes
from sterna.migration.messages import Mode
from sterna.priority_classes import ApiKey
from sterna.types import InstanceId
from tests.frontend.http.opened import opened

INSTANCES = [{"id": "i0", "state": "running", "freeness": 12.5}]
NODES = [{"node": "10.0.0.1", "drained": False, "instances": ["i0"]}]
JSON = {"Content-Type": "application/json"}
RECENT = {"decisions": [], "ttft_s": [], "tpot_s": [], "waiting": 0}
REQUESTS = [{"id": "chatcmpl-tern-9f86d081", "instance": "i0", "status": "running"}]


class ScriptedOperators:
    """Answers as told; an error is raised."""

    def __init__(self, *reports: dict[str, Any], error: Exception | None = None) -> None:
        self._reports = list(reports)
        self._error = error
        self.moves: list[tuple[str, InstanceId, Mode]] = []
        self.orders: list[str] = []

    async def list_instances(self) -> list[dict[str, Any]]:
        if self._error is not None:
            raise self._error
        return INSTANCES

    async def list_requests(self, timeout_s: float | None) -> list[dict[str, Any]]:
        return REQUESTS if timeout_s is None else [{"id": "r1", "asked_s": timeout_s}]

    async def recent(self, last_s: float) -> dict[str, Any]:
        return {**RECENT, "ttft_s": [last_s]}

    async def migrate(self, name: str, to: InstanceId, mode: Mode) -> list[dict[str, Any]]:
        self.moves.append((name, to, mode))
        if self._error is not None:
            raise self._error
        return self._reports

    async def drain(self, instance_id: InstanceId, *, is_undo: bool) -> None:
        self.orders.append(f"drain {instance_id} undo={is_undo}")

    async def drain_node(self, node: str, *, is_undo: bool) -> None:
        self.orders.append(f"drain node {node} undo={is_undo}")

    def list_nodes(self) -> list[dict[str, Any]]:
        return NODES

    async def start_instances(self, num: int) -> None:
        self.orders.append(f"start {num}")

    async def restart(self, options: Sequence[str], *, has_surge: bool) -> dict[str, int]:
        self.orders.append(" ".join(["restart", *options, f"surge={has_surge}"]))
        return {"generation": 1}


class ScriptedWatch:
    """A stream of two events."""

    async def events(self) -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        yield b"data: 2\n\n"


def take_any(options: Sequence[str]) -> None:
    """A check by which an engine can have all options."""


def client(
    operators: ScriptedOperators,
    *api_keys: str,
    check_options: Callable[[Sequence[str]], None] = take_any,
) -> TestClient:
    app = FastAPI()
    keys = [ApiKey("test", sha256(key.encode()).digest(), is_admin=True) for key in api_keys]
    add_admin_routes(app, operators, ScriptedWatch(), check_options=check_options)
    return TestClient(opened(app, keys))


def move(operators: ScriptedOperators, body: object) -> Any:
    return client(operators).post("/admin/migrate", content=msgspec.json.encode(body), headers=JSON)


def test_instances_and_requests_are_listed():
    answers = client(ScriptedOperators())
    assert answers.get("/admin/instances").json() == INSTANCES
    assert answers.get("/admin/nodes").json() == NODES
    assert answers.get("/admin/requests").json() == REQUESTS


def test_a_move_answers_with_its_report():
    report = {"request": "r1", "from": "i0", "to": "i1", "stages": 2, "suspended_ms": 3.5}
    operators = ScriptedOperators(report)
    answer = move(operators, {"request": "r1", "to": "i1"})
    assert (answer.status_code, answer.json()) == (200, report)
    assert operators.moves == [("r1", "i1", Mode.LIVE)]


def test_moves_of_several_requests_answer_with_a_list():
    reports = [{"request": "0_r1"}, {"request": "1_r1"}]
    assert move(ScriptedOperators(*reports), {"request": "r1", "to": "i1"}).json() == reports


def test_the_mode_can_be_chosen():
    operators = ScriptedOperators({})
    move(operators, {"request": "r1", "to": "i1", "mode": "recompute"})
    assert operators.moves[0][2] is Mode.RECOMPUTE


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (UnknownRequestError("no live request is called r1"), 404, "NotFoundError"),
        (UnknownInstanceError("no instance is called i9"), 404, "NotFoundError"),
        (ImmovableError("its prompt is still being prefilled"), 409, "ConflictError"),
        (UnansweredError("instance i0 died; try again"), 503, "ServiceUnavailableError"),
    ],
)
def test_a_refusal_is_an_error_object_with_its_reason(error: Exception, status: int, kind: str):
    answer = move(ScriptedOperators(error=error), {"request": "r1", "to": "i1"})
    assert answer.status_code == status
    assert answer.json() == {
        "error": {"message": str(error), "type": kind, "param": None, "code": status}
    }


@pytest.mark.parametrize(
    ("body", "part_of_message"),
    [
        ({"request": "r1"}, "missing required field `to`"),
        ({"request": 1, "to": "i1"}, "Expected `str`, got `int` - at `$.request`"),
        ({"request": "r1", "to": "i1", "mode": "fast"}, "Invalid enum value 'fast'"),
        ({"request": "r1", "to": "i1", "how": "fast"}, "unknown field `how`"),
    ],
)
def test_a_body_that_cannot_be_understood_is_a_bad_request(body: object, part_of_message: str):
    operators = ScriptedOperators({})
    answer = move(operators, body)
    assert answer.status_code == 400
    assert part_of_message in answer.json()["error"]["message"]
    assert operators.moves == []


def need_seqs(options: Sequence[str]) -> None:
    """A check by which an engine has one option."""
    if options[:1] != ("--max-num-seqs",):
        raise ConfigurationError("unrecognized arguments: " + " ".join(options))


def restart(operators: ScriptedOperators, body: object) -> Any:
    answers = client(operators, check_options=need_seqs)
    return answers.post("/admin/restart", content=msgspec.json.encode(body), headers=JSON)


def test_a_restart_with_options_that_cannot_work_is_a_bad_request_and_replaces_nothing():
    operators = ScriptedOperators()
    answer = restart(operators, {"options": ["--max-seqs", "8"]})
    message = "unrecognized arguments: --max-seqs 8"
    assert answer.status_code == 400
    assert answer.json() == {
        "error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}
    }
    assert operators.orders == []


@pytest.mark.parametrize("surge", [True, False])
def test_a_restart_with_options_that_can_work_answers_with_its_generation(surge: bool):
    operators = ScriptedOperators()
    answer = restart(operators, {"options": ["--max-num-seqs", "8"], "surge": surge})
    assert (answer.status_code, answer.json()) == (202, {"generation": 1})
    assert operators.orders == [f"restart --max-num-seqs 8 surge={surge}"]


@pytest.mark.parametrize(
    ("path", "body", "order"),
    [
        ("drain", {"instance": "i1"}, "drain i1 undo=False"),
        ("drain", {"instance": "i1", "undo": True}, "drain i1 undo=True"),
        ("drain", {"node": "10.0.0.2"}, "drain node 10.0.0.2 undo=False"),
        ("drain", {"node": "10.0.0.2", "undo": True}, "drain node 10.0.0.2 undo=True"),
        ("start", {}, "start 1"),
        ("start", {"instances": 3}, "start 3"),
    ],
)
def test_a_drain_and_a_start_are_ordered_as_the_body_says(
    path: str, body: dict[str, object], order: str
):
    operators = ScriptedOperators()
    answer = client(operators).post(f"/admin/{path}", json=body)
    assert (answer.status_code, answer.json()) == (202, None)
    assert operators.orders == [order]


@pytest.mark.parametrize("body", [{}, {"instance": "i1", "node": "10.0.0.2"}])
def test_a_drain_is_of_an_instance_or_of_a_node(body: dict[str, str]) -> None:
    operators = ScriptedOperators()
    answer = client(operators).post("/admin/drain", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "name either an instance or a node"
    assert operators.orders == []


ROUTES = ["migrate", "drain", "start", "restart"]
NESTED = b"[" * 100_000
any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["to", "instance", "instances", "x"]), inner, max_size=3)
    ),
    max_leaves=5,
)
not_meant = any_json.filter(lambda value: not isinstance(value, dict)) | st.fixed_dictionaries(
    {"x": any_json}, optional={"to": any_json, "instance": any_json, "instances": any_json}
)


@given(
    path=st.sampled_from(ROUTES),
    content=st.binary(max_size=30) | not_meant.map(msgspec.json.encode),
)
@example("migrate", b"")
@example("drain", b'{"x": ' + NESTED)
@example("restart", b'{"options": ' + NESTED)
@example("restart", NESTED)
@example("migrate", b'{"request": "\xff", "to": "i1"}')
@example("start", b'{"instances": 1e400}')
@example("start", b'{"instances": %d}' % 10**100)
def test_what_no_route_understands_is_a_bad_request_and_orders_nothing(path: str, content: bytes):
    operators = ScriptedOperators({})
    answer = client(operators).post(f"/admin/{path}", content=content, headers=JSON)
    if operators.orders:
        # Bytes by chance, or all defaults; a number that a message can carry.
        body = msgspec.json.decode(content)
        assert isinstance(body, dict)
        assert path != "start" or msgspec.msgpack.encode(body.get("instances", 1))
        assert answer.status_code == 202
        return
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
    assert operators.moves == []


@pytest.mark.parametrize("content_type", ["text/plain", "", "application/x-www-form-urlencoded"])
@pytest.mark.parametrize("path", ROUTES)
def test_what_a_page_of_another_origin_could_send_is_refused(path: str, content_type: str):
    """Browsers ask before they send JSON elsewhere, and nobody allows it."""
    answer = client(ScriptedOperators()).post(
        f"/admin/{path}", content=b"{}", headers={"Content-Type": content_type}
    )
    assert answer.status_code == 400
    assert "application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/admin/instances"),
        ("GET", "/admin/requests"),
        ("POST", "/admin/migrate"),
        ("POST", "/admin/drain"),
        ("POST", "/admin/start"),
        ("POST", "/admin/restart"),
    ],
)
@pytest.mark.parametrize("header", [None, "Bearer wrong", "Bearer", "Basic secret", "secret"])
def test_with_an_api_key_every_route_asks_for_it(method: str, path: str, header: str | None):
    operators = ScriptedOperators({})
    headers = {} if header is None else {"Authorization": header}
    answer = client(operators, "secret").request(method, path, headers=headers, content=b"{}")
    assert answer.status_code == 401
    assert answer.json()["error"]["type"] == "UnauthorizedError"
    assert operators.moves == []


def test_the_key_of_a_client_does_not_open_the_routes():
    app = FastAPI()
    keys = [ApiKey("client", sha256(b"secret").digest())]
    add_admin_routes(app, ScriptedOperators(), ScriptedWatch(), check_options=take_any)
    headers = {"Authorization": "Bearer secret"}
    answer = TestClient(opened(app, keys)).get("/admin/instances", headers=headers)
    assert answer.status_code == 401
    assert "an operator" in answer.json()["error"]["message"]


@pytest.mark.parametrize("key", ["secret", "other"])
def test_any_of_the_api_keys_opens_the_routes(key: str):
    headers = {"Authorization": f"Bearer {key}"}
    answer = client(ScriptedOperators(), "secret", "other").get("/admin/requests", headers=headers)
    assert answer.status_code == 200


def test_a_missing_scheduler_is_told():
    error = UnansweredError("there is no scheduler at this moment; try again")
    answer = client(ScriptedOperators(error=error)).get("/admin/instances")
    assert answer.status_code == 503


def test_what_has_happened_in_the_last_seconds_is_listed():
    answers = client(ScriptedOperators())
    assert answers.get("/admin/recent").json() == {**RECENT, "ttft_s": [10.0]}
    assert answers.get("/admin/recent?last_s=2.5").json() == {**RECENT, "ttft_s": [2.5]}
    for wrong in ("0", "-1", "601", "nan", "soon"):
        assert answers.get(f"/admin/recent?last_s={wrong}").status_code == 422


def test_requests_are_listed_also_where_not_all_instances_answer():
    answer = client(ScriptedOperators()).get("/admin/requests?timeout_s=2")
    assert answer.json() == [{"id": "r1", "asked_s": 2.0}]


def test_frames_are_a_stream_of_events():
    answer = client(ScriptedOperators()).get("/admin/watch")
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    assert answer.text == "data: 1\n\ndata: 2\n\n"


def test_the_page_needs_no_key_and_what_it_shows_does():
    answers = client(ScriptedOperators(), "secret")
    document = answers.get("/dashboard")
    assert document.status_code == 200
    assert document.headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert answers.get("/admin/watch").status_code == 401
    assert answers.get("/admin/recent").status_code == 401
    key = {"Authorization": "Bearer secret"}
    assert answers.get("/admin/watch", headers=key).status_code == 200
