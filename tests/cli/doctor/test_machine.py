"""Facts about the machine of the tests, and `sterna doctor` on it."""

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from sterna.cli.doctor import doctor_report
from sterna.cli.doctor.doctor_report import repair
from sterna.cli.doctor.machine import Gpu, look_at_machine, look_at_model
from sterna.cli.main import main
from sterna.runtime.processes import limits


@pytest.fixture
def listening() -> socket.socket:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_this_machine_is_described() -> None:
    found = look_at_machine("127.0.0.1", 0)

    assert found.python == sys.version_info[:3]
    assert "ray" in found.versions
    assert 0 < found.num_cores <= (os.cpu_count() or 1)
    assert found.available_bytes > 0
    assert found.port_error is None


def test_a_port_at_which_something_listens_is_not_free(listening: socket.socket) -> None:
    assert look_at_machine("127.0.0.1", listening.getsockname()[1]).port_error is not None


def test_gpus_are_those_of_the_drivers_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    rows = ("0, GPU-1a, NVIDIA H100 80GB HBM3, 81559", "1, GPU-5f, NVIDIA L4, [N/A]")
    tool.write_text("#!/bin/sh\n" + "".join(f"echo '{each}'\n" for each in rows))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    found = look_at_machine("127.0.0.1", 0)

    assert found.gpus == (Gpu("NVIDIA H100 80GB HBM3", 81559 << 20), Gpu("NVIDIA L4", 0))
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert look_at_machine("127.0.0.1", 0).gpus is None


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, "012"),
        ("2,0", "20"),
        ("GPU-5f", "1"),
        ("1,9,0", "1"),
        ("-1", ""),
        ("", ""),
        ("MIG-8a", "012"),
    ],
)
def test_gpus_are_those_that_a_server_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, indices: str
) -> None:
    """As CUDA takes the variable: up to the first device that is not there."""
    tool = tmp_path / "nvidia-smi"
    rows = [f"echo '{n}, GPU-{uuid}, {n}, 1'\n" for n, uuid in enumerate(("1a", "5f33", "77"))]
    tool.write_text("#!/bin/sh\n" + "".join(rows))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus = look_at_machine("127.0.0.1", 0).gpus
    assert gpus is not None
    assert "".join(each.name for each in gpus) == indices


def test_memory_is_at_most_that_of_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, used, missing = (tmp_path / name for name in ("memory.max", "memory.current", "missing"))
    (cached, _) = [each.cached for each in limits.MEMORY_FILES]
    pairs = [limits.MemoryFiles(str(each), str(used), cached) for each in (missing, limit)]
    monkeypatch.setattr(limits, "MEMORY_FILES", pairs)
    limit.write_text("1000\n")
    used.write_text("400\n")
    assert look_at_machine("127.0.0.1", 0).available_bytes == 600
    # Files that were read are in memory as long as nothing else needs it.
    stat = "anon 30\nfile 370\nshmem 20\ninactive_file 300\nactive_file 50\n"
    (tmp_path / "memory.stat").write_text(stat)
    assert look_at_machine("127.0.0.1", 0).available_bytes == 950
    limit.write_text("max\n")
    assert look_at_machine("127.0.0.1", 0).available_bytes > 1000


@pytest.mark.parametrize(("named", "kv_cache_bytes"), [(None, None), ("", None), ("3", 3 << 30)])
def test_the_kv_cache_is_the_one_that_the_user_has_set(
    monkeypatch: pytest.MonkeyPatch, named: str | None, kv_cache_bytes: int | None
) -> None:
    if named is None:
        monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    else:
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", named)
    assert look_at_machine("127.0.0.1", 0).kv_cache_bytes == kv_cache_bytes


def test_a_cache_folder_that_cannot_be_made_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("STERNA_CACHE", str(tmp_path / "file" / "cache"))
    assert look_at_machine("127.0.0.1", 0).cache_error is not None


def test_models_are_folders_or_names(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    assert not look_at_model(str(folder)).has_config
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(100))
    found = look_at_model(str(folder))
    assert (found.is_folder, found.has_config, found.weight_bytes) == (True, True, 100)
    assert look_at_model("./missing").is_folder
    assert not look_at_model("org/model").is_folder


@pytest.mark.vllm
def test_the_weights_of_a_downloaded_model_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(100))

    def snapshot(name: str, **_: Any) -> str:
        if name != "org/model":
            raise FileNotFoundError(name)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    found, missing = (look_at_model(name) for name in ("org/model", "org/other"))
    assert (found.is_folder, found.weight_bytes) == (False, 100)
    assert (missing.is_folder, missing.weight_bytes) == (False, 0)


def test_the_exit_status_says_whether_a_server_can_start(
    listening: socket.socket, capsys: pytest.CaptureFixture[str]
) -> None:
    port = str(listening.getsockname()[1])

    assert main(["doctor", "--port", port, "--json"]) == 1

    rows = json.loads(capsys.readouterr().out)
    [found] = [row for row in rows if row["subject"] == "port"]
    assert found["level"] == "error"
    assert found["advice"] == "end what listens there, or choose another --port or --host"


def test_only_what_breaks_the_import_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = [("torchvision", "torchaudio"), ("torchaudio",)]
    removed: list[object] = []
    monkeypatch.setattr(doctor_report, "wrong_companions", lambda: wrong.pop(0))
    monkeypatch.setattr(doctor_report, "define_operators", lambda: None)
    monkeypatch.setattr(doctor_report, "_uninstall", removed.append)

    assert repair() == ["torchvision: made importable", "torchaudio: removed"]
    assert removed == [("torchaudio",)]


def test_a_good_environment_is_left_alone() -> None:
    assert repair() == ["nothing to repair in this environment"]
