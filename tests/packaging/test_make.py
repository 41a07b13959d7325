"""Decisions of the Makefile and of `scripts/install.sh`: when to install, and which engine.

`make` only lists what it would do, and the script gets a Python and a uv that install nothing.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.needed_tools import missing_program, needs

ROOT = Path(__file__).parents[2]

SOURCES = ("Makefile", "pyproject.toml", "requirements/excluded-cpu.txt", "scripts/install.sh")
"""All that decides about an installation."""

SCRIPT = ("scripts/install.sh", ".venv", ".cache/tools")

ONE_GPU = "GPU 0: NVIDIA H200 (UUID: GPU-0)"

PYTHON = """
case "$*" in
    -c*print*) basename "$0" ;;
    -c*) ;;
    *) exit 1 ;;
esac
"""
"""It has the version of its name, and no pip."""

UV = """
case "$*" in
    "pip install --help") echo --excludes ;;
    venv*)
        rm -rf "${@: -1}"
        mkdir -p "${@: -1}/bin"
        printf '#!/bin/sh\\necho %s' "$(basename "${@: -2:1}")" >"${@: -1}/bin/python"
        chmod +x "${@: -1}/bin/python"
        ;;
    *)
        echo "$*"
        env | grep -E '^(ALL_PROXY|UV_)'
        exit "${STATUS:-0}"
        ;;
