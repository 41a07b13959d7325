"""Two nodes in two network namespaces, and the link between them cut: nothing acts twice."""

import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from sterna.cli.operate.admin_commands import ask
from tests.serve.load import Load
from tests.serve.nodes import (
    NODE_TIMEOUT_S,
    Network,
    Node,
    join_address,
    make_network,
    spread_environment,
    spread_server,
    states,
)
from tests.serve.server import (
    HANG_TIMEOUT_S,
    ServerProcess,
    has_ended,
    logged_s,
    until,
)

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_CLIENTS = 8
LEASE_S = 15.0
"""Longer than a supervisor's successor takes on a busy machine."""
MAX_ANSWER_AGE_S = LEASE_S / 3
"""So long before the cut, at most, the last heartbeat was sent that was answered. There are four a
second."""
SHORT_CUT_S = 4.0


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    network = make_network()
    yield network
    network.close()


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """What lets the other node into the server's Ray, which has more patience with it than a test
    has: only its lease tells that an instance has ended."""
    return {**spread_environment(), "RAY_health_check_failure_threshold": "1000"}


@pytest.fixture(scope="module")
def server(network: Network, environment: dict[str, str]) -> Iterator[ServerProcess]:
    with spread_server(environment, network.host, LEASE_S) as server:
        yield server


@pytest.fixture(scope="module")
def node(server: ServerProcess, network: Network, environment: dict[str, str]) -> Iterator[Node]:
    """On the other side of the link, with room for one instance; another one is here."""
    ask(server.url, "POST", "/admin/start", None, {"instances": 1})
    node = Node(join_address(server), environment, network.there, network)
    yield node
    network.restore()
    node.kill()


@dataclass(frozen=True, slots=True)
class Remote:
    """The instance on the other side of the link."""

    instance_id: str
    process: psutil.Process


@pytest.fixture
def remote(server: ServerProcess, node: Node) -> Remote:
    until(lambda: list(states(server).values()) == ["running"] * 2, "two serve", NODE_TIMEOUT_S)
    there = {each.pid: each for each in node.processes()}

    def found() -> set[Remote]:
        return {
            Remote(instance_id.removeprefix("instance "), there[int(pid)])
            for instance_id, pid in re.findall(r"\((instance \S+) pid=(\d+)", server.log)
            if int(pid) in there
        }

    # What it has printed comes by Ray, which takes its time.
    until(lambda: bool(found()), "it has printed something", NODE_TIMEOUT_S)
    (remote,) = found()
    return remote


def own_log(pid: int) -> str:
    """What a worker of Ray has written to its log on its own node."""
    files = Path("/tmp/ray").glob(f"session_*/logs/worker-*-{pid}.err")
    return "".join(each.read_text("utf-8", errors="replace") for each in files)


def test_actors_listen_for_each_other_on_the_addresses_of_their_nodes(
    server: ServerProcess, network: Network, remote: Remote
) -> None:
    """Besides Ray's own ports, which are on all addresses."""
    supervisor = server.at_work("ray::_SupervisorActor")[0]
    here = {
        each.laddr.ip
        for each in supervisor.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    }
    assert here - {"0.0.0.0", "::"} == {network.host}
    assert network.listening(remote.process.pid) - {"0.0.0.0", "*", "::"} == {network.there}


def until_remote_is_busy(server: ServerProcess, remote: Remote) -> None:
    until(
        lambda: any(each["instance"] == remote.instance_id for each in server.requests()),
        "it has requests",
    )


def test_a_cut_that_is_shorter_than_the_lease_costs_nothing_but_the_time(
    server: ServerProcess, network: Network, remote: Remote
) -> None:
    before = states(server)
    with Load(server, NUM_CLIENTS) as load:
        load.until_ended(2 * NUM_CLIENTS)
        until_remote_is_busy(server, remote)
        network.cut()
        # Nothing can be seen of the other side that would be worth waiting for.
        threading.Event().wait(SHORT_CUT_S)
        network.restore()
        after = load.until_ended(4 * NUM_CLIENTS)
        # What was begun by mistake would have come about by then.
        threading.Event().wait(LEASE_S)
    assert after.failures == load.seen().failures == []
    assert f"instance lost instance={remote.instance_id}" not in server.log
    assert remote.process.is_running()
    assert states(server) == before
    until(server.is_empty, "nothing is left of the requests")


def test_the_successor_of_a_supervisor_renews_leases_in_time(
    server: ServerProcess, remote: Remote
) -> None:
    with Load(server, NUM_CLIENTS) as load:
        load.until_ended(NUM_CLIENTS)
        server.at_work("ray::_SupervisorActor")[0].kill()
        server.until_line("supervisor took over", HANG_TIMEOUT_S)
        threading.Event().wait(LEASE_S)
        seen = load.until_ended(NUM_CLIENTS)
    assert seen.failures == []
    assert f"instance lost instance={remote.instance_id}" not in server.log
    assert remote.process.is_running()


@pytest.mark.parametrize("supervisor_dies", [False, True])
def test_an_instance_that_is_cut_off_has_ended_before_its_requests_go_on_elsewhere(
    server: ServerProcess, network: Network, remote: Remote, *, supervisor_dies: bool
) -> None:
    """Also where its supervisor died: the successor, who has never heard of it, waits as well.

    The order is asserted, by what each of them has logged; how long after the cut it came about is
    printed.
    """
    lost = f"instance lost instance={remote.instance_id} "
    with Load(server, NUM_CLIENTS) as load:
        load.until_ended(2 * NUM_CLIENTS)
        until_remote_is_busy(server, remote)
        num_before = len(server.lines)
        cut_s = time.time()
        network.cut()
        if supervisor_dies:
            server.at_work("ray::_SupervisorActor")[0].kill()
        server.until_line(lost, HANG_TIMEOUT_S)
        assert has_ended(remote.process)
        # Whoever was with it goes on before the link is there again.
        cut_off = load.until_ended(2 * NUM_CLIENTS)
        network.restore()
        restored = load.until_ended(2 * NUM_CLIENTS)
    assert cut_off.failures == restored.failures == []

    lines = server.lines[num_before:]
    lost_s, again_s = logged_s(lines, lost), logged_s(lines, "request sent again ")
    ending = f"no supervisor has answered within its lease instance={remote.instance_id}"
    ended_s = logged_s(own_log(remote.process.pid).splitlines(), ending)
    print(f"s after the cut: ended {ended_s - cut_s:.2f}, lost {lost_s - cut_s:.2f}")
    assert cut_s + LEASE_S - MAX_ANSWER_AGE_S < ended_s < lost_s <= again_s

    # There is room for another one only where it was.
    until(lambda: list(states(server).values()) == ["running"] * 2, "as many serve", NODE_TIMEOUT_S)
    assert remote.instance_id not in states(server)
    until(server.is_empty, "nothing is left of the requests")
