"""Compiled functions are kept from one process to the next, and never beyond their source."""

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
