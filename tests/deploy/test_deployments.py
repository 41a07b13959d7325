"""Images, compose files and manifests, as far as they can be checked without their engines."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from sterna.cli.serve.serve_options import TABLES
from tests.deploy.kubernetes_versions import KUBERNETES_VERSIONS

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
IMAGES = sorted((DEPLOY / "docker").glob("Dockerfile.*"))
MANIFESTS = [
    manifest
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    for manifest in yaml.safe_load_all(path.read_text())
]


@pytest.fixture
def deployment() -> dict[str, Any]:
    [found] = [each for each in MANIFESTS if each["kind"] == "Deployment"]
    return found


def container_of(deployment: dict[str, Any]) -> dict[str, Any]:
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    return container


def test_a_large_body_does_not_take_the_pod_out_of_its_service(deployment: dict[str, Any]) -> None:
    """A front end answers nothing while it reads one, for up to two seconds."""
    container = container_of(deployment)
    asked = [each for each in container.values() if isinstance(each, dict) and "httpGet" in each]
    assert [each["timeoutSeconds"] for each in asked] == [5, 5]


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path: Path) -> None:
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert program is not None
    done = subprocess.run((program, str(path)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_what_an_image_copies_is_sent_to_its_build(path: Path) -> None:
    lines = [line.split() for line in path.read_text().splitlines()]
    copied = [
        name
        for line in lines
        if line[:1] == ["COPY"] and not line[1].startswith("--")
        for name in line[1:-1]
    ]
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert copied
    for name in copied:
        assert (ROOT / name).exists()
        assert f"!{name}" in ignored


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda manifest: manifest["kind"])
def test_manifests_follow_the_schemas(manifest: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(manifest, version, strict=True)


def test_a_pod_is_ended_only_after_its_requests(deployment: dict[str, Any]) -> None:
    container = container_of(deployment)
    arguments = container["args"]
    shutdown_s = int(arguments[arguments.index("--shutdown-timeout") + 1])
    wait_s = int(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    grace_s = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s >= wait_s + shutdown_s + 14


def test_a_pod_has_a_gpu_for_each_instance(deployment: dict[str, Any]) -> None:
    container = container_of(deployment)
    num_instances = container["args"][container["args"].index("--instances") + 1]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == num_instances
    known = {option.name for table in TABLES for option in table.options}
    given = {each for each in container["args"] if each.startswith("--")}
    assert given <= known | {"--shutdown-timeout"}


def test_what_the_compose_file_mounts_is_there() -> None:
    folder = DEPLOY / "compose"
    services = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    mounted = [
        volume.split(":")[0]
        for service in services.values()
        for volume in service.get("volumes", ())
        if volume.startswith(".")
    ]
    assert len(mounted) >= 5
    assert [each for each in mounted if not (folder / each).is_file()] == []
    build = services["sterna"]["build"]
    assert (folder / build["context"] / build["dockerfile"]).is_file()
    assert all(
        port.startswith("127.0.0.1:") for service in services.values() for port in service["ports"]
    )
