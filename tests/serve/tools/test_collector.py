"""Spans through a collector that is not ours: Rotel takes them by OpenTelemetry's protocol, and
passes them on.

    make test-tools ARGS="-k collector"
"""

import subprocess
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from bench.serving.ports import free_port
from tests.otlp_receiver import Received, Receiver, receiving
from tests.serve.emulated.quick import completion, quick_server
from tests.serve.server import HANG_TIMEOUT_S, until
from tests.serve.tools.test_tools import ENVIRONMENTS

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.soak, pytest.mark.timeout(900)]

VERSION = "0.0.1a15"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TRACE = f"00-{TRACE_ID}-b7ad6b7169203331-01"


def agent() -> Path:
    """The collector's program, in an environment of its own, which is made once."""
    folder = ENVIRONMENTS / f"rotel-{VERSION}"
    if not (folder / "complete").exists():
        venv.create(folder, with_pip=True, clear=True)
        pip = (folder / "bin" / "python", "-m", "pip", "install", "-q")
        subprocess.run([*pip, f"rotel=={VERSION}"], check=True)
        (folder / "complete").touch()
    (found,) = folder.glob("lib/python*/site-packages/rotel/rotel-agent")
    found.chmod(0o755)
    return found


@contextmanager
def collecting(receiver: Receiver, folder: Path) -> Iterator[str]:
    """A collector that passes all spans on to the receiver; yields its address."""
    grpc, http = free_port(), free_port()
    process = subprocess.Popen(
        [
            *(agent(), "start", "--pid-file", folder / "pid", "--log-file", folder / "log"),
            *("--otlp-grpc-endpoint", f"127.0.0.1:{grpc}"),
            *("--otlp-http-endpoint", f"127.0.0.1:{http}"),
            *("--exporter", "otlp", "--otlp-exporter-endpoint", receiver.endpoint),
        ],
        stdin=subprocess.DEVNULL,
    )

    def listens() -> bool:
        assert process.poll() is None
        try:
            httpx.get(f"http://127.0.0.1:{http}/")
        except httpx.ConnectError:
            return False
        return True

    try:
        until(listens, "the collector listens")
        yield f"http://127.0.0.1:{grpc}"
    finally:
        process.terminate()
        process.wait(HANG_TIMEOUT_S)


def children(spans: list[Received], parent: Received) -> set[str]:
    return {each.name for each in spans if each.parent_id == parent.span_id}


def test_a_collector_gets_the_spans_of_a_request_in_the_clients_trace(tmp_path: Path) -> None:
    began_s = time.time()
    with receiving() as receiver, collecting(receiver, tmp_path) as endpoint:
        options = ("--otlp-traces-endpoint", endpoint)
        with quick_server(tmp_path, *options) as server:
            headers = {"traceparent": TRACE}
            url = f"{server.url}/v1/completions"
            answer = httpx.post(url, json=completion(0, 20), headers=headers, timeout=60.0)
            assert answer.status_code == 200
            spans = receiver.until("request", "llm_request", "prefill", "decode")
    (request,) = [each for each in spans if each.name == "request"]
    assert (request.service, request.trace_id) == ("sterna", TRACE_ID)
    assert request.parent_id == TRACE.split("-")[2]
    assert {"scheduler", "prefill", "decode"} <= children(spans, request)
    assert began_s <= request.begin_s < request.end_s <= time.time()
