"""Instances on several nodes of Ray, one of which dies as a machine does: all of it, at once; or is
drained before."""

from collections.abc import Iterator

import pytest

from sterna.cli.operate.admin_commands import ask
from tests.addresses import own_address
from tests.serve.load import Load
from tests.serve.nodes import (
    NODE_TIMEOUT_S,
    Node,
    join_address,
    spread_environment,
    spread_server,
    states,
)
from tests.serve.server import (
    HANG_TIMEOUT_S,
    ServerProcess,
    has_ended,
    until,
)

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

DRAINED, OTHER = "127.0.0.2", "127.0.0.3"
"""Addresses of two nodes."""

NUM_CLIENTS = 8
LEASE_S = 10.0


@pytest.fixture
def environment() -> dict[str, str]:
    """What lets further nodes into a server's Ray."""
    return spread_environment()


@pytest.fixture
def server(environment: dict[str, str]) -> Iterator[ServerProcess]:
    with spread_server(environment, own_address(), LEASE_S) as server:
        yield server


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    nodes: list[Node] = []
    yield nodes
    for node in nodes:
        node.kill()


def num_serving(server: ServerProcess) -> int:
    return list(states(server).values()).count("running")


@pytest.mark.parametrize("is_whole", [True, False], ids=["all_of_it", "its_raylet"])
def test_the_instances_of_a_node_that_dies_are_lost_and_no_stream_is(
    server: ServerProcess, environment: dict[str, str], nodes: list[Node], *, is_whole: bool
) -> None:
    """Three nodes with an instance each; the second one dies, and a fourth takes its place. Without
    its raylet, nothing else of a node goes on either."""
    address = join_address(server)
    ask(server.url, "POST", "/admin/start", None, {"instances": 2})
    until(lambda: sorted(states(server).values()) == ["pending", "pending", "running"], "no place")
    for num_running in (2, 3):
        # One after the other: two that start on one machine at once take the same socket.
        nodes.append(Node(address, environment, own_address()))
        until(lambda n=num_running: num_serving(server) == n, "it has one", NODE_TIMEOUT_S)

    victim = "i2"
    ready = server.until_line(rf"instance {victim} pid=(\d+)", HANG_TIMEOUT_S)
    (node,) = [n for n in nodes if any(p.pid == int(ready[1]) for p in n.processes())]
    with Load(server, NUM_CLIENTS) as load:
        load.until_ended(2 * NUM_CLIENTS)
        until(
            lambda: any(each["instance"] == victim for each in server.requests()),
            "it has requests",
        )
        family = node.processes()
        if is_whole:
            node.kill()
        else:
            (raylet,) = [each for each in family if each.name() == "raylet"]
            raylet.kill()
        server.until_line(f"instance lost instance={victim} ", HANG_TIMEOUT_S)
        until(lambda: "request sent again " in server.log, "its requests go on elsewhere")
    after = load.seen()
    assert after.failures == []
    until(lambda: all(map(has_ended, family)), "nothing is left of the node")
    # Each client has read to its end at least the stream that it had then.
    assert after.num_ended >= NUM_CLIENTS
    until(lambda: states(server)["i3"] == "pending", "its successor waits for a node")
    nodes.append(Node(address, environment, own_address()))
    running = dict.fromkeys(("i0", "i1", "i3"), "running")
    until(lambda: states(server) == running, "its successor has a node", NODE_TIMEOUT_S)
    until(server.is_empty, "nothing is left of the requests")


def nodes_of(server: ServerProcess) -> dict[str, tuple[str, str | None]]:
    """The state and the node of each instance."""
    return {each["id"]: (each["state"], each["node"]) for each in server.instances()}


def test_a_drained_node_has_no_instances_until_that_is_undone_and_no_stream_is_cut(
    server: ServerProcess, environment: dict[str, str], nodes: list[Node]
) -> None:
    """The instance in place of the one that leaves waits, though there is room where that was."""
    address = join_address(server)
    ask(server.url, "POST", "/admin/start", None, {"instances": 2})
    for number, host in enumerate((DRAINED, OTHER), start=2):
        nodes.append(Node(address, environment, host))
        until(lambda n=number: num_serving(server) == n, "it has one", NODE_TIMEOUT_S)
    (leaves,) = [each for each, (_, node) in nodes_of(server).items() if node == DRAINED]
    with Load(server, NUM_CLIENTS) as load:
        load.until_ended(NUM_CLIENTS)
        ask(server.url, "POST", "/admin/drain", None, {"node": DRAINED})
        until(lambda: leaves not in states(server), "it is empty", NODE_TIMEOUT_S)
        until(lambda: nodes_of(server)["i3"] == ("pending", None), "another one waits")
    assert load.seen().failures == []
    (waits,) = [each for each in server.instances() if each["id"] == "i3"]
    assert f"no node but drained ones ({DRAINED}) has " in waits["note"]
    listed = {each["node"]: each for each in ask(server.url, "GET", "/admin/nodes", None)}
    assert listed[DRAINED] == {"node": DRAINED, "drained": True, "instances": []}
    ask(server.url, "POST", "/admin/drain", None, {"node": DRAINED, "undo": True})
    until(lambda: nodes_of(server)["i3"] == ("running", DRAINED), "it is there", NODE_TIMEOUT_S)
    until(server.is_empty, "nothing is left of the requests")
