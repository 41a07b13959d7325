"""Requests made up from the server's own description of its API: none of them breaks anything."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

pytest.importorskip("schemathesis")

import schemathesis

from tests.serve.emulated.quick import quick_server
from tests.serve.server import ServerProcess, until

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]

MAX_EXAMPLES = 25

INTERNAL_ERRORS = {
    501: "vLLM's word for what a server was started without",
}
"""Answers above 499 that are meant."""

WITH_CONSEQUENCES = r"^/admin/(start|drain|restart|migrate)$"
"""Valid orders would be carried out; tests/frontend/test_admin.py has these routes."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    # An answer without a length ends soon.
    options = ("--instances", "2", "--max-model-len", "64")
    with quick_server(tmp_path_factory.mktemp("schema"), *options) as server:
        yield server


@pytest.fixture(scope="module")
def described(server: ServerProcess) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


schema = schemathesis.pytest.from_fixture("described").exclude(path_regex=WITH_CONSEQUENCES)


@schema.parametrize()
@settings(
    max_examples=MAX_EXAMPLES,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
def test_no_request_is_answered_with_an_error_of_the_server(case: Any) -> None:
    answer = case.call(timeout=30)
    assert answer.status_code < 500 or answer.status_code in INTERNAL_ERRORS, answer.text


def test_afterwards_the_server_is_as_it_was(server: ServerProcess) -> None:
    """The last test of this module."""
    until(server.is_empty, "every instance is empty")
    with server.http() as http:
        assert http.get("/health").status_code == 200
    assert [each["state"] for each in server.instances()] == ["running", "running"]
    assert "lost" not in server.log
