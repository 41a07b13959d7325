"""Next vLLM: a release without a CPU build, put together so that tests can import and run it.

    python -m scripts.next_vllm 0.33.0 FOLDER

The folder, in front of Python's path, replaces the installed vLLM by the Python files of the
release's CUDA wheel. Compiled code is that of the installed CPU build, so that engines run also: a
mixture for tests and for nothing else. docs/internals/next_vllm.md says what it shows.
"""

import argparse
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

NEW_REQUIREMENTS = ("orjson",)
"""Packages that the release needs on CPU, and the installed one does not."""

SUFFIXES = {".py", ".json", ".jinja", ".txt", ".html", ".yaml"}
"""Of the files that are taken from the wheel."""


def put_together(version: str, folder: Path) -> None:
    """Make the folder, unless it is there.

    Raises:
        subprocess.CalledProcessError: pip has no such release.
        FileNotFoundError: vLLM is not installed here.
    """
    if folder.is_dir():
        return
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    with TemporaryDirectory() as downloads:
        _pip("download", "--only-binary", ":all:", "--dest", downloads, f"vllm=={version}")
        (wheel,) = Path(downloads).glob("vllm-*.whl")
        with zipfile.ZipFile(wheel) as files:
            names = [name for name in files.namelist() if name.startswith("vllm/")]
            files.extractall(unfinished, [n for n in names if Path(n).suffix in SUFFIXES])
    # By this version vLLM chooses its platform.
    distribution = unfinished / f"vllm-{version}+cpu.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: vllm\nVersion: {version}+cpu\n"
    )
    for library in installed_vllm().glob("*.so"):
        (unfinished / "vllm" / library.name).symlink_to(library)
    _pip("install", "--target", str(unfinished), *NEW_REQUIREMENTS)
    unfinished.rename(folder)


def installed_vllm() -> Path:
    """The folder of the installed vLLM, which is not imported."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        raise FileNotFoundError("vLLM is not installed here")
    return Path(found.origin).parent


def _pip(command: str, *arguments: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", command, "--quiet", "--no-deps", *arguments], check=True
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("version")
    parser.add_argument("folder", type=Path)
    args = parser.parse_args(arguments)
    put_together(args.version, args.folder)


if __name__ == "__main__":
    main()
