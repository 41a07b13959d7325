"""The servers of `bench.parts`, and the faults that each of them gets."""

from dataclasses import replace

from bench.parts.__main__ import schedules
from bench.parts.report import WITH, WITHOUT
from bench.parts.trials import DRIVER, SUPERVISOR, TRIALS


def test_parts_of_equal_servers_share_one_and_each_removal_has_its_own() -> None:
    other = replace(SUPERVISOR, options=("--instances", "3"))
    (driver,), (supervisor,) = DRIVER.faults, SUPERVISOR.faults
    assert list(schedules([DRIVER, SUPERVISOR])) == [
        (
            WITH,
            [(DRIVER, driver)] * driver.repeats + [(SUPERVISOR, supervisor)] * supervisor.repeats,
        ),
        (WITHOUT, [(DRIVER, driver)] * driver.repeats),
        (WITHOUT, [(SUPERVISOR, supervisor)] * supervisor.repeats),
    ]
    assert [side for side, _ in schedules([DRIVER, other])] == [WITH, WITH, WITHOUT, WITHOUT]


def test_faults_of_a_trial_have_names_of_their_own() -> None:
    names = [(trial.name, fault.name) for trial in TRIALS for fault in trial.faults]
    assert len({*names}) == len(names)
