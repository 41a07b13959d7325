"""Start of a run's Ray, also where the machine is busy."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from sterna.errors import ConfigurationError
from sterna.runtime.home import launch
from sterna.runtime.home.launch import (
    NUM_RAY_STARTS,
    RayStartError,
    ShutdownSignals,
    start_ray,
)

SLEEPS = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]


class Reaper:
    """Notes who is spared, and ends nobody."""

    def __init__(self) -> None:
        self.spared: list[set[int]] = []

    @contextmanager
    def noting(self) -> Iterator[None]:
        yield

    def reap_now(self, spared: Collection[int]) -> None:
        self.spared.append(set(spared))


class Gcs:
    def prepare(self) -> None:
        """Nothing is to be found again."""


class BusyRay:
    """A Ray whose first processes come up too slowly.

    Attributes:
        num_slow: the number of starts that are too slow.
    """

    def __init__(self) -> None:
        self.num_slow = 1
        self.processes: list[subprocess.Popen[bytes]] = []

    def init(self, **options: Any) -> None:
        self.folder = options["_temp_dir"]
        self.entrypoint = ray._private.utils.get_entrypoint_name()
        self.processes.append(subprocess.Popen(SLEEPS))
        if len(self.processes) <= self.num_slow:
            raise ConnectionError("Ray's processes do not come up")


@pytest.fixture
def busy_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[BusyRay]:
    environment = dict(os.environ)
    busy_ray = BusyRay()
    monkeypatch.setattr(launch.ray, "init", busy_ray.init)
    monkeypatch.setattr(launch.ray, "shutdown", lambda: None)
    yield busy_ray
    for each in busy_ray.processes:
        each.kill()
        each.wait()
    # It has options of its own for Ray.
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture
def driver() -> Iterator[subprocess.Popen[bytes]]:
    """What is begun before Ray is, and waits for it."""
    driver = subprocess.Popen(SLEEPS)
    yield driver
    driver.kill()
    driver.wait()


def test_what_was_begun_before_ray_is_spared_where_ray_is_begun_again(
    driver: subprocess.Popen[bytes], busy_ray: BusyRay
) -> None:
    reaper = Reaper()
    start_ray(ShutdownSignals(), reaper, Gcs())  # type: ignore[arg-type]
    (spared,) = reaper.spared
    assert driver.pid in spared
    assert not spared & {each.pid for each in busy_ray.processes}


def test_ray_does_not_get_the_command_line_with_its_keys(
    busy_ray: BusyRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would tell it to every node of the cluster, and write it to the GCS's files."""
    of_process = ray._private.utils.get_entrypoint_name()
    start_ray(ShutdownSignals(), Reaper(), Gcs())  # type: ignore[arg-type]
    assert busy_ray.entrypoint == "sterna serve"
    assert ray._private.utils.get_entrypoint_name() == of_process


def test_rays_files_are_in_a_folder_that_no_other_user_may_enter(
    busy_ray: BusyRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    # Ray's paths may not be long, and those of tests are.
    with tempfile.TemporaryDirectory(dir="/tmp") as own:
        monkeypatch.setattr(tempfile, "tempdir", own)
        start_ray(ShutdownSignals(), Reaper(), Gcs())  # type: ignore[arg-type]
        parent = Path(busy_ray.folder).parent
        assert parent.parent == Path(own)
        assert stat.S_IMODE(parent.stat().st_mode) == 0o700
        # As Ray makes it where the machine joined another server before.
        parent.chmod(0o755)
        start_ray(ShutdownSignals(), Reaper(), Gcs())  # type: ignore[arg-type]
        assert stat.S_IMODE(parent.stat().st_mode) == 0o700
        # As another user could have made it before.
        parent.rmdir()
        parent.symlink_to(own)
        with pytest.raises(RayStartError, match="belongs to another user; remove it, or name"):
            start_ray(ShutdownSignals(), Reaper(), Gcs())  # type: ignore[arg-type]
        monkeypatch.setenv("RAY_TMPDIR", own)
        start_ray(ShutdownSignals(), Reaper(), Gcs())  # type: ignore[arg-type]
        assert busy_ray.folder is None


def test_rays_files_are_in_tmp_where_its_sockets_could_not_be_in_a_long_folder(
    busy_ray: BusyRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux has 107 characters for the path of a socket; Ray would not start."""
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    warnings: list[str] = []
    # Whatever other tests have done to the log.
    monkeypatch.setattr(launch.logger, "warning", lambda text, *of: warnings.append(text % of))
    looked_at: list[str] = []
    monkeypatch.setattr(launch, "check_room", looked_at.extend)
    with tempfile.TemporaryDirectory(dir="/tmp") as parent:
        own = Path(parent).joinpath("x" * 40)
        own.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(own))
        launch._check_room()
        start_ray(ShutdownSignals(), Reaper(), Gcs())  # type: ignore[arg-type]
        assert busy_ray.folder == f"/tmp/sterna-ray-{os.getuid()}/ray"
        assert looked_at == ["/tmp", str(own)]
        assert list(own.iterdir()) == []
    assert f"TMPDIR is too long for Ray's sockets folder={busy_ray.folder}" in warnings


@pytest.mark.parametrize(
    ("is_stopping", "num_starts"),
    [
        pytest.param(False, NUM_RAY_STARTS, id="after some attempts"),
        pytest.param(True, 1, id="at once where the run is to end"),
    ],
)
def test_a_ray_that_does_not_start_is_an_error_with_its_reason(
    busy_ray: BusyRay, is_stopping: bool, num_starts: int
) -> None:
    signals, reaper = ShutdownSignals(), Reaper()
    if is_stopping:
        signals.on_signal(signal.SIGTERM)
    busy_ray.num_slow = NUM_RAY_STARTS
    with pytest.raises(RayStartError) as refused:
        start_ray(signals, reaper, Gcs())  # type: ignore[arg-type]
    assert str(refused.value) == (
        "Ray does not start on this machine, which may be overloaded: "
        "Ray's processes do not come up"
    )
    assert len(busy_ray.processes) == num_starts
    # What the last attempt has left ends with the run.
    assert len(reaper.spared) == num_starts - 1


def test_without_a_whole_cpu_the_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container with a limit below one: instances would wait for a place for ever."""
    monkeypatch.setattr(launch.ray, "cluster_resources", dict)
    config: Any = SimpleNamespace(num_instances=2, cpus_per_instance=0.0, num_gpus_per_instance=0)
    with pytest.raises(ConfigurationError, match="there is no whole CPU"):
        launch._check_resources(config)
