"""A server whose disk fills while it serves: it goes on, and has all again when there is room."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bench.serving.ports import free_port
from tests.models import small_model
from tests.serve.emulated.quick import MODEL, PROFILE
from tests.serve.emulated.test_exhaustion import is_answering
from tests.serve.server import (
    HANG_TIMEOUT_S,
    START_TIMEOUT_S,
    STERNA_IS_READY,
    ServerProcess,
    serve_command,
    until,
)
from tests.small_disk import fill, with_small_disk

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_TOKENS = 400


@pytest.fixture
def disk() -> Iterator[Path]:
    # Ray's sockets are below, whose names may not be long.
    with tempfile.TemporaryDirectory(prefix="disk-") as folder:
        yield Path(folder)


@pytest.fixture
def server(disk: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    small_model()
    profile = tmp_path / "quick.yaml"
    profile.write_text(PROFILE)
    port = free_port()
    own = ("--engine", "emulated", "--profile", str(profile), "--port", str(port))
    command = serve_command(*own, "--shutdown-timeout", "0", "--instances", "2")
    environment = {"TMPDIR": str(disk), "RAY_TMPDIR": str(disk)}
    server = ServerProcess(with_small_disk(disk, "400m", command), environment, port)
    try:
        server.until_line(STERNA_IS_READY, START_TIMEOUT_S)
        yield server
    finally:
        server.end()


def gcs(server: ServerProcess) -> psutil.Process:
    (process,) = (each for each in server.processes() if each.name() == "gcs_server")
    return process


def num_running(server: ServerProcess) -> int:
    return sum(each["state"] == "running" for each in server.instances())


def test_a_server_whose_disk_is_full_serves_and_has_all_again_when_there_is_room(
    server: ServerProcess, disk: Path
) -> None:
    stream = server.client().completions.create(
        model=MODEL,
        prompt="Terns",
        max_tokens=NUM_TOKENS,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    token_ids = list(next(iter(stream)).choices[0].token_ids)
    # As the server sees it.
    filling = fill(Path(f"/proc/{server.pid}/root{disk}"))
    server.until_line("disk nearly full", HANG_TIMEOUT_S)
    # What Ray's GCS knows is on that disk.
    gcs(server).kill()
    server.until_line("Ray's GCS lost, again in 1 s", HANG_TIMEOUT_S)
    server.at_work("ray::_InstanceActor")[0].kill()
    for event in stream:
        token_ids += event.choices[0].token_ids
    assert len(token_ids) == NUM_TOKENS
    until(lambda: num_running(server) == 1, "its death is known")
    assert is_answering(server.port)
    filling.unlink()
    server.until_line("disk has room again", HANG_TIMEOUT_S)
    until(lambda: num_running(server) == 2, "there is another")
    server.at_work("ray::_FrontendActor")[0].kill()
    until(lambda: not is_answering(server.port), "nobody answers")
    until(lambda: is_answering(server.port), "another front end does")
    server.interrupt()
    assert server.until_end() == 0
