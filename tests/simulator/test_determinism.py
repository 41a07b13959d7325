"""The same run gives the same bits: twice, and in a process that hashes differently."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from sterna.policy.presets import LLUMNIX
from sterna.simulator import simulate
from tests.simulator.builders import configuration, crowded_trace, differences, digest

ROOT = Path(__file__).parents[2]
CONFIG = configuration(replace(LLUMNIX, num_concurrent_migrations=2))


def digests() -> list[str]:
    """Of a plain and of a compiled run."""
    trace = crowded_trace(60, fraction_high=0.2)
    return [digest(simulate(trace, replace(CONFIG, is_fast=fast))) for fast in (False, True)]


def test_a_run_repeats_itself() -> None:
    trace = crowded_trace(60)
    for is_fast in (False, True):
        config = replace(CONFIG, is_fast=is_fast)
        assert differences(simulate(trace, config), simulate(trace, config)) == []


def test_results_that_differ_are_told_apart() -> None:
    """Else equal digests would mean nothing."""
    trace, other = crowded_trace(60), crowded_trace(60, seed=2)
    config = replace(CONFIG, is_fast=False)
    assert "Records.end_s" in differences(simulate(trace, config), simulate(other, config))
    assert digest(simulate(trace, config)) != digest(simulate(other, config))


def test_another_process_that_hashes_differently_gives_the_same_bits() -> None:
    """Nothing depends on the order of sets, on the clock, or on what ran before."""
    ours = digests()
    code = "import json; from tests.simulator import test_determinism as t; "
    code += "print(json.dumps(t.digests()))"
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    theirs = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": seed},
        check=True,
        capture_output=True,
        text=True,
    )
    assert json.loads(theirs.stdout) == ours
