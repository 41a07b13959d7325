"""SIGTERM while requests run, and what goes wrong meanwhile."""

import signal
from pathlib import Path

import pytest

from tests.serve.emulated.quick import quick_server
from tests.serve.server import HANG_TIMEOUT_S, MODEL_NAME

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

SUPERVISOR = "ray::_SupervisorActor"
NUM_TOKENS = 1500
SHUTDOWN_TIMEOUT_S = 3600
"""Longer than the test may take: the server ends because its request has."""


def test_a_server_whose_supervisor_is_stopped_at_sigterm_ends_with_its_last_request(
    tmp_path: Path,
) -> None:
    name = ("--served-model-name", MODEL_NAME)
    patience = ("--shutdown-timeout", str(SHUTDOWN_TIMEOUT_S))
    with quick_server(tmp_path, "--instances", "2", *name, *patience) as server:
        stream = iter(server.stream(NUM_TOKENS))
        next(stream)
        server.send_signal(signal.SIGTERM)
        server.until_line("^shutting down: requests have", HANG_TIMEOUT_S)
        (supervisor,) = server.at_work(SUPERVISOR)
        supervisor.send_signal(signal.SIGSTOP)
        server.until_line("supervisor lost reason=", HANG_TIMEOUT_S)
        *_, last = stream
        assert last.choices[0].finish_reason == "length"
        assert server.until_end(HANG_TIMEOUT_S) == 0
