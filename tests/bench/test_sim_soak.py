"""The program that runs many seeds under faults, and shows one again."""

import pytest

from bench.sim_soak import main
from sterna.hostile.run import run_seed


def test_a_seed_is_shown_again_to_the_same_event(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--replay", "3"]) == 0
    result = run_seed(3)
    shown = capsys.readouterr().out
    assert f"seed 3: {result.num_events} events, digest {result.digest}" in shown


@pytest.mark.slow
def test_many_seeds_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "12", "--workers", "2"]) == 0
    assert "12 seeds, 0 violations" in capsys.readouterr().out
