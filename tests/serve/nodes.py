"""Further nodes of a server's Ray, on this machine, and networks of their own for them."""

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence

import psutil

from bench.serving.ports import free_port
from sterna.runtime.home.ray_environment import IS_SPREAD
from tests.models import small_model
from tests.needed_tools import skip
from tests.serve.server import (
    HANG_TIMEOUT_S,
    START_TIMEOUT_S,
    STERNA_IS_READY,
    ServerProcess,
    serve_command,
)

NUM_CPUS = os.cpu_count() or 1
"""Of each node, and asked for each instance: no two fit on one node."""

NODE_TIMEOUT_S = 400.0
"""A node takes seconds to join, on a free machine, and so does the start of its instance."""


class Network:
    """A network namespace, and the link between it and that of the tests.

    Both ends have addresses: `host` here, `there` in the namespace.
    """

    def __init__(self) -> None:
        number = os.getpid() % 250
        self.name = f"sterna{number}"
        self.host, self.there = f"10.213.{number}.1", f"10.213.{number}.2"
        self._end = f"st{number}a"
        self._other_end = f"st{number}b"
        _ip("netns", "add", self.name)
        try:
            _ip("link", "add", self._end, "type", "veth", "peer", "name", self._other_end)
            _ip("link", "set", self._other_end, "netns", self.name)
            _ip("addr", "add", f"{self.host}/30", "dev", self._end)
            _ip("-n", self.name, "addr", "add", f"{self.there}/30", "dev", self._other_end)
            for own in ("lo", self._other_end):
                _ip("-n", self.name, "link", "set", own, "up")
            _ip("link", "set", self._end, "up")
        except BaseException:
            self.close()
            raise

    def cut(self) -> None:
        """Nothing comes through any more; both sides keep their addresses."""
        # At the far end: here a default route would take what is sent elsewhere.
        _ip("-n", self.name, "link", "set", self._other_end, "down")

    def restore(self) -> None:
        """Everything comes through again."""
        _ip("-n", self.name, "link", "set", self._other_end, "up")

    def listening(self, pid: int) -> set[str]:
        """The addresses on which a process in the namespace listens."""
        command = ["ip", "netns", "exec", self.name, "ss", "-ltnHp"]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        own = [each.split() for each in lines.splitlines() if f"pid={pid}," in each]
        return {fields[3].rpartition(":")[0].strip("[]") for fields in own}

    def close(self) -> None:
        """Leave nothing behind."""
        # The link goes with it, as soon as no process is in it any more.
        subprocess.run(["ip", "link", "del", self._end], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", self.name], check=False, capture_output=True)


def make_network() -> Network:
    """Return a network, or have the test skipped (`needed_tools`), with the reason."""
    if shutil.which("ip") is None:
        skip("needs the command ip (iproute2) for a network namespace")
    if os.geteuid() != 0:
        skip("needs root for a network namespace")
    try:
        return Network()
    except subprocess.CalledProcessError as error:
        skip(f"this machine gives no network namespace: {error.stderr.strip()}")


class Node:
    """A further node.

    Args:
        address: where the server's Ray is joined.
        host: the node's own address.
        network: in which it is, where it is not this one.
        command: which makes it; None: `sterna join`, for a small node.
    """

    def __init__(
        self,
        address: str,
        environment: dict[str, str],
        host: str,
        network: Network | None = None,
        command: Sequence[str] | None = None,
    ) -> None:
        usual = (
            *(sys.executable, "-m", "sterna.cli.main", "join", address, "--block"),
            *(
                f"--node-ip-address={host}",
                f"--num-cpus={NUM_CPUS}",
                "--object-store-memory=80000000",
            ),
            *("--min-worker-port=0", "--max-worker-port=0"),
            # Else all on one machine choose the same.
            f"--dashboard-agent-listen-port={free_port()}",
        )
        self._process = subprocess.Popen(
            [
                *(() if network is None else ("ip", "netns", "exec", network.name)),
                *(command or usual),
            ],
            # The tests' own Ray has no further nodes.
            env={**os.environ, **environment, IS_SPREAD: "1"},
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


def spread_environment() -> dict[str, str]:
    """What lets further nodes into a server's Ray."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


@contextlib.contextmanager
def spread_server(
    environment: dict[str, str], host: str, lease_s: float
) -> Iterator[ServerProcess]:
    """A server of one instance, which others join at this address."""
    small_model()
    port = free_port()
    server = ServerProcess(
        serve_command(
            *("--engine", "emulated", "--port", str(port), "--shutdown-timeout", "0"),
            *("--instances", "1", "--cpus-per-instance", str(NUM_CPUS)),
            *("--cluster-address", host, "--instance-lease", str(lease_s)),
        ),
        environment,
        port,
    )
    try:
        server.until_line(STERNA_IS_READY, START_TIMEOUT_S)
        yield server
    finally:
        server.end()


def join_address(server: ServerProcess) -> str:
    """Where nodes join, as the server has said."""
    return server.until_line(r"nodes join with: sterna join (\S+)", HANG_TIMEOUT_S)[1]


def states(server: ServerProcess) -> dict[str, str]:
    return {each["id"]: each["state"] for each in server.instances()}


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
