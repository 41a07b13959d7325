"""The sdist and the wheel: what they contain, and the wheel in an environment of its own."""

import email
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import httpx
import pytest

from bench.serving.ports import free_port
from scripts.release import ROOT, WHEEL_VARIABLE, build, obstacles, version_of
from tests.serve.server import START_TIMEOUT_S, STERNA_IS_READY, ServerProcess

INSTALL_TIMEOUT_S = 1_200.0
"""vLLM and PyTorch are 3 GB on disk."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist and the wheel, in this order."""
    wheel, sdist = sorted(
        build(ROOT, tmp_path_factory.mktemp("dist")), key=lambda path: path.suffix, reverse=True
    )
    return sdist, wheel


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(
    files: tuple[Path, Path],
) -> None:
    _, wheel = files
    tracked = subprocess.run(
        ("git", "ls-files", "src/sterna"), cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()

    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}

    assert names == {name.removeprefix("src/") for name in tracked if (ROOT / name).is_file()}
    assert "sterna/py.typed" in names


def test_the_sdist_can_be_tested_and_is_small(files: tuple[Path, Path]) -> None:
    sdist, _ = files
    with tarfile.open(sdist) as archive:
        folders = {Path(name).parts[1] for name in archive.getnames() if len(Path(name).parts) > 1}

    assert {"src", "tests", "bench", "docs", "Makefile", "LICENSE", "README.md"} <= folders
    assert sdist.stat().st_size < 8 << 20


def test_the_metadata_have_one_version_and_pass_the_checks_of_the_index(
    files: tuple[Path, Path],
) -> None:
    sdist, wheel = files
    with zipfile.ZipFile(wheel) as archive:
        [name] = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))

    subprocess.run(
        (sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel)), check=True
    )

    assert metadata["Version"] == version_of(ROOT)
    assert {"cpu", "cuda", "frames"} <= set(metadata.get_all("Provides-Extra") or ())
    assert metadata["License-File"] == "LICENSE"


def test_what_a_release_lacks_is_listed(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        author = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(("git", *author, *arguments), cwd=tmp_path, check=True, capture_output=True)

    log = tmp_path / "CHANGELOG.md"
    log.write_text("# Changelog\n\n## [Unreleased]\n")
    git("init")
    assert obstacles(tmp_path, "1.2.3") == [
        "the tree has changes that are not committed",
        "CHANGELOG.md has no section [1.2.3]",
    ]
    log.write_text("# Changelog\n\n## [1.2.3] - 2026-01-01\n")
    git("add", ".")
    git("commit", "--message", "all")
    assert obstacles(tmp_path, "1.2.3") == []
    git("tag", "v1.2.3")
    assert [each.partition(" is there")[0] for each in obstacles(tmp_path, "1.2.3")] == [
        "the tag v1.2.3"
    ]


# -------------------------------------------------------------- in an environment of its own


@pytest.fixture(scope="module")
def installed(
    files: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, str]]:
    """The programs' folder of an environment with the wheel and its engine, and its variables.

    The folder is far from the checkout, and so is the cache.
    """
    folder = tmp_path_factory.mktemp("installed")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment.pop("STERNA_CACHE", None)
    environment["XDG_CACHE_HOME"] = str(folder / "cache")
    subprocess.run((sys.executable, "-m", "venv", str(folder / "venv")), check=True)
    programs = folder / "venv" / "bin"
    wheel = Path(os.environ.get(WHEEL_VARIABLE) or files[1])
    subprocess.run(
        (
            str(programs / "python"),
            "-m",
            "pip",
            "install",
            "--quiet",
            f"sterna[cpu] @ {wheel.as_uri()}",
        ),
        cwd=folder,
        env=environment,
        check=True,
        timeout=INSTALL_TIMEOUT_S,
    )
    return programs, environment


def run(
    installed: tuple[Path, dict[str, str]], *arguments: str
) -> "subprocess.CompletedProcess[str]":
    programs, environment = installed
    return subprocess.run(
        (str(programs / "sterna"), *arguments),
        cwd=programs,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(1_800)
def test_a_server_of_the_wheel_answers(installed: tuple[Path, dict[str, str]]) -> None:
    programs, environment = installed
    repaired = run(installed, "doctor", "--repair", "--port", "0", "--json")
    assert repaired.returncode == 0, repaired.stdout + repaired.stderr
    assert all(row["level"] != "error" for row in json.loads(repaired.stdout))
    port = free_port()
    command = ("env", "-C", str(programs), str(programs / "sterna"), "serve", "--port", str(port))
    unset = dict.fromkeys(("PYTHONPATH", "STERNA_CACHE"), "")

    server = ServerProcess(command, {**environment, **unset}, port=port)
    try:
        server.until_line(STERNA_IS_READY, START_TIMEOUT_S)
        answer = httpx.post(
            f"http://127.0.0.1:{port}/v1/completions",
            json={"model": "SmolLM2-135M-Instruct", "prompt": "Once", "max_tokens": 4},
            timeout=120,
        )
        server.interrupt()
        assert server.until_end() in (0, 130)
    finally:
        server.end()

    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 4


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_simulations_run_from_the_wheel(installed: tuple[Path, dict[str, str]]) -> None:
    done = run(installed, "simulate", "--requests", "200", "--rate", "5", "--json")

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("command", [("bench", "serve"), ("reproduce",), ("reproduce", "policies")])
def test_what_needs_a_checkout_says_so_in_one_line(
    installed: tuple[Path, dict[str, str]], command: tuple[str, ...]
) -> None:
    done = run(installed, *command)

    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "source checkout" in done.stderr
