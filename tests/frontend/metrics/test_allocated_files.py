"""The files in which front ends show each other their metrics, where there is no room for them."""

import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from prometheus_client.mmap_dict import mmap_key

from sterna.frontend.metrics import allocated_files
from sterna.frontend.metrics.allocated_files import SeriesFile
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
def test_a_file_of_an_earlier_process_is_gone_on_with(tmp_path: Path, number: int) -> None:
    """Counters do not fall then."""
    script = f"""
        from prometheus_client import Counter
        from prometheus_client.values import MultiProcessValue
        from prometheus_client import values
        for process_id in (4711, 4712):
            values.ValueClass = MultiProcessValue(lambda: process_id)
            c = Counter("c", "Something.", ["of"], registry=None)
            for each in range({number}):
                c.labels(str(each)).inc()
            values.ValueClass.close_all_files()
        print(shown("c_total", 0), shown("c_total", {number - 1}))
        """
    told, _ = told_by(script, tmp_path)
    assert told == ["2.0", "2.0"]


def test_what_an_earlier_process_has_counted_stays_where_there_is_no_room_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def has_no_room(filename: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), filename)

    monkeypatch.setattr(allocated_files, "_files", [])
    monkeypatch.setattr(allocated_files, "RETRY_S", 0.0)
    path, key = str(tmp_path / "counter_slot0.db"), mmap_key("c", "c_total", [], [], "Something.")
    earlier = SeriesFile(path)
    earlier.read_value(key)
    earlier.write_value(key, 5.0, 1.0)
    earlier.close()
    with monkeypatch.context() as full:
        full.setattr(allocated_files, "_AllocatedFile", has_no_room)
        file = SeriesFile(path)
        assert file.read_value(key) == (0.0, 0.0)
        file.write_value(key, 1.0, 2.0)
    file.write_value(key, 2.0, 3.0)
    assert file.read_value(key) == (2.0, 3.0), "what this process has counted"
    assert SeriesFile(path).read_value(key) == (7.0, 3.0)


# ------------------------------------------------------------------------- processes that end

FORKS = """
import os
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from sterna.frontend.metrics.allocated_files import allocate_metrics
from tests.small_disk import fill

folder = Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])

def counter():
    return Counter("c", "Something.", ["of"], registry=None).labels("a")

def gauge(name, mode):
    return Gauge(name, "Something.", registry=None, multiprocess_mode=mode)

def begin(run):
    process_id = os.fork()
    if process_id == 0:
        try:
            allocate_metrics()
            run()
            os._exit(0)
        finally:
            os._exit(1)
    return process_id

def end(process_id):
    assert os.waitpid(process_id, 0)[1] == 0
    # As the supervisor does.
    mark_process_dead(process_id, folder)

def shown(name, **labels):
    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    return registry.get_sample_value(name, labels)
"""


def printed(script: str, folder: Path, *, disk: str | None = None) -> list[str]:
    """What the script prints, whose processes have their metrics in the folder.

    Args:
        disk: the size of a file system for the folder; None: it is where it is.
    """
    command = [sys.executable, "-W", "ignore", "-c", FORKS + textwrap.dedent(script)]
    ended = subprocess.run(
        command if disk is None else with_small_disk(folder, disk, command),
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()


def test_processes_that_end_leave_their_counts_and_no_files_of_their_own(tmp_path: Path) -> None:
    """Each scrape reads all files: with a front end that fails at each start, it took longer and
    longer."""
    told = printed(
        """
        def count(number):
            counter().inc()
            Histogram("h", "Something.", registry=None).observe(number)
            gauge("living", "livemostrecent").set(number)
            gauge("all", "mostrecent").set(number)

        for number in range(50):
            end(begin(lambda: count(number)))
            if number == 0:
                names = sorted(os.listdir(folder))
        assert sorted(os.listdir(folder)) == names, os.listdir(folder)
        print(shown("c_total", of="a"), shown("h_count"), shown("h_sum"), shown("living"))
        """,
        tmp_path,
    )
    assert told == ["50.0", "50.0", f"{sum(range(50))}.0", "None"]


def test_processes_that_live_at_a_time_count_in_files_of_their_own(tmp_path: Path) -> None:
    told = printed(
        """
        counted, go_on = os.pipe(), os.pipe()

        def count_twice():
            own = counter()
            own.inc()
            os.write(counted[1], b".")
            os.read(go_on[0], 1)
            own.inc()

        first = begin(count_twice)
        os.read(counted[0], 1)
        end(begin(lambda: counter().inc(10)))
        os.write(go_on[1], b".")
        end(first)
        print(shown("c_total", of="a"))
        """,
        tmp_path,
    )
    assert told == ["12.0"]


def test_a_process_does_not_show_the_gauges_of_the_one_before_it(tmp_path: Path) -> None:
    """Requests that ran at a front end that was killed run no longer."""
    told = printed(
        """
        end(begin(lambda: gauge("g", "mostrecent").set(7)))
        print(shown("g"))
        end(begin(lambda: counter().inc()))
        print(shown("g"))
        """,
        tmp_path,
    )
    assert told == ["7.0", "None"]


def test_a_process_without_room_does_not_show_the_gauges_of_the_one_before_it(
    tmp_path: Path,
) -> None:
    told = printed(
        """
        end(begin(lambda: gauge("g", "mostrecent").set(7)))
        print(shown("g"))
        fill(folder)
        end(begin(lambda: counter().inc()))
        print(shown("g"))
        """,
        tmp_path,
        disk="1m",
    )
    assert told == ["7.0", "None"]


def test_a_process_that_gets_no_lock_counts_in_files_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "slot0.lock").mkdir()
    told = printed(
        """
        process_id = begin(lambda: counter().inc())
        end(process_id)
        assert (folder / f"counter_{process_id}.db").exists()
        print(shown("c_total", of="a"))
        """,
        tmp_path,
    )
    assert told == ["1.0"]
