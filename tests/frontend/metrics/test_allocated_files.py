"""The files in which front ends show each other their metrics, where there is no room for them."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.small_disk import with_small_disk

ROOT = Path(__file__).resolve().parents[3]
BEGINNING = """
import os, sys
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.multiprocess import MultiProcessCollector

from sterna.frontend.metrics import allocated_files
from tests.small_disk import fill

allocated_files.allocate_metrics()
allocated_files.RETRY_S = 0.0
folder = Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])
gauges = []

def gauge(name):
    gauges.append(
        Gauge(name, "Something.", ["of"], registry=None, multiprocess_mode="mostrecent")
    )
    return gauges[-1]

def show(gauge, number):
    gauge.labels(str(number)).set(number)

def shown(name, number):
    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    return registry.get_sample_value(name, {"of": str(number)})
"""


def told_by(script: str, folder: Path) -> tuple[list[str], str]:
    """What the script prints, and what it logs, where there is a file system of 1 MiB for the
    files."""
    command = [sys.executable, "-W", "ignore", "-c", BEGINNING + textwrap.dedent(script)]
    ended = subprocess.run(
        with_small_disk(folder, "1m", command),
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, (ended.returncode, ended.stderr)
    return ended.stdout.split(), ended.stderr


def test_a_process_lives_on_that_has_no_room_for_another_series(tmp_path: Path) -> None:
    """Its file is sparse: without this the first touch of another page ends it by SIGBUS."""
    told, log = told_by(
        """
        a = gauge("a")
        show(a, 0)
        filling = fill(folder)
        for number in range(3000):
            show(a, number + 1)
        show(a, 0.5)
        a.labels("0").set(7)
        print(shown("a", 0), shown("a", 3000))
        filling.unlink()
        show(a, 3001)
        print(*(shown("a", number) for number in (0, 0.5, 3000, 3001)))
        """,
        tmp_path,
    )
    # What has a place is kept up to date; the rest is shown when there is room again.
    assert told == ["7.0", "None", "7.0", "0.5", "3000.0", "3001.0"]
    assert log.count("metrics are incomplete") == 1
    assert "No space left on device" in log


def test_a_process_that_begins_without_room_shows_its_metrics_when_there_is(
    tmp_path: Path,
) -> None:
    """As the successor of a front end that died while the disk was full; another one's metrics are
    to be had from any that lives."""
    told, log = told_by(
        """
        filling = fill(folder)
        a = gauge("a")
        show(a, 1)
        show(a, 2)
        # Nothing is there that would be no file of metrics.
        print(shown("a", 1), *folder.glob("*.db*"))
        filling.unlink()
        show(a, 3)
        print(*(shown("a", number) for number in (1, 2, 3)))
        """,
        tmp_path,
    )
    assert told == ["None", "1.0", "2.0", "3.0"]
    assert log.count("metrics are incomplete") == 1


def test_a_file_has_all_of_its_pages_before_they_are_used(tmp_path: Path) -> None:
    told, _ = told_by(
        """
        a = gauge("a")
        for number in range(3000):
            show(a, number)
            (file,) = folder.glob("*.db")
            status = file.stat()
            assert status.st_blocks * 512 >= status.st_size, status
        print(status.st_size > 2 * 65536)
        """,
        tmp_path,
    )
    assert told == ["True"]


@pytest.mark.parametrize("number", [1, 3000])
def test_a_file_of_an_earlier_process_of_the_same_id_is_gone_on_with(
    tmp_path: Path, number: int
) -> None:
    """Ids of processes come again; counters do not fall then."""
    script = f"""
        from prometheus_client import Counter
        from prometheus_client.values import MultiProcessValue
        from prometheus_client import values
        values.ValueClass = MultiProcessValue(lambda: 4711)
        for begun in range(2):
            c = Counter("c", "Something.", ["of"], registry=None)
            for each in range({number}):
                c.labels(str(each)).inc()
            values.ValueClass.close_all_files()
            values.ValueClass = MultiProcessValue(lambda: 4711)
        print(shown("c_total", 0), shown("c_total", {number - 1}))
        """
    told, _ = told_by(script, tmp_path)
    assert told == ["2.0", "2.0"]
