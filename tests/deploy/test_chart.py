"""The Helm chart, rendered and linted by Helm itself."""

import re
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml
from helm_python.errors import HelmError, HelmValuesError

from sterna.cli.serve.serve_options import TABLES
from tests.deploy.kubernetes_versions import KUBERNETES_VERSIONS

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "sterna"

QWEN = {
    **{"name": "qwen", "repository": "sterna", "tag": "cuda", "modelURL": "Qwen/Qwen3-8B"},
    **{"replicaCount": 2, "requestCPU": 8, "requestMemory": "64Gi", "requestGPU": 2},
}
EVERYTHING = {
    "servingEngineSpec": {
        "runtimeClassName": "nvidia",
        "labels": {"team": "search"},
        "extraVolumes": [{"name": "keys", "secret": {"secretName": "clients"}}],
        "extraVolumeMounts": [{"name": "keys", "mountPath": "/etc/sterna"}],
        "modelSpec": [
            {
                **QWEN,
                "maxReplicaCount": 4,
                "limitMemory": "128Gi",
                "vllmConfig": {
                    "tensorParallelSize": 2,
                    "maxModelLen": 16_384,
                    "dtype": "bfloat16",
                    "gpuMemoryUtilization": 0.9,
                    "enablePrefixCaching": True,
                    "enableChunkedPrefill": False,
                    "extraArgs": ["--max-num-seqs", "64"],
                },
                "env": [{"name": "HF_HUB_OFFLINE", "value": "1"}],
                "hf_token": {"secretName": "hf", "secretKey": "token"},
                "pvcStorage": "100Gi",
                "storageClass": "fast",
                "nodeSelector": {"gpu": "h100"},
                "tolerations": [{"key": "gpu", "operator": "Exists"}],
            },
            {**QWEN, "name": "small", "requestGPU": 0},
        ],
    },
    "routerSpec": {
        "replicaCount": 3,
        "apiKeySecret": {"secretName": "keys", "secretKey": "operators"},
        "extraArgs": ["--policy", "llumnix"],
        "ingress": {
            "enabled": True,
            "className": "nginx",
            "hosts": [{"host": "llm.example.org", "model": "qwen"}],
        },
    },
    "podMonitor": {"enabled": True},
}


