"""The RayCluster for KubeRay: its pods by Kubernetes's schemas, its commands by running them."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from bench.serving.ports import free_port
from sterna.cli.operate.admin_commands import ask
from sterna.runtime.home.ray_environment import RECONNECT_TIMEOUT_VARIABLE
from tests.addresses import own_address
from tests.deploy.kubernetes_versions import KUBERNETES_VERSIONS
from tests.serve.nodes import NODE_TIMEOUT_S, Node, spread_environment, spread_server, states
from tests.serve.server import HANG_TIMEOUT_S, until

MANIFEST = Path(__file__).parents[2] / "deploy" / "kuberay" / "raycluster.yaml"
CLUSTER: dict[str, Any]
CLUSTER, SERVICE = yaml.safe_load_all(MANIFEST.read_text())
HEAD = CLUSTER["spec"]["headGroupSpec"]
(WORKERS,) = CLUSTER["spec"]["workerGroupSpecs"]

KUBERAYS_PORT = "6379"
"""At which it lets the workers join, unless the head's `rayStartParams` have another `port`."""


def container_of(group: dict[str, Any]) -> dict[str, Any]:
    (container,) = group["template"]["spec"]["containers"]
    return container


def test_it_has_what_a_ray_cluster_needs_and_nothing_unknown() -> None:
    """The fields of KubeRay's `RayClusterSpec`, version v1."""
    assert (CLUSTER["apiVersion"], CLUSTER["kind"]) == ("ray.io/v1", "RayCluster")
    assert CLUSTER["metadata"]["annotations"] == {"ray.io/overwrite-container-cmd": "true"}
    assert CLUSTER["spec"].keys() == {"headGroupSpec", "workerGroupSpecs"}
    assert HEAD.keys() == {"rayStartParams", "template"}
    assert WORKERS.keys() == {
        *("groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template")
    }
    # KubeRay finds its own service by this label, and releases before 1.2 let pods change it.
    for group in (HEAD, WORKERS):
        assert "app.kubernetes.io/name" not in group["template"]["metadata"]["labels"]


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_the_service_follows_the_schema_and_finds_the_head(version: str) -> None:
    kubernetes_validate.validate(SERVICE, version, strict=True)
    # The labels that KubeRay gives its pods.
    selector = {"ray.io/cluster": CLUSTER["metadata"]["name"], "ray.io/node-type": "head"}
    assert SERVICE["spec"]["selector"] == selector
    (port,) = SERVICE["spec"]["ports"]
    assert port["targetPort"] in {each["name"] for each in container_of(HEAD)["ports"]}


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
@pytest.mark.parametrize("group", [HEAD, WORKERS], ids=["head", "workers"])
def test_pods_follow_the_schemas(group: dict[str, Any], version: str) -> None:
    template = {
        "apiVersion": "v1",
        "kind": "PodTemplate",
        "metadata": {"name": "pod"},
        "template": group["template"],
    }
    kubernetes_validate.validate(template, version, strict=True)


def test_the_head_is_the_pod_of_one_node_that_others_may_join() -> None:
    """All but the command, which has one option more, is as in the manifest without KubeRay."""
    path = MANIFEST.parents[1] / "kubernetes" / "sterna.yaml"
    (deployment,) = (
        each for each in yaml.safe_load_all(path.read_text()) if each["kind"] == "Deployment"
    )
    alone, head = deployment["spec"]["template"]["spec"], HEAD["template"]["spec"]
    assert {**head, "containers": None} == {**alone, "containers": None}
    (its_container,) = alone["containers"]
    container = container_of(HEAD)
    own = dict.fromkeys(("args", "command", "env", "ports"))
    assert {**container, **own} == {**its_container, **own}
    options = " ".join(container["args"]).replace("=", " ").split()
    assert options == [
        *("Qwen/Qwen3-8B", "--host", "0.0.0.0", "--cluster-address", f"$(POD_IP):{KUBERAYS_PORT}"),
        *its_container["args"][1:],
    ]
    ports = {each["containerPort"] for each in container["ports"]}
    assert ports == {8000, int(KUBERAYS_PORT)}


def test_workers_know_the_heads_token_and_answer_at_the_port_that_is_asked() -> None:
    head, worker = container_of(HEAD), container_of(WORKERS)
    # The API and operators' commands are in the head's pod, and its keys are not for instances.
    keys = ("STERNA_API_KEY", "VLLM_API_KEY")
    *shared, timeout = worker["env"]
    assert shared == [each for each in head["env"] if each["name"] not in keys]
    # A new head has another address.
    assert timeout == {"name": RECONNECT_TIMEOUT_VARIABLE, "value": "60"}
    assert worker["image"] == head["image"]
    specs = [each["template"]["spec"] for each in (HEAD, WORKERS)]
    assert [each["automountServiceAccountToken"] for each in specs] == [False, False]
    assert [each["enableServiceLinks"] for each in specs] == [False, False]
    (script,) = worker["args"]
    (port,) = worker["ports"]
    assert f"--node-manager-port={port['containerPort']}" in script.split()
    assert {worker[each]["tcpSocket"]["port"] for each in ("livenessProbe", "readinessProbe")} == {
        port["name"]
    }


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_worker_that_runs_its_command_gets_an_instance() -> None:
    """With KubeRay's variables, on this machine."""
    host = own_address()
    port = str(free_port())
    (joined_at,) = (
        each.partition("=")[2].replace("$(POD_IP)", host).replace(KUBERAYS_PORT, port)
        for each in container_of(HEAD)["args"]
        if each.startswith("--cluster-address=")
    )
    access = spread_environment()
    # KubeRay gives the head's container this variable, by which Ray's programs find a cluster.
    head = {**access, "RAY_ADDRESS": f"127.0.0.1:{port}"}
    worker = {
        **access,
        **{"FQ_RAY_IP": host, "RAY_PORT": port, "RAY_ADDRESS": joined_at, "POD_IP": host},
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    container = container_of(WORKERS)
    command = [*container["command"][2:], *container["args"]]
    with spread_server(head, joined_at, lease_s=20.0) as server:
        # What KubeRay has each worker wait for, with the worker's variables.
        wait = ["ray", "health-check", "--address", joined_at]
        subprocess.run(wait, env={**os.environ, **worker}, check=True, timeout=HANG_TIMEOUT_S)
        ask(server.url, "POST", "/admin/start", None, {"instances": 1})
        until(lambda: states(server) == {"i0": "running", "i1": "pending"}, "no place")
        node = Node(joined_at, worker, host, command=command)
        try:
            both = dict.fromkeys(("i0", "i1"), "running")
            until(lambda: states(server) == both, "it has one", NODE_TIMEOUT_S)
        finally:
            node.kill()