esac
"""
"""It makes environments with a Python that only says which one it is, and prints how it would
install."""

pytestmark = needs(missing_program("make", "make"))


class Checkout:
    """A folder with the files that decide, and programs of its own before those of the machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.venv = folder / ".venv"
        self._programs = folder / "programs"
        for name in SOURCES:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)

    def add_program(self, name: str, script: str) -> None:
        """Add a program of Bash, which is found by its name."""
        self._programs.mkdir(exist_ok=True)
        program = self._programs / name
        program.write_text(f"#!/usr/bin/env bash\n{script}\n")
        program.chmod(0o755)

    def add_stamp(self, engine: str) -> None:
        """As `make install` leaves it behind when it has installed everything."""
        self.venv.mkdir(exist_ok=True)
        (self.venv / f".installed-{engine}").touch()

    def run(
        self, *command: str, variables: Mapping[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        path = f"{self._programs}:{os.environ['PATH']}"
        return subprocess.run(
            command,
            cwd=self.folder,
            env={"PATH": path, **(variables or {})},
            capture_output=True,
            text=True,
            check=False,
        )

    def installs(self, *variables: str) -> str | None:
        """The arguments of `scripts/install.sh` in `make install`; None: it is not run."""
        done = self.run("make", "-n", "install", *variables)
        assert done.returncode == 0, done.stderr
        for line in done.stdout.splitlines():
            if line.startswith("scripts/install.sh "):
                return line.removeprefix("scripts/install.sh ")
        return None

    def uv_of(self, variables: Mapping[str, str]) -> tuple[str, dict[str, str]]:
        """The arguments and the variables with which `scripts/install.sh` has uv install."""
        done = self.run(*SCRIPT, "cpu", variables=variables)
        assert done.returncode == 0, done.stderr
        # The last line is that of the environment's Python.
        arguments, *environment, _ = done.stdout.splitlines()
        return arguments, dict(each.split("=", 1) for each in environment)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    checkout = Checkout(tmp_path)
    checkout.add_program("nvidia-smi", "exit 9")
    for name in ("python3.11", "python3.13"):
        checkout.add_program(name, PYTHON)
    checkout.add_program("python3.12", "exit 127")
    checkout.add_program("uv", UV)
    return checkout


def test_a_fresh_clone_gets_the_engine_of_its_machine(checkout: Checkout) -> None:
    assert checkout.installs() == ".venv .cache/tools cpu"
    assert checkout.installs("ENGINE=cuda") == ".venv .cache/tools cuda"
    checkout.add_program("nvidia-smi", f"echo '{ONE_GPU}'")
    assert checkout.installs() == ".venv .cache/tools cuda"
    assert checkout.installs("ENGINE=cpu") == ".venv .cache/tools cpu"


@pytest.mark.parametrize(
    "message",
    [
        "No devices were found",
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
    ],
)
def test_a_driver_that_finds_no_gpu_is_none(checkout: Checkout, message: str) -> None:
    """It says so on its standard output."""
    checkout.add_program("nvidia-smi", f'echo "{message}"; exit 9')
    assert checkout.installs() == ".venv .cache/tools cpu"


def test_an_engine_that_was_chosen_stays(checkout: Checkout) -> None:
    """`make test` would clear the environment under a server of `make serve ENGINE=cpu`."""
    checkout.add_program("nvidia-smi", f"echo '{ONE_GPU}'")
    checkout.add_stamp("cpu")
    assert checkout.installs() is None
    assert checkout.installs("ENGINE=cuda") == ".venv .cache/tools cuda"
    os.utime(checkout.venv / ".installed-cpu", (0, 0))
    assert checkout.installs() == ".venv .cache/tools cpu"


def test_an_engine_that_does_not_exist_is_refused(checkout: Checkout) -> None:
    for engine in ("gpu", ""):
        done = checkout.run("make", "-n", "install", f"ENGINE={engine}")
        assert done.returncode == 2
        assert f"ENGINE is cpu or cuda, not '{engine}'" in done.stderr


def test_an_interrupted_installation_is_cleared_for_the_other_engine(checkout: Checkout) -> None:
    """Files of both would overwrite each other."""
    assert checkout.run(*SCRIPT, "cuda", variables={"STATUS": "1"}).returncode == 1
    # It is not complete.
    assert checkout.installs() == ".venv .cache/tools cuda"
    left = checkout.venv / "left"
    left.touch()
    assert checkout.run(*SCRIPT, "cuda").returncode == 0
    assert left.exists()
    assert checkout.run(*SCRIPT, "cpu").returncode == 0
    assert not left.exists()


def test_a_python_that_is_named_is_that_of_the_environment(checkout: Checkout) -> None:
    def install(python: str) -> "subprocess.CompletedProcess[str]":
        return checkout.run(*SCRIPT, "cpu", variables={"PYTHON": python})

    assert install("python3.11").returncode == 0
    checkout.add_stamp("cpu")
    left = checkout.venv / "left"
    left.touch()
    assert checkout.installs("PYTHON=python3.11") is None
    assert install("python3.11").returncode == 0
    assert left.exists()

    assert checkout.installs("PYTHON=python3.12") == ".venv .cache/tools cpu"
    refused = install("python3.12")
    assert refused.returncode == 1
    assert refused.stderr == "sterna: PYTHON=python3.12 is no Python 3.11, 3.12 or 3.13\n"
    assert left.exists()

    checkout.add_stamp("cpu")
    assert checkout.installs() is None
    assert checkout.installs("PYTHON=python3.13") == ".venv .cache/tools cpu"
    assert install("python3.13").returncode == 0
    assert not left.exists()
    assert checkout.run(".venv/bin/python").stdout == "python3.13\n"
    assert checkout.run(*SCRIPT, "cpu").returncode == 0
    assert checkout.run(".venv/bin/python").stdout == "python3.13\n"


def test_uv_has_the_settings_of_pip(checkout: Checkout) -> None:
    variables = {
        "PIP_INDEX_URL": "https://index.example/simple",
        # As lists in pip's files read.
        "PIP_EXTRA_INDEX_URL": "\nhttps://a.example/simple\nhttps://b.example/simple",
        "PIP_PROXY": "http://proxy.example:3128",
        "PIP_TRUSTED_HOST": "a.example b.example:8443",
    }
    assert checkout.uv_of(variables)[1] == {
        "ALL_PROXY": "http://proxy.example:3128",
        "UV_DEFAULT_INDEX": "https://index.example/simple",
        "UV_INDEX": "https://a.example/simple https://b.example/simple",
        # As pip does; by default uv takes what the first index with the package has.
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_INSECURE_HOST": "a.example b.example:8443",
    }


def test_settings_of_uv_go_before_those_of_pip(checkout: Checkout) -> None:
    variables = {"UV_INDEX": "https://uv.example/simple", "ALL_PROXY": "http://uv.example:1"}
    pips = {"PIP_EXTRA_INDEX_URL": "https://a.example/simple", "PIP_PROXY": "http://a.example:1"}
    assert checkout.uv_of({**variables, **pips})[1] == variables


@pytest.mark.parametrize(
    ("links", "has_index"),
    [
        ("", True),
        ("wheels", True),
        ("file://{folder}/wheels", True),
        ("missing", True),
        ("wheels with_torch", False),
        ("file://{folder}/with_torch", False),
        # What a page has is not looked up.
        ("https://wheels.example/", False),
    ],
)
def test_torch_comes_from_its_own_index_unless_wheel_folders_have_it(
    checkout: Checkout, links: str, has_index: bool
) -> None:
    for wheel in ("wheels/torchvision-1.whl", "with_torch/torch-2.13.0+cpu-cp311-cp311-linux.whl"):
        (checkout.folder / wheel).parent.mkdir()
        (checkout.folder / wheel).touch()
    options, _ = checkout.uv_of({"PIP_FIND_LINKS": links.format(folder=checkout.folder)})
    assert ("--torch-backend cpu" in options) is has_index
