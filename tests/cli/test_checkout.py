"""Programs of the checkout: they are found from any folder, and work in the user's own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.paper import page
from bench.paper.__main__ import main as reproduce
from sterna.cli.checkout import become
from sterna.errors import ConfigurationError

REPORT = """import json, os, sys
import bench
print(json.dumps([os.getcwd(), sys.argv[1:], bench.__path__[0], os.environ["PYTHONPATH"]]))
"""


def a_package(folder: Path, content: str) -> Path:
    """A folder with a program `bench.report` of that content."""
    (folder / "bench").mkdir(parents=True)
    (folder / "bench" / "__init__.py").touch()
    (folder / "bench" / "report.py").write_text(content)
    return folder


def reported(checkout: Path, folder: Path, path: str | None) -> Any:
    """What the checkout's program says when it is started from the folder."""
    script = (
        "from pathlib import Path\nfrom sterna.cli import checkout\n"
        f"checkout.ROOT = Path({str(checkout)!r})\n"
        "checkout.become('bench.report', ['--results', 'out'])"
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = path
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("path", [None, "/somewhere/else"])
def test_a_program_of_the_checkout_stays_in_the_users_folder(
    path: str | None, tmp_path: Path
) -> None:
    """So that relative paths among its options are the user's; a package of the same name there
    is another one."""
    checkout = a_package(tmp_path / "checkout", REPORT)
    folder = a_package(tmp_path / "folder", "raise SystemExit('not this one')")
    paths = str(checkout) if path is None else f"{checkout}{os.pathsep}{path}"
    assert reported(checkout, folder, path) == [
        str(folder),
        ["--results", "out"],
        str(checkout / "bench"),
        paths,
    ]


@pytest.mark.slow
def test_the_evaluation_writes_where_the_user_says(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-m", "sterna.cli.main", "reproduce", "--redraw"]
    subprocess.run([*command, "--results", "out"], cwd=tmp_path, check=True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["evaluation.md"]


def test_all_figures_are_drawn_unless_some_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reproduce(["--redraw", "--results", str(tmp_path)]) == 0
    assert (tmp_path / "evaluation.md").is_file()
    with pytest.raises(SystemExit):
        reproduce(["figure99", "--redraw", "--results", str(tmp_path)])
    assert "argument FIGURE: must be all or some of figure3, " in capsys.readouterr().err


def test_what_is_not_in_the_checkout_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"bench\.nothing is not installed with sterna"):
        become("bench.nothing", [])


def test_a_relative_path_to_the_default_folder_is_the_default_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, written = tmp_path / "results", tmp_path / "evaluation.md"
    results.mkdir()
    (tmp_path / "other").mkdir()
    monkeypatch.setattr(page, "RESULTS", results)
    monkeypatch.setattr(page, "PAGE", written)
    monkeypatch.chdir(tmp_path)
    page.write_all(Path("other"))
    assert (tmp_path / "other" / "evaluation.md").is_file()
    assert not written.exists()
    page.write_all(Path("results"))
    assert written.is_file()
    assert list(results.iterdir()) == []
