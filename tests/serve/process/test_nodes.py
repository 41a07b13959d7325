"""Instances on several nodes of Ray, one of which dies as a machine does: all of it, at once."""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from sterna.cli.admin import ask
from tests.models import small_model
from tests.serve.load import Load
from tests.serve.server import (
    HANG_TIMEOUT_S,
    START_TIMEOUT_S,
    STERNA_IS_READY,
    ServerProcess,
    free_port,
    serve_command,
    until,
)

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

NUM_CPUS = os.cpu_count() or 1
"""Of each node, and asked for each instance: no two fit on one node."""

NUM_CLIENTS = 8

NODE_TIMEOUT_S = 120.0
"""A node takes seconds to join, on a free machine."""


class Node:
    """A further node of a server's Ray, on this machine."""

    def __init__(self, address: str, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [
                *(str(Path(sys.executable).with_name("ray")), "start", "--block"),
                *(
                    f"--address={address}",
                    f"--num-cpus={NUM_CPUS}",
                    "--object-store-memory=80000000",
                ),
                *("--min-worker-port=0", "--max-worker-port=0"),
                # Else all on one machine choose the same.
                f"--dashboard-agent-listen-port={free_port()}",
            ],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def processes(self) -> list[psutil.Process]:
        own = psutil.Process(self._process.pid)
        return [own, *own.children(recursive=True)]

    def kill(self) -> None:
        """End all of it at once."""
        if self._process.poll() is not None:
            return
        family = self.processes()
        for process in family:
            process.kill()
        self._process.wait()
        psutil.wait_procs(family, HANG_TIMEOUT_S)


@pytest.fixture
def environment() -> dict[str, str]:
    """What lets further nodes into a server's Ray."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


@pytest.fixture
def server(environment: dict[str, str]) -> Iterator[ServerProcess]:
    small_model()
    port = free_port()
    server = ServerProcess(
        serve_command(
            *("--engine", "emulated", "--port", str(port), "--shutdown-timeout", "0"),
            *("--instances", "1", "--cpus-per-instance", str(NUM_CPUS)),
        ),
        environment,
        port,
    )
    try:
        server.until_line(STERNA_IS_READY, START_TIMEOUT_S)
        yield server
    finally:
        server.end()


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    nodes: list[Node] = []
    yield nodes
    for node in nodes:
        node.kill()


def ray_address(server: ServerProcess) -> str:
    (raylet,) = [each for each in server.processes() if each.name() == "raylet"]
    option = "--gcs-address="
    (address,) = [each for each in raylet.cmdline() if each.startswith(option)]
    return address.removeprefix(option)


def states(server: ServerProcess) -> dict[str, str]:
    return {each["id"]: each["state"] for each in server.instances()}


def num_serving(server: ServerProcess) -> int:
    return list(states(server).values()).count("running")


def test_the_instances_of_a_node_that_dies_are_lost_and_no_stream_is(
    server: ServerProcess, environment: dict[str, str], nodes: list[Node]
) -> None:
    """Three nodes with an instance each; the second one dies, and a fourth takes its place."""
    address = ray_address(server)
    ask(server.url, "POST", "/admin/start", None, {"instances": 2})
    until(lambda: sorted(states(server).values()) == ["pending", "pending", "running"], "no place")
    for num_running in (2, 3):
        # One after the other: two that start on one machine at once take the same socket.
        nodes.append(Node(address, environment))
        until(lambda n=num_running: num_serving(server) == n, "it has one", NODE_TIMEOUT_S)

    victim = "i2"
    ready = server.until_line(rf"instance {victim} pid=(\d+)", HANG_TIMEOUT_S)
    (node,) = [n for n in nodes if any(p.pid == int(ready[1]) for p in n.processes())]
    with Load(server, NUM_CLIENTS) as load:
        load.until_ended(2 * NUM_CLIENTS)
        node.kill()
        server.until_line(f"instance lost instance={victim} ", HANG_TIMEOUT_S)
    after = load.seen()
    assert after.failures == []
    # Each client has read to its end at least the stream that it had then.
    assert after.num_ended >= NUM_CLIENTS
    until(lambda: states(server)["i3"] == "pending", "its successor waits for a node")
    nodes.append(Node(address, environment))
    running = dict.fromkeys(("i0", "i1", "i3"), "running")
    until(lambda: states(server) == running, "its successor has a node", NODE_TIMEOUT_S)
    until(server.is_empty, "nothing is left of the requests")