def rendered(values: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """The manifests, in the order of their files."""
    files = helm_python.Chart.load(CHART).render(values, name="llm", namespace="llms")
    texts = [text for name, text in sorted(files.items()) if name.endswith(".yaml")]
    return [each for text in texts for each in yaml.safe_load_all(text) if each is not None]


def of_kind(kind: str, manifests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in manifests if each["kind"] == kind]


def container_of(deployment: dict[str, Any]) -> dict[str, Any]:
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return container


def from_secret(name: str, secret: str, key: str) -> dict[str, Any]:
    """The environment variable that has the value of this key of a Secret."""
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def test_helm_finds_nothing_wrong_with_the_chart() -> None:
    found = helm_python.lint(CHART, EVERYTHING, strict=True)
    # An icon is only recommended.
    messages = [each for each in found["messages"] if "icon" not in each["error"]]
    assert (messages, found["errors"]) == ([], [])


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
@pytest.mark.parametrize("values", [None, EVERYTHING], ids=["default", "everything"])
def test_what_it_renders_follows_the_schemas(values: dict[str, Any] | None, version: str) -> None:
    manifests = rendered(values)
    kinds = [each["kind"] for each in manifests]
    num_models = 1 if values is None else 2
    assert kinds.count("Deployment") == kinds.count("Service") == num_models
    for each in manifests:
        # Of the Prometheus operator, whose schemas are not Kubernetes's.
        if each["kind"] != "PodMonitor":
            kubernetes_validate.validate(each, version, strict=True)


def test_every_value_has_its_place() -> None:
    manifests = rendered(EVERYTHING)
    qwen, small = of_kind("Deployment", manifests)
    assert [qwen["metadata"]["name"], small["metadata"]["name"]] == ["llm-qwen", "llm-small"]
    container = container_of(qwen)
    assert container["args"] == [
        *("Qwen/Qwen3-8B", "--instances=2", "--min-instances=2", "--max-instances=4"),
        *("--frontends=3", "--shutdown-timeout=60", "--tensor-parallel-size=2"),
        *("--max-model-len=16384", "--dtype=bfloat16", "--gpu-memory-utilization=0.9"),
        *("--enable-prefix-caching", "--no-enable-chunked-prefill"),
        *("--max-num-seqs", "64", "--policy", "llumnix"),
    ]
    assert container["env"] == [
        from_secret("HF_TOKEN", "hf", "token"),
        from_secret("VLLM_API_KEY", "keys", "operators"),
        from_secret("STERNA_API_KEY", "keys", "operators"),
        {"name": "HF_HUB_OFFLINE", "value": "1"},
    ]
    assert {"name": "keys", "mountPath": "/etc/sterna"} in container["volumeMounts"]
    volumes = qwen["spec"]["template"]["spec"]["volumes"]
    assert {"name": "keys", "secret": {"secretName": "clients"}} in volumes
    assert container["resources"] == {
        "requests": {"cpu": "32", "memory": "64Gi"},
        "limits": {"memory": "128Gi", "nvidia.com/gpu": "8"},
    }
    pod = qwen["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    claimed = [each.get("persistentVolumeClaim", {}).get("claimName") for each in pod["volumes"]]
    (claim,) = of_kind("PersistentVolumeClaim", manifests)
    assert claimed == [None, claim["metadata"]["name"], None]
    assert (pod["runtimeClassName"], pod["nodeSelector"]) == ("nvidia", {"gpu": "h100"})
    assert (
        "limits" not in container_of(small)["resources"]
        or not container_of(small)["resources"]["limits"]
    )
    (ingress,) = of_kind("Ingress", manifests)
    (path,) = ingress["spec"]["rules"][0]["http"]["paths"]
    assert path["backend"] == {"service": {"name": "llm-qwen", "port": {"name": "http"}}}
    (monitor,) = of_kind("PodMonitor", manifests)
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["honorLabels"] is True
    (job,) = endpoint["relabelings"]
    selector = of_kind("Service", manifests)[0]["spec"]["selector"]
    labels = {f"__meta_kubernetes_pod_label_{re.sub('[./]', '_', each)}" for each in selector}
    # What differs between the servers of all releases.
    assert labels >= {each for each in job["sourceLabels"] if "label" in each}
    assert [each.rpartition("_")[2] for each in job["sourceLabels"]] == [
        *("namespace", "instance", "component")
    ]


def test_a_service_finds_its_pod_and_no_other() -> None:
    manifests = rendered(EVERYTHING)
    pods = [each["spec"]["template"]["metadata"] for each in of_kind("Deployment", manifests)]
    component = "app.kubernetes.io/component"
    found = {
        service["metadata"]["name"]: [
            each["labels"][component]
            for each in pods
            if service["spec"]["selector"].items() <= each["labels"].items()
        ]
        for service in of_kind("Service", manifests)
    }
    assert found == {"llm-qwen": ["qwen"], "llm-small": ["small"]}


def test_every_option_is_one_of_sternas_or_vllms() -> None:
    known = {option.name for table in TABLES for option in table.options}
    vllms = {
        *("--tensor-parallel-size", "--max-model-len", "--dtype", "--gpu-memory-utilization"),
        *("--enable-prefix-caching", "--no-enable-chunked-prefill", "--max-num-seqs"),
        "--shutdown-timeout",
    }
    deployment, _ = of_kind("Deployment", rendered(EVERYTHING))
    args = container_of(deployment)["args"]
    given = {each.partition("=")[0] for each in args if each.startswith("--")}
    assert given <= known | vllms


def test_a_pod_is_ended_only_after_its_requests() -> None:
    values = {"routerSpec": {"shutdownTimeoutSeconds": 300}}
    (deployment,) = of_kind("Deployment", rendered(values))
    wait_s = int(container_of(deployment)["lifecycle"]["preStop"]["exec"]["command"][-1])
    grace_s = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s >= wait_s + 300 + 14


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "Qwen 3"},
        {"replicaCount": 0},
        {"replicaCount": "two"},
        {"modelURL": ""},
        {"vllmConfig": {"enablePrefixCaching": "yes"}},
        {"vllmConfig": {"maxNumSeqs": 64}},
        {"hf_token": "hf_secret"},
        {"hf_token": {"secretName": "hf"}},
        {"enabled": False},
    ],
    ids=str,
)
def test_a_wrong_value_of_a_model_is_refused(wrong: dict[str, Any]) -> None:
    refused({"servingEngineSpec": {"modelSpec": [{**QWEN, **wrong}]}})


