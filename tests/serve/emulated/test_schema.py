"""Requests made up from the server's own description of its API: none of them breaks anything."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

pytest.importorskip("schemathesis")

import schemathesis

from tests.serve.emulated.quick import quick_server
from tests.serve.server import HANG_TIMEOUT_S, ServerProcess, until

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

MAX_EXAMPLES = 25

MEANT = {501: "vLLM's word for what a server was started without"}
"""Answers above 499 that are no error of the server."""

NOT_ASKED = r"^/admin/(start|drain|restart|migrate)$"
"""Valid orders would be carried out; tests/frontend/operators/test_admin_routes.py has them."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    # An answer without a length ends soon.
    options = ("--instances", "2", "--max-model-len", "64")
    with quick_server(tmp_path_factory.mktemp("schema"), *options) as server:
        yield server


def test_no_request_is_answered_with_an_error_of_the_server(server: ServerProcess) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [each.ok() for each in schema.exclude(path_regex=NOT_ASKED).get_all_operations()]
    assert len(operations) > 20
    failures = []
    for operation in operations:

        @settings(
            max_examples=MAX_EXAMPLES,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def ask(case: Any) -> None:
            answer = case.call(timeout=HANG_TIMEOUT_S)
            assert answer.status_code < 500 or answer.status_code in MEANT, (
                f"{answer.status_code} {answer.text[:300]}\n{case.as_curl_command()[:500]}"
            )

        try:
            ask()
        except Exception as error:
            # The others are asked all the same.
            failures.append(f"{operation.label}: {error!r}")
    assert not failures, "\n\n".join(failures)


def test_afterwards_the_server_is_as_it_was(server: ServerProcess) -> None:
    """The last test of this module."""
    until(server.is_empty, "every instance is empty")
    with server.http() as http:
        assert http.get("/health").status_code == 200
    assert [each["state"] for each in server.instances()] == ["running", "running"]
    assert "lost" not in server.log
