"""Release: build it, check it, try it in an empty environment, and publish it.

    python -m scripts.release              # everything but the upload and the tag
    python -m scripts.release --publish    # also tag the commit and upload to the package index

The version is that of `pyproject.toml`, and nowhere else. A release needs a clean tree, a section
of its version in CHANGELOG.md, and a tag that is not there yet; without `--publish` what is missing
is only listed. The trial installs the wheel and its engine into an environment outside of this
checkout, serves the small model there, and asks for a completion.
"""

import argparse
import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]

DIST = ROOT / "dist"

WHEEL_VARIABLE = "STERNA_WHEEL"
"""Variable with the wheel that the trial installs; without it, the tests build one."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the steps; returns the exit status."""
    parser = argparse.ArgumentParser(description="Build, check, try and publish a release.")
    parser.add_argument("--publish", action="store_true", help="tag the commit, and upload")
    parser.add_argument("--no-trial", action="store_true", help="leave out the trial of the wheel")
    options = parser.parse_args(argv)
    version = version_of(ROOT)
    missing = obstacles(ROOT, version)
    for each in missing:
        print(f"not ready for a release: {each}")
    if missing and options.publish:
        return 1
    files = build(ROOT, DIST)
    _run(sys.executable, "-m", "twine", "check", "--strict", *map(str, files))
    if not options.no_trial:
        [wheel] = [path for path in files if path.suffix == ".whl"]
        os.environ[WHEEL_VARIABLE] = str(wheel)
        _run(sys.executable, "-m", "pytest", "-m", "slow", "tests/packaging", "-x")
    names = " and ".join(path.name for path in files)
    if not options.publish:
        print(f"built and checked, not published: {names}; --publish tags v{version} and uploads")
        return 0
    _run(sys.executable, "-m", "twine", "upload", *map(str, files))
    _run("git", "tag", "--annotate", f"v{version}", "--message", f"Sterna {version}")
    print(f"published {names}; push the tag: git push origin v{version}")
    return 0


def version_of(root: Path) -> str:
    """Return the version of the project in this folder."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    return str(project["version"])


def obstacles(root: Path, version: str) -> list[str]:
    """Return what a release of this version lacks, in words."""
    found = []
    if _output(root, "git", "status", "--porcelain"):
        found.append("the tree has changes that are not committed")
    if f"\n## [{version}]" not in (root / "CHANGELOG.md").read_text():
        found.append(f"CHANGELOG.md has no section [{version}]")
    if _output(root, "git", "tag", "--list", f"v{version}"):
        found.append(f"the tag v{version} is there already; raise the version in pyproject.toml")
    return found


def build(root: Path, folder: Path) -> list[Path]:
    """Build sdist, and the wheel from it, into an empty folder; returns both files."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("sterna-*.whl"), *folder.glob("sterna-*.tar.gz")):
        old.unlink()
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(root))
    return sorted((*folder.glob("sterna-*.whl"), *folder.glob("sterna-*.tar.gz")))


def _run(*command: str) -> None:
    try:
        subprocess.run(command, cwd=ROOT, check=True)
    except subprocess.CalledProcessError as error:
        sys.exit(f"{' '.join(command)} failed with status {error.returncode}")


def _output(root: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