@pytest.mark.parametrize(
    "unknown",
    [
        {"servingEngineSpec": {"vllmApiKey": {"secretName": "keys", "secretKey": "k"}}},
        {"routerSpec": {"vllmApiKey": "secret"}},
        {"routerSpec": {"ingress": {"hosts": [{"host": "llm.example.org"}]}}},
        {"cacheserverSpec": {"replicaCount": 1}},
    ],
    ids=str,
)
def test_a_value_that_would_mean_nothing_is_refused(unknown: dict[str, Any]) -> None:
    """Those of vLLM's production stack can be brought along; a key that the chart did not read
    would leave the API open."""
    refused(unknown)


def refused(values: dict[str, Any]) -> None:
    with pytest.raises(HelmValuesError):
        helm_python.Chart.load(CHART).validate_schema(values)


def test_a_host_of_no_model_is_refused() -> None:
    hosts = [{"host": "llm.example.org", "model": "qwem"}]
    with pytest.raises(HelmError, match='there is no model "qwem"'):
        rendered({"routerSpec": {"ingress": {"enabled": True, "hosts": hosts}}})


def test_with_a_certificate_probes_and_prometheus_speak_tls() -> None:
    values = {**EVERYTHING, "routerSpec": {**EVERYTHING["routerSpec"], "tlsSecret": "sterna-tls"}}
    manifests = rendered(values)
    for deployment in of_kind("Deployment", manifests):
        container = container_of(deployment)
        assert [each for each in container["args"] if "ssl" in each] == [
            *("--ssl-certfile=/etc/sterna-tls/tls.crt", "--ssl-keyfile=/etc/sterna-tls/tls.key"),
            "--enable-ssl-refresh",
        ]
        for probe in ("startupProbe", "readinessProbe"):
            assert container[probe]["httpGet"] == {
                **{"path": "/health", "port": "http", "scheme": "HTTPS"}
            }
            # A front end that reads a large body answers nothing for up to two seconds.
            assert container[probe]["timeoutSeconds"] == 5
        (mount,) = (each for each in container["volumeMounts"] if each["name"] == "tls")
        assert mount == {"name": "tls", "mountPath": "/etc/sterna-tls", "readOnly": True}
        annotations = deployment["spec"]["template"]["metadata"]["annotations"]
        assert annotations["prometheus.io/scheme"] == "https"
        volumes = deployment["spec"]["template"]["spec"]["volumes"]
        assert {"name": "tls", "secret": {"secretName": "sterna-tls"}} in volumes
        kubernetes_validate.validate(deployment, KUBERNETES_VERSIONS[-1], strict=True)
    for service in of_kind("Service", manifests):
        (port,) = service["spec"]["ports"]
        assert port["appProtocol"] == "https"
        kubernetes_validate.validate(service, KUBERNETES_VERSIONS[-1], strict=True)
    (monitor,) = of_kind("PodMonitor", manifests)
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["scheme"] == "https"


def test_without_a_certificate_nothing_speaks_tls() -> None:
    manifests = rendered(EVERYTHING)
    assert "ssl" not in str(manifests)
    assert "https" not in str(manifests).lower()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"servingEngineSpec": {"modelSpec": [{**QWEN, "maxReplicaCount": 1}]}},
            "maxReplicaCount .1. is less than replicaCount .2.",
        ),
        ({"routerSpec": {"extraArgs": ["--ssl-certfile", "/a.pem"]}}, "routerSpec.tlsSecret"),
        (
            {"routerSpec": {"extraArgs": ["--shutdown_timeout=300"]}},
            "--shutdown-timeout: the chart",
        ),
        (
            {
                "servingEngineSpec": {
                    "modelSpec": [{**QWEN, "vllmConfig": {"extraArgs": ["--port", "9000"]}}]
                }
            },
            "--port: the chart",
        ),
    ],
)
def test_values_that_cannot_serve_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(HelmError, match=words):
        rendered(values)
