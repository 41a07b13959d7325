"""LoRA adapters of requests that arrive: found before they are needed, and equal on both sides.

vLLM loads an adapter in the step that first needs it, and ends the engine where it cannot; an
engine that starts later has not loaded the adapters of the others. So each is loaded once before
its first request is added, and takes no place of an adapter that the batch needs. Requests name an
adapter by a number and a path. Under the same path, another machine may have other weights, so a
request that moves takes a digest of them along.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

from sterna.engine.model_files import snapshot_folder
from sterna.engine.vllm.facts import weights_digest


@dataclass(frozen=True, slots=True)
class _Known:
    """A loaded adapter: its files then, and their digest."""

    files: tuple[tuple[str, int, int], ...]
    digest: str | None


class Adapters:
    """The adapters of one engine. All methods run on the engine's thread; `core` is its core."""

    def __init__(self) -> None:
        # By number and path.
        self._known: dict[tuple[int, str], _Known] = {}

    def load(self, core: Any, adapter: LoRARequest) -> str | None:
        """Load the adapter where it was never loaded, where its number has had another path since,
        or where vLLM has dropped it since and its files are others now, and return the digest of
        its files then.

        Raises:
            Exception: vLLM cannot load it; the message is vLLM's.
        """
        key, folder = (adapter.lora_int_id, adapter.lora_path), Path(adapter.lora_path)
        files = _files(folder)
        known = self._known.get(key) if core.adapter_paths.get(key[0]) == key[1] else None
        if known is not None and (files == known.files or key[0] in core.list_loras()):
            # What vLLM has dropped, the next step that needs it loads again.
            return known.digest
        _add(core, adapter)
        self._known[key] = _Known(files, adapter_digest(folder))
        return self._known[key].digest

    def load_equal(self, core: Any, adapter: LoRARequest, digest: str | None) -> None:
        """Load the adapter of a request that arrives from an engine where it has this digest.

        Raises:
            ValueError: its files are others here.
            Exception: vLLM cannot load it.
        """
        if (found := self.load(core, adapter)) != digest:
            raise ValueError(
                f"the LoRA adapter {adapter.lora_name!r} has other files here than on the other "
                f"instance: {adapter.lora_path} ({found}, not {digest})"
            )


def _add(core: Any, adapter: LoRARequest) -> None:
    """Load the adapter. Where there is no room vLLM drops the one that was used longest ago, so
    those of the batch are used first."""
    for number in core.scheduler.batch_adapters() & core.list_loras():
        core.add_lora(LoRARequest("loaded already", number, core.adapter_paths[number]))
    core.add_lora(adapter)


def adapter_digest(folder: Path) -> str | None:
    """Return a digest of an adapter's configuration and of samples of its weights. Where the path
    is not a folder, it is the name of a repository: the commit that has been downloaded."""
    weights = weights_digest(folder)
    if weights is None:
        snapshot = snapshot_folder(str(folder), None, None)
        return None if snapshot is None else snapshot.name
    digest = hashlib.sha256(weights.encode())
    config = folder / "adapter_config.json"
    if config.is_file():
        digest.update(config.read_bytes())
    return digest.hexdigest()[:12]


def _files(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """The names, sizes and times of a folder's files; none where it is not a folder."""
    if not folder.is_dir():
        return ()
    states = [(each.name, each.stat()) for each in sorted(folder.iterdir()) if each.is_file()]
    return tuple((name, state.st_size, state.st_mtime_ns) for name, state in states)


def adapter_number(request: Request) -> int | None:
    """Return the number of the request's adapter; None where it has none."""
    adapter = request.lora_request
    return None if adapter is None else int(adapter.lora_int_id)


def adapter_numbers(requests: Iterable[Request]) -> set[int]:
    """Return the numbers of these requests' adapters."""
    return {number for each in requests if (number := adapter_number(each)) is not None}
