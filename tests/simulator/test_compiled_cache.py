"""Compiled functions are kept from one process to the next, and never beyond their source."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import sterna

SCRIPT = """
import numpy as np
from sterna.engine.emulated.compiled import entries
from sterna.engine.emulated.compiled.tables import REQUEST, SETTINGS, make_tables
tables = make_tables(np.zeros(1, REQUEST), np.ones(1, SETTINGS), num_rows=1)
tables.rows[0]["exists"] = 1
tables.rows[0]["first"] = -1
places = entries.places_of(tables)
*_, num_engines = entries.sample_memory(places, np.zeros(1, np.int64))
((hit, miss),) = (
    (sum(each.values()) for each in (stats.cache_hits, stats.cache_misses))
    for stats in [entries.sample_memory.stats]
)
print(num_engines, "compiled" if miss else "found")
"""


@pytest.mark.slow
def test_a_change_in_another_file_of_the_compiled_code_is_seen(tmp_path: Path) -> None:
    """`entries.sample_memory` has `reports.sample_memory` compiled into it."""
    folder = tmp_path / "sterna"
    shutil.copytree(
        Path(sterna.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__")
    )

    def run() -> str:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            cwd=tmp_path,
            env={"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    assert run() == "1 compiled"
    assert run() == "1 found"
    source = folder / "engine" / "emulated" / "compiled" / "reports.py"
    changed = source.read_text().replace("        num_engines += 1\n", "        num_engines += 2\n")
    assert changed != source.read_text()
    source.write_text(changed)
    assert run() == "2 compiled"


@pytest.mark.slow
def test_what_is_compiled_is_kept_where_neither_the_package_nor_the_home_can_be_written_to(
    tmp_path: Path,
) -> None:
    """As in a container with a file system that can only be read. Files in place of the folders
    also stop root."""
    folder, home, temporary = (tmp_path / name for name in ("sterna", "home", "temporary"))
    shutil.copytree(
        Path(sterna.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__")
    )
    (folder / "engine" / "emulated" / "compiled" / "__pycache__").touch()
    home.touch()
    temporary.mkdir()
    script = (
        "from sterna.engine.emulated.compiled import entries\n"
        "print(entries.sample_memory.stats.cache_path)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "HOME": str(home), "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout).is_relative_to(temporary / f"sterna-compiled-{os.getuid()}")
