"""Files of a model on this machine: its folder, its configuration and its weights. vLLM need not be
installed."""

import contextlib
import json
import os
from pathlib import Path


def folder_of(name: str, revision: str | None, cache: str | None) -> Path:
    """Return the model's folder, which may be one in a cache of Hugging Face, or not exist.

    Args:
        cache: the folder of downloads; None for Hugging Face's own.
    """
    if os.path.isdir(name):
        return Path(name)
    return snapshot_folder(name, revision, cache) or Path(name)


def snapshot_folder(name: str, revision: str | None, cache: str | None) -> Path | None:
    """Return the folder of a repository in Hugging Face's cache, which has the name of the commit,
    or None where nothing of it has been downloaded."""
    # The library comes with vLLM.
    with contextlib.suppress(ImportError, OSError, ValueError):
        from huggingface_hub import snapshot_download

        # No file is asked for: what vLLM does not load need not be there.
        found = snapshot_download(
            name, revision=revision, cache_dir=cache, local_files_only=True, ignore_patterns="*"
        )
        return Path(found)
    return None


def has_configuration(folder: Path) -> bool:
    """Whether a model can be loaded from the folder, by its configuration."""
    # Mistral's own format has its configuration in params.json. Path.is_file would raise where the
    # folder may not be entered.
    return any(os.path.isfile(folder / name) for name in ("config.json", "params.json"))


def weight_bytes_of(folder: Path) -> int:
    """The size of a model's weights; 0 for what is no folder."""
    return sum(file.stat().st_size for file in _weight_files(folder))


def _weight_files(folder: Path) -> list[Path]:
    """The files that vLLM loads: of weights that are there in several formats, one."""
    index = folder / "model.safetensors.index.json"
    with contextlib.suppress(OSError, ValueError, LookupError, AttributeError):
        names = set(json.loads(index.read_bytes())["weight_map"].values())
        return [folder / name for name in names if (folder / name).is_file()]
    for pattern in ("model*.safetensors", "*.safetensors", "pytorch_model*.bin"):
        if files := [*folder.glob(pattern)]:
            return files
    return []
