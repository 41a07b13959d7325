"""Where other nodes reach a server, and what is refused before anything is started."""

import socket
from argparse import Namespace

import pytest

from sterna.cli.serve.cluster_address import (
    ClusterAddress,
    cluster_address,
    internal_host,
    transport_config,
)
from sterna.config import LOOPBACK
from sterna.errors import ConfigurationError
from sterna.runtime.home.ray_environment import IS_SPREAD, protect_ray
from tests.addresses import own_address


def test_without_the_option_no_other_node_is_let_in() -> None:
    assert cluster_address(["model", "--port", "8000"]) is None


@pytest.mark.parametrize("joint", [" ", "="])
def test_an_address_of_this_machine_is_taken(joint: str) -> None:
    host = own_address()
    given = f"--cluster-address{joint}{host}".split(" ")
    assert cluster_address(["model", *given, "--instances", "3"]) == ClusterAddress(host)


def test_a_port_is_that_at_which_nodes_join() -> None:
    host = own_address()
    address = cluster_address(["--cluster-address", f"{host}:43117"])
    assert address == ClusterAddress(host, 43117)
    assert address.environment() == {"RAY_GCS_SERVER_PORT": "43117"}


def test_the_other_options_are_read_while_ray_listens_at_the_address() -> None:
    """They are read in a process of their own, meanwhile."""
    host = own_address()
    with socket.create_server((host, 0)) as taken:
        port = taken.getsockname()[1]
        given = ["--cluster-address", f"{host}:{port}"]
        with pytest.raises(ConfigurationError, match="a free port"):
            cluster_address(given)
        assert cluster_address(given, is_in_use=True) == ClusterAddress(host, port)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("127.0.0.1", "other nodes cannot connect to that"),
        ("0.0.0.0", "other nodes cannot connect to that"),
        ("fd00::2", "with an IPv4 address"),
        ("head", "with an IPv4 address"),
        ("head:6380", "with an IPv4 address"),
        ("10.0.0.1:99999", r"the port must be in \[1024, 65535\]"),
        ("10.0.0.1:ray", r"the port must be in \[1024, 65535\]"),
        # Reserved for documentation: nobody's.
        ("203.0.113.1", "must be an address of this machine"),
    ],
)
def test_what_other_nodes_could_not_reach_is_refused(given: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        cluster_address(["--cluster-address", given])


def test_kv_travels_by_shared_memory_on_one_machine_and_by_tcp_between_nodes() -> None:
    assert transport_config(Namespace()).kind == "shm"
    assert transport_config(Namespace(transport="gloo")).kind == "gloo"
    shared = Namespace(cluster_address="10.0.0.1")
    assert transport_config(shared).kind == "tcp"
    with pytest.raises(ConfigurationError, match="choose tcp or gloo"):
        transport_config(Namespace(cluster_address="10.0.0.1", transport="shm"))


def test_the_address_is_known_before_ray_starts() -> None:
    assert internal_host(Namespace(), None) == LOOPBACK
    shared = Namespace(cluster_address="10.0.0.1")
    assert internal_host(shared, ClusterAddress("10.0.0.1")) is None
    with pytest.raises(ConfigurationError, match="is for the command line, and spelt so"):
        internal_host(shared, None)


def test_a_token_is_drawn_for_a_run_on_one_machine() -> None:
    environment: dict[str, str] = {}
    protect_ray(environment)
    assert environment["RAY_AUTH_MODE"] == "token"
    assert len(environment["RAY_AUTH_TOKEN"]) == 64
    assert environment[IS_SPREAD] == "0"


@pytest.mark.parametrize("option", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"])
def test_other_nodes_join_with_a_token_that_they_can_know(option: str) -> None:
    with pytest.raises(ConfigurationError, match="set RAY_AUTH_TOKEN"):
        protect_ray({}, is_shared=True)
    environment = {option: "one of ours"}
    protect_ray(environment, is_shared=True)
    assert environment == {option: "one of ours", "RAY_AUTH_MODE": "token", IS_SPREAD: "1"}
